"""One forward of an exact generation: which tokens go in, at which columns and positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....compact import CompactKV
from ....config import Config
from ....kv import Placement
from ....layer import LayerState
from ....verifying import Pass, attend
from .. import guard
from ..cache import cache_keyword
from ..indexed import Reader
from .ahead import Ahead
from .rows import Row

ENDLESS = 1 << 62


class Passes:
    """The model, and the pass that is running.

    Attributes:
        others: whether some layers keep caches of their own kind.
        turn, drifts: position from which on rotary frequencies are others, for all positions of a
            pass; whether they go on changing with every position behind it.
        running: None between passes; while it is set, the session hands attention to `attend`.
        together: whether all rows go through every pass at the same columns.
        weight_bytes: weights that a step reads.
    """

    def __init__(
        self,
        model: Any,
        config: Config,
        cache: Any,
        states: dict[int, LayerState],
        mask: Tensor | None,
        valid: Tensor | None,
        reader: Reader | None = None,
    ) -> None:
        """mask: [B, columns] or None; valid: the same as bool, where some row has holes; reader:
        of an indexer that chooses what drafts read."""
        self._model, self._config, self.cache = model, config, cache
        self._reader = reader
        self.states, self._mask, self._valid = states, mask, valid
        self.others = len(states) < len(cache.layers)
        self.turn, self.drifts = turn(model.config.get_text_config(decoder=True))
        self.together = self.others or self.turn < ENDLESS
        self.weight_bytes = weight_bytes(model)
        self._keyword = cache_keyword(model)
        self._seen: set[int] = set()
        self.running: Pass | None = None

    @torch.no_grad()
    def run(
        self,
        rows: Sequence[Row],
        tokens: Sequence[Sequence[int]],
        first: Sequence[int],
        *,
        verify: bool,
        evidence: frozenset[int] = frozenset(),
        kept: frozenset[int] = frozenset(),
    ) -> tuple[Tensor, Pass]:
        """Feed tokens[i] to rows[i], from column first[i] on; all rows equally many.

        Returns:
            logits [N, T, V], and what was read.
        """
        new = len(tokens[0])
        ends = tuple(column + new for column in first)
        step = Pass(
            tuple(row.index for row in rows), tuple(row.start for row in rows), ends, verify,
            self._covering(max(ends)), self._idle(rows, verify), evidence, kept,
        )  # fmt: skip
        device = self._model.device
        positions = torch.tensor([
            [column - row.shift + t for t in range(new)]
            for row, column in zip(rows, first, strict=True)
        ], device=device)  # fmt: skip
        self.running = step
        logits = self._by_model(torch.tensor(tokens, device=device), positions, step.rows, first)
        guard.check_logits(logits)
        return logits, step

    def _by_model(
        self, ids: Tensor, positions: Tensor, rows: tuple[int, ...], first: Sequence[int]
    ) -> Tensor:
        """Logits [N, T, V] of the model's own forward, which writes row i's keys from column
        first[i] of the cache's row rows[i] on."""
        given: dict[str, Any] = {self._keyword: self.cache, "use_cache": True}
        if self.together:
            given["attention_mask"] = self._extended(first[0] + ids.shape[1])
        placement, self._seen = Placement(rows, tuple(first)), set()
        try:
            for state in self.states.values():
                state.kv.placement = placement
            if self._reader is not None:
                self._reader.listen()
            logits: Tensor = self._model(input_ids=ids, position_ids=positions, **given).logits
        finally:
            self.running = None
            if self._reader is not None:
                self._reader.stop()
            for state in self.states.values():
                state.kv.placement = None
        guard.check_layers(type(self._model).__name__, self.states, self._seen)
        return logits

    def _idle(self, rows: Sequence[Row], verify: bool) -> frozenset[int]:
        """Rows of a pass that read nothing. Where rows go through every pass together, what is
        verified of rows that are done is padding, which the next turn may read."""
        wanted = verify and self.together
        return frozenset(row.index for row in rows if row.done and not wanted)

    @property
    def ahead(self) -> Ahead | None:
        """What drafts without waiting, where there is such."""
        return None

    @property
    def joint(self) -> bool:
        """Whether one pass serves all rows at a cost that does not depend on which of them
        choose."""
        return False

    def size(self, tokens: int) -> int:
        """Tokens that a row of a verification gets where the longest needs so many."""
        return tokens

    def attend(
        self, module: Any, layer: int, tensors: tuple[Tensor, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        """One layer's attention [N, T, H, Dv]; None where the layer's own has to run."""
        state, (query, key, value) = self.states.get(layer), tensors
        if state is None or self.running is None:
            return None
        name = type(module).__name__
        guard.check_attention_call(name, kwargs)
        guard.check_cached(name, "keys", key, state.kv.keys)
        guard.check_cached(name, "values", value, state.kv.values)
        self._seen.add(layer)
        scaling = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        # also where everything is read: dense attention leaves other inputs than drafts have left
        reader, starts = self._reader, self.running.starts
        iq = None if reader is None else reader.read(module, layer, state.kv, starts)
        return self.read(layer, query, scale, iq)

    def read(self, layer: int, query: Tensor, scale: float, iq: Tensor | None = None) -> Tensor:
        """One layer of the running pass: [N, H, T, D] -> [N, T, H, Dv]; iq: [N, n, T, d], index
        queries, where an indexer chooses."""
        assert self.running is not None
        return attend(self.states[layer], query, self.running, self._config, scale, iq)

    @property
    def on(self) -> str:
        """Kind of the device."""
        return str(self._model.device.type)

    @property
    def key_bytes(self) -> int:
        """Of one position's keys and values, in all layers that reread keeps."""
        state = next(iter(self.states.values()))
        kv_heads, _, dim = state.kv.keys.shape[1:]
        values = state.kv.values.shape[3]
        return kv_heads * (dim + values) * state.kv.keys.itemsize * len(self.states)

    @property
    def index_bytes(self) -> int:
        """Of one position's index keys, which a draft reads of every position; 0 without them."""
        if self._reader is None:
            return 0
        card, state = self._reader.indexer.card, next(iter(self.states.values()))
        return card.heads * card.width * state.kv.keys.itemsize * len(self.states)

    def settle(
        self, rows: Sequence[Row], taken: dict[int, int], kept: frozenset[int] = frozenset()
    ) -> None:
        """Behind a verification: taken[b] tokens of row b stand, which `rows` count already. Forget
        columns in which no row has one; give what kept rows chose the keys of dense attention in
        the place of the draft's."""
        length = max(row.length for row in rows)
        for state in self.states.values():
            for row in (row for row in rows if row.index in kept):
                self._follow(state, row, taken[row.index])
            state.kv.crop(min(length, state.kv.length))
            state.tail = None

    def _follow(self, state: LayerState, row: Row, taken: int) -> None:
        compact = state.chosen[row.index]
        if isinstance(compact, CompactKV):
            span = slice(row.length - taken, row.length)
            k, v = state.kv.keys[row.index, :, span], state.kv.values[row.index, :, span]
            compact.replace(len(row.draft), k, v)

    def crop(self, length: int) -> None:
        """Forget columns from `length` on in the layers that reread keeps."""
        for state in self.states.values():
            state.kv.crop(length)

    def _covering(self, columns: int) -> Tensor | None:
        """The validity of so many columns, if some row has holes; all new ones are valid."""
        return None if self._valid is None else _wider(self._valid, columns, True)

    def _extended(self, columns: int) -> Tensor | None:
        return None if self._mask is None else _wider(self._mask, columns, 1)


def _wider(mask: Tensor, columns: int, value: int) -> Tensor:
    missing = columns - mask.shape[1]
    return torch.nn.functional.pad(mask, (0, missing), value=value) if missing > 0 else mask


def turn(config: Any) -> tuple[int, bool]:
    """The position at which a model's rotary frequencies change with a text's length (LongRoPE,
    dynamic NTK), ENDLESS where they never do; and whether they then change at every position."""
    rope = getattr(config, "rope_parameters", None) or {}
    found, drifts = ENDLESS, False
    for one in (rope, *[inner for inner in rope.values() if isinstance(inner, dict)]):
        if one.get("rope_type") in ("dynamic", "longrope"):
            given = one.get("original_max_position_embeddings")
            found = min(found, int(given or config.max_position_embeddings))
            drifts = drifts or one["rope_type"] == "dynamic"
    return found, drifts


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a step reads: all but the table of input embeddings, unless the output
    shares it."""
    total = sum(int(p.nbytes) for p in model.parameters())
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    shared = head is not None and head.weight is table.weight
    return total - (0 if shared else int(table.weight.nbytes))
