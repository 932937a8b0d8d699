"""What is learned by watching decode steps: what dense attention looks at, and what a method reads
of that.

Batches of one row, on the reference path; the layers that reread makes sparse, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ...integrations.hf.cache import adopt, sparse_layers
from ...types import StepKind, Watched
from . import support

See = Callable[[int, Watched], None]
LEAST_CHOSEN = 8  # sets are at most one in so many of the candidates, or overlap says little
FETCHED = 8  # keys whose attention tells how much a KV head fetches from far away
MOST_RECENT = 4  # the window of a text is at most one in so many of its tokens


@contextmanager
def watching(model: Any, cache: DynamicCache, see: See) -> Iterator[None]:
    """Inside it, `see(layer, watched)` is told of every row of every decode step of `cache` that
    runs row by row; layers that are not made sparse are left out."""
    config = model.config.get_text_config(decoder=True)
    states = adopt(cache, config, sparse_layers(config))

    def telling(layer: int) -> Callable[[Watched], None]:
        return lambda watched: see(layer, watched)

    for layer, state in states.items():
        state.watch = telling(layer)
    try:
        yield
    finally:
        for state in states.values():
            state.watch = None


@dataclass(frozen=True, slots=True)
class Support:
    """Whose top sets are compared: the k best of [sink, length - recent)."""

    sink: int
    recent: int
    k: int

    @classmethod
    def of(cls, sink: int, recent: int, k: int, length: int) -> Support | None:
        """For a text of `length` tokens; None where it has too few candidates.

        The window is capped at a quarter of the text and k at an eighth of the candidates: the
        sets of a larger k overlap whatever attention does.
        """
        recent = min(recent, length // MOST_RECENT)
        k = min(k, (length - sink - recent) // LEAST_CHOSEN)
        return cls(sink, recent, k) if k > 0 else None


@dataclass(slots=True)
class Mean:
    """A running mean."""

    total: float = 0.0
    count: int = 0

    def add(self, values: Tensor) -> None:
        """Count every one of `values`."""
        self.total += float(values.sum())
        self.count += values.numel()

    @property
    def value(self) -> float | None:
        """None where nothing was counted."""
        return self.total / self.count if self.count else None


class DenseWatch:
    """Watches dense steps: overlap of each step's top sets with those of the step before, and which
    layer and KV head fetches most from far away.

    Args:
        supports: the sets that are compared.
        near: sink and window that `fetching` leaves out.
        ends: per step, whether the token that goes in ends a sentence.
    """

    def __init__(
        self, supports: Sequence[Support], near: tuple[int, int], ends: Sequence[bool]
    ) -> None:
        self.stability = {s: (Mean(), Mean()) for s in supports}  # inside, across
        self._near = near
        self._ends = ends
        self._before: dict[tuple[int, Support], Tensor] = {}
        self._steps: dict[int, int] = {}
        self._far: dict[int, Tensor] = {}

    def __call__(self, layer: int, watched: Watched) -> None:
        step = self._steps[layer] = self._steps.get(layer, -1) + 1
        p = support.probabilities(watched.q, watched.kv, watched.scale)
        length, (sink, recent) = watched.kv.lengths[0], self._near
        candidates = p.mean(dim=1)[:, sink : length - recent]
        far = candidates.topk(min(FETCHED, candidates.shape[1])).values.sum(dim=-1)
        self._far[layer] = self._far.get(layer, torch.zeros_like(far)) + far
        for s, means in self.stability.items():
            found = support.top_set(p, s.sink, length - s.recent, s.k)
            before = self._before.get((layer, s))
            if before is not None:
                # a sentence that ended with the step before: this step is in the next one
                means[self._ends[step - 1]].add(support.overlap(before, found))
            self._before[layer, s] = found

    @property
    def fetching(self) -> tuple[int, int] | None:
        """The layer and KV head with the most attention on its best few keys outside sink and
        window, over all steps: heads that spread it there look at nothing. None where no layer was
        watched."""
        best = {layer: float(far.max()) for layer, far in self._far.items()}
        layer = max(best, key=lambda i: (best[i], -i), default=None)
        return None if layer is None else (layer, int(self._far[layer].argmax()))


@dataclass(slots=True)
class _Period:
    """Fast steps of one layer that read the same selection."""

    selected: Tensor
    used: Tensor


class MethodWatch:
    """Watches a method's steps: the attention that its fast steps cover, and keys that were
    selected for nothing.

    A period is the fast steps that read one selection; a key of it is useless if at none of them
    some query head gave it more than an even share. A selection that no step read does not count,
    nor does a period that the text's end cut short, unless there is no other.
    """

    def __init__(self) -> None:
        self.mass = Mean()
        self._useless = Mean()
        self._periods: dict[int, _Period] = {}

    def __call__(self, layer: int, watched: Watched) -> None:
        reading, period = watched.reading, self._periods.get(layer)
        if period is not None and (reading is None or reading.selected is not period.selected):
            self._useless.add(~self._periods.pop(layer).used)
        if reading is None:
            return
        kv = watched.kv
        p = support.probabilities(watched.q, kv, watched.scale)
        self.mass.add(support.covered(p, support.read_mask(reading, kv)))
        used = support.in_use(p, reading.selected, int(support.existing(kv).sum()))
        open_period = self._periods.setdefault(layer, _Period(reading.selected, used))
        open_period.used |= used

    @property
    def useless(self) -> float | None:
        """Share of the selected keys; None where nothing was selected."""
        if self._useless.count:
            return self._useless.value
        cut = Mean()
        for period in self._periods.values():
            cut.add(~period.used)
        return cut.value


class Picture:
    """Watches one layer and KV head: attention and what was read of it, by bins of positions.

    Args:
        at: layer and KV head.
        edges: int64 [bins + 1], from 0 to the text's tokens.
        steps: how many are seen; later ones are left out.
    """

    def __init__(self, at: tuple[int, int], edges: Tensor, steps: int) -> None:
        self.at = at
        self.edges = edges
        self._steps = steps
        self.mass: list[list[float]] = []
        self.kept: list[list[float]] = []
        self.kinds: list[str] = []
        self.missed: list[float | None] = []

    def __call__(self, layer: int, watched: Watched) -> None:
        if layer != self.at[0] or len(self.kinds) == self._steps:
            return
        kv, head = watched.kv, self.at[1]
        p = support.probabilities(watched.q, kv, watched.scale)
        read = support.read_mask(watched.reading, kv)
        edges = self.edges.to(p.device)
        held = support.binned(support.existing(kv), edges).clamp(min=1)
        share = support.binned(read[head], edges) / held
        fast = watched.kind is StepKind.FAST
        self.mass.append(_rounded(support.binned(p.mean(dim=1)[head], edges), 4))
        self.kept.append(_rounded(share, 2))
        self.kinds.append(watched.kind.value)
        left = max(0.0, 1 - float(support.covered(p, read)[head]))
        self.missed.append(round(left, 4) if fast else None)


def _rounded(values: Tensor, digits: int) -> list[float]:
    return [round(value, digits) for value in values.tolist()]
