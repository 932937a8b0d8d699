"""`reread bench prefill`: what a sparse prefill saves on this GPU."""

# No `from __future__ import annotations` here: typer reads the annotations of the options.
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..errors import InputError
from ..prefilling import SparsePrefill
from ..shapes import SHAPES
from .options import whole_numbers
from .report import make_console, print_json

if TYPE_CHECKING:
    from ..bench.prefill import Plan

ARMS = "all, or some of cudnn, flash, flash_attn_3, flashinfer"
PARTS = ("layer", "crossover", "ttft")


@dataclass(frozen=True, kw_only=True)
class PrefillOptions:
    """Options of `reread bench prefill`."""

    shape: Annotated[
        str, typer.Option(help=f"{', '.join(SHAPES)}, qwen3.5-9b, or a folder with config.json.")
    ] = "qwen3-4b"
    context: Annotated[
        str, typer.Option(metavar="TOKENS", help="Tokens of the prompt; several between commas.")
    ] = "32768,65536,131072,262144"
    k: Annotated[int, typer.Option("--k", help="Tokens chosen for a block of queries.")] = 2048
    b_sel: Annotated[int, typer.Option("--b-sel", help="Queries that share a choice.")] = 64
    parts: Annotated[
        str, typer.Option(help=f"Some of {', '.join(PARTS)}: one layer, where sparse chunks begin "
                          "to be faster, time to the first token of a whole model.")
    ] = "layer,ttft"  # fmt: skip
    arms: Annotated[str, typer.Option(help=f"Dense arms of a layer: {ARMS}.")] = "all"
    chunk: Annotated[
        int, typer.Option(help="Tokens of a forward in ttft's sparse arm; 0: the whole prompt.")
    ] = 0
    commit: Annotated[
        str, typer.Option(help="The commit to note, for a copy without its history.")
    ] = ""
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on standard output.")
    ] = False

    def plan(self) -> "Plan":
        """What to measure.

        Raises:
            ConfigError, InputError: a value that cannot be right, by name.
        """
        contexts = tuple(whole_numbers("--context", self.context))
        config = SparsePrefill(chooser="indexer", k=self.k, b_sel=self.b_sel)
        parts = tuple(part.strip() for part in self.parts.split(","))
        if self.chunk < 0:
            raise InputError(f"--chunk {self.chunk} is not possible: at least 0")
        from ..bench.prefill import Plan
        from ..bench.prefill_arms import pick
        from ..bench.ttft import bench_shape

        shape = bench_shape(self.shape)
        plan = Plan(shape, contexts, config, parts, tuple(pick(self.arms)), self.chunk)
        plan.check()
        return plan


def prefill_command(options: PrefillOptions) -> None:
    """Time a sparse prefill on this GPU against the fastest dense one: one layer, a whole model."""
    plan = options.plan()
    from ..bench.prefill import LABEL, measure

    result = measure(plan, commit=options.commit, progress=make_console().print)
    if options.as_json:
        print_json(result)
        return
    out = Console(file=sys.stdout, highlight=False)
    for table in tables(result):
        out.print(table)
    out.print(f"{LABEL[0].upper()}{LABEL[1:]}.")


def tables(result: dict[str, Any]) -> list[Table]:
    """One for each part that is there."""
    makers = {"layer": layer_table, "crossover": crossover_table, "ttft": ttft_table}
    return [maker(result) for part, maker in makers.items() if result.get(part)]


def layer_table(result: dict[str, Any]) -> Table:
    """A line per length and arm; parts of ours below it."""
    table = _table(
        f"attention of one layer on {result['device']['name']}, matmul "
        f"{result['matmul_tflops']:.0f} TFLOP/s",
        ("tokens", "arm", "ms", "p20", "p80", "TFLOP/s", "of its floor", "speed-up"),
    )
    for row in result["layer"]:
        best = _fastest(row)
        for cells in _dense_lines(row, best):
            table.add_row(*cells)
        ours, where = row.get("sparse", row), str(row["context"])
        if "failed" in ours:
            table.add_row(where, f"sparse: failed: {ours['failed']}")
            continue
        table.add_row(
            where, "sparse", *_times(ours), f"{ours['attention_tflops']:.0f}",
            f"{ours['share_of_floor']:.0%}", "" if best is None else f"{best / ours['ms']:.2f}",
        )  # fmt: skip
        for name, part in _parts(ours["parts"]):
            table.add_row("", f"  {name}", f"{part:.2f}")
    return table


