"""A random model with its caches, and how one captured step of it is run and timed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..attention import StepPlan
from ..config import Config
from ..device import Arena
from ..integrations.hf.graph import StepGraphs, Weights
from ..layer import DeviceRow, LayerState
from ..shapes import Shape
from ..steps import StepShape
from ..types import StepKind
from .timing import Record, milliseconds

REPEATS, GROUP = 9, 8  # groups that a median is taken of, replays in each


@dataclass(slots=True)
class Bench:
    """A random model and its caches.

    Attributes:
        context: cached positions of every row, the new token included.
        bandwidth: bytes a second of a device copy, measured in the same run.
    """

    shape: Shape
    rows: int
    context: int
    config: Config
    bandwidth: float
    model: Any
    weights: Weights
    states: dict[int, LayerState] = field(default_factory=dict)

    def graphs(self, arena: Arena, *, compiled: bool = True) -> StepGraphs:
        """Captured steps over an arena."""
        return StepGraphs(self.model, self.model.forward, arena, self.weights, compiled=compiled)

    def floor_ms(self, keys: float) -> float:
        """Milliseconds to read the weights once, and `keys` keys and values in every row."""
        kv = keys * self.rows * self.shape.kv_bytes_per_token()
        return (self.shape.active_weight_bytes(self.rows) + kv) / self.bandwidth * 1e3

    def plan(self, kinds: Sequence[StepKind]) -> StepPlan:
        """A step in which every row stands at the same context."""
        rows = (0,) * self.rows, (True,) * self.rows
        return StepPlan(tuple(kinds), rows[0], self.context, None, rows[1])

    def step(self, graphs: StepGraphs, kinds: Sequence[StepKind], ages: Sequence[int]) -> Tensor:
        """Run one step; ages: steps since each row's last slow one. Returns logits [B, V]."""
        arena, plan = graphs.arena, self.plan(kinds)
        count = min(self.config.k, self.context)
        for row, age in enumerate(ages):
            known = DeviceRow(self.context - self.config.recent - age, count)
            for state in self.states.values():
                state.chosen[row] = known
        arena.begin(plan, self.states)
        output = graphs.run(StepShape.of(plan.kinds), self._ids, None, self.context)
        logits: Tensor = output.logits[:, -1]
        return logits

    @property
    def _ids(self) -> Tensor:
        return torch.arange(self.rows, device=self.model.device)[:, None] + 7


def timing(bench: Bench, graphs: StepGraphs, kinds: Sequence[StepKind]) -> Record:
    """Milliseconds of one captured step: median, p20 and p80 of groups of replays, back to back so
    that the host's part is not in it."""
    bench.step(graphs, kinds, [0] * bench.rows)
    shape = StepShape.of(tuple(kinds))

    def group() -> None:
        for _ in range(GROUP):
            graphs.replay(shape)

    group()
    times = sorted(milliseconds(group) / GROUP for _ in range(REPEATS))
    return {
        "ms": statistics.median(times), "p20": times[len(times) // 5],
        "p80": times[-1 - len(times) // 5],
    }  # fmt: skip
