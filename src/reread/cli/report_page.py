"""`reread report`: the results of `reread eval` as one HTML file."""

# No `from __future__ import annotations` here: typer reads the annotations of the options.
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from .report import busy, make_console, print_json, write_text


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of `reread report`."""

    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of results, written by reread eval --out.")
    ]
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="HTML file to write. Default: report.html in DIR.",
            show_default=False,
        ),
    ] = None  # fmt: skip
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on standard output.")
    ] = False


def report_command(options: ReportOptions) -> None:
    """Make one HTML file of the results in DIR; it needs no network."""
    console = make_console()
    with busy(console, "writing the report"):
        from ..evaluation.report import write_report

        path = write_report(options.folder, options.out)
    if options.as_json:
        print_json({"report": str(path)})
        return
    write_text(f"{path}\n")
