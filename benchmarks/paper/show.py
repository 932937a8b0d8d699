"""How a run is printed and saved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Grid

from reread.evaluation.provenance import provenance
from reread.indexer.checkpoint import write_json
from reread.integrations.hf.load import resolve_device

from .asked import Asked, Measured
from .expected import OUTSIDE, SMOKE, Expected, Found, Table, verdict
from .tables import TABLES

RESULT = "paper.json"
Line = tuple[Expected, Found, str]


def lines(table: Table, asked: Asked, measured: Measured) -> list[Line]:
    """All rows with what was measured and the verdict."""
    unjudged = SMOKE if asked.smoke else ""
    rows = [row for row in table.rows if asked.label in ("", row.model)]
    nothing = Found(reason="not reached")
    pairs = [(row, measured.found.get(row, nothing)) for row in rows]
    return [(row, found, verdict(row, found, unjudged)) for row, found in pairs + measured.extra]


def outside(judged: list[Line]) -> int:
    """How many rows are outside their tolerance."""
    return sum(said == OUTSIDE for _, _, said in judged)


def as_json(table: Table, asked: Asked, measured: Measured, judged: list[Line]) -> dict[str, Any]:
    """Everything a reader needs to judge the result."""
    return {
        "table": table.name, "paper": table.paper, "section": table.section,
        "models": dict(table.models), "hardware": table.hardware,
        "differs": list(table.notes), "notes": measured.notes, "smoke": asked.smoke,
        "model": asked.model, "label": asked.label, "limit": asked.limit,
        "work": asdict(table.work),
        "rows": [
            {**asdict(row), "measured": found.value,
             "difference": _difference(row, found, asked.smoke), "verdict": said}
            for row, found, said in judged
        ],
        "outside": outside(judged),
        **provenance(resolve_device(asked.device)),
        "details": measured.details,
    }  # fmt: skip


def save(folder: Path, result: dict[str, Any]) -> Path:
    """Write paper.json.

    Raises:
        InputError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RESULT, result)
    return folder / RESULT


def show(
    console: Console, table: Table, asked: Asked, measured: Measured, judged: list[Line]
) -> None:
    """Print rows, then what differs."""
    grid = Grid(title=f"{table.name}: {table.paper}, {table.section}", box=SIMPLE_HEAD)
    for head in ("model", "row"):
        grid.add_column(head, overflow="fold")
    for head in ("published", "measured", "difference"):
        grid.add_column(head, justify="right")
    grid.add_column("within tolerance?", overflow="fold")
    for row, found, said in judged:
        short = said.replace(f": {SMOKE}", ", smoke")
        grid.add_row(row.model, row.name, _published(row), _value(found.value),
                     _value(_difference(row, found, asked.smoke), "+"), short)  # fmt: skip
    console.print(grid)
    if asked.smoke:
        console.print(SMOKE)
    for note in measured.notes:
        console.print(f"note: {note}")
    for note in table.notes:
        console.print(f"differs: {note}")


def show_list(console: Console) -> None:
    """All tables."""
    grid = Grid(box=SIMPLE_HEAD)
    for head in ("table", "paper and section", "models", "rows", "wants"):
        grid.add_column(head, overflow="fold", min_width=16 if head == "table" else None)
    for table in TABLES.values():
        where, models = f"{table.paper}: {table.section}", ", ".join(table.models.values())
        grid.add_row(table.name, where, models, str(len(table.rows)), table.hardware)
    console.print(grid)


def described() -> Iterator[dict[str, Any]]:
    """All tables as plain values, without what is measured."""
    for table in TABLES.values():
        yield {
            "table": table.name, "paper": table.paper, "section": table.section,
            "models": dict(table.models), "hardware": table.hardware,
            "differs": list(table.notes), "rows": [asdict(row) for row in table.rows],
        }  # fmt: skip


def _difference(row: Expected, found: Found, smoke: bool) -> float | None:
    """Measured less published; None in a smoke run, where it would say nothing."""
    if smoke or row.value is None or found.value is None or row.absent:
        return None
    return found.value - row.value


def _published(row: Expected) -> str:
    if row.value is None or row.tolerance is None:
        return "-"
    sign = {"equal": "±", "at least": "-", "at most": "+"}[row.sense]
    return f"{row.value:g} {row.unit} ({sign}{row.tolerance.amount:g})"


def _value(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.2f}"
