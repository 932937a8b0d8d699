"""What one decode step is: of all rows for the kernels, of each row for the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from .attention import StepPlan
from .config import Config
from .layer import DeviceRow, LayerState
from .types import StepKind


class StepShape(Enum):
    """Which kernels one step of all rows needs; each is captured as a graph of its own."""

    FAST = "fast"  # every row reads what was selected
    MIXED = "mixed"  # each row says on the device what it reads
    SLOW = "slow"  # every row reads everything, some or all choose again
    DENSE = "dense"  # every row reads everything, none chooses

    @classmethod
    def of(cls, kinds: tuple[StepKind, ...]) -> StepShape:
        """The smallest shape that covers the rows' kinds."""
        found = set(kinds)
        if found == {StepKind.FAST}:
            return cls.FAST
        if found == {StepKind.FULL}:
            return cls.DENSE
        return cls.MIXED if StepKind.FAST in found else cls.SLOW


@dataclass(frozen=True, slots=True)
class RowStep:
    """One row of one step, as the host knows it. All in cache positions; see `KVView`."""

    start: int
    length: int
    low: int
    high: int
    window: int
    count: int  # positions that a fast step chose, per KV head
    kind: StepKind
    asked: int = 0  # of several new positions, whose query is the Selector's evidence
    idle: bool = False  # reads nothing: its result is not wanted
    keeps: bool = False  # what was chosen before stays, though it reads everything

    @classmethod
    def of(cls, plan: StepPlan, b: int, known: object, config: Config) -> RowStep:
        """Row `b` of `plan`; `known`: what it selected last, a DeviceRow in a fast step of mode
        "slow-fast"."""
        start, length = plan.starts[b], plan.length
        low = start + config.sink
        high = max(low, length - config.recent)
        kind = plan.kinds[b]
        if kind is StepKind.FAST and config.mode != "indexed":
            assert isinstance(known, DeviceRow), "a fast step needs a selection"
            return cls(start, length, low, high, known.window_start, known.count, kind)
        # a row shorter than the sink has no window
        window = min(high, length)
        return cls(start, length, low, high, window, min(config.k, high - low), kind)

    @classmethod
    def afresh(cls, start: int, length: int, config: Config, *, asked: bool) -> RowStep:
        """A row whose newest token chooses its own keys; one that is not asked reads the little
        that it needs to stay finite."""
        low = start + config.sink
        high = max(low, length - config.recent) if asked else low
        window = min(high, length) if asked else length - 1
        return cls(start, length, low, high, window, min(config.k, high - low), StepKind.FAST)

    @classmethod
    def verifying(
        cls,
        start: int,
        first: int,
        new: int,
        config: Config,
        *,
        refresh: bool,
        idle: bool,
        keeps: bool = False,
    ) -> RowStep:
        """A row whose `new` positions from `first` on are verified. The first of them is the
        evidence: whatever was drafted behind it, it stands."""
        low = start + config.sink
        high = max(low, first + 1 - config.recent)
        kind = StepKind.SLOW if refresh and not idle else StepKind.FULL
        window = min(high, first + 1)
        count = min(config.k, high - low)
        return cls(start, first + new, low, high, window, count, kind, idle=idle, keeps=keeps)

    def keys(self, sink: int) -> int:
        """Keys that the row reads per KV head."""
        if self.kind is not StepKind.FAST:
            return self.length - self.start
        return min(sink, self.window - self.start) + self.count + self.length - self.window

    def values(self) -> tuple[int, ...]:
        """In the order of FIELDS."""
        fast, refresh = self.kind is StepKind.FAST, self.kind is StepKind.SLOW
        spans = (self.start, self.length, self.low, self.high, self.window)
        dense = not fast and not self.idle
        return (*spans, int(dense), int(refresh), int(fast), self.asked)


def note_chosen(steps: Sequence[RowStep], states: Mapping[int, LayerState], longest: int) -> None:
    """What each row's fast steps read after steps that have run; longest: positions that a
    selection has room for."""
    for b, step in enumerate(steps):
        if step.kind is StepKind.FAST or step.keeps:
            continue
        found = None
        if step.kind is StepKind.SLOW:
            found = DeviceRow(step.window, max(0, min(longest, step.high - step.low)))
        for state in states.values():
            state.chosen[b] = found
    for state in states.values():
        state.tail = None
