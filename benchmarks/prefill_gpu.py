"""A sparse prefill against the fastest dense one, on one GPU, into one JSON.

    python -m benchmarks.prefill_gpu --json benchmarks/results/gpu_prefill.json --commit SHA

Each part runs in a process of its own, so that one that breaks the GPU's context or takes too long
does not take the others with it. The file is written anew after every length. `--parts` measures
some parts anew and keeps the others of the file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

LENGTHS = (32_768, 65_536, 131_072, 262_144)
QUICK_LENGTHS = (32_768, 65_536)
K, B_SEL = 2048, 64


@dataclass(frozen=True)
class Part:
    """One process: which part of the benchmark, of which shape, at which lengths, and the seconds
    that it may take."""

    part: str
    shape: str
    lengths: tuple[int, ...]
    seconds: int


PARTS = {
    "layer": Part("layer", "qwen3-4b", LENGTHS, 75),
    "crossover": Part("crossover", "qwen3-4b", (), 45),
    "ttft-4b": Part("ttft", "qwen3-4b", LENGTHS[:3], 200),
    # a dense run of this length takes most of a minute: measured apart
    "ttft-4b-256k": Part("ttft", "qwen3-4b", LENGTHS[3:], 200),
    "ttft-9b": Part("ttft", "qwen3.5-9b", LENGTHS[2:], 240),
}


ORIGIN = ("versions", "device", "commit", "config")


def say(what: str) -> None:
    """Progress, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def read(path: Path) -> dict[str, Any]:
    """What the file holds; {} if it is not there."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write(path: Path, name: str, found: dict[str, Any]) -> None:
    """Put one part's result into the file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    # of the part that was measured last; each part has its own besides
    origin = {key: found[key] for key in ORIGIN if key in found}
    beside.write_text(json.dumps({**read(path), **origin, name: found}, indent=1) + "\n")
    beside.replace(path)


def measure_part(name: str, path: Path, commit: str, quick: bool) -> None:
    """Measure one part in this process."""
    from reread.bench.prefill import Plan, measure
    from reread.bench.prefill_arms import dense_arms
    from reread.bench.ttft import bench_shape
    from reread.cli.bench_prefill import tables
    from reread.prefilling import SparsePrefill

    part, begun = PARTS[name], time.monotonic()
    lengths = QUICK_LENGTHS[: len(part.lengths)] if quick else part.lengths
    config = SparsePrefill(chooser="indexer", k=K, b_sel=B_SEL)
    plan = Plan(bench_shape(part.shape), lengths, config, (part.part,), tuple(dense_arms()))

    def keep(found: dict[str, Any]) -> None:
        write(path, name, {**found, "seconds": round(time.monotonic() - begun, 1)})

    result = measure(plan, commit=commit, progress=say, keep=keep)
    keep(result)
    console = Console(file=sys.stdout, highlight=False, width=140)
    for table in tables(result):
        console.print(table)


def run_part(name: str, args: argparse.Namespace) -> bool:
    """Measure one part in a process of its own; how it failed goes into the file."""
    more = ["--quick"] if args.quick else []
    command = [sys.executable, "-m", "benchmarks.prefill_gpu", "--one", name, *more]
    before = read(args.json)
    before.pop(name, None)
    if args.json.exists():
        args.json.write_text(json.dumps(before, indent=1) + "\n")
    try:
        done = subprocess.run(
            [*command, "--json", str(args.json), "--commit", args.commit],
            timeout=PARTS[name].seconds, check=False,
        )  # fmt: skip
        failed = f"exit code {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        failed = f"took longer than {PARTS[name].seconds} s"
    if failed:
        write(args.json, name, read(args.json).get(name, {}) | {"failed": failed})
        say(f"{name}: failed: {failed}")
    return not failed


def main() -> int:
    """Run the parts that were asked for; 1 where one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--commit", default="", help="for a copy of the tree without its history")
    parser.add_argument("--parts", default=",".join(PARTS), help="between commas")
    parser.add_argument("--quick", action="store_true", help="short prompts only")
    parser.add_argument("--one", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure_part(args.one, args.json, args.commit, args.quick)
        return 0
    names = args.parts.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"part {unknown[0]!r} is unknown: some of {', '.join(PARTS)}")
    return 1 if [name for name in names if not run_part(name, args)] else 0


if __name__ == "__main__":
    raise SystemExit(main())
