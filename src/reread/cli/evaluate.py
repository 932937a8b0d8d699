"""`reread eval gaps` and `reread eval mass`: what sparse prefill costs, and what it could read."""

# No `from __future__ import annotations` here: typer reads the annotations of the options.
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.progress import TimeRemainingColumn as Remaining
from rich.table import Table

from ..errors import InputError
from .options import read_text, whole_numbers
from .report import LINE_EVERY_S, busy, make_console, print_json

if TYPE_CHECKING:
    from ..evaluation.gaps.run import Report, Request
    from ..evaluation.mass import MassProfile

SCHEDULE = "schedule"


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """What both commands take."""

    model: Annotated[str, typer.Option(help="Builtin name, folder, GGUF file or hub id.")]
    seed: Annotated[int, typer.Option(help="Of the texts.")] = 0
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto"
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on standard output.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class GapsOptions(EvalOptions):
    """Options of `reread eval gaps`."""

    out: Annotated[
        Path, typer.Option(help="JSON file of the result; the same command continues it.")
    ]
    indexer: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a distilled indexer. Default: the training-free sampled chooser.",
            show_default=False,
        ),
    ] = None
    tasks: Annotated[
        str,
        typer.Option(
            help="Some of needle, needle-greedy, niah_single, niah_multikey, vt; niah: both of its."
        ),
    ] = "needle"
    lengths: Annotated[str, typer.Option(metavar="TOKENS", help="Several between commas.")] = "4096"
    k: Annotated[str, typer.Option(help="Tokens chosen for a block, or schedule.")] = "256"
    b_sel: Annotated[
        str, typer.Option(metavar="QUERIES", help="Queries that share a choice; several.")
    ] = "16,32,64,128"
    limit: Annotated[int, typer.Option(help="Texts of each task and length.")] = 4
    local: Annotated[int, typer.Option(help="Newest tokens that are always read.")] = 16

    def request(self) -> "Request":
        """What is asked for.

        Raises:
            InputError: an option that cannot be read.
        """
        from ..evaluation.gaps.run import Request

        budget = None if self.k == SCHEDULE else whole_numbers("--k", self.k)
        if budget is not None and len(budget) > 1:
            raise InputError(f"--k {self.k!r} is not possible: one number, or schedule")
        return Request(
            model=self.model, tasks=task_names(self.tasks), out=self.out, indexer=self.indexer,
            lengths=tuple(whole_numbers("--lengths", self.lengths)),
            k=None if budget is None else budget[0],
            b_sel=tuple(whole_numbers("--b-sel", self.b_sel)),
            limit=self.limit, seed=self.seed, local=self.local,
            dtype=self.dtype, device=self.device,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MassOptions(EvalOptions):
    """Options of `reread eval mass`."""

    prompt_file: Annotated[
        str | None, typer.Option(metavar="PATH", help="UTF-8 text to read, - for standard input.")
    ] = None
    tasks: Annotated[
        str | None, typer.Option(help="Read a text of this task instead, such as needle.")
    ] = None
    length: Annotated[int, typer.Option(help="Tokens to read, at most.")] = 8192
    k: Annotated[str, typer.Option(help="Several between commas.")] = "64,256,1024"
    queries: Annotated[int, typer.Option(help="Query positions that are asked.")] = 256
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the k needed by layer: .svg or .png.")
    ] = None


def task_names(text: str) -> tuple[str, ...]:
    """ "needle,niah" as ("needle", "niah_single", "niah_multikey")."""
    names: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        names += ["niah_single", "niah_multikey"] if part == "niah" else [part]
    return tuple(dict.fromkeys(names))


def gaps_command(options: GapsOptions) -> None:
    """Measure the oracle, indexer and realisation gaps of sparse prefill."""
    console = make_console()
    with busy(console, "loading torch"):
        from ..evaluation.gaps.run import measure_gaps
    request = options.request()
    try:
        with progress(console, "texts") as report:
            result = measure_gaps(request, report)
    except KeyboardInterrupt:
        console.print(f"interrupted: {options.out} keeps its rows; the same command continues")
        raise
    for entry in result["skipped"]:
        console.print(f"skipped: {entry['task']} at {entry['length']}, {entry['reason']}")
    if options.as_json:
        print_json(result)
        return
    out = Console(file=sys.stdout, highlight=False)
    for table in gap_tables(result):
        out.print(table)
    for entry in result["default_b_sel"]:
        if entry["b_sel"] is not None:
            out.print(
                f"b_sel at {entry['length']} tokens: {entry['b_sel']}, the largest that stays "
                "within 1 point of choosing per query"
            )
    for note in result["notes"]:
        out.print(f"note: {note}")
    console.print(f"written to {options.out}")


def gap_tables(result: Mapping[str, Any]) -> list[Table]:
    """Rows, then gaps, of each task and length."""
    places = dict.fromkeys((row["task"], row["length"]) for row in result["rows"])
    found = []
    for place in places:
        found.append(_rows_table(place, [r for r in result["rows"] if _place(r) == place]))
        gaps = [gap for gap in result["gaps"] if _place(gap) == place]
        if gaps:
            found.append(_gaps_table(place, gaps))
    return found


def _place(entry: Mapping[str, Any]) -> tuple[str, int]:
    return entry["task"], entry["length"]


