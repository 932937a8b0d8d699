"""What a session needs besides where an indexer chooses: the indexer itself, and each layer's
input."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...config import Config
from ...errors import ConfigError, InputError, UnsupportedError
from ...indexer.apply import read
from ...indexer.model import Indexer
from ...kv import GrowingKV
from .indexers import backbone_identity

INPUT = "hidden_states"


class Reader:
    """Reads along with the model: index keys of what goes through its attention.

    While it listens, hooks keep the input of the attention modules; nothing else of the model
    changes.
    """

    def __init__(
        self, model: Any, indexer: Indexer, layers: tuple[int, ...], backend: str = "reference"
    ) -> None:
        """layers: those that are made sparse; the indexer must have a part for each.

        Raises:
            InputError: a part is missing, or of another width.
            UnsupportedError: an attention that is not given its layer's input.
        """
        card = indexer.card
        weight = model.get_input_embeddings().weight
        hidden = model.config.get_text_config(decoder=True).hidden_size
        card.check_fits(hidden, layers)
        own = copy.deepcopy(indexer).to(device=weight.device, dtype=weight.dtype)
        self.indexer, self.layers = own.requires_grad_(False), layers
        self.digest = _digest(own)
        self._modules: list[Any] = [m for m in model.modules() if _attends(m, layers)]
        found = {int(m.layer_idx) for m in self._modules}
        if found != set(layers):
            lost = sorted(set(layers) - found)
            raise UnsupportedError(f"the attention of layers {lost} takes no {INPUT}")
        self._turns: Tensor | None = None
        if backend == "triton" and card.heads == 1:
            from ...ops.triton import frequencies

            self._turns = frequencies(card.width, card.theta, weight.device)
            self._rows = dict(zip(layers, self.rows, strict=True))
        self._inputs: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    @property
    def rows(self) -> list[Tensor]:
        """Per layer its query and key projection, [2 n d, hidden]."""
        parts: tuple[Any, ...] = self.indexer.query, self.indexer.key
        return [torch.cat([part[str(i)].weight for part in parts]) for i in self.layers]

    def listen(self) -> None:
        """Keep the inputs of the forward pass that comes."""
        self.stop()
        for module in self._modules:
            hook = module.register_forward_pre_hook(self._keep, with_kwargs=True)
            self._hooks.append(hook)

    def stop(self) -> None:
        """The model as it was."""
        while self._hooks:
            self._hooks.pop().remove()
        self._inputs.clear()

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inputs[module] = kwargs[INPUT] if INPUT in kwargs else args[0]

    def read(self, module: nn.Module, layer: int, kv: GrowingKV, starts: Sequence[int]) -> Tensor:
        """See `indexer.apply.read`; the keys of this forward are in `kv`."""
        x = self._inputs.pop(module)
        if self._turns is None:
            return read(self.indexer, layer, x, kv, starts)
        return self.turn(nn.functional.linear(x, self._rows[layer]), kv, starts)

    def turn(self, raw: Tensor, kv: GrowingKV, starts: Sequence[int]) -> Tensor:
        """`read` from what the projections gave, by the kernels; raw: [B, T, 2 d]."""
        from ...ops.triton import on_device, turn_and_append

        assert self._turns is not None, "the kernels' way"
        index = kv.index_room(raw.shape[1], raw[:, None, :, : self.indexer.card.width])
        begins, new = on_device(tuple(starts), raw.device), raw.shape[1]
        placed, everyone = kv.placement, tuple(range(len(starts)))
        assert placed is None or placed.rows == everyone, "the kernels write all rows of the cache"
        columns = (kv.length - new,) * len(everyone) if placed is None else placed.columns
        lengths = on_device(tuple(first + new for first in columns), raw.device)
        return turn_and_append(raw, index, self._turns, begins, lengths)[:, None]


def kernels_lack(config: Config, reader: Reader | None, heads: int, positions: int) -> str | None:
    """Why the Triton kernels do not cover a sparse prefill, or an indexer; None if they do.

    Args:
        heads: query heads of a KV head; positions: columns of the conversation.
    """
    from ...ops.triton import index_refusal, prefill_refusal

    reason, prefill = None, config.prefill
    if prefill is not None:
        chosen = min(prefill.k or 0, positions) if prefill.chooser == "indexer" else 0
        reason = prefill_refusal(heads, prefill.b_sel, chosen)
    if reason is None and reader is not None:
        card, dtype = reader.indexer.card, next(reader.indexer.parameters()).dtype
        reason = index_refusal(card.heads, card.width, 1, dtype)
    return reason


def _digest(indexer: Indexer) -> str:
    """By which a cache knows whose index keys it holds."""
    found = hashlib.sha256(repr(indexer.card.width).encode())
    for parameter in indexer.parameters():
        found.update(parameter.detach().float().cpu().numpy().tobytes())
    return found.hexdigest()


def _attends(module: nn.Module, layers: tuple[int, ...]) -> bool:
    """Whether it is the attention of one of `layers`; some models number whole layers, too."""
    return (
        getattr(module, "layer_idx", None) in layers
        and INPUT in inspect.signature(module.forward).parameters
        and any(isinstance(child, nn.Linear) for child in module.children())
    )


def reader_of(
    model: Any, config: Config, layers: tuple[int, ...], indexer: Indexer | None, backend: str
) -> Reader | None:
    """The reader that `config` needs, None if none.

    Args:
        indexer: one in memory, in the place of the configured folder.
        backend: of the ops, "reference" or "triton".

    Raises:
        ConfigError: no indexer is given where one is needed, or the other way round.
        InputError: the indexer is not this model's; see `Indexer.load`.
    """
    if indexer is not None and not isinstance(indexer, Indexer):
        raise ConfigError(
            f"indexer={indexer!r} is not possible: an Indexer; a folder goes into the config"
        )
    if not config.uses_indexer:
        if indexer is not None:
            raise ConfigError("indexer= is given, and nothing in the config uses one")
        return None
    if indexer is None:
        folder = config.indexer_folder
        if folder is None:
            where = "prefill.chooser='indexer'" if config.mode != "indexed" else "mode='indexed'"
            raise ConfigError(f"{where} needs an indexer: set indexer to the folder of one")
        indexer = Indexer.load(Path(folder), backbone=backbone_identity(model))
    elif indexer.card.backbone != (own := backbone_identity(model)):
        raise InputError(
            f"the indexer was made for another backbone (config hash {indexer.card.backbone[:12]}, "
            f"this model's is {own[:12]})"
        )
    return Reader(model, indexer, layers, backend) if layers else None
