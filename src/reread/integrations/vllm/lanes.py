"""What the host remembers of each request on the GPU. Slow or fast is decided there, so the host
learns it a step later: for the counts, and to replay the steps of a request that lost its pages."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...attention import Meter
from ...config import Config
from ...cuda import Telling, upload
from ...policy.trigger import entropy
from ...types import StepKind
from .arena import Board, PagedArena
from .compat import BatchRow
from .prompts import DenseRun, PromptReader, SparsePart, split


@dataclass(slots=True, eq=False)
class LaneRequest:
    """One request while it runs.

    Attributes:
        prompt: tokens of its prompt.
        lane: where its selection and triggers are; None before its first decode step, and after
            its pages were lost.
        steps: decode steps planned so far; codes: what the first of them were, see `REASONS`.
        window, chosen: of its last selection, for the counts.
    """

    prompt: int
    lane: int | None = None
    steps: int = 0
    codes: list[int] = field(default_factory=list)
    window: int = 0
    chosen: int = 0


@dataclass(frozen=True, slots=True)
class Replay:
    """Steps that one row of a pass takes one board after the other, behind what it has of its
    prompt; first: the token of the first of them."""

    row: int
    first: int
    boards: list[Board]


@dataclass(frozen=True, slots=True)
class Pass:
    """What the plug-in does in one forward pass.

    Attributes:
        rows: of the batch; decodes: those at its front that have one token each.
        replays: of the rows behind them.
        dense, sparse: how those rows' prompts are read; None: all of it densely.
    """

    rows: int
    decodes: int
    replays: tuple[Replay, ...] = ()
    dense: tuple[DenseRun, ...] | None = None
    sparse: tuple[SparsePart, ...] = ()


def _groups(steps: list[tuple[int, ...]], most: int) -> list[list[tuple[int, ...]]]:
    """Steps of one request, in order: runs of steps that choose nothing, at most so many, and alone
    those that do or may."""
    from ...ops.triton import trigger

    groups: list[list[tuple[int, ...]]] = []
    open_run = False
    for step in steps:
        alone = step[4] not in (0, trigger.FULL)
        if alone or not open_run or len(groups[-1]) == most:
            groups.append([])
        groups[-1].append(step)
        open_run = not alone
    return groups


class LaneRegistry:
    """All requests of one worker process; the arena's lanes are dealt out to them.

    Attributes:
        meter: counts what ran, rows x layers by kind, as far as the device has told.
        pending: yields the rows of the pass that is about to run; None once planned.
        plan_of: the pass that is running; None outside of passes that serve requests.
        lanes_of_rows: of that pass's batch, in its order; the last lane where a row has none.
        tokens: gives the input ids of the pass, int32 on the device; the worker sets it.
        reader: of prompts that are read sparsely; the worker sets it. None: they are not.
    """

    def __init__(self, config: Config, arena: PagedArena) -> None:
        self.config, self.arena = config, arena
        self.requests: dict[str, LaneRequest] = {}
        self.meter = Meter.of(1)
        self.pending: Callable[[], Iterable[BatchRow]] | None = None
        self.plan_of: Pass | None = None
        self.reasons: Counter[str] = Counter()
        self.refreshes = 0
        self.refresh_s = 0.0  # choosing runs under other layers, within a graph: not timed
        self._free = list(range(arena.rows))[::-1]
        self._told: deque[tuple[Telling, list[tuple[LaneRequest, int]]]] = deque()
        self.lanes_of_rows: list[int] = []
        self.tokens: Callable[[], Tensor]
        self.reader: PromptReader | None = None

    def drop(self, ended: Iterable[str], lost: Iterable[str]) -> None:
        """Requests that ended are forgotten; of those that lost their pages only what their
        decode steps were stays."""
        for name in ended:
            request = self.requests.pop(name, None)
            if request is not None:
                self._release(request)
        for name in lost:
            if name in self.requests:
                self._release(self.requests[name])

    def _release(self, request: LaneRequest) -> None:
        if request.lane is not None:
            self._free.append(request.lane)
            request.lane = None

    # -- planning a pass

    def plan(self) -> Pass | None:
        """Tell the device, before layer 0, what each row of the pass is; once a pass. None outside
        of passes that serve requests."""
        if self.pending is None:
            return self.plan_of
        rows, self.pending = list(self.pending()), None
        tokens = self.tokens()
        self.learn()
        info: list[tuple[int, ...]] = []
        asked: list[tuple[LaneRequest, int]] = []
        replays, first = [], 0
        front = True
        self.lanes_of_rows = []
        for at, row in enumerate(rows):
            front = front and row.new == 1
            steps = self._steps(row, first, asked if front else None, at)
            if front:
                info.append(steps[0] if steps else self._prompt(row, at))
            elif steps:
                replays.append(self._replay(row, at, first, steps, tokens))
            lane = self.requests[row.name].lane if row.name in self.requests else None
            self.lanes_of_rows.append(self.arena.rows if lane is None else lane)
            first += row.new
        self.arena.tell(info, tokens)
        if asked:
            self._told.append((Telling(self.arena.board.codes), asked))
        self.plan_of = Pass(len(rows), len(info), tuple(replays), *self._prompts(rows, len(info)))
        return self.plan_of

    def _prompts(
        self, rows: list[BatchRow], front: int
    ) -> tuple[tuple[DenseRun, ...] | None, tuple[SparsePart, ...]]:
        """How the prompts of the rows behind the first `front` are read."""
        if self.reader is None:
            return None, ()
        runs, parts = split(rows, front, self.reader.config)
        chosen = {part.row: part.begin for part in parts}
        for at, row in enumerate(rows):
            end = chosen.get(at, min(row.prompt, row.cached + row.new))
            self.reader.count_dense(row.cached, max(row.cached, end), len(self.arena.layers))
        return (runs if parts else None), parts

    def _prompt(self, row: BatchRow, at: int) -> tuple[int, ...]:
        """A row whose one token belongs to its prompt."""
        from ...ops.triton import trigger

        return self.arena.rows, row.cached + 1, trigger.PROMPT, 0, -1, at

    def _steps(
        self, row: BatchRow, first: int, asked: list[tuple[LaneRequest, int]] | None, at: int
    ) -> list[tuple[int, ...]]:
        """The row's decode steps, in the order of INFO; none of a row within its prompt."""
        from ...ops.triton import trigger

        begin, end = max(row.cached, row.prompt), row.cached + row.new
        if begin >= end:
            return []
        request = self.requests.get(row.name)
        if request is None or request.prompt != row.prompt:
            if request is not None:
                self._release(request)
            request = self.requests[row.name] = LaneRequest(row.prompt)
        if request.lane is None:
            assert row.cached <= row.prompt or self.config.mode == "dense", (
                "a request resumes behind its prompt: its generated pages must not be cached"
            )
            request.lane = self._free.pop()
        if begin - row.prompt < request.steps:
            self.learn(wait=True)
        steps: list[tuple[int, ...]] = []
        for position in range(begin, end):
            step = position - row.prompt
            known = request.codes[step] if step < request.steps else -1
            place = first + position - row.cached
            steps.append((request.lane, position + 1, trigger.DECODE, int(step == 0), known, place))
            if step >= request.steps:
                request.steps = step + 1
                if asked is not None:
                    asked.append((request, at))
        return steps

    def _replay(
        self, row: BatchRow, at: int, first: int, steps: list[tuple[int, ...]], tokens: Tensor
    ) -> Replay:
        boards = self.arena.replay(_groups(steps, self.arena.rows), tokens)
        request = self.requests[row.name]
        if steps[-1][4] < 0:  # the newest token's step is none that ran before
            self._told.append((Telling(boards[-1].codes), [(request, 0)]))
        return Replay(at, first + row.new - len(steps), boards)

    def done(self) -> None:
        """The pass is over, or failed."""
        self.pending, self.plan_of = None, None
        if self.reader is not None:
            self.reader.index.forget()

    def warm_up_prompts(self, layers: Mapping[str, Any]) -> None:
        """Compile what reads prompts sparsely; layers: vLLM's, with their pages."""
        if self.reader is not None:
            name, shape = self.arena.layers[0], self.arena.shape
            k, v = (x.transpose(1, 2) for x in layers[name].kv_cache.unbind(1))
            most = -(-self.arena.longest // k.shape[2])
            table = torch.zeros(most, dtype=torch.int32, device=self.arena.device)
            self.reader.warm_up(name, (k, v), shape.heads, self.arena.longest, table)

    # -- what the device has told

    def learn(self, *, wait: bool = False) -> None:
        """Count the steps whose kinds have arrived; wait: for all of them."""
        while self._told and (wait or self._told[0][0].there):
            telling, asked = self._told.popleft()
            codes = telling.get()
            for request, row in asked:
                self._note(request, int(codes[row]))

    def _note(self, request: LaneRequest, code: int) -> None:
        from ...ops.triton import trigger

        length = request.prompt + len(request.codes) + 1
        request.codes.append(code)
        layers, read, kind = len(self.arena.layers), length, StepKind.FULL
        if code == 0:
            kind = StepKind.FAST
            read = min(self.config.sink, request.window) + request.chosen + length - request.window
        elif code != trigger.FULL:
            kind = StepKind.SLOW
            high = max(self.config.sink, length - self.config.recent)
            request.window = min(high, length)
            request.chosen = min(self.arena.k, high - self.config.sink)
            self.reasons[trigger.REASONS[code]] += 1
            self.refreshes += layers
        self.meter.add(0, kind, read, length, layers)

    def observe(self, logits: Tensor | None) -> None:
        """Tell the outputs of the pass that ran, [rows, vocabulary]: the uncertainty trigger."""
        threshold = self.config.triggers.uncertainty
        if threshold is None or logits is None or not self.lanes_of_rows:
            return
        lanes = upload([self.lanes_of_rows], self.arena.device)[0]
        self.arena.uncertain(entropy(logits) > threshold, lanes)

    @property
    def nbytes(self) -> int:
        """Bytes of all requests' selections."""
        held = sum(1 for request in self.requests.values() if request.lane is not None)
        return held * self.arena.lane_bytes
