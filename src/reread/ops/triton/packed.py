"""Sparse attention from a packed copy of sink + selected, recent read in place: the paper's
two-segment cache."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from . import packed_kernels
from .decode import DENSE, LOG2_E, Cache, Chosen, Tuning, _combine, _precision, _shape
from .workspace import Workspace, check


def pack(kv: Cache, chosen: Chosen, k: Tensor, v: Tensor, *, active: Tensor | None = None) -> None:
    """Copy sink and selected of the active rows into k, v [B, Hkv, sink + K, D], in that order,
    without a gap."""
    rows, heads, room, dim = k.shape
    assert k.is_contiguous()
    assert v.is_contiguous()
    assert room >= chosen.sink + chosen.indices.shape[2]
    on = torch.ones_like(kv.starts) if active is None else active
    packed_kernels.pack_kernel[(triton.cdiv(room, 64), rows * heads)](
        kv.k, kv.v, *kv.strides, k, v, room, kv.starts, on, chosen.window_start,
        chosen.indices, chosen.counts, chosen.indices.shape[2], chosen.sink,
        HKV=heads, D=dim, BN=64, num_warps=4,
    )  # fmt: skip


def decode_packed(
    q: Tensor,
    kv: Cache,
    chosen: Chosen,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    work: Workspace,
    active: Tensor | None = None,
    out: Tensor | None = None,
    tuning: Tuning = DENSE,
) -> Tensor:
    """`decode_sparse` with sink and selected read from what `pack` wrote to k and v."""
    check(q, kv.k)
    out = torch.empty_like(q) if out is None else out
    on = work.always[: q.shape[0]] if active is None else active
    tiles = q.shape[0] * kv.k.shape[1]
    splits = tuning.splits or work.max_splits
    block = tuning.block or 64
    shape = _shape(q, kv)
    del shape["BPAD"]
    work.require(q, kv.k, 0, splits, evidence=False)
    packed_kernels.packed_kernel[(tiles * splits,)](
        q, kv.k, kv.v, *kv.strides, k, v, k.shape[2], out, work.parts, work.sums, kv.starts,
        kv.lengths, on, chosen.window_start, chosen.counts, chosen.sink, scale * LOG2_E, splits,
        **shape, BN=block, DIRECT=splits == 1, PRECISION=_precision(q),
        num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip
    if splits > 1:
        _combine(q, kv, out, work, on, 0, splits, block, False, dense=False, sparse=True)
    return out
