"""The three gaps, each by itself: of this run's decoding, and of a result of `reread eval gaps`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..intervals import DENSE, DENSE_FLOOR, bootstrap
from ..tasks.base import Sample
from .cells import Cell, Row, Table, counted, interval, signed, titled, whole
from .sums import Summary

ORACLE, INDEXER = "oracle", "indexer"


def decode_gaps(samples: Sequence[Sample], summary: Summary) -> list[dict[str, Any]]:
    """Oracle gap (dense minus oracle) and indexer gap (oracle minus indexer) of a run.

    Args:
        samples: tasks that compare distributions are left out.
        summary: theirs. An indexer is compared with the oracle that has the same changes and
            share in its name.
    """
    methods = summary.methods
    answers = [sample for sample in samples if sample.task not in summary.fidelity]
    oracles = [name for name in methods if _base(name) == ORACLE]
    indexers = [name for name in methods if _base(name) == INDEXER]
    pairs = [("oracle gap", DENSE, name) for name in oracles if DENSE in methods]
    for name in indexers:
        same = ORACLE + name[len(INDEXER) :]
        if same in oracles:
            pairs.append(("indexer gap", same, name))
    return [line for pair in pairs for line in _gap(answers, *pair)]


def _base(name: str) -> str:
    return name.partition("@")[0].partition(":")[0]


def _gap(samples: Sequence[Sample], name: str, upper: str, lower: str) -> Iterator[dict[str, Any]]:
    spots: dict[tuple[str, int, str], dict[str, dict[tuple[int, int], float]]] = {}
    for sample in sorted(samples, key=lambda s: (s.task, s.length, s.number, s.query)):
        if sample.score is not None and sample.method in (upper, lower, DENSE):
            spot = spots.setdefault((sample.task, sample.length, sample.kind), {})
            spot.setdefault(sample.method, {})[sample.number, sample.query] = sample.score
    for (task, length, kind), scores in spots.items():
        above, below = scores.get(upper, {}), scores.get(lower, {})
        differences = [above[key] - below[key] for key in below if key in above]
        if not differences:
            continue
        low, high = bootstrap(differences) if len(differences) > 1 else (None, None)
        dense = list(scores.get(DENSE, {}).values())
        can = math.fsum(dense) / len(dense) >= DENSE_FLOOR if dense else None
        yield {
            "task": task, "length": length, "gap": name, "of": [upper, lower], "kind": kind,
            "value": math.fsum(differences) / len(differences), "low": low, "high": high,
            "cases": len(differences), "dense_can": can,
        }  # fmt: skip


def gap_tables(name: str, where: str, gaps: Sequence[Mapping[str, Any]]) -> list[Table]:
    """One table for each gap: they answer different questions, and are never added up.

    Args:
        name: begins the tables' anchors.
        where: what the gaps are of, such as "decoding".
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for gap in gaps:
        found.setdefault(str(gap["gap"]), []).append(gap)
    return [
        Table(
            name=f"{name}-{number}",
            caption=f"{title[:1].upper()}{title[1:]} of {where}, in points of 100.",
            heads=("kind", "gap", "95 % interval", "samples"),
            groups=tuple(_groups(lines)),
        )
        for number, (title, lines) in enumerate(found.items())
    ]


def _groups(lines: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, tuple[Row, ...]]]:
    groups: dict[str, list[Row]] = {}
    for line in lines:
        notes = ["dense cannot do it"] if line.get("dense_can") is False else []
        if line["low"] is not None and line["low"] > 0:
            notes.append("all above zero")
        cells = (
            Cell(text=signed(line["value"])),
            Cell(
                text=interval(line["low"], line["high"]),
                note="\n".join(notes),
                mark="worse" * (notes[-1:] == ["all above zero"]),
            ),
            Cell(text=whole(line["cases"])),
        )
        head = f"{' minus '.join(map(str, line['of']))}, {whole(line['length'])} tokens"
        groups.setdefault(head, []).append(
            Row(head=titled(str(line["task"]), str(line["kind"])), cells=cells)
        )
    return ((head, tuple(rows)) for head, rows in groups.items())


def oracle_missing(methods: Sequence[str]) -> str:
    """Which indexers have no oracle to be compared with, in words; "" where none lacks one."""
    lone = [
        name for name in methods
        if _base(name) == INDEXER and ORACLE + name[len(INDEXER) :] not in methods
    ]  # fmt: skip
    if not lone:
        return ""
    verb = "has" if len(lone) == 1 else "have"
    return (
        f"{counted(len(lone), 'indexer')} {verb} no oracle with the same changes: {', '.join(lone)}"
    )
