"""`reread plan`: what to expect of a model, context, batch and GPU, before there is any."""

# No `from __future__ import annotations` here: typer reads the annotations of PlanOptions.
import sys
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..config import AFRESH
from ..errors import InputError
from ..hardware import CALIBRATION, GPUS, gpu_of
from ..planner import ACCEPTANCE, Plan, plan
from ..shapes import shape_of
from .options import CellOptions, PresetOptions
from .report import print_json

GIB = 2**30
MODEL_NOTE = "a roofline model, not a measurement"
NOT_MEASURED = "TTFT, GPUs other than the H200, mixtures of experts and more than 16 rows"


@dataclass(frozen=True, kw_only=True)
class PlanOptions(CellOptions, PresetOptions):
    """What the user asked for, as given; each field is one option."""

    gpu: Annotated[
        str, typer.Option(help=f"{', '.join(GPUS)}. Only the H200's steps are measured.")
    ] = "h200"
    sentence: Annotated[
        float | None,
        typer.Option(
            help="Mean tokens between slow steps. Default: what real text gives with the triggers.",
            show_default=False,
        ),
    ] = None
    acceptance: Annotated[
        float, typer.Option(metavar="SHARE", help="Preset exact: drafted tokens that stand.")
    ] = ACCEPTANCE


def plan_command(options: PlanOptions) -> None:
    """Estimate speed and memory of dense and slow-fast decoding on a GPU, from a model of both."""
    config, shape, gpu = options.config(), shape_of(options.shape), gpu_of(options.gpu)
    if config.mode in AFRESH:
        raise InputError(
            f"mode {config.mode!r} is not in the planner's model: measure it with bench decode"
        )
    if config.indexed:
        raise InputError(
            f"drafts by an indexer ({config.indexer!r}) are not in the planner's model: leave"
            " indexer unset, for drafts by the Selector"
        )
    every, rate = options.sentence, options.acceptance
    plans = [
        plan(shape, context, batch, gpu, config, slow_every=every, acceptance=rate)
        for batch, context in options.cells()
    ]
    if options.as_json:
        print_json(_as_json(options, plans))
        return
    console = Console(file=sys.stdout, highlight=False)
    console.print(_table(options, plans))
    for line in _notes(plans):
        console.print(line)


def _as_json(options: PlanOptions, plans: list[Plan]) -> dict[str, Any]:
    # imports torch, which the table does without
    from ..evaluation.provenance import commit, versions

    return {
        "note": f"{MODEL_NOTE}; calibrated with {CALIBRATION.source}; never measured:"
        f" {NOT_MEASURED}",
        "plans": [found.to_dict() for found in plans],
        "preset": options.preset,
        "config": options.config().to_dict(),
        "gpu": asdict(gpu_of(options.gpu)),
        "calibration": asdict(CALIBRATION),
        "versions": versions(),
        "commit": commit(),
    }


def _table(options: PlanOptions, plans: list[Plan]) -> Table:
    """Two lines a plan: dense, then the preset."""
    title = f"{plans[0].shape} on {plans[0].gpu}, dense and preset {options.preset}"
    # no frame and little padding: it has to fit into 80 columns
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    heads = ("context\nx batch", "", "step\nms", "tokens\n/s", "speed\n-up", "largest\npart")
    for head in (*heads, "1.0x at\n1.1x at", "TTFT s\nKV GiB", "fit"):
        table.add_column(head, justify="right", overflow="fold")
    for found in plans:
        arms = found.dense, found.preset
        cells = (
            (str(found.context), f"x {found.batch}"),
            ("dense", options.preset),
            [f"{arm.step_ms:.1f}" for arm in arms],
            [f"{arm.tokens_per_s:.0f}" for arm in arms],
            ("1.00x", f"{found.speedup:.2f}x"),
            [arm.limit for arm in arms],
            [str(n or "never") for n in (found.crossover, found.crossover_worthwhile)],
            (f"{found.ttft_s:.2f}", f"{found.kv_bytes / GIB:.1f}"),
            [str(arm.residents) for arm in arms],
        )
        table.add_row(*("\n".join(lines) for lines in cells))
    return table


def _notes(plans: list[Plan]) -> list[str]:
    every = next((found.slow_every for found in plans if found.slow_every is not None), None)
    workspace = max(found.workspace_bytes for found in plans)
    drafted = max(found.drafted for found in plans)
    rate = (
        "no step is slow" if every is None else f"a row is slow every {every:.2f} tokens on average"
    )
    if drafted:
        rate = f"up to {drafted} tokens are drafted, of which so many stand as --acceptance says"
    lines = [
        f"This is {MODEL_NOTE}. Calibrated with: {CALIBRATION.source}."
        f" Never measured: {NOT_MEASURED}.",
        f"Weights {plans[0].weight_bytes / GIB:.1f} GiB, the preset's workspace at most"
        f" {workspace / GIB:.2f} GiB; {rate}. 1.0x at, 1.1x at: the contexts from which the preset"
        " is as fast as dense and 1.1 times as fast. fit: requests that fit in the memory.",
    ]
    for found in plans:
        fit = min(found.dense.residents, found.preset.residents)
        if fit < found.batch:
            lines.append(
                f"note: {fit} of {found.batch} requests of {found.context} tokens fit in the"
                f" memory of {found.gpu}: the figures of that row suppose that all do."
            )
    return lines
