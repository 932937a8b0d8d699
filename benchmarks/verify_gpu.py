"""Verification of T queries a row on one GPU: checked against fp32 attention, then timed against
one query a row, PyTorch's attention and the bytes that must be read.

    python -m benchmarks.verify_gpu --json benchmarks/results/gpu_verify.json --commit SHA

First other processes compile all kernels into Triton's cache. What fails is recorded with its
error, what would begin after `--seconds` as skipped: the most telling is timed first.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.verify_arms import Arm, Bench, rivals, sweep, sweep_asked
from reread.bench.caches import KernelShape
from reread.bench.timing import Record, copy_bandwidth, origin, require_cuda, time_layers
from reread.ops import reference
from reread.ops.triton import VerifyTuning
from reread.types import KVView

SHAPES = {
    "4 x 128K": KernelShape(4, 131072),
    "8 x 128K, G 2": KernelShape(8, 131072, heads=16),
    "16 x 32K": KernelShape(16, 32768),
}
QUERIES = (1, 3, 5, 9, 17)
TOLERANCE = 1e-2  # of bfloat16 outputs, relative in the 2-norm
MASS_TOLERANCE = 1e-3
SHOWN = ("shape", "queries", "arm", "tuning", "us", "floor_us", "roofline", "error", "failed")
COMPARED = (
    "verify: T queries a row in one pass over the keys, default tuning; sweep: other tunings. "
    "decode: one query a row. asked: either one leaving what the Selector starts from, of one "
    "query a row. Of PyTorch's attention, lower right is causal; mask has a KV head's queries "
    "packed as one head's; no mask is packed and not causal, so another result, for its speed "
    "alone."
)


class Report:
    """Records so far, in a file that is whole at any time."""

    def __init__(self, path: Path, head: Record, seconds: float) -> None:
        self.path, self.head, self.until = path, head, time.monotonic() + seconds
        self.records: list[Record] = []

    def add(self, record: Record) -> None:
        """Keep, print and save."""
        self.records.append(record)
        shown = {key: record[key] for key in SHOWN if key in record}
        print(" ".join(f"{k}={_short(v)}" for k, v in shown.items()), flush=True)
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps({**self.head, "records": self.records}, indent=1) + "\n")
        beside.replace(self.path)

    def attempt(self, base: Record, work: Callable[[], Record]) -> None:
        """The record of `work`, or why there is none."""
        if time.monotonic() > self.until:
            self.add({**base, "failed": "skipped: out of time"})
            return
        try:
            found = work()
        except Exception as error:  # a variant may not fit the card: the table says so
            found = {"failed": f"{type(error).__name__}: {error}"[:300]}
        self.add({**base, **found})


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "/".join(str(v) for v in value.values())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def difference(got: Tensor, want: Tensor) -> float:
    """Relative error in the 2-norm; NaN where there is one."""
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-20))


def wanted(bench: Bench, queries: int, row: int) -> tuple[Tensor, Tensor]:
    """fp32 attention of one row over layer 0, and each query's evidence."""
    kv = bench.caches[0]
    start, length = int(bench.starts[row]), int(bench.lengths[row])
    view = KVView(kv.k[row : row + 1].float(), kv.v[row : row + 1].float(), (start,), (length,))
    allowed = [(int(bench.allowed[0][row]), int(bench.allowed[1][row]))]
    q = bench.q(queries)[row : row + 1].float()
    out, mass = reference.verify_dense(q, view, scale=bench.scale, allowed=allowed)
    assert mass is not None
    return out, mass


def check(bench: Bench, queries: int) -> Record:
    """Output and evidence of some rows, ragged ones too."""
    worst = {"error": 0.0, "mass_error": 0.0}
    for ragged in (False, True):
        bench.ragged(ragged)
        plain = bench.verify(0, queries).clone()
        out = bench.verify(0, queries, evidence=True)
        mass, asked = bench.mass(), bench.asked(queries).tolist()
        for row in {0, 1, bench.shape.rows - 1}:
            want, want_mass = wanted(bench, queries, row)
            found = {
                "error": max(difference(x[row], want[0]) for x in (plain, out)),
                "mass_error": difference(mass[row], want_mass[0, :, asked[row]]),
            }
            worst = {key: max(worst[key], found[key]) for key in worst}
    bench.ragged(False)
    ok = worst["error"] < TOLERANCE and worst["mass_error"] < MASS_TOLERANCE
    return worst if ok else {**worst, "failed": "wrong result"}


