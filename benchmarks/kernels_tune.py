"""Launch parameters of the kernels by shape: a table to read when choosing their defaults.

python -m benchmarks.kernels_tune --json tune.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import torch

from reread.bench.caches import SINK, Bench, KernelShape, make_pool
from reread.bench.timing import Record, copy_bandwidth, origin, time_layers
from reread.config import SelectorConfig
from reread.ops.triton import selection
from reread.ops.triton.decode import Tuning

SHAPES = [KernelShape(*s) for s in ((32, 16384), (16, 16384), (8, 16384), (1, 131072))]
DENSE = [Tuning(64, 4, s, programs=132 * n) for s, n in product((3, 4), (1, 2, 3))]
SPARSE = [(32, 4, 5), (32, 4, 7), (64, 4, 5), (64, 8, 5), (128, 4, 3)]
MIXED = [
    Tuning(64, 4, s, programs=132 * n, splits=k) for s, n, k in product((2, 3), (1, 2), (1, 2, 4))
]


def note(
    bench: Bench, kind: str, keys: float, tuning: Tuning, step: Callable[[int], object], layers: int
) -> Record:
    try:
        timed = time_layers(step, layers, repeats=7)
    except Exception as error:  # a configuration may not fit the card; the table says so
        return {"kernel": kind, "tuning": dataclasses.asdict(tuning), "failed": str(error)[:200]}
    return bench.record(keys, timed, kernel=kind, tuning=dataclasses.asdict(tuning))


def tune_dense(bench: Bench) -> Iterator[Record]:
    for t in DENSE:
        yield note(bench, "dense", bench.length, t, lambda i, t=t: bench.dense(i, tuning=t), 4)


def tune_evidence(bench: Bench) -> Iterator[Record]:
    allowed = (bench.starts + SINK, bench.lengths - 256)
    for t in DENSE:
        step = lambda i, t=t: bench.dense(i, tuning=t, allowed=allowed)  # noqa: E731
        yield note(bench, "dense with evidence", bench.length, t, step, 4)


def tune_sparse(bench: Bench, share: float) -> Iterator[Record]:
    keys = round(share * bench.length)
    layers = bench.layers_for(keys)
    choices = [bench.choice(keys) for _ in range(layers)]
    fill = bench.work.max_splits
    for (block, warps, stages), splits in product(SPARSE, sorted({fill, fill // 2, fill // 4})):
        if splits:
            t = Tuning(block, warps, stages, splits=splits)
            step = lambda i, t=t: bench.sparse(i, choices[i], tuning=t)  # noqa: E731
            yield note(bench, f"sparse {share}", keys, t, step, layers)


def tune_mixed(bench: Bench, keys: int = 772) -> Iterator[Record]:
    layers = bench.layers_for(keys)
    choices = [bench.choice(keys) for _ in range(layers)]
    slow = bench.int32(0)
    slow[bench.rows // 2] = 1
    read = keys + (bench.length - keys) / bench.rows
    for t in MIXED:
        step = lambda i, t=t: bench.mixed(i, choices[i], slow, tuning=t)  # noqa: E731
        yield note(bench, "mixed", read, t, step, layers)


def selector_pieces(bench: Bench, k: int = 512) -> Iterator[Record]:
    """Where the Selector's time goes."""
    low, high = bench.starts + SINK, bench.lengths - 256
    shape = (bench.rows, bench.shape.kv_heads, k)
    indices = torch.empty(shape, dtype=torch.int32, device=bench.device)
    counts = torch.empty(shape[:2], dtype=torch.int32, device=bench.device)
    config, work = SelectorConfig(), bench.work
    group = bench.shape.heads // bench.shape.kv_heads
    plan = selection._plan((*shape[:2], bench.length), config, (low, high), None, work)
    bench.dense(0, allowed=(low, high))

    def both(_: int) -> None:
        selection._scores(work.logits, group, None, plan, config, work)
        selection.top_k(plan, work, indices, counts)

    steps: dict[str, Callable[[int], object]] = {
        "both": both,
        "scores": lambda _: selection._scores(work.logits, group, None, plan, config, work),
    }
    for name, step in steps.items():
        yield {"kernel": f"selector: {name}", "rows": bench.rows, "length": bench.length} | (
            time_layers(step, 4, repeats=7)
        )
    work.hists.zero_()  # scores alone leave their counts behind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    pool = make_pool(SHAPES)
    records: list[Record] = []
    for shape in SHAPES:
        rows, length = shape.rows, shape.length
        bench = Bench(pool, shape, bandwidth, programs=132 * 3)
        records += selector_pieces(bench)
        records += tune_evidence(bench)
        records += tune_mixed(bench) if rows == 16 else tune_dense(bench)
        for share in (0.016, 0.063, 0.25) if length == 16384 else (0.006, 0.016):
            records += tune_sparse(bench, share)
        args.json.write_text(json.dumps({**origin(bandwidth), "records": records}, indent=1))


if __name__ == "__main__":
    main()
