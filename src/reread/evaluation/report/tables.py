"""The report's tables about quality: floors, every kind of question, fidelity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..intervals import ALL, DENSE
from .cells import (
    NOTHING,
    SPACE,
    Cell,
    Row,
    Table,
    counted,
    cut,
    interval,
    percent,
    points,
    signed,
    titled,
    whole,
)
from .reading import finite
from .sums import Floor, Line, Spot, Summary

# figures of fidelity in the order in which they are shown, as people call them
FIGURES = {
    "kl": "KL from dense, nats",
    "kl_max": "KL, worst step",
    "ppl": "perplexity",
    "ppl_dense": "perplexity, dense",
    "mass_fast": "mass on fast steps",
    "useless_share": "useless keys",
    "stability_inside": "overlap inside sentences",
    "stability_across": "overlap across sentences",
    "stability_k": "size of those sets",
    "slow_rate": "slow steps",
    "keys_read_share": "keys read",
    "sentences": "sentence ends",
}
SHARES = frozenset(name for name in FIGURES if name.endswith(("_share", "_rate"))) | {
    "mass_fast", "stability_inside", "stability_across",
}  # fmt: skip
SCORE = "agreement"  # of fidelity, which is its score, too
KEPT = "kept_share"  # of the prompt's keys, what a baseline did not drop


def floors_table(summary: Summary, speed: Sequence[Mapping[str, Any]]) -> Table:
    """One row per length and method: floor, largest loss, mean, keys read, speed."""
    timed = {(line["method"], line["length"]): line for line in speed}
    groups: dict[int, list[Row]] = {}
    for floor in summary.floors:
        seconds = timed.get((floor.method, floor.length), {})
        groups.setdefault(floor.length, []).append(
            Row(
                head=floor.method,
                cells=(
                    _lowest_cell(floor),
                    _loss_cell(floor),
                    _mean_cell(floor),
                    _keys_cell(summary, floor),
                    _time_cell(seconds.get("ms_per_token"), 1.0),
                    _time_cell(seconds.get("ttft_s"), 1000.0),
                ),
            )
        )
    return Table(
        name="floors",
        caption="Floor and mean of each method. Scores and losses in points of 100.",
        heads=("method", "floor: lowest kind", "largest loss", "mean of kinds", "keys read",
               "ms per token", "TTFT, ms"),
        groups=tuple((f"{whole(length)} tokens", tuple(rows)) for length, rows in groups.items()),
    )  # fmt: skip


def keys_read(summary: Summary, method: str, length: int) -> float | None:
    """Mean share of keys that decode steps of a method read at a length, over the kinds of all
    tasks with answers; of a baseline, of keys that it kept."""
    read = _mean_figure(summary, method, length, "keys_read_share")
    return _mean_figure(summary, method, length, KEPT) if read is None else read


def _mean_figure(summary: Summary, method: str, length: int, name: str) -> float | None:
    found = [
        line.figures[name]
        for line in summary.lines
        if (line.method, line.length) == (method, length) and line.kind != ALL
        and line.task not in summary.fidelity and name in line.figures
    ]  # fmt: skip
    return math.fsum(found) / len(found) if found else None


def _keys_cell(summary: Summary, floor: Floor) -> Cell:
    place = summary, floor.method, floor.length
    share, fast = keys_read(*place), _mean_figure(*place, "fast_keys_share")
    if share is None:
        return Cell(text=NOTHING)
    kept = "kept" if _mean_figure(*place, KEPT) is not None else ""
    return Cell(text=percent(share), note=kept if fast is None else f"fast steps {percent(fast)}")


def _mean_cell(floor: Floor) -> Cell:
    kinds = counted(floor.kinds, "kind")
    if floor.mean is None:
        return Cell(text="failed", note="on every kind", mark="failed")
    if floor.failed:
        note = f"{points(floor.mean)} over the other {kinds}"
        return Cell(text="failed", note=note, mark="failed")
    return Cell(text=points(floor.mean), note=kinds)


def _lowest_cell(floor: Floor) -> Cell:
    if floor.failed:
        return Cell(text="failed", note=", ".join(map(name_of, floor.failed)), mark="failed")
    if floor.lowest is None or floor.lowest.score is None:
        return Cell(text=NOTHING, note="dense does none of the kinds")
    return Cell(text=points(floor.lowest.score), note=name_of(floor.lowest))


def _loss_cell(floor: Floor) -> Cell:
    if floor.failed:
        return Cell(text="failed", mark="failed")
    if floor.method == DENSE:
        return Cell(text=NOTHING, note="the reference")
    line = floor.largest_loss
    if line is None or line.difference is None:
        return Cell(text=NOTHING, note="no sample in common with dense")
    if line.difference >= 0:
        return Cell(text="none", note="no kind below dense")
    note = f"{interval(line.low, line.high)}\n{name_of(line)}"
    return Cell(text=_arrow(line) + signed(line.difference), note=note, mark=verdict(line))


def _time_cell(value: Any, scale: float) -> Cell:
    return Cell(text=f"{scale * value:.1f}" if finite(value) else NOTHING)


def name_of(line: Line) -> str:
    """Task and kind."""
    return titled(line.task, line.kind)


def verdict(line: Line) -> str:
    """ "worse" or "better" where the whole interval is on one side of dense, else ""."""
    if line.low is None or line.high is None:
        return ""
    return "worse" if line.high < 0 else "better" if line.low > 0 else ""


def _arrow(line: Line) -> str:
    return {
        "worse": "\N{BLACK DOWN-POINTING TRIANGLE} ",
        "better": "\N{BLACK UP-POINTING TRIANGLE} ",
    }.get(verdict(line), "")


def scores_table(summary: Summary, ours: frozenset[str], *, whole_tasks: bool = False) -> Table:
    """Rows of tasks with answers, worst first; a column per method.

    Args:
        ours: the methods whose losses decide the order.
        whole_tasks: a row per task and length over all of its kinds, instead of one per kind.
    """
    spots = {
        spot: lines
        for spot, lines in summary.spots().items()
        if spot[0] not in summary.fidelity and (spot[2] == ALL or not whole_tasks)
        and (spot[2] != ALL or whole_tasks)
    }  # fmt: skip
    ordered = sorted(spots, key=lambda spot: _badness(spots[spot], ours))
    rows = tuple(_score_row(spot, spots[spot], summary.methods) for spot in ordered)
    what = "task, all of its kinds together" if whole_tasks else "kind of question"
    return Table(
        name="tasks" if whole_tasks else "kinds",
        caption=f"Mean score of each {what}, in points of 100; beneath it the difference to dense "
        f"over the same samples with its 95{SPACE}% interval.",
        heads=("task" if whole_tasks else "kind", *summary.methods),
        groups=(("", rows),) if rows else (),
        sortable=True,
    )


def _badness(lines: Mapping[str, Line], ours: frozenset[str]) -> tuple[bool, float, float]:
    """Sorts failures first, then the worst difference, then the lowest score."""
    mine = [line for name, line in lines.items() if name in ours] or list(lines.values())
    return (
        not any(line.failed for line in mine),
        min((line.difference for line in mine if line.difference is not None), default=0.0),
        min((line.score for line in mine if line.score is not None), default=1.0),
    )


def _score_row(spot: Spot, lines: Mapping[str, Line], methods: Sequence[str]) -> Row:
    task, length, kind = spot
    counts = {line.count for line in lines.values() if not line.failed}
    common = counts.pop() if len(counts) == 1 else None
    able = next(iter(lines.values())).dense_can
    notes = [f"{whole(length)} tokens"]
    notes += [counted(common, "sample")] if common is not None else []
    notes += ["dense cannot do it"] if able is False else []
    cells = tuple(_score_cell(lines.get(method), common) for method in methods)
    return Row(head=titled(task, kind), note="\n".join(notes), cells=cells)


def _score_cell(line: Line | None, common: int | None) -> Cell:
    if line is None:
        return Cell(text=NOTHING, note="not measured")
    if line.failed:
        return Cell(text="failed", note=_failure(line), mark="failed", sort=-2.0)
    if line.score is None:
        return Cell(text=NOTHING, note="not measured")
    notes = [] if line.count == common else [counted(line.count, "sample")]
    if line.difference is not None:
        pairs = "" if line.pairs == line.count else f", {counted(line.pairs, 'pair')}"
        between = interval(line.low, line.high)
        notes.insert(0, f"{_arrow(line)}{signed(line.difference)}{pairs}\n{between}")
    weak = "weak" if line.method == DENSE and line.dense_can is False else ""
    sort = line.score if line.difference is None else line.difference
    return Cell(
        text=points(line.score), note="\n".join(notes), mark=verdict(line) or weak, sort=sort
    )


def _failure(line: Line) -> str:
    error = cut(line.errors[0]) if line.errors else "no reason given"
    if line.score is None:
        return error
    total = line.failed + line.count
    return (
        f"{line.failed} of {whole(total)}: {error}; "
        f"{points(line.score)} over the other {whole(line.count)}"
    )


def fidelity_table(summary: Summary) -> Table:
    """Rows of methods under each text kind and length; a column per figure."""
    lines = [ln for ln in summary.lines if ln.task in summary.fidelity and ln.kind != ALL]
    known = {name for line in lines for name in line.figures}
    names = [name for name in FIGURES if name in known] + sorted(known - {*FIGURES, SCORE})
    groups: dict[Spot, list[Row]] = {}
    unmarked = {line.spot for line in lines if line.figures.get("sentences") == 0}
    for line in lines:
        groups.setdefault(line.spot, []).append(_fidelity_row(line, names))
    return Table(
        name="fidelity",
        caption="Every figure is a mean over samples; texts of one kind have rows of their own.",
        heads=("method", "same next token", *(FIGURES.get(name, name) for name in names)),
        groups=tuple(
            (_text_title(*spot) + ", no sentence ends" * (spot in unmarked), tuple(rows))
            for spot, rows in groups.items()
        ),
    )


def _text_title(task: str, length: int, kind: str) -> str:
    return f"{kind}, {task} at {whole(length)} tokens"


def _fidelity_row(line: Line, names: Sequence[str]) -> Row:
    note = counted(line.count, "sample")
    if line.failed:
        failed = Cell(text="failed", note=_failed_fidelity(line), mark="failed")
        blank = Cell(text=NOTHING)
        return Row(head=line.method, note=note, cells=(failed, *(blank for _ in names)))
    score = NOTHING if line.score is None else percent(line.score)
    cells = (Cell(text=score), *(Cell(text=_figure(name, line.figures)) for name in names))
    return Row(head=line.method, note=note, cells=cells)


def _failed_fidelity(line: Line) -> str:
    error = cut(line.errors[0]) if line.errors else "no reason given"
    return f"{line.failed} of {whole(line.failed + line.count)}: {error}"


def _figure(name: str, figures: Mapping[str, float]) -> str:
    if name not in figures:
        return NOTHING
    value = figures[name]
    if name in SHARES:
        return percent(value)
    if name in ("stability_k", "sentences"):
        return f"{value:.1f}".removesuffix(".0")
    return f"{value:.2f}" if name.startswith("ppl") else f"{value:.4f}"
