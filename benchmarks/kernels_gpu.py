"""Times the attention and Selector kernels on one GPU against the strongest dense decode attention
found there.

    python -m benchmarks.kernels_gpu --json benchmarks/results/kernels.json

Every arm runs as one CUDA graph over many layers' caches, so that no arm finds its keys in the L2
cache; a time is that
graph's median over its layers. Correctness is checked before anything is timed. `floor` is bytes
that must be read over
the copy bandwidth measured in the same run; `roofline` is floor over time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from reread.config import SelectorConfig
from reread.ops import triton as kernels
from reread.ops.triton import decode

from .kernel_bench import (
    DEVICE,
    DIM,
    KV_HEADS,
    SCALE,
    SHAPES,
    SHARES,
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


@contextmanager
def backend(name: str) -> Iterator[None]:
    kind = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[name]
    with sdpa_kernel(kind):
        yield


def close(got: Tensor, want: Tensor, what: str) -> float:
    error = float((got.double() - want.double()).norm() / want.double().norm())
    assert error < 1e-2, f"{what}: relative error {error:.3g}"
    return error


def dense_arms(bench: Bench) -> list[Record]:
    """cuDNN and FlashAttention through SDPA, and ours, checked against each other, then timed."""
    records = []
    layers = bench.layers_for(bench.bytes_of(bench.length))
    ours = bench.dense(0)[0].clone()
    for name, packed in product(("cudnn", "flash"), (True, False)):
        arm = f"{name}, {'packed' if packed else 'gqa'}"
        with backend(name):
            close(bench.sdpa(0, packed).reshape_as(ours), ours, arm)
            timed = time_layers(lambda i, p=packed: bench.sdpa(i, p), layers)
        records.append(bench.record(bench.length, timed, kernel="dense", arm=arm))
    timed = time_layers(bench.dense, layers)
    records.append(bench.record(bench.length, timed, kernel="dense", arm="reread"))
    return records


def sparse_want(bench: Bench, chosen: kernels.Chosen, layer: int) -> Tensor:
    """fp32 attention over the gathered keys, one row at a time."""
    cache, out = bench.caches[layer], torch.empty_like(bench.q, dtype=torch.float32)
    for b in range(bench.rows):
        recent = torch.arange(int(chosen.window_start[b]), bench.length, device=DEVICE)
        fixed = torch.arange(SINK, device=DEVICE)
        at = torch.cat(
            [x.expand(KV_HEADS, -1) for x in (fixed, chosen.indices[b].long(), recent)], dim=1
        )[..., None].expand(-1, -1, DIM)
        k, v = cache.k[b].gather(1, at).float(), cache.v[b].gather(1, at).float()
        q = bench.q[b].view(KV_HEADS, -1, DIM).float()
        out[b] = scaled_dot_product_attention(q[None], k[None], v[None], scale=SCALE)[0].flatten(
            0, 1
        )
    return out


def sparse_arms(bench: Bench, keys: int, fastest: float) -> list[Record]:
    """Gathering from the full cache, single positions and runs of 32, and the packed copy."""
    recent, records = recent_of(keys), []
    count = keys - SINK - recent
    layers = bench.layers_for(bench.bytes_of(keys))
    for run in (1, 32):
        choices = [random_choice(bench, count, recent, run) for _ in range(layers)]
        error = close(bench.sparse(0, choices[0]), sparse_want(bench, choices[0], 0), "sparse")
        timed = time_layers(lambda i, c=choices: bench.sparse(i, c[i]), layers)
        records.append(
            bench.record(
                keys, timed, kernel="sparse", arm="gather", run=run, layers=layers,
                speedup=fastest / timed["us"], error=error,
            )
        )  # fmt: skip
    records.append(packed_arm(bench, keys, choices, layers, fastest))
    return records


def packed_arm(
    bench: Bench, keys: int, choices: list[kernels.Chosen], layers: int, fastest: float
) -> Record:
    room = SINK + choices[0].indices.shape[2]
    copies = torch.empty(
        layers, 2, bench.rows, KV_HEADS, room, DIM, device=DEVICE, dtype=torch.bfloat16
    )

    def pack(i: int) -> None:
        kernels.pack(bench.caches[i], choices[i], copies[i, 0], copies[i, 1])

    def attend(i: int) -> Tensor:
        return kernels.decode_packed(
            bench.q, bench.caches[i], choices[i], copies[i, 0], copies[i, 1],
            scale=SCALE, work=bench.work, out=bench.out,
        )  # fmt: skip

    for i in range(layers):
        pack(i)
    error = close(attend(0), sparse_want(bench, choices[0], 0), "packed")
    timed, packing = time_layers(attend, layers), time_layers(pack, layers)
    return bench.record(
        keys, timed, kernel="sparse", arm="packed", layers=layers, speedup=fastest / timed["us"],
        error=error, pack_us=packing["us"],
    )  # fmt: skip


def mixed_arms(bench: Bench, keys: int) -> list[Record]:
    """One slow row among all: one launch, or the sparse and the dense kernel one after the
    other."""
    recent = recent_of(keys)
    layers = bench.layers_for(bench.bytes_of(keys))
    choices = [random_choice(bench, keys - SINK - recent, recent, 1) for _ in range(layers)]
    slow = torch.zeros(bench.rows, dtype=torch.int32, device=DEVICE)
    slow[bench.rows // 2] = 1
    fast = 1 - slow
    allowed = (bench.starts + SINK, bench.lengths - recent)

    def one(i: int, allowed: decode.Allowed | None = None) -> None:
        kernels.decode_mixed(
            bench.q, bench.caches[i], choices[i], slow,
            scale=SCALE, work=bench.work, out=bench.out, allowed=allowed,
        )  # fmt: skip

    def two(i: int, allowed: decode.Allowed | None = None) -> None:
        bench.sparse(i, choices[i], active=fast)
        bench.dense(i, active=slow, allowed=allowed)

    all_fast = time_layers(lambda i: bench.sparse(i, choices[i]), layers)["us"]
    extra = bench.length * KV_HEADS * DIM * 4
    records = []
    for name, step in (
        ("one launch", one),
        ("two launches", two),
        ("one launch, evidence", lambda i: one(i, allowed)),
        ("two launches, evidence", lambda i: two(i, allowed)),
    ):
        timed = time_layers(step, layers)
        rate = extra / (timed["us"] - all_fast) * 1e6
        records.append(
            {
                "kernel": "mixed", "arm": name, "rows": bench.rows, "length": bench.length,
                "keys": keys, "all_fast_us": all_fast, **timed, "slow_row_bytes": extra,
                "slow_row_share_of_bandwidth": rate / bench.bandwidth,
            }
        )  # fmt: skip
    return records


def refresh_arm(bench: Bench, k: int, dense_us: float) -> Record:
    """What a slow step costs beyond dense attention: evidence and Selector, against half of the
    dense attention."""
    layers = min(len(bench.caches), 4)
    allowed = (bench.starts + SINK, bench.lengths - 256)
    indices = torch.empty(bench.rows, KV_HEADS, k, dtype=torch.int32, device=DEVICE)
    counts = torch.empty(bench.rows, KV_HEADS, dtype=torch.int32, device=DEVICE)

    def choose(_: int) -> None:
        assert mass is not None
        kernels.select(
            mass, *allowed, SelectorConfig(), work=bench.work, indices=indices, counts=counts
        )

    def whole(i: int) -> None:
        bench.dense(i, allowed=allowed)
        choose(i)

    mass = bench.dense(0, allowed=allowed)[1]
    plain = time_layers(bench.dense, layers)["us"]
    evidence = time_layers(lambda i: bench.dense(i, allowed=allowed), layers)["us"]
    selector = time_layers(choose, 4)["us"]
    total = time_layers(whole, layers)
    return {
        "kernel": "refresh", "rows": bench.rows, "length": bench.length, "k": k, **total,
        "dense_us": plain, "with_evidence_us": evidence, "selector_us": selector,
        "refresh_us": total["us"] - plain, "share_of_dense": (total["us"] - plain) / dense_us,
    }  # fmt: skip


def measure(pool: Tensor, bandwidth: float) -> list[Record]:
    records: list[Record] = []
    for rows, length in SHAPES:
        bench = Bench(pool, rows, length, bandwidth)
        dense = dense_arms(bench)
        fastest = min(r["us"] for r in dense)
        records += dense
        shares = SHARES if rows > 1 else (0.006, 0.016, 0.063)
        for share in shares:
            records += sparse_arms(bench, round(share * length), fastest)
        records.append(refresh_arm(bench, 512, fastest))
        records.append(refresh_arm(bench, 2048, fastest))
    for length in (16384, 32768):
        records += mixed_arms(Bench(pool, 16, length, bandwidth), 772)
    return records


def line(r: Record) -> str:
    """One row of the printed table."""
    shown = {k: v for k, v in r.items() if k not in ("p20", "p80", "tuning")}
    text = " ".join(
        f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in shown.items()
    )
    return text + (f" {list(r['tuning'].values())}" if "tuning" in r else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="for a copy of the tree without its history")
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s; floors below are bytes over this")
    records = measure(make_pool(), bandwidth)
    if args.json:
        args.json.write_text(
            json.dumps({**provenance(bandwidth, args.commit), "records": records}, indent=1)
        )
    for record in records:
        print(line(record))


if __name__ == "__main__":
    main()
