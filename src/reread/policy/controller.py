"""Per-row state of slow-fast decoding: decides slow or fast before layer 0. Owns no loop and no
model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..config import AFRESH, Config
from ..types import StepKind


@dataclass(slots=True)
class RowState:
    """What one row of a batch remembers between steps."""

    fresh: bool = True  # no decode step since the last prefill
    since_slow: int = 0  # steps since the last slow one
    resting: bool = False  # whether a boundary has to wait for t_min steps after it
    uncertain: bool = False  # the previous step's output was above the uncertainty threshold


class Controller:
    """Decides the kind of every step, for each row on its own.

    Args:
        config: the triggers and the budget.
        boundary: bool [vocabulary], tokens that end a sentence or line; None where no tokenizer is
            known.
        rows: batch size.
    """

    def __init__(self, config: Config, boundary: Tensor | None, rows: int) -> None:
        self.config = config
        self.boundary = boundary
        self.rows = [RowState() for _ in range(rows)]
        self.reasons: Counter[str] = Counter()

    def prefilled(self) -> None:
        """A prefill (or a further turn) has written keys: what was remembered about decoding no
        longer holds."""
        for row in self.rows:
            row.fresh, row.since_slow, row.uncertain = True, 0, False
            row.resting = False

    def plan(
        self, tokens: Sequence[int] | None, keys: Sequence[int], has_selection: Sequence[bool]
    ) -> tuple[StepKind, ...]:
        """The kind of the step that is about to run, per row.

        Args:
            tokens: the tokens that go in (the previous step's output), one per row; None where
                unknown (embeddings).
            keys: valid keys of each row, the current token included.
            has_selection: whether each row has a selection (or evidence of a prefill) that a fast
                step could use.
        """
        kinds = []
        for b, row in enumerate(self.rows):
            token = None if tokens is None else tokens[b]
            reason = self._reason(row, token, keys[b], has_selection[b])
            kinds.append(self._advance(row, reason))
        return tuple(kinds)

    def _reason(self, row: RowState, token: int | None, keys: int, has_selection: bool) -> str:
        """Why the row's step is not fast; "" if it is."""
        config, triggers = self.config, self.config.triggers
        # tokens that are given need no draft: exact steps of them are dense ones
        dense = config.mode in ("dense", "exact")
        if dense or (config.dense_below_budget and keys <= config.budget):
            return "full"
        if not has_selection and config.mode not in AFRESH:
            return "first" if row.fresh else "no selection"
        if row.fresh and triggers.first_step:
            return "first"
        if triggers.t_max is not None and row.since_slow + 1 >= triggers.t_max:
            return "interval"
        if row.resting and row.since_slow + 1 < triggers.t_min:
            return ""
        if (
            triggers.boundary
            and self.boundary is not None
            and token is not None
            and bool(self.boundary[token])
        ):
            return "boundary"
        return "uncertainty" if row.uncertain else ""

    def _advance(self, row: RowState, reason: str) -> StepKind:
        row.fresh = False
        if reason == "full":
            return StepKind.FULL
        if not reason:
            row.since_slow += 1
            return StepKind.FAST
        row.since_slow = 0
        # an answer's first step is slow wherever its sentence stands, so the next end still counts
        row.resting = reason != "first"
        self.reasons[reason] += 1
        # where every step chooses, a slow one reads everything and chooses nothing
        return StepKind.FULL if self.config.mode in AFRESH else StepKind.SLOW

    def observe_entropy(self, nats: Sequence[float]) -> None:
        """Tell the entropy of the step that just ran, per row (uncertainty trigger)."""
        threshold = self.config.triggers.uncertainty
        for row, value in zip(self.rows, nats, strict=True):
            row.uncertain = threshold is not None and value > threshold
