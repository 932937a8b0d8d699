"""From samples to lines of a table: means, differences to dense with intervals, and floors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..intervals import ALL, DENSE, DENSE_FLOOR, bootstrap

if TYPE_CHECKING:
    from ..tasks.base import Sample

FIDELITY = "kl"  # a task whose samples carry this figure compares distributions, not answers
Spot = tuple[str, int, str]  # task, length, kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One method on one kind of question of a task at one length.

    Attributes:
        kind: ALL: the samples of all kinds, where there are several.
        score: mean of the measured samples, 0 to 1; None where none was measured.
        count, failed: samples with a score, and without one.
        errors: why samples failed, each once, the most frequent first.
        difference: mean of score minus dense's score over the samples that both have; None for
            dense itself and where they share none.
        low, high: its 95 % interval; None with fewer than two pairs.
        pairs: how many samples both have.
        dense_can: whether dense reaches 0.5 here; None where dense was not measured.
        figures: means of the samples' figures.
    """

    task: str
    length: int
    kind: str
    method: str
    score: float | None = None
    count: int = 0
    failed: int = 0
    errors: tuple[str, ...] = ()
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    pairs: int = 0
    dense_can: bool | None = None
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def spot(self) -> Spot:
        """Where it was measured."""
        return self.task, self.length, self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The worst that a method does at one length, over the kinds of all tasks with answers.

    Attributes:
        mean: of the kinds' scores; None where no kind was measured.
        kinds: how many kinds that is.
        lowest: line of the lowest score, of the kinds that dense can do where dense is there.
        largest_loss: line of the lowest difference to dense; None without dense.
        failed: lines in which samples failed; then there is no other floor than that.
    """

    method: str
    length: int
    mean: float | None
    kinds: int
    lowest: Line | None
    largest_loss: Line | None
    failed: tuple[Line, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Samples that a run has still to measure."""

    task: str
    length: int
    method: str
    samples: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What the samples of a run add up to.

    Attributes:
        methods: in the order of the run.
        lines: tasks in the order of the run, lengths ascending, kinds, methods.
        floors: by length, then method.
        missing: not measured yet; () for a whole run.
        fidelity: names of the tasks that compare distributions; they have no floor.
    """

    methods: tuple[str, ...]
    lines: tuple[Line, ...]
    floors: tuple[Floor, ...]
    missing: tuple[Missing, ...]
    fidelity: frozenset[str]

    def spots(self) -> dict[Spot, dict[str, Line]]:
        """Lines by where they were measured, then by method."""
        found: dict[Spot, dict[str, Line]] = {}
        for line in self.lines:
            found.setdefault(line.spot, {})[line.method] = line
        return found

    def whole(self, task: str, length: int, method: str) -> Line | None:
        """The line over all kinds of a task, whether it has one kind or several."""
        here = [
            line
            for line in self.lines
            if (line.task, line.length, line.method) == (task, length, method)
        ]
        return next((line for line in here if line.kind == ALL), here[0] if here else None)


def summarise(run: Mapping[str, Any], samples: Sequence[Sample]) -> Summary:
    """Sums of a run's samples; the order in which they were measured does not matter.

    Args:
        run: content of run.json.
        samples: of two with the same key, the later one counts.
    """
    unique = {sample.key: sample for sample in samples}
    ordered = sorted(unique.values(), key=lambda s: (s.number, s.query, s.kind))
    methods = tuple(dict.fromkeys([*run.get("methods", {}), *sorted({s.method for s in ordered})]))
    lines = tuple(_lines(_cells(run, ordered), methods))
    fidelity = frozenset(line.task for line in lines if FIDELITY in line.figures)
    answers = [line for line in lines if line.task not in fidelity and line.kind != ALL]
    missing = tuple(_missing(run, ordered, methods, fidelity))
    return Summary(methods, lines, tuple(_floors(answers, methods)), missing, fidelity)


def _cells(run: Mapping[str, Any], ordered: Sequence[Sample]) -> dict[Spot, dict[str, list[Any]]]:
    """Samples by place and method, in the order of `Summary.lines`."""
    places = [place["task"] for place in run.get("places", [])]
    tasks = list(dict.fromkeys([*places, *sorted({s.task for s in ordered})]))
    found: dict[Spot, dict[str, list[Any]]] = {}
    for task in tasks:
        mine = [sample for sample in ordered if sample.task == task]
        for length in sorted({sample.length for sample in mine}):
            here = [sample for sample in mine if sample.length == length]
            kinds = list(dict.fromkeys(sample.kind for sample in here))
            for kind in kinds if len(kinds) == 1 else [*kinds, ALL]:
                cell = found.setdefault((task, length, kind), {})
                for sample in here:
                    if kind in (ALL, sample.kind):
                        cell.setdefault(sample.method, []).append(sample)
    return found


def _lines(
    cells: Mapping[Spot, Mapping[str, Sequence[Sample]]], methods: Sequence[str]
) -> Iterator[Line]:
    for (task, length, kind), cell in cells.items():
        dense = _scores(cell.get(DENSE, ()))
        can = _mean(list(dense.values())) >= DENSE_FLOOR if dense else None
        for method in methods:
            here = cell.get(method, ())
            if not here:
                continue
            scores = _scores(here)
            errors = Counter(s.error or "no score" for s in here if s.score is None)
            yield Line(
                task=task, length=length, kind=kind, method=method, count=len(scores),
                score=_mean(list(scores.values())) if scores else None,
                failed=len(here) - len(scores),
                errors=tuple(error for error, _ in errors.most_common()),
                dense_can=can, figures=_figures(here),
                **({} if method == DENSE else _difference(scores, dense)),
            )  # fmt: skip


def _scores(samples: Sequence[Sample]) -> dict[tuple[int, int], float]:
    return {(s.number, s.query): s.score for s in samples if s.score is not None}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _figures(samples: Sequence[Sample]) -> dict[str, float]:
    """Means of the figures, each over the samples that have it as a number."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.figures.items():
            if sample.score is not None and math.isfinite(value):
                found.setdefault(name, []).append(value)
    return {name: _mean(values) for name, values in found.items()}