def timed(bench: Bench, queries: int, arm: Arm) -> Record:
    """Microseconds of one arm, whose output is compared first where it should be ours."""
    found: Record = {}
    if arm.alike:
        found["error"] = difference(arm.step(0), bench.verify(0, queries))
        if not found["error"] < TOLERANCE:
            return {**found, "failed": "wrong result"}
    found |= time_layers(arm.step, len(bench.caches), repeats=7)
    floor = bench.shape.layer_bytes / bench.bandwidth * 1e6
    return {**found, "floor_us": floor, "roofline": floor / found["us"]}


def ours(bench: Bench, queries: int) -> Iterator[Arm]:
    """The default tuning, plain and with evidence."""
    yield Arm("verify", partial(bench.verify, queries=queries))
    yield Arm("verify, asked", partial(bench.verify, queries=queries, evidence=True))
    if queries == 1:
        yield Arm("decode", bench.decode)
        yield Arm("decode, asked", partial(bench.decode, evidence=True))


def swept(bench: Bench, queries: int) -> Iterator[Arm]:
    """Every tuning that is worth a try."""
    for tuning in sweep(bench.shape, queries):
        step = partial(bench.verify, queries=queries, tuning=tuning)
        yield Arm("sweep", step, tuning=dataclasses.asdict(tuning))
    for tuning in sweep_asked(bench.shape, queries):
        step = partial(bench.verify, queries=queries, evidence=True, tuning=tuning)
        yield Arm("sweep, asked", step, tuning=dataclasses.asdict(tuning))


def measure(report: Report, benches: dict[str, Bench]) -> None:
    """Checks, then our own kernels on every shape, then others', then the sweep."""
    for name, bench in benches.items():
        for t in QUERIES:
            base: Record = {"shape": name, "queries": t, "arm": "check"}
            report.attempt(base, partial(check, bench, t))
    for arms in (ours, rivals, swept):
        for number, (name, bench) in enumerate(benches.items()):
            # others take long to plan: at all T on the first shape only
            for t in (9,) if arms is rivals and number else QUERIES:
                for arm in _made(report, name, t, arms, bench):
                    base = {"shape": name, "queries": t, "arm": arm.name, "tuning": arm.tuning}
                    report.attempt(base, partial(timed, bench, t, arm))


def _made(
    report: Report, name: str, t: int, arms: Callable[[Bench, int], Iterator[Arm]], bench: Bench
) -> Iterator[Arm]:
    """The arms as long as they can be made."""
    try:
        yield from arms(bench, t)
    except Exception as error:  # an arm that cannot be made does not take the others with it
        report.add({"shape": name, "queries": t, "arm": arms.__name__, "failed": str(error)[:300]})


def warm(part: int, parts: int) -> None:
    """Compile every `parts`-th of our kernels by running it on short rows: the same kernels."""
    number = 0
    for shape in SHAPES.values():
        bench = Bench(dataclasses.replace(shape, length=2048), 1, max(QUERIES), 1.0)
        for arm in (arm for t in QUERIES for arms in (ours, swept) for arm in arms(bench, t)):
            number += 1
            if number % parts != part:
                continue
            try:
                arm.step(0)
            except Exception as error:  # it is recorded where it is timed
                print(f"{arm.name} {arm.tuning}: {error}"[:200], file=sys.stderr)
    torch.cuda.synchronize()


def compile_all(parts: int, seconds: float) -> None:
    """`warm` in processes of their own; whatever they do not get to is compiled when it is run."""
    command = [sys.executable, "-m", "benchmarks.verify_gpu", "--json", os.devnull, "--warm"]
    running = [subprocess.Popen([*command, f"{i}/{parts}"]) for i in range(parts)]
    until = time.monotonic() + seconds
    for process in running:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--commit", default="", help="for a copy of the tree without its history")
    parser.add_argument("--seconds", type=float, default=85.0, help="in all; the rest is skipped")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    args = parser.parse_args()
    begun = time.monotonic()
    device = require_cuda()
    if args.warm:
        part, parts = map(int, args.warm.split("/"))
        warm(part, parts)
        return
    compile_all(min(12, os.cpu_count() or 1), args.seconds / 2)
    compiled = time.monotonic() - begun
    bandwidth = copy_bandwidth()
    config = {
        "shapes": {name: dataclasses.asdict(shape) for name, shape in SHAPES.items()},
        "queries": QUERIES, "default": dataclasses.asdict(VerifyTuning()), "layers": 2,
        "compile_seconds": compiled, "device": str(device),
    }  # fmt: skip
    head = {"compared": COMPARED, **origin(bandwidth, args.commit), "config": config}
    report = Report(args.json, head, args.seconds - compiled)
    most = max(QUERIES)
    measure(report, {name: Bench(shape, 2, most, bandwidth) for name, shape in SHAPES.items()})
    print(f"{len(report.records)} records in {time.monotonic() - begun:.0f} s: {args.json}")


if __name__ == "__main__":
    main()
