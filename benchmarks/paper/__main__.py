"""Published tables, measured again.

    python -m benchmarks.paper list
    python -m benchmarks.paper TABLE --model ID_OR_FOLDER [--data DIR] [--out DIR] [--limit N]
    python -m benchmarks.paper TABLE --smoke

--model is the checkpoint; tables that time take none, they use random weights. Its folder's name
says which of the table's models it is, or --as does. The same command continues an interrupted
run. Exit code 1: something is outside its tolerance; 2: what was asked for cannot be done.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from rich.console import Console

from reread.cli.evaluate import progress
from reread.errors import InputError, RereadError

from . import quality, show, smoke, speed, speed_smoke
from .asked import Asked, Measured
from .expected import Quality, Table, label_for
from .tables import named

OUT = Path("paper-results")
WIDTH = 140  # characters
INTERRUPTED = 130  # exit code, as of a shell


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.paper", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("table", help="a table's name, or list")
    made.add_argument("--model", help="hub id or folder")
    made.add_argument("--as", dest="label", help="which of the table's models that is")
    made.add_argument("--data", type=Path, help="copies of data sets, as for reread eval")
    made.add_argument("--indexer", type=Path, help="a distilled indexer, for tables that use one")
    made.add_argument("--out", type=Path, default=OUT, help=f"folder of results (default {OUT})")
    made.add_argument("--limit", type=int, help="cases of each task, or cells of a speed table; "
                      "then nothing is judged that needs more")  # fmt: skip
    made.add_argument("--smoke", action="store_true", help="on a CPU, with a stand-in, in minutes")
    made.add_argument("--dtype", default="auto")
    made.add_argument("--device", default="auto")
    made.add_argument("--json", action="store_true", help="paper.json on standard output, too")
    return made


def ask(table: Table, args: argparse.Namespace) -> Asked:
    """What the options ask for.

    Raises:
        InputError: a model that is missing or none of the table's, or a limit below 1.
    """
    if args.limit is not None and args.limit < 1:
        raise InputError(f"--limit {args.limit} is not possible: at least 1")
    if args.data is not None and not args.data.is_dir():
        raise InputError(f"--data {str(args.data)!r} is no folder")
    model, label = args.model, args.label
    if args.smoke:
        model = smoke.stand_in(table, model)
        label = label_for(table, None, label or next(iter(table.models)))
    elif not table.needs_gpu:
        if model is None:
            ids = ", ".join(table.models.values())
            raise InputError(f"table {table.name} needs --model: a copy of {ids}")
        label = label_for(table, model, label)
    elif model is not None or label is not None:
        label = label_for(table, model, label)
    return Asked(
        label="" if table.needs_gpu and args.smoke else label or "", model=model,
        out=args.out / table.name, data=args.data, indexer=args.indexer, limit=args.limit,
        smoke=args.smoke, dtype=args.dtype, device="cpu" if args.smoke else args.device,
    )  # fmt: skip


def measure(table: Table, asked: Asked, console: Console) -> Measured:
    """Run the table, with progress."""
    notes: list[str] = []
    if asked.smoke:
        asked = smoke.prepare(table, asked, notes)
    with progress(console, "samples") as report:
        asked = replace(asked, report=report)
        if isinstance(table.work, Quality):
            measured = quality.measure(table, asked)
        else:
            measured = (speed_smoke if asked.smoke else speed).measure(table, asked)
    measured.notes[:0] = notes
    return measured


def _console(file: TextIO) -> Console:
    """Wide enough for the tables where no terminal says how wide it is."""
    return Console(file=file, highlight=False, width=None if file.isatty() else WIDTH)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = parser().parse_args(arguments)
    out, console = _console(sys.stdout), _console(sys.stderr)
    try:
        if args.table == "list":
            if args.json:
                print(json.dumps(list(show.described()), indent=1, ensure_ascii=False))
            else:
                show.show_list(out)
            return 0
        table = named(args.table)
        asked = ask(table, args)
        measured = measure(table, asked, console)
        judged = show.lines(table, asked, measured)
        result = show.as_json(table, asked, measured, judged)
        path = show.save(asked.out, result)
    except KeyboardInterrupt:
        console.print("interrupted: samples are kept, and the same command continues")
        return INTERRUPTED
    except RereadError as error:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    if args.json:
        print(json.dumps(result, indent=1, ensure_ascii=False))
    show.show(console if args.json else out, table, asked, measured, judged)
    console.print(f"written to {path}", soft_wrap=True)
    return 1 if show.outside(judged) and not asked.smoke else 0


if __name__ == "__main__":
    sys.exit(main())