def _dense_lines(row: dict[str, Any], best: float | None) -> Iterator[tuple[str, ...]]:
    where = str(row["context"])
    for arm in row.get("dense", []):
        if "ms" not in arm:
            yield where, f"{arm['arm']}: {arm['not_run']}"
            continue
        speedup = "" if best is None else f"{best / arm['ms']:.2f}"
        times = _times(arm) if "p20" in arm else (f"{arm['ms']:.0f}",)
        rates = (f"{arm['tflops']:.0f}", f"{arm['share_of_matmul']:.0%}") if "tflops" in arm else ()
        yield where, arm["arm"], *times, *rates, speedup


def crossover_table(result: dict[str, Any]) -> Table:
    """A line per length."""
    found = result["crossover"]
    if "failed" in found:
        table = _table("crossover", ("failed",))
        table.add_row(found["failed"])
        return table
    names = ("lower_right", "difference", "own", "sparse")
    table = _table(
        f"ms of the last {found['chunk']} queries, one layer; sparse is faster from "
        f"{found['position']} tokens on, than our own dense from {found['position_against_own']}",
        ("keys", *names, "failed"),
    )
    for row in found["rows"]:
        failed = "; ".join(f"{name}: {why}" for name, why in row["failed"].items())
        cells = (f"{row[name]:.3f}" if name in row else "" for name in names)
        table.add_row(str(row["length"]), *cells, failed)
    return table


def ttft_table(result: dict[str, Any]) -> Table:
    """A line per model, length and arm; parts of ours below it."""
    table = _table(
        f"time to the first token on {result['device']['name']}",
        ("model", "tokens", "arm", "ms", "speed-up"),
    )
    for row in result["ttft"]:
        best = _fastest(row)
        for where, *cells in _dense_lines(row, best):
            table.add_row(row["shape"], where, *cells)
        for name in ("sparse", "no_attention"):
            arm, at = row.get(name, row), (row["shape"], str(row["context"]))
            if "failed" in arm:
                table.add_row(*at, f"{name}: failed: {arm['failed']}")
                continue
            speedup = "" if best is None else f"{best / arm['ms']:.2f}"
            table.add_row(*at, name, f"{arm['ms']:.0f}", speedup)
            for part, ms in _parts(arm.get("parts", {})):
                table.add_row("", "", f"  {part}", f"{ms:.0f}")
        if told := _linear_layers(row):
            table.add_row(row["shape"], str(row["context"]), told)
    return table


def _linear_layers(row: dict[str, Any]) -> str:
    fast = row.get("linear_layers", {}).get("fast_kernels", {})
    if not fast:
        return ""
    told = {
        True: "on their fast kernels",
        False: "on PyTorch, without their fast kernels",
        None: "on kernels that could not be seen",
    }
    return f"its linear layers {told[fast['torch_chunk_gated_delta_rule']]}"


def _table(title: str, heads: tuple[str, ...]) -> Table:
    table = Table(title=title)
    for head in heads:
        table.add_column(head, justify="right", overflow="fold")
    return table


def _fastest(row: dict[str, Any]) -> float | None:
    return min((float(arm["ms"]) for arm in row.get("dense", []) if "ms" in arm), default=None)


def _times(arm: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"{arm[name]:.2f}" for name in ("ms", "p20", "p80"))


def _parts(parts: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in parts.items():
        if key.endswith("_ms"):
            yield key.removesuffix("_ms").replace("_", " "), float(value)
