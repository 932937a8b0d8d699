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

from reread.config import SelectorConfig
from reread.ops import triton as kernels
from reread.ops.triton import selection
from reread.ops.triton.decode import Tuning

from .kernel_bench import (
    DEVICE,
    KV_HEADS,
    SCALE,
    SINK,
    Bench,
    Record,
    copy_bandwidth,
    make_pool,
    provenance,
    random_choice,
    recent_of,
    time_layers,
)  # fmt: skip

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
    recent = recent_of(keys)
    layers = bench.layers_for(bench.bytes_of(keys))
    choices = [random_choice(bench, keys - SINK - recent, recent, 1) for _ in range(layers)]
    fill = bench.work.max_splits
    for (block, warps, stages), splits in product(SPARSE, sorted({fill, fill // 2, fill // 4})):
        if splits:
            t = Tuning(block, warps, stages, splits=splits)
            step = lambda i, t=t: bench.sparse(i, choices[i], tuning=t)  # noqa: E731
            yield note(bench, f"sparse {share}", keys, t, step, layers)


def tune_mixed(bench: Bench, keys: int = 772) -> Iterator[Record]:
    recent = recent_of(keys)
    layers = bench.layers_for(bench.bytes_of(keys))
    choices = [random_choice(bench, keys - SINK - recent, recent, 1) for _ in range(layers)]
    slow = torch.zeros(bench.rows, dtype=torch.int32, device=DEVICE)
    slow[bench.rows // 2] = 1
    read = keys + (bench.length - keys) / bench.rows
    for t in MIXED:
        step = lambda i, t=t: kernels.decode_mixed(  # noqa: E731
            bench.q, bench.caches[i], choices[i], slow, scale=SCALE, work=bench.work, tuning=t
        )
        yield note(bench, "mixed", read, t, step, layers)


def selector_pieces(bench: Bench, k: int = 512) -> Iterator[Record]:
    """Where the Selector's time goes."""
    low, high = bench.starts + SINK, bench.lengths - 256
    mass = torch.randn(bench.rows, KV_HEADS, bench.length, device=DEVICE).mul_(2).softmax(-1)
    indices = torch.empty(bench.rows, KV_HEADS, k, dtype=torch.int32, device=DEVICE)
    counts = torch.empty(bench.rows, KV_HEADS, dtype=torch.int32, device=DEVICE)
    blocks = -(-bench.length // selection.CHUNK)
    plan = selection.Plan(
        (blocks, bench.rows * KV_HEADS), blocks * selection.CHUNK,
        (low, high, bench.work.always[: bench.rows]), 24, 8, False,
    )  # fmt: skip
    config, work = SelectorConfig(), bench.work
    scores = work.scores[0], work.scores[1], work.scores[2]

    def refine_and_choose(_: int) -> None:
        refined = selection._refine(*scores, KV_HEADS, plan, config, work)
        selection._top_k(refined, KV_HEADS, plan, work, indices, counts)

    steps: dict[str, Callable[[int], object]] = {
        "log": lambda _: selection._log_scores(mass, None, plan, config, work),
        "refine and top-k": refine_and_choose,
    }
    for name, step in steps.items():
        yield {"kernel": f"selector: {name}", "rows": bench.rows, "length": bench.length} | (
            time_layers(step, 4, repeats=7)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    bandwidth, pool = copy_bandwidth(), make_pool()
    args = parser.parse_args()
    records: list[Record] = []
    for rows, length in ((32, 16384), (16, 16384), (8, 16384), (1, 131072)):
        bench = Bench(pool, rows, length, bandwidth, programs=132 * 3)
        records += selector_pieces(bench)
        records += tune_evidence(bench)
        records += tune_mixed(bench) if rows == 16 else tune_dense(bench)
        for share in (0.016, 0.063, 0.25) if length == 16384 else (0.006, 0.016):
            records += tune_sparse(bench, share)
        args.json.write_text(json.dumps({**provenance(bandwidth), "records": records}, indent=1))


if __name__ == "__main__":
    main()
