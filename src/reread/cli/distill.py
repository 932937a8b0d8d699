"""`reread distill`: train the indexer of a model."""

# No `from __future__ import annotations` here: typer reads the annotations of the options.
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.progress import TimeRemainingColumn as Remaining
from rich.table import Table

from .report import LINE_EVERY_S, busy, make_console, print_json

if TYPE_CHECKING:
    from ..evaluation.distilling import Outcome
    from ..indexer.distill import Progress as Done


@dataclass(frozen=True, kw_only=True)
class DistillOptions:
    """Options of `reread distill`."""

    model: Annotated[str, typer.Option(help="Builtin name, folder, GGUF file or hub id.")]
    data: Annotated[
        str,
        typer.Option(
            help="needle, a UTF-8 file (.jsonl: lines with a text field), a folder, or a dataset "
            "of the hub."
        ),
    ]
    tokens: Annotated[int, typer.Option(help="Tokens to learn from, over all steps.")]
    out: Annotated[Path, typer.Option(help="Folder of the result; the same command continues.")]
    context: Annotated[int, typer.Option(help="Tokens of each context.")] = 16384
    width: Annotated[int, typer.Option(help="d of an index head, even.")] = 64
    heads: Annotated[int, typer.Option(help="Index heads; the kernels serve 1.")] = 1
    init: Annotated[str, typer.Option(help="svd of the layers' own projections, or random.")] = (
        "svd"
    )
    lr: Annotated[float, typer.Option(help="Peak of the learning rate.")] = 3e-3
    stretch: Annotated[
        float,
        typer.Option(
            help="Positions are multiplied by up to so much, for longer texts than these."
        ),
    ] = 4.0
    accumulate: Annotated[int, typer.Option(help="Contexts of each step.")] = 1
    queries: Annotated[int, typer.Option(help="Query positions drawn of each context.")] = 1024
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 50
    seed: Annotated[int, typer.Option(help="Of weights, data order and drawn queries.")] = 0
    dtype: Annotated[str, typer.Option(help="Of the model: auto, bfloat16 or float32.")] = "auto"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto"
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on standard output.")
    ] = False


def distill_command(options: DistillOptions) -> None:
    """Train the small indexer that predicts where a model's layers attend; the model is frozen."""
    console = make_console()
    with busy(console, "loading torch"):
        from ..evaluation.distilling import Interrupted, Request, distil

    given = {name: value for name, value in vars(options).items() if name != "as_json"}
    request = Request(**given)
    request.check()
    try:
        with _progress(console) as report:
            outcome = distil(request, report)
    except Interrupted as interrupt:
        console.print(
            f"interrupted: {options.out} holds step {interrupt.step} of {interrupt.steps}; run the "
            "same command to continue"
        )
        raise
    _tell(console, options, outcome)


def _tell(console: Console, options: DistillOptions, outcome: "Outcome") -> None:
    if outcome.rank:
        return
    for note in outcome.notes:
        console.print(f"note: {note}")
    if outcome.already:
        console.print(f"{options.out} was finished before with these settings: nothing was done")
    if options.as_json:
        print_json(outcome.record)
        return
    Console(file=sys.stdout, highlight=False).print(result_table(outcome.record))
    console.print(f"indexer: {options.out}")


def result_table(record: dict[str, Any]) -> Table:
    """A line per layer, on the held-out contexts, before and after."""
    k = record["k"]
    table = Table(title=f"held-out contexts of {record['settings']['context']} tokens")
    table.add_column("layer", justify="right")
    for head in ("KL before", "KL", f"recall@{k}", f"mass@{k}"):
        table.add_column(head, justify="right")
    before, after = record["before"], record["after"]
    for layer, found in after["layers"].items():
        table.add_row(layer, *_figures(before["layers"][layer], found))
    table.add_section()
    table.add_row("mean", *_figures(before, after))
    return table


def _figures(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    values = before["kl"], after["kl"], after["recall"], after["mass"]
    return ["-" if value is None else f"{value:.3f}" for value in values]


@contextmanager
def _progress(console: Console) -> "Iterator[Callable[[Done, int], None]]":
    """A bar on a terminal, else a line every ten seconds and at the end."""
    if not console.is_terminal:
        last = time.monotonic()

        def line(done: "Done", steps: int) -> None:
            nonlocal last
            now = time.monotonic()
            if done.step >= steps or now - last >= LINE_EVERY_S:
                last = now
                console.print(f"step {done.step}/{steps}, mean KL {done.kl:.4f}")

        yield line
        return
    columns = TextColumn("mean KL {task.fields[kl]}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TextColumn("steps"), Remaining(), console=console) as bars:
        task = bars.add_task("", total=None, kl="-")
        yield lambda done, steps: bars.update(
            task, completed=done.step, total=steps, kl=f"{done.kl:.4f}"
        )