def _rows_table(place: tuple[str, int], rows: Sequence[Mapping[str, Any]]) -> Table:
    kinds = [*rows[0]["shares"], *(["all"] if len(rows[0]["shares"]) > 1 else [])]
    budget = next((f", k={row['k']}" for row in rows if row["k"] is not None), "")
    timed = any(row["ttft_s"] is not None for row in rows)
    cases = sum(rows[0]["cases"].values())
    table = Table(
        title=f"{place[0]} at {place[1]} tokens{budget}: share right of {cases} answers",
        box=SIMPLE_HEAD,
    )
    table.add_column("prefill", overflow="fold")
    for head in (*kinds, "keys read"):
        table.add_column(head, justify="right", overflow="fold")
    table.add_column("ran", overflow="fold")
    if timed:
        table.add_column("TTFT, s", justify="right")
    for row in rows:
        seconds = "-" if row["ttft_s"] is None else f"{row['ttft_s']:.3f}"
        table.add_row(
            row["variant"],
            *(f"{row['accuracy'][kind]:.3f}" for kind in kinds),
            f"{row['share_read']:.1%}",
            row["path"],
            *([seconds] if timed else []),
        )
    return table


def _gaps_table(place: tuple[str, int], gaps: Sequence[Mapping[str, Any]]) -> Table:
    """Under each gap's name the rows that it is the difference of."""
    table = Table(
        title=f"{place[0]} at {place[1]} tokens: gaps in points, 95 % intervals", box=SIMPLE_HEAD
    )
    table.add_column("gap", overflow="fold")
    table.add_column("kind", overflow="fold")
    table.add_column("points", justify="right")
    table.add_column("interval", overflow="fold")
    for _, group in groupby(gaps, key=lambda gap: (gap["gap"], gap["of"])):
        lines = list(group)
        names = lines[0]["gap"], f"  {' - '.join(lines[0]['of'])}"
        for name, line in zip_longest(names, lines, fillvalue=None):
            table.add_row(name or "", *(_gap_cells(line) if line is not None else ()))
    return table


def _gap_cells(gap: Any) -> tuple[str, str, str]:
    unable = ", dense cannot do it" if gap["dense_can"] is False else ""
    interval = f"{100 * gap['low']:+.1f} to {100 * gap['high']:+.1f}{unable}"
    return gap["kind"], f"{100 * gap['value']:+.1f}", interval


@contextmanager
def progress(console: Console, unit: str) -> "Iterator[Report]":
    """What is done and the time left: a bar on a terminal, else a line every ten seconds and at the
    end."""
    if not console.is_terminal:
        began = last = time.monotonic()

        def line(name: str, done: int, total: int) -> None:
            nonlocal last
            now = time.monotonic()
            if done >= total or now - last >= LINE_EVERY_S:
                last = now
                left = f", about {time_left(now - began, done, total)} left" if done else ""
                console.print(f"{name}: {done}/{total} {unit}{left if done < total else ''}")

        yield line
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TextColumn(unit), Remaining(), console=console) as bars:
        task = bars.add_task("", total=None)
        yield lambda name, done, total: bars.update(
            task, description=name, completed=done, total=total
        )


def time_left(seconds: float, done: int, total: int) -> str:
    """ "90 s" or "12 min", if what is left takes as long as what was done."""
    left = seconds / done * (total - done)
    return f"{left:.0f} s" if left < 2 * 60 else f"{left / 60:.0f} min"


def mass_command(options: MassOptions) -> None:
    """Show how much attention mass the top k of past tokens hold, layer by layer."""
    ks = whole_numbers("--k", options.k)
    if (options.prompt_file is None) == (options.tasks is None):
        raise InputError("give --prompt-file or --tasks, one of them")
    console = make_console()
    with busy(console, "loading torch"):
        from ..evaluation.mass_run import MassRequest, measure_mass
    text = None if options.prompt_file is None else read_text(options.prompt_file)
    request = MassRequest(
        model=options.model, text=text, tasks=task_names(options.tasks or ""),
        length=options.length, ks=tuple(ks), queries=options.queries, seed=options.seed,
        plot=options.plot, dtype=options.dtype, device=options.device,
    )  # fmt: skip
    with progress(console, "layers") as report:
        profile, result = measure_mass(request, report)
    if options.as_json:
        print_json(result)
        return
    Console(file=sys.stdout, highlight=False).print(mass_table(profile))
    if options.plot is not None:
        console.print(f"plot: {options.plot}")


def mass_table(profile: "MassProfile") -> Table:
    """Two lines a layer: per query and shared."""
    table = Table(
        title=f"mass of the top k over {profile.tokens} tokens, and the k needed: "
        "mean/median/90th percentile",
        box=SIMPLE_HEAD,
    )
    some = next(iter(profile.per_query.values()))
    heads = [f"k={k}" for k in some.mass] + [f"for {target:.0%}" for target in some.needed]
    for head in ("layer", "b_sel", *heads):
        table.add_column(head, justify="right", overflow="fold")
    for layer in profile.per_query:
        for block, layers in ((1, profile.per_query), (profile.block, profile.shared)):
            found = layers[layer]
            table.add_row(
                str(layer) if block == 1 else "",
                str(block),
                *(f"{held:.3f}" for held in found.mass.values()),
                *("/".join(f"{v:.0f}" for v in s.values()) for s in found.needed.values()),
            )
    return table
