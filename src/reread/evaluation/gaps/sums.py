"""From rows to gaps: differences between two rows over the same cases, with their intervals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..intervals import ALL, DENSE, DENSE_FLOOR, bootstrap

WITHIN = 0.01  # what a shared choice may lose
Row = Mapping[str, Any]

ORACLE, INDEXER, SAMPLED = "oracle", "indexer", "sampled"


def variant(chooser: str, b_sel: int) -> str:
    """Name of a row."""
    if chooser == DENSE:
        return DENSE
    return f"{chooser} per query" if b_sel == 1 else f"{chooser} shared by {b_sel}"


def shares_of(row: Row, kind: str) -> list[float]:
    """The cases of one kind, or of all kinds in their order."""
    found: Mapping[str, list[float]] = row["shares"]
    if kind == ALL:
        return [share for shares in found.values() for share in shares]
    return found[kind]


def accuracies(shares: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Mean share right by kind, and over the cases of all kinds."""
    every = [share for found in shares.values() for share in found]
    kinds = {kind: sum(found) / len(found) for kind, found in shares.items()}
    return {**kinds, ALL: sum(every) / len(every)}


def kinds_of(row: Row) -> tuple[str, ...]:
    """Its kinds, and ALL where there are several."""
    kinds = tuple(row["shares"])
    return kinds if len(kinds) == 1 else (*kinds, ALL)


def difference(name: str, upper: Row, lower: Row) -> list[dict[str, Any]]:
    """One gap: a line per kind of question, `upper` minus `lower` over the same cases."""
    found = []
    for kind in kinds_of(upper):
        pairs = zip(shares_of(upper, kind), shares_of(lower, kind), strict=True)
        differences = [a - b for a, b in pairs]
        low, high = bootstrap(differences)
        found.append(
            {
                "task": upper["task"],
                "length": upper["length"],
                "gap": name,
                "of": [upper["variant"], lower["variant"]],
                "kind": kind,
                "value": sum(differences) / len(differences),
                "low": low,
                "high": high,
                "cases": len(differences),
            }
        )
    return found


def cells(rows: Sequence[Row]) -> dict[tuple[str, int], dict[str, Row]]:
    """Rows by task and length, then by name."""
    found: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["task"], row["length"]), {})[row["variant"]] = row
    return found


def gaps_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every gap whose two rows are there; those of a task that dense attention cannot do are
    marked so ("dense_can" is False)."""
    found: list[dict[str, Any]] = []
    for here in cells(rows).values():
        for name, upper, lower in _pairs(here):
            lines = difference(name, here[upper], here[lower])
            dense = here.get(DENSE)
            for line in lines:
                able = None if dense is None else _able(dense, line["kind"])
                found.append({**line, "dense_can": able})
    return found


def _able(dense: Row, kind: str) -> bool:
    return bool(dense["accuracy"][kind] >= DENSE_FLOOR)


def _pairs(here: Mapping[str, Row]) -> Iterator[tuple[str, str, str]]:
    """Gaps of one task and length: name, and the rows it is the difference of."""
    oracle, indexer = variant(ORACLE, 1), variant(INDEXER, 1)
    pairs = [("oracle gap", DENSE, oracle), ("indexer gap", oracle, indexer)]
    for name, row in here.items():
        if row["b_sel"] == 1 or row["chooser"] == DENSE:
            continue
        if row["chooser"] == ORACLE:
            pairs.append(("sharing of the oracle", DENSE, name))
        elif row["chooser"] == INDEXER:
            pairs.append(("realisation gap", indexer, name))
        else:
            # sampled with one query a block is the oracle per query
            pairs.append(("sampling gap", variant(ORACLE, row["b_sel"]), name))
            pairs.append(("sampled realisation gap", oracle, name))
    return (pair for pair in pairs if pair[1] in here and pair[2] in here)


def default_blocks(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """By length, the largest b_sel that loses at most WITHIN against choosing per query, on every
    kind of question that dense attention can do; 1 where none does, None where nothing tells."""
    by_length: dict[int, list[dict[str, Row]]] = {}
    for (_, length), here in cells(rows).items():
        by_length.setdefault(length, []).append(here)
    found = []
    for length, places in sorted(by_length.items()):
        lost: dict[int, float] = {}
        for here in places:
            for block, loss in _losses(here):
                lost[block] = max(lost.get(block, loss), loss)
        kept = [block for block, loss in lost.items() if loss <= WITHIN + 1e-9]
        best = max(kept, default=1) if lost else None
        losses = {str(block): loss for block, loss in sorted(lost.items())}
        found.append({"length": length, "b_sel": best, "lost": losses})
    return found


def _losses(here: Mapping[str, Row]) -> Iterator[tuple[int, float]]:
    """b_sel and what it loses, of every shared row of the chooser and kind that counts."""
    dense = here.get(DENSE)
    if dense is None:
        return
    for row in here.values():
        if row["chooser"] not in (INDEXER, SAMPLED) or row["b_sel"] == 1:
            continue
        alone = here.get(variant(INDEXER if row["chooser"] == INDEXER else ORACLE, 1))
        for kind in row["shares"] if alone is not None else ():
            if alone is not None and _able(dense, kind):
                yield row["b_sel"], alone["accuracy"][kind] - row["accuracy"][kind]
