"""The frozen model as a teacher: one dense pass over a context, in which every full-attention layer
is shown to a callback while its queries and keys exist."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...errors import InputError, UnsupportedError
from ...indexer.loss import LayerCall
from ...oracle import attention_mass
from . import guard, interface
from .cache import sparse_layers

OnLayer = Callable[[LayerCall], None]


class Teacher:
    """Attaches a model, in eval mode, inside its `with` block, which leaves it as it was.

    Attributes:
        layers: indices of the full-attention layers, which are shown.

    Raises:
        UnsupportedError: attention whose probabilities are not those of plain dense attention.
        InputError: the model is attached to reread already.
    """

    def __init__(self, model: Any) -> None:
        guard.check_model(model)
        self.model = model
        self._config = model.config.get_text_config(decoder=True)
        self.layers = sparse_layers(self._config)
        self._inputs: dict[nn.Module, Tensor] = {}
        self._shown: set[int] = set()
        self._on_layer: OnLayer | None = None
        self._undo: list[Callable[[], object]] = []

    def __enter__(self) -> Self:
        if any(module in interface.SESSIONS for module in self.model.modules()):
            raise InputError(f"{type(self.model).__name__} is attached already: leave that first")
        self._undo.append(functools.partial(self.model.train, self.model.training))
        self.model.eval()
        interface.claim(self._config)
        self._undo.append(functools.partial(interface.release, self._config))
        for module in self.model.modules():
            if getattr(module, "layer_idx", None) in self.layers:
                interface.SESSIONS[module] = self
                self._undo.append(functools.partial(interface.SESSIONS.pop, module, None))
                hook = module.register_forward_pre_hook(self._before, with_kwargs=True)
                self._undo.append(hook.remove)
        return self

    def __exit__(self, *exc: object) -> None:
        while self._undo:
            self._undo.pop()()

    @torch.no_grad()
    def read(self, ids: Tensor, on_layer: OnLayer) -> None:
        """Run the model over one context without a cache and show its layers in their order.

        Args:
            ids: int64 [T].

        Raises:
            UnsupportedError: a layer's attention does not go through transformers' interface.
        """
        self._on_layer = on_layer
        self._shown.clear()
        try:
            row = ids.to(self.model.device)[None]
            self.model(row, use_cache=False, logits_to_keep=1)
        finally:
            self._on_layer = None
            self._inputs.clear()
        if missed := set(self.layers) - self._shown:
            raise UnsupportedError(
                f"{type(self.model).__name__}: the attention of layers {sorted(missed)} does not "
                "go through transformers' attention interface"
            )

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]
    ) -> None:
        """Called by the attention interface: shows the layer, then lets the model's own run.

        Args:
            query: [1, H, T, D], key: [1, Hkv, T, D], as the attention gets them, after RoPE.
        """
        guard.check_attention_call(type(self.model).__name__, kwargs)
        layer = getattr(module, "layer_idx", None)
        x = self._inputs.pop(module, None)
        if self._on_layer is None or not isinstance(layer, int) or x is None:
            return
        scale = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        mass = functools.partial(_mass, query[0], key[0], scale)
        self._shown.add(layer)
        self._on_layer(LayerCall(layer, x[0], query.shape[1], mass))

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        self._inputs[module] = x


def _mass(q: Tensor, k: Tensor, scale: float, positions: Tensor, keys: int) -> Tensor:
    """P of the queries at `positions` over the first `keys` keys, fp32 [N, keys]."""
    return attention_mass(q[:, positions], k[:, :keys], positions, 0, scale)