def _difference(
    scores: Mapping[tuple[int, int], float], dense: Mapping[tuple[int, int], float]
) -> dict[str, Any]:
    """`Line`'s fields about the difference to dense."""
    differences = [score - dense[key] for key, score in scores.items() if key in dense]
    if not differences:
        return {}
    low, high = bootstrap(differences) if len(differences) > 1 else (None, None)
    return {
        "difference": _mean(differences),
        "low": low,
        "high": high,
        "pairs": len(differences),
    }


def _floors(answers: Sequence[Line], methods: Sequence[str]) -> Iterator[Floor]:
    for length in sorted({line.length for line in answers}):
        for method in methods:
            here = [ln for ln in answers if ln.length == length and ln.method == method]
            if not here:
                continue
            whole = [line for line in here if line.score is not None and not line.failed]
            counted = [line for line in whole if line.dense_can is not False]
            compared = [line for line in whole if line.difference is not None]
            yield Floor(
                method=method, length=length, kinds=len(whole),
                mean=_mean([line.score for line in whole if line.score is not None])
                if whole else None,
                lowest=min(counted, key=lambda ln: ln.score or 0.0, default=None),
                largest_loss=min(compared, key=lambda ln: ln.difference or 0.0, default=None),
                failed=tuple(line for line in here if line.failed),
            )  # fmt: skip


def _missing(
    run: Mapping[str, Any],
    samples: Sequence[Sample],
    methods: Sequence[str],
    fidelity: frozenset[str],
) -> Iterator[Missing]:
    """Samples of run.json's places, as many for every method, less those there. Baselines answer
    questions only, so that fidelity lacks none of theirs."""
    there = Counter((s.task, s.length, s.method) for s in samples)
    baselines = {name for name, method in run.get("methods", {}).items() if method.get("press")}
    for place in run.get("places", []):
        for method in methods:
            task, length = place["task"], place["length"]
            if method in baselines and (task in fidelity or task.startswith("fidelity")):
                continue
            left = place["samples"] - there[task, length, method]
            if left > 0:
                yield Missing(task=task, length=length, method=method, samples=left)
