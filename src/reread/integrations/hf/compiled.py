"""Decoder layers compiled around an opaque attention op: what decode steps and prompts have in
common.

The model's own forward runs around them, with its attention implementation and its layers' forwards
swapped. One compilation serves all layers: which one it is comes in as a tensor, so nothing is
specialised on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from .fuse import ATTENTION as PROJECTIONS
from .fuse import BESIDE, First, Stack, shared_parameters, stack_siblings

HANDLE = "reread_layer"  # keyword that tells the attention op its layer, int64 []
RECOMPILES = 64  # batch sizes, dtypes and models that one process may compile for


class PassingCache(Cache):
    """Hands new keys and values through: the attention op writes them where they belong."""

    def __init__(self, length: int = 1) -> None:
        """length: columns that the model is to believe cached."""
        super().__init__(layers=[])
        self.length = length

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.length + query_length, 0


def op_arguments(
    module: nn.Module, query: Tensor, scaling: float | None, kwargs: dict[str, Any]
) -> tuple[Tensor, float, Tensor | None]:
    """What the attention op is told beside queries, keys and values: the layer, the factor on the
    logits, and what an indexer's projections gave (None without one)."""
    layer = kwargs.get(HANDLE)
    if layer is None:
        layer = torch.tensor(module.layer_idx)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    first = module._modules.get("q_proj")
    index = first.rest() if isinstance(first, First) and BESIDE in first.names else None
    return layer, scale, index


# two functions of one text: what is compiled is kept for each function apart
def _step_layer(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


def _prompt_layer(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


_COMPILED: dict[tuple[str, bool], Callable[..., Any]] = {}


def _compiled(device: torch.device, prompt: bool) -> Callable[..., Any]:
    """One function for all layers of all models; on the CPU it is traced, not compiled."""
    backend = "inductor" if device.type == "cuda" else "eager"
    if (backend, prompt) not in _COMPILED:
        # combo kernels: queries and keys of a step are normalised and rotated in one launch
        options: Any = {"combo_kernels": True} if backend == "inductor" and not prompt else None
        _COMPILED[backend, prompt] = torch.compile(
            _prompt_layer if prompt else _step_layer,
            fullgraph=True, dynamic=prompt, backend=backend, options=options,
        )  # fmt: skip
    return _COMPILED[backend, prompt]


@contextmanager
def layers_compiled(
    layers: list[nn.Module], device: torch.device, *, prompt: bool = False
) -> Iterator[None]:
    """Inside it the layers run compiled; prompt: for any number of tokens, else for one."""
    compiled = _compiled(device, prompt)
    for i, layer in enumerate(layers):
        layer.forward = _bind(compiled, layer, torch.tensor(i))
    try:
        # room for one compilation per batch size, where torch would give up after eight
        with torch._dynamo.config.patch(recompile_limit=RECOMPILES):
            yield
    finally:
        for layer in layers:
            del layer.forward


def _bind(compiled: Callable[..., Any], layer: nn.Module, handle: Tensor) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return compiled(layer, *args, **{HANDLE: handle}, **kwargs)

    return forward


@contextmanager
def attention_of(model: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside it `function` is the model's attention, as transformers calls it; no mask is made for
    it, because the name is none that transformers makes masks for."""
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    AttentionInterface.register(name, function)
    config._attn_implementation_internal = name
    try:
        yield
    finally:
        config._attn_implementation_internal = before
        AttentionInterface._global_mapping.pop(name, None)


def decoder_layers(model: nn.Module, count: int) -> list[nn.Module]:
    """The model's decoder layers, each with one attention of its own index; [] if not to be
    found."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            owners = [
                [m.layer_idx for m in layer.modules() if hasattr(m, "layer_idx")]
                for layer in module
            ]
            if all(set(found) == {i} for i, found in enumerate(owners)):
                return list(module)
    return []


class Weights:
    """What is done to a model's weights for its captured steps; undone by `close`."""

    def __init__(
        self, model: nn.Module, layers: list[nn.Module], beside: Sequence[Tensor] = ()
    ) -> None:
        """beside: per layer, an indexer's query and key projection, [2 d, hidden]."""
        self.layers = layers
        shared = shared_parameters(model)
        self.stacks: list[Stack] = []
        for i, layer in enumerate(layers):
            self.stacks += stack_siblings(layer, shared, beside[i] if beside else None)
        self._model = model
        self._addresses = self._where()

    def _where(self) -> tuple[int, ...]:
        return tuple(p.data_ptr() for p in self._model.parameters())

    @property
    def index_beside(self) -> bool:
        """Whether every layer's index projections are computed with those of its attention."""
        return len(self.layers) > 0 and len(self.layers) == sum(
            stack.names == PROJECTIONS for stack in self.stacks
        )

    @property
    def moved(self) -> bool:
        """Whether a parameter was replaced since, so that captured steps read stale memory."""
        return self._where() != self._addresses or not all(s.in_place for s in self.stacks)

    def close(self) -> None:
        """Separate parameters again."""
        for stack in self.stacks:
            stack.split()
        self.stacks = []
