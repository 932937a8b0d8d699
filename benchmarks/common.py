"""What the benchmarks share: where results go, and how a table is printed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
console = Console(stderr=True)


def save(name: str, result: Mapping[str, Any]) -> Path:
    """Write a result file under benchmarks/results."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def show(title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Print rows as a table on stderr."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(_cell(row[column]) for column in columns))
    console.print(table)


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
