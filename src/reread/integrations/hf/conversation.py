"""What belongs to one cache: its layers' states, its rows' controller, and the plan of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ...attention import StepPlan
from ...config import Config
from ...device import Arena
from ...errors import InputError, UnsupportedError
from ...layer import LayerState
from ...policy.controller import Controller
from .cache import adopt


@dataclass(slots=True, weakref_slot=True, eq=False)
class Conversation:
    """One cache while its model is attached.

    Attributes:
        states: of each layer that is made sparse, by layer index.
        controller: decides slow or fast for each row.
        before: starts of the latest step whose rows had no holes, also int64 [B, 1] on the device.
        arena: what its decode steps use on the GPU; None on the CPU, and before the first step.
    """

    states: dict[int, LayerState]
    controller: Controller
    arena: Arena | None = None
    before: tuple[tuple[int, ...], Tensor] | None = None

    @property
    def length(self) -> int:
        """Cached columns, equal for all layers and rows."""
        return next(iter(self.states.values())).kv.length

    def prepare_prefill(self, reserve: int) -> None:
        """More prompt is coming: forget selections, make room for `reserve` columns in total."""
        self.controller.prefilled()
        self.before = None
        for state in self.states.values():
            state.chosen = [None] * len(state.chosen)
            state.evidence.clear()
            state.kv.reserve(reserve)

    def forget(self) -> None:
        """What was chosen no longer holds; a row's next step chooses from evidence of its own."""
        self.controller.prefilled()
        for state in self.states.values():
            state.invalidate()

    def plan(self, ids: Tensor | None, mask: Any, counted: tuple[bool, ...]) -> StepPlan:
        """Decide the decode step that is about to run.

        Args:
            ids: [B, 1] the tokens that go in, None if unknown (embeddings).
            mask: attention_mask [B, length + 1] or None.
            counted: per row, whether the step goes into the statistics.
        """
        rows, length = len(self.controller.rows), self.length + 1
        starts, valid = self._spans(mask, rows, length)
        keys = [length - s for s in starts] if valid is None else valid.sum(dim=1).tolist()
        # on the GPU all layers of a row have a selection, or none has
        states = list(self.states.values())[: 1 if self.arena is not None else None]
        has_selection = [all(state.can_select(b) for state in states) for b in range(rows)]
        tokens = None if ids is None else ids[:, 0].tolist()
        kinds = self.controller.plan(tokens, keys, has_selection)
        return StepPlan(kinds, starts, length, valid, counted)

    def _spans(self, mask: Any, rows: int, length: int) -> tuple[tuple[int, ...], Tensor | None]:
        """`spans`; one read from the device instead of three where the rows still begin where they
        began in the step before, and nothing is missing behind."""
        if isinstance(mask, Tensor) and self.before is not None and mask.shape == (rows, length):
            starts, begins = self.before
            at = torch.arange(length, device=mask.device)
            if torch.equal(mask != 0, at >= begins):
                return starts, None
        starts, valid = spans(mask, rows, length)
        self.before = None
        if isinstance(mask, Tensor) and valid is None:
            self.before = starts, torch.tensor(starts, device=mask.device)[:, None]
        return starts, valid


class Conversations:
    """The conversations of one session, by cache; each is forgotten with its cache."""

    def __init__(
        self,
        config: Config,
        text_config: Any,
        layers: tuple[int, ...],
        boundary: Tensor | None,
        indexer: str = "",
    ) -> None:
        """indexer: digest of the one that reads along, "" if none does."""
        self._config, self._indexer = config, indexer
        self._text_config = text_config
        self._layers = layers
        self._boundary = boundary
        self._known: WeakKeyDictionary[Cache, Conversation] = WeakKeyDictionary()

    def of(self, cache: Cache, rows: int) -> Conversation:
        """The conversation of `cache`; its full-attention layers are replaced where needed.

        Raises:
            InputError: the cache holds another number of rows.
            UnsupportedError: another kind of cache.
        """
        states = adopt(cache, self._text_config, self._layers)
        for state in states.values():
            if state.kv.length and state.kv.keys.shape[0] != rows:
                raise InputError(f"the cache has {state.kv.keys.shape[0]} rows, the input {rows}")
            if self._indexer:
                state.kv.claim_index(self._indexer)
        known = self._known.get(cache)
        if known is None or known.states != states or len(known.controller.rows) != rows:
            known = Conversation(states, Controller(self._config, self._boundary, rows))
            self._known[cache] = known
            for state in states.values():
                # what another session chose lies where that session kept it
                state.chosen = [None] * len(state.chosen)
        for state in states.values():
            if self._config.selector.lambda_clip > 0:
                state.kv.track_norms()
        return known


def spans(mask: Any, rows: int, length: int) -> tuple[tuple[int, ...], Tensor | None]:
    """Per row the first valid cache position; and the validity [B, length] if a row has holes.

    Raises:
        UnsupportedError: a mask that is not 2D.
        InputError: a mask of another shape.
    """
    if mask is None:
        return (0,) * rows, None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise UnsupportedError("reread needs a 2D attention_mask [batch, tokens] in decode steps")
    if mask.shape != (rows, length):
        raise InputError(
            f"attention_mask is {tuple(mask.shape)}, cache and input need {(rows, length)}"
        )
    valid = mask != 0
    starts = valid.int().argmax(dim=1)
    filled = valid.sum(dim=1) == length - starts
    return tuple(starts.tolist()), None if bool(filled.all()) else valid


def queries_that_exist(mask: Any, new: int) -> Tensor | None:
    """Which of a prefill's `new` columns are text, bool [B, new]; None if all are.

    A mask of another form concerns the prefill alone, which is the model's own.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    exist = mask[:, -new:] != 0
    return None if bool(exist.all()) else exist


def has_holes(mask: Any, rows: int, length: int) -> bool:
    """Whether a prefill's mask says that some row has padding behind its first token.

    A mask of another form concerns the prefill alone.
    """
    if not isinstance(mask, Tensor) or mask.shape != (rows, length):
        return False
    valid = mask != 0
    # the first chunk of a short row may be padding alone
    count, start = valid.sum(dim=1), valid.int().argmax(dim=1)
    return bool(((count > 0) & (count != length - start)).any())


def first_positions(mask: Any, rows: int, length: int, *, holes: bool = False) -> tuple[int, ...]:
    """Per row the first position that is no padding, `length` where there is none yet; holes:
    whether a row may have padding behind it.

    Raises:
        UnsupportedError: a mask that is not 2D, or padding behind or between the tokens of a row.
    """
    if mask is None:
        return (0,) * rows
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise UnsupportedError(
            "a sparse prefill or an indexer needs a 2D attention_mask [batch, tokens]"
        )
    if not holes and has_holes(mask, rows, length):
        raise UnsupportedError(
            "a sparse prefill does not cover padding behind or between the tokens of a row"
        )
    valid = mask[:, :length] != 0
    starts = valid.int().argmax(dim=1).where(valid.any(dim=1), length)
    return tuple(starts.tolist())
