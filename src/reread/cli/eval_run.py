"""`reread eval --model M --tasks ...`: methods over tasks, into one folder."""

# No `from __future__ import annotations` here: typer reads the annotations of the options.
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from .evaluate import progress
from .options import whole_numbers
from .report import busy, make_console, print_json

if TYPE_CHECKING:
    from ..evaluation.report.sums import Line, Summary
    from ..evaluation.suite.request import Request

RUN = "run"
WIDE = 160  # characters of a line that goes to no terminal


class RunByDefault(TyperGroup):
    """`reread eval --model M ...` is short for `reread eval run --model M ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the name of the command in where an option comes first."""
        if args and args[0].startswith("-") and args[0] != "--help":
            args = [RUN, *args]
        return super().parse_args(ctx, args)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of `reread eval`."""

    model: Annotated[str, typer.Option(help="Builtin name, folder, GGUF file or hub id.")]
    out: Annotated[Path, typer.Option(help="Folder of the results; the same command continues it.")]
    tasks: Annotated[
        str,
        typer.Option(
            help="Several between commas: needle, needle_en, fidelity, ruler, ruler_vt, longbench, "
            "longbench2, gpqa_diamond, mmlu, mmlongbench_doc, videomme and others."
        ),
    ] = "needle_en,fidelity"
    lengths: Annotated[str, typer.Option(metavar="TOKENS", help="Several between commas.")] = "4096"
    methods: Annotated[
        str,
        typer.Option(
            help="Presets (dense, default, paper), oracle, indexer, prefill, changed as in "
            "default:k=256:t_max=8; baselines (snapkv, ...); NAME@3% for 3 % of the keys."
        ),
    ] = "dense,default,paper"
    indexer: Annotated[
        Path | None, typer.Option(help="Folder of a distilled indexer.", show_default=False)
    ] = None
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with copies of data sets; else the hub.", show_default=False),
    ] = None
    texts: Annotated[
        list[Path] | None,
        typer.Option("--text", help="UTF-8 file for fidelity; repeatable.", show_default=False),
    ] = None
    steps: Annotated[int, typer.Option(help="Teacher-forced steps of fidelity.")] = 128
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of lm-eval's generated answers. Default: as each task says.",
            show_default=False,
        ),
    ] = None
    limit: Annotated[int, typer.Option(help="Cases of each task and length.")] = 4
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0
    speed: Annotated[
        str, typer.Option(help="Time our methods, too: auto (with a GPU), on or off.")
    ] = "auto"
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Measure samples again that failed.")
    ] = False
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto"
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on standard output.")
    ] = False

    def request(self) -> "Request":
        """What is asked for.

        Raises:
            InputError: an option that cannot be read.
        """
        from ..evaluation.suite.request import Request

        return Request(
            model=self.model, out=self.out, methods=self.methods, indexer=self.indexer,
            tasks=tuple(part.strip() for part in self.tasks.split(",") if part.strip()),
            lengths=tuple(whole_numbers("--lengths", self.lengths)),
            max_new_tokens=self.max_new_tokens, data=self.data, texts=tuple(self.texts or ()),
            steps=self.steps, limit=self.limit,
            seed=self.seed, speed=self.speed, retry_failed=self.retry_failed,
            dtype=self.dtype, device=self.device,
        )  # fmt: skip


def run_command(options: RunOptions) -> None:
    """Compare methods on tasks: quality, and speed where there is a GPU (the default command)."""
    console = make_console()
    with busy(console, "loading torch"):
        from ..evaluation.report.sums import summarise
        from ..evaluation.suite.run import evaluate
    request = options.request()
    try:
        with progress(console, "samples") as report:
            folder = evaluate(request, report)
    except KeyboardInterrupt:
        console.print(f"interrupted: {options.out} keeps its samples; the same command continues")
        raise
    for entry in folder.run["skipped"]:
        console.print(
            f"skipped: {entry['task']} at {entry['length']}, {entry['samples']} samples: "
            f"{entry['reason']}"
        )
    summary = summarise(folder.run, list(folder.samples.values()))
    if options.as_json:
        print_json({**folder.run, "lines": [as_dict(line) for line in summary.lines]})
        return
    # a file has no width of its own
    wide = None if sys.stdout.isatty() else WIDE
    out = Console(file=sys.stdout, highlight=False, width=wide, markup=False)  # text of others
    for table in tables(summary):
        out.print(table)
    for failure in failures(summary.lines):
        out.print(failure)
    console.print(f"written to {options.out}; `reread report {options.out}` draws it")


def as_dict(line: "Line") -> dict[str, Any]:
    """Plain values, for JSON."""
    from dataclasses import asdict

    return asdict(line)


def tables(summary: "Summary") -> list[Table]:
    """One table a task and length; tasks that compare distributions show their figures."""
    places = dict.fromkeys((line.task, line.length) for line in summary.lines)
    found = []
    for place in places:
        lines = [line for line in summary.lines if (line.task, line.length) == place]
        make = _figures_table if place[0] in summary.fidelity else _scores_table
        found.append(make(place, lines))
    return found


def _scores_table(place: tuple[str, int], lines: Sequence["Line"]) -> Table:
    kinds = list(dict.fromkeys(line.kind for line in lines))
    count = max(line.count + line.failed for line in lines)
    table = Table(
        title=f"{place[0]} at {place[1]} tokens: mean score of up to {count} samples a cell; "
        "keys read by a fast step, and by all decode steps",
        box=SIMPLE_HEAD,
    )
    table.add_column("method", overflow="fold")
    for head in (*kinds, "fast keys", "keys read"):
        table.add_column(head, justify="right", overflow="fold")
    for method, cells in _by_method(lines).items():
        figures = list(cells.values())[-1].figures
        table.add_row(
            method,
            *(_score(cells.get(kind)) for kind in kinds),
            _percent(figures.get("fast_keys_share", figures.get("kept_share"))),
            _percent(figures.get("keys_read_share", figures.get("kept_share"))),
        )
    return table


FIGURES = {
    "agreement": "agreement",
    "kl": "KL, nats",
    "ppl": "perplexity",
    "slow_rate": "slow steps",
    "keys_read_share": "keys read",
    "mass_fast": "mass read",
    "useless_share": "useless",
    "stability_inside": "stable inside",
    "stability_across": "across",
}


def _figures_table(place: tuple[str, int], lines: Sequence["Line"]) -> Table:
    table = Table(
        title=f"{place[0]} at {place[1]} tokens, teacher-forced",
        box=SIMPLE_HEAD,
    )
    table.add_column("text", overflow="fold")
    table.add_column("method", overflow="fold")
    for head in FIGURES.values():
        table.add_column(head, justify="right", overflow="fold")
    for line in lines:
        values = (line.figures.get(name) for name in FIGURES)
        table.add_row(line.kind, line.method, *("-" if v is None else f"{v:.4f}" for v in values))
    return table


def _by_method(lines: Sequence["Line"]) -> Mapping[str, dict[str, "Line"]]:
    found: dict[str, dict[str, Line]] = {}
    for line in lines:
        found.setdefault(line.method, {})[line.kind] = line
    return found


def _score(line: "Line | None") -> str:
    if line is None:
        return "-"
    return "failed" if line.failed or line.score is None else f"{line.score:.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def failures(lines: Sequence["Line"]) -> list[str]:
    """Why samples failed, each method's errors once."""
    found = dict.fromkeys(
        f"failed: {line.method}: {error}" for line in lines for error in line.errors
    )
    return list(found)
