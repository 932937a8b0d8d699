"""Passes of an exact generation on the GPU: all rows of the batch in every one, as CUDA graphs
where the model can be captured.

A row that is not asked goes along and is not looked at: in a draft it writes behind its text, in a
verification it is off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....attention import StepPlan
from ....config import Config
from ....cuda import upload
from ....drafting import verify_size
from ....errors import UnsupportedError
from ....layer import DeviceRow
from ....steps import RowStep, StepShape
from ....types import StepKind
from ....verifying import Pass
from ..conversation import Conversation
from ..indexed import Reader
from ..runner import Runner
from .ahead import Ahead
from .passes import Passes
from .rows import Row


class DevicePasses(Passes):
    """See the module."""

    def __init__(
        self,
        model: Any,
        config: Config,
        cache: Any,
        conversation: Conversation,
        mask: Tensor | None,
        rows: Sequence[Row],
        runner: Runner,
        reader: Reader | None = None,
    ) -> None:
        """rows: of the whole batch."""
        super().__init__(model, config, cache, conversation.states, mask, None, reader)
        self._conversation, self._rows, self._runner = conversation, rows, runner
        self._steps: list[RowStep] = []
        self._shape = StepShape.FAST
        if self.together and not self.others:
            why = "rotary frequencies that change with the text's length"
            if config.runner == "graph":
                raise UnsupportedError(f"runner='graph' is not possible in mode 'exact': {why}")
            note = f"exact passes were not captured as graphs: {why}"
            runner.notes += [note] if note not in runner.notes else []

    @property
    def ahead(self) -> Ahead | None:
        """Drafts whose next step does not wait for the host; None where rows go together."""
        return None if self.together else Ahead(self)

    @property
    def rows(self) -> Sequence[Row]:
        """Of the whole batch."""
        return self._rows

    @property
    def joint(self) -> bool:
        """See `Passes.joint`."""
        return True

    def size(self, tokens: int) -> int:
        """Tokens that a row of a verification gets, padding included."""
        # a model that runs kernel by kernel has nothing to capture, and recurrent states to spare
        return tokens if self.together else verify_size(tokens)

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
        """As `Passes.run`, but NaN in the logits is for whoever reads them to find."""
        new, asked = len(tokens[0]), {row.index: i for i, row in enumerate(rows)}
        columns = self._columns(rows, first)
        fed = [list(tokens[asked[b]]) if b in asked else [0] * new for b in range(len(self._rows))]
        places = [
            [column - row.shift + t for t in range(new)]
            for row, column in zip(self._rows, columns, strict=True)
        ]
        device = self._model.device
        logits, step = self.run_all(
            rows, first, upload(fed, device), upload(places, device),
            verify=verify, evidence=evidence, kept=kept,
        )  # fmt: skip
        if len(rows) < len(self._rows):
            logits = logits[[row.index for row in rows]]
        return logits, step

    def _columns(self, rows: Sequence[Row], first: Sequence[int]) -> list[int]:
        """Where each row of the batch writes."""
        asked = {row.index: column for row, column in zip(rows, first, strict=True)}
        return [asked.get(row.index, row.length) for row in self._rows]

    @torch.no_grad()
    def run_all(
        self,
        rows: Sequence[Row],
        first: Sequence[int],
        ids: Tensor,
        positions: Tensor,
        *,
        verify: bool,
        evidence: frozenset[int] = frozenset(),
        kept: frozenset[int] = frozenset(),
    ) -> tuple[Tensor, Pass]:
        """`run` of what is on the device already, waiting for nothing: ids and positions [B, T] of
        the whole batch, logits [B, T, V] unchecked; rows: those that are asked."""
        new, columns = ids.shape[1], self._columns(rows, first)
        for state in self.states.values():
            state.kv.ensure_room(max(columns) + new - state.kv.length)
        self._runner.prepare(self._conversation)
        arena = self._conversation.arena
        assert arena is not None
        absent = frozenset(row.index for row in self._rows) - {row.index for row in rows}
        idle = self._idle(self._rows, verify) | absent
        self._steps = self._planned(
            columns, new, verify=verify, evidence=evidence, idle=idle, kept=kept
        )
        chooses = any(step.kind is StepKind.SLOW for step in self._steps)
        dense = StepShape.SLOW if chooses else StepShape.DENSE
        self._shape = dense if verify else StepShape.FAST
        arena.tell(self._steps)
        logits = self._forward(arena, ids, positions, columns, verify)
        arena.lanes.barrier()
        if verify:
            arena.chose(self._steps, self.states)
        arena.unfinished = False
        return logits, self._told(rows, first, new, verify)

    def _planned(
        self, columns: Sequence[int], new: int, *, verify: bool, evidence: frozenset[int],
        idle: frozenset[int], kept: frozenset[int],
    ) -> list[RowStep]:  # fmt: skip
        config = self._config
        if verify:
            return [
                RowStep.verifying(
                    row.start, column, new, config,
                    refresh=row.index in evidence, idle=row.index in idle, keeps=row.index in kept,
                )
                for row, column in zip(self._rows, columns, strict=True)
            ]  # fmt: skip
        if config.indexed:
            return [
                RowStep.afresh(row.start, column + 1, config, asked=row.index not in idle)
                for row, column in zip(self._rows, columns, strict=True)
            ]
        ends, starts = [column + 1 for column in columns], tuple(row.start for row in self._rows)
        kinds = tuple(StepKind.FULL if b in idle else StepKind.FAST for b in range(len(starts)))
        plan = StepPlan(kinds, starts, max(ends), None, (True,) * len(starts))
        self._runner.seed(self._conversation, plan)
        chosen = next(iter(self.states.values())).chosen
        found = []
        for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
            known = chosen[b]
            # a row that is not asked reads the little that it needs to stay finite
            window, count = (
                (end - 1, 0)
                if not isinstance(known, DeviceRow)
                else (known.window_start, known.count)
            )
            low = start + config.sink
            found.append(RowStep(start, end, low, low, window, count, StepKind.FAST))
        return found

    def _forward(
        self, arena: Any, ids: Tensor, positions: Tensor, columns: Sequence[int], verify: bool
    ) -> Tensor:
        """Logits [B, T, V], of a captured pass until the next one."""
        new, shape = ids.shape[1], self._shape
        if not self.together:
            given = {"input_ids": ids, "position_ids": positions}
            output = self._runner.replay(arena, shape, ids, positions, max(columns) + new, given)
            if output is not None:
                for state in self.states.values():
                    state.kv.wrote(max(columns) + new, indexed=arena.index is not None)
                logits: Tensor = output.logits
                return logits
        self._runner.ran = "eager"
        everywhere, starts = tuple(range(len(self._rows))), tuple(row.start for row in self._rows)
        self.running = Pass(everywhere, starts, tuple(c + new for c in columns), verify)
        return self._by_model(ids, positions, everywhere, columns)

    def read(self, layer: int, query: Tensor, scale: float, iq: Tensor | None = None) -> Tensor:
        """One layer of a pass that runs kernel by kernel: [B, H, T, D] -> [B, T, H, D]; see
        `Passes.read`."""
        arena = self._conversation.arena
        assert arena is not None
        assert self.running is not None
        if self.running.verify:
            return arena.verify(layer, query, self._shape, scale).transpose(1, 2)
        index = None if iq is None else iq[:, 0, 0].contiguous()
        return arena.attend(layer, query[:, :, 0], StepShape.FAST, scale, index=index).unsqueeze(1)

    def _told(self, rows: Sequence[Row], first: Sequence[int], new: int, verify: bool) -> Pass:
        """What was read, for the meter."""
        ends = tuple(column + new for column in first)
        step = Pass(tuple(row.index for row in rows), tuple(r.start for r in rows), ends, verify)
        for i, row in enumerate(rows):
            step.read[i] = self._steps[row.index].keys(self._config.sink)
        return step
