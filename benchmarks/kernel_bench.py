"""What the kernel benchmarks share: timing in CUDA graphs, caches of many layers, provenance."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from reread.evaluation import provenance as evaluation
from reread.ops import triton as kernels
from reread.ops.triton import decode

HEADS, KV_HEADS, DIM, SINK = 32, 8, 128, 4
SCALE = DIM**-0.5
SHAPES = ((32, 16384), (8, 16384), (1, 131072), (4, 131072))
SHARES = (0.016, 0.063, 0.125, 0.25, 0.5)
POOL_BYTES = 24 << 30
COLD_BYTES = (
    256 << 20
)  # several times the L2: a graph that reads this much finds nothing of its last replay
DEVICE = torch.device("cuda")

Record = dict[str, Any]


def time_layers(step: Callable[[int], object], layers: int, repeats: int = 15) -> Record:
    """Microseconds a layer: median, p20, p80 of replays of one graph that runs `step` for each
    layer."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            step(layer)
    for _ in range(2):
        graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / layers)
    times.sort()
    return {
        "us": statistics.median(times),
        "p20": times[len(times) // 5],
        "p80": times[-1 - len(times) // 5],
    }


def copy_bandwidth() -> float:
    """Bytes a second of a large device copy, read and write counted; the best of five."""
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return 2 * source.nbytes / min(times)


class Bench:
    """Caches of one shape for many layers, cut from one pool of random numbers, and the arms on
    them."""

    def __init__(
        self, pool: Tensor, rows: int, length: int, bandwidth: float, programs: int = 0
    ) -> None:
        self.rows, self.length, self.bandwidth = rows, length, bandwidth
        size = rows * KV_HEADS * length * DIM
        self.room = pool.numel() // (2 * size)
        shape = (2, rows, KV_HEADS, length, DIM)
        layers = min(self.room, 48)
        caches = pool[: layers * 2 * size].view(layers, *shape)
        int32 = {"dtype": torch.int32, "device": DEVICE}
        self.starts, self.lengths = torch.zeros(rows, **int32), torch.full((rows,), length, **int32)
        self.caches = [kernels.Cache(c[0], c[1], self.starts, self.lengths) for c in caches]
        self.q = torch.randn(rows, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
        self.work = kernels.Workspace(rows, HEADS, KV_HEADS, DIM, length, DEVICE, programs=programs)
        self.out = torch.empty_like(self.q)

    def layers_for(self, bytes_read: float) -> int:
        """Enough layers to be cold, at least 4 where the pool has them."""
        return min(len(self.caches), max(4, -(-COLD_BYTES // int(bytes_read))))

    def bytes_of(self, keys: float) -> float:
        """Bytes of `keys` keys and values in every row and KV head."""
        return self.rows * KV_HEADS * keys * DIM * 4

    def floor(self, keys: float) -> float:
        """Microseconds that reading them takes at the copy bandwidth."""
        return self.bytes_of(keys) / self.bandwidth * 1e6

    def sdpa(self, layer: int, packed: bool) -> Tensor:
        """PyTorch's attention, K and V read once: `packed`, the G queries of a KV head as G query
        positions; otherwise as the heads of grouped-query attention, which the backend packs."""
        cache = self.caches[layer]
        if packed:
            q = self.q.view(self.rows, KV_HEADS, HEADS // KV_HEADS, DIM)
            return scaled_dot_product_attention(q, cache.k, cache.v, scale=SCALE)
        q = self.q.view(self.rows, HEADS, 1, DIM)
        return scaled_dot_product_attention(q, cache.k, cache.v, scale=SCALE, enable_gqa=True)

    def dense(self, layer: int, **more: Any) -> tuple[Tensor, Tensor | None]:
        return kernels.decode_dense(
            self.q, self.caches[layer], scale=SCALE, work=self.work, out=self.out, **more
        )

    def sparse(self, layer: int, chosen: kernels.Chosen, **more: Any) -> Tensor:
        return kernels.decode_sparse(
            self.q, self.caches[layer], chosen, scale=SCALE, work=self.work, out=self.out, **more
        )

    def record(self, keys: float, timed: Record, **more: Any) -> Record:
        floor = self.floor(keys)
        row = {"rows": self.rows, "length": self.length, "keys": keys, "floor_us": floor}
        return {**row, **more, **timed, "roofline": floor / timed["us"]}


def provenance(bandwidth: float, commit: str = "") -> Record:
    """Where the numbers come from, beside what the project's own `provenance` tells."""
    known = evaluation.provenance(DEVICE)
    known["versions"] |= {
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
    return {
        **known,
        "commit": commit or known["commit"],
        "copy_bandwidth": bandwidth,
        "config": {
            "heads": HEADS,
            "kv_heads": KV_HEADS,
            "dim": DIM,
            "dtype": "bfloat16",
            "sink": SINK,
            "tuning": {
                "dense": dataclasses.asdict(decode.DENSE),
                "sparse": dataclasses.asdict(decode.SPARSE),
            },
        },
    }


def make_pool() -> Tensor:
    """Random numbers that all shapes' caches are cut from."""
    torch.manual_seed(0)
    pool = torch.empty(POOL_BYTES // 2, dtype=torch.bfloat16, device=DEVICE)
    for part in pool.chunk(16):
        part.normal_()
    return pool


def recent_of(keys: int) -> int:
    """Size of the recent window where `keys` are read in all."""
    return 256 if keys >= 1024 else 64


def random_choice(bench: Bench, count: int, recent: int, run: int) -> kernels.Chosen:
    """`count` positions per row and head in runs of `run` neighbours, at random places of J,
    ascending."""
    slots = (bench.length - recent - SINK) // run
    scores = torch.rand(bench.rows, KV_HEADS, slots, device=DEVICE)
    first = scores.topk(-(-count // run), dim=-1).indices.sort(dim=-1).values * run + SINK
    every = (first[..., None] + torch.arange(run, device=DEVICE)).flatten(2)[..., :count]
    counts = torch.full((bench.rows, KV_HEADS), count, dtype=torch.int32, device=DEVICE)
    window = torch.full((bench.rows,), bench.length - recent, dtype=torch.int32, device=DEVICE)
    return kernels.Chosen(every.to(torch.int32).contiguous(), counts, window, SINK)
