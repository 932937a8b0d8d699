"""What pages cost: the kernels of a decode step on vLLM's layout and on contiguous rows.

    python -m benchmarks.paged_gpu --json benchmarks/results/paged_gpu.json

One layer of Qwen3-4B's shape, all rows resident, times of CUDA graphs in microseconds; page 0 is
contiguous. `bytes` are those of the layer's keys and values, which a dense step reads. "one row"
are steps in which a single row of the batch is slow, the most frequent of those that are not fast
in all. The result file grows with every shape.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reread.config import Config
from reread.evaluation.provenance import provenance
from reread.ops import triton as kernels

from .common import console, show

HEADS, KV_HEADS, DIM = 32, 8, 128
SHAPES = ((16, 2048), (16, 16384), (8, 65536), (4, 131072))
PAGES = (16, 64)
CONFIG = Config()


class Layer:
    """A layer's cache, contiguous or in pages of `page` positions in a random order."""

    def __init__(self, rows: int, length: int, page: int, longest: int) -> None:
        ints = {"dtype": torch.int32, "device": "cuda"}
        starts, lengths = torch.zeros(rows, **ints), torch.full((rows,), length, **ints)
        if page:
            most = -(-length // page)
            cache = torch.randn(
                rows * most, 2, page, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda"
            )
            k, v = (t.transpose(1, 2) for t in cache.unbind(1))
            tables = torch.randperm(rows * most, device="cuda").to(torch.int32).view(rows, most)
            self.kv = kernels.Cache(k, v, starts, lengths, tables, longest)
        else:
            shape = (rows, KV_HEADS, length, DIM)
            k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
            self.kv = kernels.Cache(k, v, starts, lengths)
        self.q = torch.randn(rows, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        self.low = torch.full((rows,), CONFIG.sink, **ints)
        self.high = torch.full((rows,), length - CONFIG.recent, **ints)
        k_most = min(CONFIG.k, length - CONFIG.recent - CONFIG.sink)
        picked = torch.rand(rows + 1, KV_HEADS, length - 260, device="cuda").topk(k_most).indices
        self.indices = (picked.sort().values + CONFIG.sink).to(torch.int32)
        self.counts = torch.full((rows + 1, KV_HEADS), k_most, **ints)
        self.lanes = torch.randperm(rows, device="cuda").to(torch.int32) if page else None
        lists = self.indices[: rows + bool(page)], self.counts[: rows + bool(page)]
        self.lists = tuple(t.contiguous() for t in lists)
        self.chosen = kernels.Chosen(*self.lists, self.high, CONFIG.sink, self.lanes)
        self.none, self.one, self.all = (torch.zeros(rows, **ints) for _ in range(3))
        self.one[0], self.all[:] = 1, 1
        self.work = kernels.Workspace(rows, HEADS, KV_HEADS, DIM, longest, self.q.device)
        self.out = torch.empty_like(self.q)
        # vLLM's pages are read by four programs an SM in fast steps, see PagedArena
        programs = 2 * self.work.programs if page else 0
        self.fast_work = kernels.Workspace(
            rows, HEADS, KV_HEADS, DIM, 2048, self.q.device, evidence=False, programs=programs
        )  # fmt: skip

    def dense(self, active: Tensor, *, evidence: bool = True) -> None:
        kernels.decode_dense(
            self.q, self.kv, scale=DIM**-0.5, work=self.work, active=active, out=self.out,
            allowed=(self.low, self.high) if evidence else None,
        )  # fmt: skip

    def sparse(self, tuning: kernels.Tuning | None = None) -> None:
        kernels.decode_sparse(
            self.q, self.kv, self.chosen, scale=DIM**-0.5, work=self.fast_work, out=self.out,
            tuning=tuning,
        )  # fmt: skip

    def mixed(self, slow: Tensor) -> None:
        kernels.decode_mixed(
            self.q, self.kv, self.chosen, slow, scale=DIM**-0.5, work=self.work, out=self.out,
            allowed=(self.low, self.high),
        )  # fmt: skip

    def refresh(self, active: Tensor) -> None:
        kernels.refresh(
            self.kv, CONFIG.selector, heads=HEADS, work=self.work, allowed=(self.low, self.high),
            active=active, indices=self.lists[0], counts=self.lists[1], lanes=self.lanes,
        )  # fmt: skip


def timed(call: Callable[[], None]) -> float:
    """Microseconds."""
    import triton.testing

    return 1000 * float(triton.testing.do_bench_cudagraph(call, rep=30))


def measure(rows: int, length: int, page: int) -> dict[str, Any]:
    layer = Layer(rows, length, page, max(n for _, n in SHAPES))
    layer.dense(layer.all)  # evidence for the refresh
    found = {
        "rows": rows, "length": length, "page": page,
        "bytes": 2 * rows * length * KV_HEADS * DIM * 2,
        "dense": timed(lambda: layer.dense(layer.all, evidence=False)),
        "slow": timed(lambda: layer.dense(layer.all)),
        "one row slow": timed(lambda: layer.dense(layer.one)),
        "no row slow": timed(lambda: layer.dense(layer.none)),
        "fast": timed(layer.sparse),
        "mixed, one": timed(lambda: layer.mixed(layer.one)),
        "mixed, none": timed(lambda: layer.mixed(layer.none)),
        "choose, all": timed(lambda: layer.refresh(layer.all)),
        "choose, one": timed(lambda: layer.refresh(layer.one)),
        "choose, none": timed(lambda: layer.refresh(layer.none)),
    }  # fmt: skip
    console.log(found)
    return found


def tune(rows: int, length: int) -> list[dict[str, Any]]:
    """Fast steps on pages of 16 with other launch parameters, the fastest first; each is compared
    with the ones that users get."""
    layer = Layer(rows, length, PAGES[0], max(n for _, n in SHAPES))
    layer.sparse()
    want, found = layer.out.clone(), []
    for block, warps, stages, splits in itertools.product(
        (32, 64), (4, 8), (3, 5), (1, 2, 3, 4, 6)
    ):
        if rows * KV_HEADS * splits > 8 * layer.work.programs:
            continue
        tuning = kernels.Tuning(block, warps, stages, splits=splits)
        layer.fast_work = kernels.Workspace(
            rows, HEADS, KV_HEADS, DIM, 2048, layer.q.device, evidence=False,
            programs=rows * KV_HEADS * splits,
        )  # fmt: skip
        layer.sparse(tuning)
        assert bool(torch.allclose(layer.out.float(), want.float(), atol=2e-2)), tuning
        us = timed(lambda tuning=tuning: layer.sparse(tuning))  # type: ignore[misc]  # bound now
        found.append({"rows": rows, "length": length, **dataclasses.asdict(tuning), "us": us})
    found.sort(key=lambda row: float(row["us"]))
    console.log(found[:3])
    return found


def main() -> None:
    """All shapes on contiguous rows and on pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/paged_gpu.json"))
    parser.add_argument("--commit", help="for a copy of the tree without its history")
    parser.add_argument("--tune", action="store_true", help="launch parameters of fast steps")
    args = parser.parse_args()
    found = provenance("cuda")
    rows: list[dict[str, Any]] = []
    if args.tune:
        # the length plays no part
        rows = [row for shape in (SHAPES[0], *SHAPES[2:]) for row in tune(*shape)]
        commit = args.commit or found["commit"]
        result = {**found, "commit": commit, "config": CONFIG.to_dict(), "rows": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
        return
    for shape in SHAPES:
        for page in (0, *PAGES):
            rows.append(measure(*shape, page))
            result = {
                **found, "commit": args.commit or found["commit"], "config": CONFIG.to_dict(),
                "rows": rows,
            }  # fmt: skip
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    show("pages", rows, [k for k in rows[0] if k not in ("dense", "choose, all")])


if __name__ == "__main__":
    main()
