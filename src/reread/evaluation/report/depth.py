"""Score by where in the text the answer stands."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..tasks.base import Sample
from .cells import NOTHING, Cell, Row, Table, points, whole
from .charts import Chart, Style, axis, not_drawn, safe
from .sums import Summary

BINS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthLine:
    """Score of a method by where the answer stands; None in a bin without samples."""

    method: str
    length: int
    scores: tuple[float | None, ...]
    counts: tuple[int, ...]
    failed: int


def depths(samples: Sequence[Sample], summary: Summary) -> Iterator[DepthLine]:
    """Bins of a tenth of the text, over the samples whose answer stands in one place."""
    unique = {sample.key: sample for sample in samples}.values()
    mine = [s for s in unique if s.depth is not None and s.task not in summary.fidelity]
    for length in sorted({sample.length for sample in mine}):
        for method in summary.methods:
            here = [s for s in mine if s.length == length and s.method == method]
            if not here:
                continue
            bins: list[list[float]] = [[] for _ in range(BINS)]
            for sample in here:
                if sample.score is not None:
                    bins[min(int((sample.depth or 0.0) * BINS), BINS - 1)].append(sample.score)
            yield DepthLine(
                method=method, length=length, counts=tuple(map(len, bins)),
                scores=tuple(math.fsum(b) / len(b) if b else None for b in bins),
                failed=sum(sample.score is None for sample in here),
            )  # fmt: skip


def by_depth(lines: Sequence[DepthLine], looks: Sequence[Style]) -> list[Chart]:
    """A chart of every length."""
    by_name = {look.method: look for look in looks}
    found = []
    for length in dict.fromkeys(line.length for line in lines):
        here = [line for line in lines if line.length == length]
        left = [f"{line.method} (failed)" for line in here if line.failed]
        data = [_depth_trace(by_name[ln.method], ln) for ln in here if not ln.failed]
        across = axis("depth, % of the text", range=[0, 100], dtick=20)
        found.append(
            Chart(
                name=f"depth-{length}", title=f"{whole(length)} tokens", note=not_drawn(left),
                data=data, height=300,
                layout={"xaxis": across, "yaxis": axis("score", range=[-4, 104])},
            )
        )  # fmt: skip
    return found


def _depth_trace(look: Style, line: DepthLine) -> dict[str, Any]:
    texts = [
        f"<b>{safe(look.method)}</b><br>{points(score or 0.0)} at depth {10 * i} to {10 * i + 10} %"
        f"<br>{count} samples"
        for i, (score, count) in enumerate(zip(line.scores, line.counts, strict=True))
    ]
    return look.trace(
        mode="lines+markers", text=texts,
        x=[100 * (i + 0.5) / BINS for i in range(BINS)],
        y=[None if score is None else 100 * score for score in line.scores],
    )  # fmt: skip


def depths_table(depths: Sequence[DepthLine]) -> Table:
    """The charts by depth as a table."""
    groups: dict[int, list[Row]] = {}
    for line in depths:
        cells = (
            Cell(text="failed", mark="failed") if line.failed
            else Cell(text=NOTHING if score is None else points(score))
            for score in line.scores
        )  # fmt: skip
        groups.setdefault(line.length, []).append(Row(head=line.method, cells=tuple(cells)))
    return Table(
        name="depths",
        caption="Mean score by depth of the answer.",
        heads=("method", *(f"{100 * i // BINS} to {100 * (i + 1) // BINS} %" for i in range(BINS))),
        groups=tuple((f"{whole(length)} tokens", tuple(rows)) for length, rows in groups.items()),
    )
