"""`reread bench kernel` and `reread bench decode`: what a GPU makes of it."""

# No `from __future__ import annotations` here: typer reads the annotations of the options.
import math
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..config import Config
from ..errors import InputError
from ..planner import expected_slow_every
from ..shapes import shape_of
from .options import CellOptions, PresetOptions, config_of
from .report import make_console, print_json

GIVEN = "as given"
MEASURED = (
    "what these triggers give on English prose and source code that Python carries, in SmolLM2's "
    "tokens (benchmarks/results/sentences.json)"
)
ARMS = "all, or some of cudnn, flash, reread-dense, flash_attn_3, flashinfer"


@dataclass(frozen=True, kw_only=True)
class BenchOptions(CellOptions):
    """What both benchmarks take."""

    context: Annotated[
        str, typer.Option(metavar="TOKENS", help="Keys of each row; several between commas.")
    ] = "32768"
    commit: Annotated[
        str, typer.Option(help="The commit to note, for a copy without its history.")
    ] = ""


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(BenchOptions, PresetOptions):
    """Options of `reread bench decode`."""

    sentence: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Mean tokens between slow steps; several between commas. Default: what the "
            "preset's triggers gave on real English text.",
            show_default=False,
        ),
    ] = None
    arms: Annotated[str, typer.Option(help=f"Dense arms: {ARMS}.")] = "all"
    acceptance: Annotated[
        str,
        typer.Option(
            metavar="SHARE", help="Preset exact: drafted tokens that stand; several between commas."
        ),
    ] = "0.8,0.9"

    def rates(self) -> list[float]:
        """The shares of `--acceptance`.

        Raises:
            InputError: no numbers from 0 to below 1.
        """
        try:
            found = [float(part) for part in self.acceptance.split(",")]
        except ValueError:
            found = []
        if not found or not all(0 <= rate < 1 for rate in found):
            raise InputError(
                f"--acceptance {self.acceptance!r} is not possible: numbers from 0 to below 1"
            )
        return found

    def config(self) -> Config:
        """The preset with the --set changes.

        Raises:
            ConfigError: an unknown preset or key, or a value that cannot be right.
            InputError: a configuration without fast steps, or drafts by an indexer.
        """
        config = config_of(self.preset, self.settings)
        if config.mode == "dense":
            raise InputError("mode 'dense' has no fast steps: dense arms are timed anyway")
        if config.mode == "exact" and config.indexed:
            raise InputError(
                f"drafts by an indexer ({config.indexer!r}) are not timed as cycles: leave indexer"
                " unset, or time their steps with --preset indexed"
            )
        return config

    def gaps(self, config: Config) -> list[float]:
        """Mean steps between slow ones.

        Raises:
            InputError: below 1, or no number.
        """
        if self.sentence is None:
            expected = expected_slow_every(config.triggers)
            if config.mode in ("indexed", "exact"):
                return []
            if math.isinf(expected):
                raise InputError("no trigger makes a step slow: give --sentence N")
            return [expected]
        try:
            found = [float(part) for part in self.sentence.split(",")]
        except ValueError:
            found = []
        if not found or not all(1 <= gap < math.inf for gap in found):
            raise InputError(f"--sentence {self.sentence!r} is not possible: numbers of at least 1")
        return found


@dataclass(frozen=True, kw_only=True)
class KernelOptions(BenchOptions):
    """Options of `reread bench kernel`."""

    shares: Annotated[
        str, typer.Option(metavar="PERCENT", help="Keys that sparse attention reads, in percent.")
    ] = "1.6,6.3,12.5,25,50"
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on standard output.")
    ] = False

    def fractions(self) -> list[float]:
        """The shares, in (0, 1).

        Raises:
            InputError: no percentages.
        """
        try:
            found = [float(part) / 100 for part in self.shares.split(",")]
        except ValueError:
            found = []
        if not found or not all(0 < share < 1 for share in found):
            raise InputError(
                f"--shares {self.shares!r} is not possible: percentages such as 1.6,25"
            )
        return found


