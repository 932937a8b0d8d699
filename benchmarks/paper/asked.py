"""What the command was asked for, and what came out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .expected import Expected, Found

Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Options, after defaults.

    Attributes:
        label: which of the table's models is measured; "" for all, of a table that times.
        model: None for a table that times shapes.
        limit: cases of each task and length, or cells of a table that times; None: as many as the
            table needs.
        report: what runs, how much is done, and of how much.
    """

    label: str
    model: str | None
    out: Path
    data: Path | None = None
    indexer: Path | None = None
    limit: int | None = None
    smoke: bool = False
    dtype: str = "auto"
    device: str = "auto"
    report: Report = lambda name, done, total: None


@dataclass(slots=True)
class Measured:
    """What a table's rows came to.

    Attributes:
        found: of the table's rows; one that is not there was not reached.
        extra: rows beyond the table's.
        details: for paper.json: configurations, lines of the evaluation, records.
        notes: what a reader has to know about this run.
    """

    found: dict[Expected, Found] = field(default_factory=dict)
    extra: list[tuple[Expected, Found]] = field(default_factory=list)
    details: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
