# mypy: ignore-errors
"""An indexer in decode steps: turning and caching what its projections gave, and scores of one
query per row over the whole cache."""

from __future__ import annotations

import triton
import triton.language as tl

from .radix import COARSE, wide_bin


@triton.jit
def turn_kernel(
    raw, raw_row, index, index_row, index_step, queries, frequencies, starts, lengths, scale,
    D: tl.constexpr,
):  # fmt: skip
    """One row: raw [B, 2 D], query then key, turned by the position; the key goes to position
    lengths - 1 of the index cache, the scaled query to `queries` [B, D]."""
    b = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = D // 2
    i = tl.arange(0, HALF)
    at = tl.load(lengths + b) - 1
    angle = (at - tl.load(starts + b)).to(tl.float32) * tl.load(frequencies + i)
    cos, sin = tl.cos(angle), tl.sin(angle)
    raw += b * raw_row
    x, y = tl.load(raw + i).to(tl.float32), tl.load(raw + HALF + i).to(tl.float32)
    dtype = queries.dtype.element_ty
    # the reference rounds before it scales
    to = queries + b * D
    tl.store(to + i, ((x * cos - y * sin).to(dtype).to(tl.float32) * scale).to(dtype))
    tl.store(to + HALF + i, ((y * cos + x * sin).to(dtype).to(tl.float32) * scale).to(dtype))
    x, y = tl.load(raw + D + i).to(tl.float32), tl.load(raw + D + HALF + i).to(tl.float32)
    to = index + b * index_row + at.to(tl.int64) * index_step
    tl.store(to + i, (x * cos - y * sin).to(dtype))
    tl.store(to + HALF + i, (y * cos + x * sin).to(dtype))


@triton.jit
def row_scores_kernel(
    queries, index, index_row, index_step, scores, hists, pitch, low, high, active,
    D: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """scores(b, j) = query b . index key j for j in [low, high), fp32, and the top-K's first count;
    BLOCK keys a program, BN at a time."""
    b = tl.program_id(1)
    if tl.load(active + b) == 0:
        return
    begin, end = tl.load(low + b), tl.load(high + b)
    first = tl.program_id(0) * BLOCK
    if (first >= end) | (first + BLOCK <= begin):
        return
    d, lane = tl.arange(0, D), tl.arange(0, BN)
    query = tl.load(queries + b * D + d).to(tl.float32)
    index += b.to(tl.int64) * index_row
    counts = tl.zeros([COARSE], tl.int32)
    for n in range(first, tl.minimum(first + BLOCK, end), BN):
        at = n + lane
        keep = (at >= begin) & (at < end)
        kk = tl.load(index + at[:, None] * index_step + d[None, :], mask=keep[:, None], other=0.0)
        z = tl.sum(kk.to(tl.float32) * query[None, :], 1)
        tl.store(scores + b.to(tl.int64) * pitch + at, z, mask=keep)
        counts += tl.histogram(wide_bin(z), COARSE, mask=keep)
    to = hists + b * COARSE + tl.arange(0, COARSE)
    tl.atomic_add(to, counts, mask=counts > 0, sem="relaxed")