def decode_command(options: DecodeOptions) -> None:
    """Time whole decode steps, dense and slow-fast, of a model with random weights on this GPU."""
    config, shape, cells = options.config(), shape_of(options.shape), options.cells()
    gaps, rates = options.gaps(config), options.rates()
    from ..bench.arms import pick
    from ..bench.table import measure

    arms = pick(options.arms)
    console = make_console()
    result = measure(
        shape, cells, config,
        slow_every=gaps, arms=arms, acceptance=rates, commit=options.commit,
        progress=console.print,
    )  # fmt: skip
    told = GIVEN if options.sentence else MEASURED
    if options.as_json:
        print_json({**result, "slow_every_from": told})
        return
    out = Console(file=sys.stdout, highlight=False)
    out.print(decode_table(result))
    if gaps:
        out.print(
            f"Mean tokens between slow steps {', '.join(f'{gap:g}' for gap in gaps)}: {told}."
        )
    out.print("Random weights and keys: speed does not depend on them, quality is not measured.")


def decode_table(result: dict[str, Any]) -> Table:
    """A line per cell and arm."""
    table = Table(title=f"whole decode steps on {result['device']['name']}")
    for head in ("model, batch x context", "arm", "ms", "tokens/s", "roofline", "speed-up"):
        table.add_column(head, justify="right", overflow="fold")
    for row in result["rows"]:
        cell = f"{row['shape']}, {row['rows']} x {row['context']}"
        if "failed" in row:
            table.add_row(cell, row["failed"])
            continue
        best = next(arm for arm in row["dense"] if arm["arm"] == row["fastest_dense"])
        for arm in row["dense"]:
            if "not_run" in arm:
                table.add_row(cell, f"{arm['arm']}: {arm['not_run']}")
            elif "ms" in arm:
                table.add_row(cell, arm["arm"], *_figures(arm, best["ms"] / arm["ms"]))
        if "indexed" in row:
            arm = row["indexed"]
            table.add_row(cell, "indexed", *_figures(arm, arm["speedup"]))
        for rate in (name for name in row.get("exact", {}) if name.startswith("at ")):
            arm = row["exact"][rate]
            drafted = f"exact {rate}, {arm['drafted']} drafted"
            table.add_row(cell, drafted, *_figures(arm, arm["speedup"]))
        for place, ours in row.get("slow_fast", {}).items():
            for gap in row["slow_every"]:
                arm = ours[f"1/{gap:g}"]
                table.add_row(cell, f"slow 1/{gap:g}, {place}", *_figures(arm, arm["speedup"]))
    return table


def _figures(arm: dict[str, Any], speedup: float) -> tuple[str, ...]:
    return (
        f"{arm['ms']:.2f}", f"{arm['tokens_per_s']:.0f}", f"{arm['roofline']:.0%}", f"{speedup:.2f}"
    )  # fmt: skip


def kernel_command(options: KernelOptions) -> None:
    """Time the attention and Selector kernels on this GPU against the fastest dense attention."""
    shape, shares, cells = shape_of(options.shape), options.fractions(), options.cells()
    from ..bench.caches import KernelShape
    from ..bench.kernel import measure

    sizes = {"heads": shape.heads, "kv_heads": shape.kv_heads, "dim": shape.head_dim}
    shapes = [KernelShape(rows, context, **sizes) for rows, context in cells]
    console = make_console()
    result = measure(shapes, shares, progress=console.print, commit=options.commit)
    if options.as_json:
        print_json(result)
        return
    table = Table(title=f"attention and Selector on {result['device']['name']}")
    for head in ("batch x keys", "kernel", "arm", "keys read", "us", "roofline", "speed-up"):
        table.add_column(head, justify="right", overflow="fold")
    for record in result["records"]:
        speedup = record.get("speedup")
        table.add_row(
            f"{record['rows']} x {record['length']}", record["kernel"], str(record.get("arm", "")),
            str(record.get("keys", "")), f"{record['us']:.1f}",
            f"{record['roofline']:.0%}" if "roofline" in record else "",
            "" if speedup is None else f"{speedup:.2f}",
        )  # fmt: skip
    Console(file=sys.stdout, highlight=False).print(table)
