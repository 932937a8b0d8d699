"""Inputs for the kernel tests: ragged caches whose unused memory is NaN, and the same view for the
reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reread.types import KVView


@dataclass(frozen=True)
class Case:
    """One shape. `spans`: per row (start, length); the cache has `spare` more positions than the
    longest row."""

    name: str
    spans: Sequence[tuple[int, int]]
    kv_heads: int = 2
    group: int = 2
    dim: int = 64
    dtype: torch.dtype = torch.float32
    k: int = 12
    sink: int = 4
    recent: int = 7
    spare: int = 5
    block: int = 16
    splits: int = 2
    programs: int = 5
    heads_first: bool = True
    selects: bool = True


class Inputs:
    """Tensors of a case on a device; everything that may not be read is NaN."""

    def __init__(self, case: Case, device: torch.device, seed: int = 0) -> None:
        g = torch.Generator(device).manual_seed(seed)
        self.case, self.device, self.generator = case, device, g
        rows, capacity = len(case.spans), max(n for _, n in case.spans) + case.spare
        self.starts = [start for start, _ in case.spans]
        self.lengths = [length for _, length in case.spans]
        self.q = self._rand(rows, case.kv_heads * case.group, case.dim)
        self.k = self._cache(rows, capacity)
        self.v = self._cache(rows, capacity)
        self.low = [start + case.sink for start in self.starts]
        self.high = [
            max(low, n - case.recent) for low, n in zip(self.low, self.lengths, strict=True)
        ]
        self.window = [min(high, n) for high, n in zip(self.high, self.lengths, strict=True)]
        self.scale = case.dim**-0.5
        self.view = KVView(self.k, self.v, tuple(self.starts), tuple(self.lengths))

    def _rand(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device).to(self.case.dtype)

    def _cache(self, rows: int, capacity: int) -> Tensor:
        """[B, Hkv, L, D], or a transposed view of [B, L, Hkv, D]."""
        heads, dim = self.case.kv_heads, self.case.dim
        shape = (rows, heads, capacity, dim)
        cache = self._rand(*shape)
        if not self.case.heads_first:
            cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
        for b, (start, length) in enumerate(self.case.spans):
            cache[b, :, :start] = torch.nan
            cache[b, :, length:] = torch.nan
        return cache

    def int32(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def mass(self, *, tied: bool = False) -> Tensor:
        """Evidence over J, zero outside; `tied`: few distinct values, many of them zero."""
        shape = self.k.shape[:3]
        mass = torch.rand(shape, generator=self.generator, device=self.device) ** 8
        if tied:
            mass = (mass * 4).floor() / 4
        at = torch.arange(shape[2], device=self.device)
        low, high = self.int32(self.low)[:, None], self.int32(self.high)[:, None]
        mass = mass * ((at >= low) & (at < high))[:, None]
        return mass / mass.sum(-1, keepdim=True).clamp(min=1e-20)

    def selection(self) -> tuple[Tensor, Tensor]:
        """A random ascending selection per KV head, of different sizes, poisoned behind its
        count."""
        shape = (*self.k.shape[:2], self.case.k)
        indices = torch.full(shape, -(2**30), dtype=torch.int32)
        counts = torch.zeros(shape[:2], dtype=torch.int32)
        g = torch.Generator().manual_seed(1)
        for b in range(shape[0]):
            n = self.high[b] - self.low[b]
            for h in range(shape[1]):
                kept = max(0, min(self.case.k, n) - h % 2)
                picked = (torch.randperm(n, generator=g)[:kept] + self.low[b]).sort().values
                indices[b, h, :kept] = picked.to(torch.int32)
                counts[b, h] = kept
        return indices.to(self.device), counts.to(self.device)


ODD = ((0, 75), (9, 50), (30, 31))

# interpreted on the CPU: tiny, and no bfloat16, whose bits the interpreter's matrix product takes
# for integers
SMALL = [
    Case("ragged", ODD),
    Case("one token", ((0, 1),)),
    Case("two rows of one token", ((0, 1), (6, 7)), group=1),
    Case("length 16 exactly", ((0, 16),), k=40),
    Case("k larger than j", ((3, 40), (0, 12)), k=64),
    Case("no sink", ODD, sink=0),
    Case("recent 1", ODD, recent=1),
    Case("g 1", ODD, group=1, selects=False),
    Case("g 3 of 3 heads", ODD, group=3, kv_heads=3),
    Case("g 7", ODD[:1], group=7, kv_heads=1, selects=False),
    Case("g 16", ODD[:2], group=16, kv_heads=1, selects=False),
    Case("d 128", ODD, dim=128, splits=1, selects=False),
    Case("d 256", ODD[:2], dim=256, group=4, selects=False),
    Case("half", ODD, dtype=torch.float16, selects=False),
    Case("more programs than blocks", ODD, programs=50, selects=False),
    Case("one program", ODD, programs=1, selects=False),
    Case("splits beyond the keys", ODD, splits=3, k=2, selects=False),
    Case("cache [B, L, Hkv, D]", ODD, heads_first=False, selects=False),
    Case("three chunks", ((2040, 4500),), kv_heads=1, k=700, block=256, programs=3),
    Case("five rows", (*ODD, (0, 33), (1, 64)), programs=7, splits=1),
]

_BF16 = {"dtype": torch.bfloat16, "dim": 128, "group": 4, "kv_heads": 8}
_TUNED = {"block": 0, "splits": 0, "programs": 0}


def _large(name: str, spans: Sequence[tuple[int, int]], **more: Any) -> Case:
    fixed: dict[str, Any] = {**_BF16, **_TUNED, "k": 512, "recent": 256}
    return Case(name, spans, **{**fixed, **more})


# on the GPU: the shapes that benchmarks time, and the edges of what is supported
LARGE = [
    _large("1 x 128K", ((0, 131072),)),
    _large("4 x 128K", ((0, 131072), (5, 131071), (0, 70001), (131000, 131072)), k=2048),
    _large("8 x 16K ragged", tuple((7 * i, 16384 - 999 * i) for i in range(8)), k=2048),
    _large("32 x 16K", tuple((i, 16384 - i) for i in range(32)), k=1024),
    _large("64 rows", tuple((i, 2000 + 31 * i) for i in range(64))),
    _large("1 x 256K", ((1, 262144),), spare=0),
    _large("64-bit offsets", tuple((0, 65536) for _ in range(33)), k=256),
    _large("fp16 g 7", ((0, 5000), (3, 4097)), dtype=torch.float16, group=7, kv_heads=2, dim=64),
    _large("d 256 g 16", ((0, 9001), (77, 300)), group=16, kv_heads=2, dim=256),
    _large("g 1", ((0, 9001), (77, 300)), group=1, kv_heads=16, dim=64),
    _large("fp32", ((0, 9001), (77, 300)), dtype=torch.float32),
    _large("one token", ((0, 1), (4, 5), (0, 400))),
    _large("cache [B, L, Hkv, D]", ((0, 30000), (7, 20001)), heads_first=False),
]
