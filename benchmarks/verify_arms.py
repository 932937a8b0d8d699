"""What `verify_gpu` runs: caches of one shape, our kernels on them, and PyTorch's attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from reread.bench.caches import DTYPE, SINK, KernelShape
from reread.ops import triton as kernels
from reread.ops.triton import VerifyTuning
from reread.ops.triton.workspace import multiprocessors

RECENT = 256
BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "FlashAttention-2": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# (block, warps, stages) by padded tile: none spills registers when compiled for sm_90
SMALL = [(64, 4, 4), (64, 4, 2), (128, 8, 3), (32, 4, 4)]
VARIANTS = {
    16: SMALL,
    32: SMALL,
    64: [(64, 4, 3), (64, 4, 2), (64, 4, 4), (64, 8, 3), (128, 8, 2), (128, 8, 3), (32, 4, 4)],
    128: [(64, 8, 2), (64, 8, 3), (64, 8, 4), (32, 8, 3), (32, 8, 4)],
}


@dataclass(frozen=True)
class Arm:
    """Something to time.

    Attributes:
        step: runs one layer, returns [B, H, T, D]; not `alike`: for its speed alone.
    """

    name: str
    step: Callable[[int], Tensor]
    alike: bool = True
    tuning: dict[str, Any] = field(default_factory=dict)


class Bench:
    """Random keys and values of some layers, full rows."""

    def __init__(self, shape: KernelShape, layers: int, queries: int, bandwidth: float) -> None:
        self.shape, self.bandwidth, self.device = shape, bandwidth, torch.device("cuda")
        self.scale = shape.dim**-0.5
        torch.manual_seed(0)
        size = (layers, 2, shape.rows, shape.kv_heads, shape.length, shape.dim)
        pool = torch.empty(size, dtype=DTYPE, device=self.device)
        for part in pool.flatten(0, 1):
            part.normal_()
        self.starts, self.lengths = self._int32(0), self._int32(shape.length)
        self.allowed = self._int32(SINK), self._int32(shape.length - RECENT)
        self.caches = [kernels.Cache(c[0], c[1], self.starts, self.lengths) for c in pool]
        self.work = kernels.Workspace(
            shape.rows, shape.heads, shape.kv_heads, shape.dim, shape.length, self.device,
            queries=queries,
        )  # fmt: skip
        at = torch.arange(shape.rows, device=self.device, dtype=torch.int32)
        self._asked = {t: (t - 1 - at) % t for t in range(1, queries + 1)}
        # as a model gives them: positions first
        wide = (shape.rows, queries, shape.heads, shape.dim)
        self._q = torch.randn(wide, dtype=DTYPE, device=self.device)

    def _int32(self, value: int) -> Tensor:
        return torch.full((self.shape.rows,), value, dtype=torch.int32, device=self.device)

    def q(self, queries: int) -> Tensor:
        """[B, H, T, D]."""
        return self._q[:, :queries].transpose(1, 2)

    def ragged(self, on: bool) -> None:
        """Rows of many lengths with padding before them, down to a few tokens; or full ones."""
        rows, length = self.shape.rows, self.shape.length
        at = torch.arange(rows, device=self.device, dtype=torch.int32)
        lengths = length - at * (length // (rows + 1)) - at % 7
        starts = torch.minimum(at * 5, lengths - 100)
        starts[-1] = lengths[-1] - 90
        self.lengths.copy_(lengths if on else self._int32(length))
        self.starts.copy_(starts if on else self._int32(0))
        self.allowed[0].copy_(self.starts + SINK)
        self.allowed[1].copy_(torch.maximum(self.lengths - RECENT, self.starts + SINK))

    def verify(
        self,
        layer: int,
        queries: int,
        *,
        evidence: bool = False,
        tuning: VerifyTuning | None = None,
    ) -> Tensor:
        """Our kernel. evidence: of one query of each row."""
        more: dict[str, Any] = {}
        if evidence:
            more = {"allowed": self.allowed, "asked": self.asked(queries)}
        return kernels.verify_dense(
            self.q(queries), self.caches[layer], scale=self.scale, work=self.work,
            tuning=tuning or VerifyTuning(), **more,
        )  # fmt: skip

    def asked(self, queries: int) -> Tensor:
        """Which query leaves evidence, another one in each row: int32 [B]."""
        return self._asked[queries]

    def mass(self) -> Tensor:
        """The evidence of the `verify` before: [B, Hkv, L]."""
        return kernels.evidence(
            self.caches[0], work=self.work, allowed=self.allowed, heads=self.shape.heads
        )

    def decode(self, layer: int, *, evidence: bool = False) -> Tensor:
        """One query a row by the kernel for that: [B, H, 1, D]."""
        q = self._q[:, 0].contiguous()
        out = kernels.decode_dense(
            q, self.caches[layer], scale=self.scale, work=self.work,
            allowed=self.allowed if evidence else None,
        )  # fmt: skip
        return out[:, :, None]


def sweep(shape: KernelShape, queries: int) -> Iterator[VerifyTuning]:
    """All variants on the first shape's grouping, the programs alone on the others."""
    sms = multiprocessors(torch.device("cuda"))
    tile = max(16, 1 << (queries * shape.heads // shape.kv_heads - 1).bit_length())
    tiles = {tile, 64} if tile < 64 else {tile}
    if (shape.rows, queries) == (4, 1) or shape.rows != 4:
        yield VerifyTuning(programs=sms)
        yield VerifyTuning(programs=2 * sms)
        return
    for padded in sorted(tiles):
        for block, warps, stages in VARIANTS[padded]:
            for programs in (sms, 2 * sms):
                yield VerifyTuning(block, warps, stages, programs, padded)


def sweep_asked(shape: KernelShape, queries: int) -> Iterator[VerifyTuning]:
    """With evidence: the same variants, its logits stored from their rows or by a product of their
    own."""
    sms = multiprocessors(torch.device("cuda"))
    tile = max(16, 1 << (queries * shape.heads // shape.kv_heads - 1).bit_length())
    if queries == 1:
        return
    for block, warps, stages in VARIANTS[tile] if shape.rows == 4 else [(0, 0, 0)]:
        for apart in (1, 2):
            for programs in (sms, 2 * sms) if tile == 128 else (2 * sms,):
                yield VerifyTuning(block, warps, stages, programs, tile, apart)


def rivals(bench: Bench, queries: int) -> Iterator[Arm]:
    """PyTorch's attention: causal at the lower right, packed under a mask, packed without one."""
    q, s = bench.q(queries).contiguous(), bench.shape
    grouped = s.heads != s.kv_heads
    group = s.heads // s.kv_heads
    packed = q.reshape(s.rows, s.kv_heads, group * queries, s.dim)
    mask = torch.zeros(group, queries, s.length, dtype=DTYPE, device=bench.device)
    for t in range(queries):
        mask[:, t, s.length - queries + t + 1 :] = -torch.inf
    mask = mask.view(1, 1, group * queries, s.length)

    def call(layer: int, backend: SDPBackend, x: Tensor, **more: Any) -> Tensor:
        kv = bench.caches[layer]
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(x, kv.k, kv.v, scale=bench.scale, **more)
        return out.reshape(q.shape)

    corner: dict[str, Any] = {
        "attn_mask": causal_lower_right(queries, s.length),
        "enable_gqa": grouped,
    }
    for name, backend in BACKENDS.items():
        yield Arm(f"{name}, lower right", partial(call, backend=backend, x=q, **corner))
        yield Arm(f"{name}, mask", partial(call, backend=backend, x=packed, attn_mask=mask))
        yield Arm(f"{name}, no mask", partial(call, backend=backend, x=packed), alike=False)
