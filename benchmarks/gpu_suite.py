"""GPU tests and all GPU tables in one go, on one card, into one JSON.

    python -m benchmarks.gpu_suite --json benchmarks/results/gpu_suite.json

The file is written anew after every part, so an interrupted run keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import reread
from benchmarks.kernels_gpu import BATCHES, LONG, LONG_SHARES
from reread import Config
from reread.bench import kernel, table
from reread.bench.arms import dense_arms
from reread.bench.kernel import SHARES
from reread.bench.model import random_model
from reread.evaluation.provenance import provenance
from reread.planner import DEFAULT_SLOW_EVERY
from reread.shapes import Shape

# the last: what the default preset's triggers gave on real text, with lines as wrapped there
GAPS = (20.0, 9.0, 6.0, DEFAULT_SLOW_EVERY)
CELLS: dict[str, list[tuple[int, int]]] = {
    "qwen3-0.6b": [(16, 32768), (8, 131072)],
    "qwen3-4b": [(16, 8192), (16, 32768), (4, 131072), (1, 131072), (4, 2048), (4, 8192),
                 (4, 32768)],
}  # fmt: skip
INDEXED: dict[str, list[tuple[int, int]]] = {
    "qwen3-0.6b": [(8, 131072)],
    "qwen3-4b": [(4, 131072)],
}
EXACT: dict[str, list[tuple[int, int]]] = {
    "qwen3-0.6b": [(8, 131072)],
    "qwen3-4b": [(4, 131072), (16, 32768), (4, 4096)],
}
ACCEPTANCE = (0.8, 0.9, 0.95, 0.98)
Keep = Callable[[dict[str, Any]], None]
TESTS = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests")


def run_tests(commit: str, keep: Keep) -> None:
    """The tests marked gpu, in a process of their own."""
    done = subprocess.run(
        [sys.executable, *TESTS], capture_output=True, text=True, timeout=420, check=False
    )
    lines = done.stdout.strip().splitlines()
    keep({"passed": done.returncode == 0, "summary": lines[-1] if lines else done.stderr[-500:]})


def kernels(commit: str, keep: Keep) -> None:
    """`reread bench kernel` on the documentation's shapes."""
    result: dict[str, Any] = {"records": []}
    for shape in (*LONG[:1], *BATCHES, *LONG[1:]):
        shares = LONG_SHARES if shape in LONG else SHARES
        more = kernel.measure([shape], shares, progress=say, commit=commit)
        result = {**more, "records": result["records"] + more["records"]}
        keep(result)


def decode(commit: str, keep: Keep) -> None:
    """`reread bench decode` on the documentation's cells."""
    rows: list[dict[str, Any]] = []

    def note(row: dict[str, Any]) -> None:
        rows.append(row)
        keep({"rows": rows})

    for name, cells in CELLS.items():
        result = table.measure(
            Shape.named(name), cells, Config(),
            slow_every=GAPS, arms=dense_arms(), commit=commit, progress=say, on_row=note,
        )  # fmt: skip
        result["config"].pop("shape")
        keep({**result, "rows": rows})


def indexed(commit: str, keep: Keep) -> None:
    """`reread bench decode --preset indexed` on long contexts."""
    _cells(INDEXED, Config.preset("indexed"), commit, keep)


def exact(commit: str, keep: Keep) -> None:
    """`reread bench decode --preset exact`, at several acceptances."""
    _cells(EXACT, Config.preset("exact"), commit, keep)


def exact_generate(commit: str, keep: Keep) -> None:
    """`reread.generate` as users call it, at a context where drafting cannot pay: modes "exact" and
    "dense" in turn, random weights and tokens."""
    shape, rows, context, new = Shape.named("qwen3-4b"), 4, 4096, 256
    model = random_model(shape, torch.device("cuda"), torch.bfloat16)
    ids = torch.randint(1000, (rows, context), device="cuda")
    found: dict[str, list[float]] = {"dense": [], "exact": []}
    for name in ("dense", "exact") * 4:
        config = Config.preset(name)
        options = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new}
        output = reread.generate(model, ids, config=config, **options)
        found[name].append(output.stats.tokens_per_s)
        drafts = output.stats.drafts
        say(f"{name}: {found[name][-1]:.0f} tokens/s, {output.stats.runner}")
    # the first of each compiles and captures
    dense, ours = (statistics.median(found[name][1:]) for name in ("dense", "exact"))
    assert drafts is not None
    keep({
        "shape": shape.name, "rows": rows, "context": context, "new": new, "tokens_per_s": found,
        "ratio": ours / dense, "drafted": drafts.drafted, "verified": drafts.verified,
    })  # fmt: skip


def _cells(
    cells: dict[str, list[tuple[int, int]]], config: Config, commit: str, keep: Keep
) -> None:
    rows: list[dict[str, Any]] = []

    def note(row: dict[str, Any]) -> None:
        rows.append(row)
        keep({"rows": rows})

    for name, of_shape in cells.items():
        result = table.measure(
            Shape.named(name), of_shape, config,
            slow_every=(), arms=dense_arms(), acceptance=ACCEPTANCE, commit=commit,
            progress=say, on_row=note,
        )  # fmt: skip
        result["config"].pop("shape")
        keep({**result, "rows": rows})


def say(what: str) -> None:
    """Progress, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--parts", default="decode,kernels,tests", help="between commas")
    parser.add_argument("--commit", default="", help="for a copy of the tree without its history")
    args = parser.parse_args()
    known = provenance("cuda")
    result: dict[str, Any] = {**known, "commit": args.commit or known["commit"]}
    result["config"] = Config().to_dict()
    for name in args.parts.split(","):
        begun = time.monotonic()

        def keep(found: dict[str, Any], name: str = name, begun: float = begun) -> None:
            result[name] = {**found, "seconds": round(time.monotonic() - begun, 1)}
            args.json.write_text(json.dumps(result, indent=1) + "\n")

        PARTS[name](args.commit, keep)
        say(f"{name}: {result[name]['seconds']} s")


PARTS: dict[str, Callable[[str, Keep], None]] = {
    "decode": decode,
    "indexed": indexed,
    "exact": exact,
    "exact_generate": exact_generate,
    "kernels": kernels,
    "tests": run_tests,
}

if __name__ == "__main__":
    main()
