"""Caches of one shape for many layers, and what the kernel benchmark runs on them.

Caches are cut from one pool of random numbers. Every arm goes over several layers' caches, so that
none finds its keys in the L2 cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..errors import InputError
from .timing import COLD_BYTES, Record, require_cuda

if TYPE_CHECKING:
    from ..ops.triton import Chosen

DTYPE = torch.bfloat16
SINK = 4
MAX_LAYERS = 48
POOL_BYTES = 24 << 30


@dataclass(frozen=True, slots=True)
class KernelShape:
    """One decode step of one layer: `rows` sequences of `length` tokens."""

    rows: int
    length: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128

    @property
    def layer_bytes(self) -> int:
        """Keys and values of one layer."""
        return self.rows * self.kv_heads * self.length * self.dim * 2 * DTYPE.itemsize


def make_pool(shapes: list[KernelShape]) -> Tensor:
    """Random numbers that all shapes' caches are cut from.

    Raises:
        InputError: a shape of which not even one layer fits the GPU. UnsupportedError: no GPU.
    """
    device = require_cuda()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0] * 2 // 3
    largest = max(shapes, key=lambda shape: shape.layer_bytes)
    if largest.layer_bytes > free:
        raise InputError(
            f"{largest} needs {largest.layer_bytes / 2**30:.1f} GiB of keys and values a layer: "
            f"at most {free / 2**30:.1f} GiB on this GPU"
        )
    torch.manual_seed(0)
    size = min(free, max(POOL_BYTES, largest.layer_bytes)) // DTYPE.itemsize
    pool = torch.empty(size, dtype=DTYPE, device=device)
    for part in pool.chunk(16):
        part.normal_()
    return pool


class Bench:
    """The caches of one shape and calls of our kernels on them."""

    def __init__(
        self, pool: Tensor, shape: KernelShape, bandwidth: float, programs: int = 0
    ) -> None:
        from ..ops import triton as kernels

        # `reread.ops.triton`, whose import needs triton installed
        self.kernels: Any = kernels
        self.shape, self.bandwidth, self.device = shape, bandwidth, pool.device
        self.rows, self.length = shape.rows, shape.length
        self.scale = shape.dim**-0.5
        size = shape.layer_bytes // DTYPE.itemsize
        layers = min(pool.numel() // size, MAX_LAYERS)
        caches = pool[: layers * size].view(
            layers, 2, shape.rows, shape.kv_heads, shape.length, shape.dim
        )
        self.starts = self.int32(0)
        self.lengths = self.int32(shape.length)
        self.caches = [kernels.Cache(c[0], c[1], self.starts, self.lengths) for c in caches]
        self.q = torch.randn(shape.rows, shape.heads, shape.dim, device=self.device, dtype=DTYPE)
        self.work = kernels.Workspace(
            shape.rows, shape.heads, shape.kv_heads, shape.dim, shape.length, self.device,
            programs=programs,
        )  # fmt: skip
        self.out = torch.empty_like(self.q)

    def int32(self, value: int) -> Tensor:
        """[B] on the device."""
        return torch.full((self.rows,), value, dtype=torch.int32, device=self.device)

    def layers_for(self, keys: float) -> int:
        """Enough layers to be cold where `keys` are read, at least 4 if the pool has them."""
        return min(len(self.caches), max(4, -(-COLD_BYTES // int(self.bytes_of(keys)))))

    def bytes_of(self, keys: float) -> float:
        """Bytes of `keys` keys and values in every row and KV head."""
        return self.shape.layer_bytes * keys / self.length

    def record(self, keys: float, timed: Record, **more: Any) -> Record:
        """A result. `floor_us`: reading `keys` a row at the copy bandwidth; `roofline`: its share
        of the time."""
        s, floor = self.shape, self.bytes_of(keys) / self.bandwidth * 1e6
        row = {
            "rows": s.rows, "length": s.length, "heads": s.heads, "kv_heads": s.kv_heads,
            "dim": s.dim, "keys": keys, "floor_us": floor,
        }  # fmt: skip
        return {**row, **more, **timed, "roofline": floor / timed["us"]}

    def dense(self, layer: int, **more: Any) -> Tensor:
        """Our dense kernel; `more`: `allowed`, `active`, `tuning`."""
        out: Tensor = self.kernels.decode_dense(
            self.q, self.caches[layer], scale=self.scale, work=self.work, out=self.out, **more
        )
        return out

    def sparse(self, layer: int, chosen: Chosen, **more: Any) -> Tensor:
        """Our sparse kernel."""
        out: Tensor = self.kernels.decode_sparse(
            self.q, self.caches[layer], chosen,
            scale=self.scale, work=self.work, out=self.out, **more,
        )  # fmt: skip
        return out

    def mixed(self, layer: int, chosen: Chosen, slow: Tensor, **more: Any) -> Tensor:
        """Our kernel for rows of both kinds."""
        out: Tensor = self.kernels.decode_mixed(
            self.q, self.caches[layer], chosen, slow,
            scale=self.scale, work=self.work, out=self.out, **more,
        )  # fmt: skip
        return out

    def choice(self, keys: int, run: int = 1) -> Chosen:
        """What makes `keys` in all: runs of `run` neighbours at random places of J, ascending."""
        recent = recent_of(keys)
        count, slots = keys - SINK - recent, (self.length - recent - SINK) // run
        scores = torch.rand(self.rows, self.shape.kv_heads, slots, device=self.device)
        first = scores.topk(-(-count // run), dim=-1).indices.sort(dim=-1).values * run + SINK
        every = (first[..., None] + torch.arange(run, device=self.device)).flatten(2)[..., :count]
        counts = torch.full_like(every[..., 0], count, dtype=torch.int32)
        window = self.int32(self.length - recent)
        chosen: Chosen = self.kernels.Chosen(
            every.to(torch.int32).contiguous(), counts, window, SINK
        )
        return chosen

    def want(self, keys: Tensor, values: Tensor, chosen: Chosen | None = None) -> Tensor:
        """fp32 attention over all of a layer's keys, or the chosen ones: [B, H, D], row by row."""
        out = torch.empty_like(self.q, dtype=torch.float32)
        for b in range(self.rows):
            k, v = keys[b], values[b]
            if chosen is not None:
                k, v = self._read(k, chosen, b), self._read(v, chosen, b)
            q = self.q[b].view(self.shape.kv_heads, -1, self.shape.dim).float()
            row = scaled_dot_product_attention(
                q[None], k[None].float(), v[None].float(), scale=self.scale
            )
            out[b] = row[0].flatten(0, 1)
        return out

    def _read(self, x: Tensor, chosen: Chosen, b: int) -> Tensor:
        """x [Hkv, L, D] -> the keys that row b reads."""
        recent = torch.arange(int(chosen.window_start[b]), self.length, device=self.device)
        fixed = torch.arange(SINK, device=self.device)
        parts = (fixed, chosen.indices[b].long(), recent)
        at = torch.cat([p.expand(self.shape.kv_heads, -1) for p in parts], dim=1)
        return x.gather(1, at[..., None].expand(-1, -1, self.shape.dim))


def recent_of(keys: int) -> int:
    """Size of the recent window where `keys` are read in all."""
    return 256 if keys >= 1024 else min(64, keys // 4)
