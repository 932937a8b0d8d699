# mypy: ignore-errors
"""An indexer in decode steps: turning and caching what its projections gave, and scores of one
query per row over the whole cache."""

from __future__ import annotations

import triton
import triton.language as tl

from .radix import COARSE, wide_bin


@triton.jit
def turn(x, y, angle, scale):
    """Pairs (x, y) turned by `angle` and scaled, float32."""
    cos, sin = tl.cos(angle), tl.sin(angle)
    return (x * cos - y * sin) * scale, (y * cos + x * sin) * scale


@triton.jit
def turn_both(raw, angle, scale, to_query, to_key, keep, keep_key, D: tl.constexpr):
    """Tokens whose `raw` values are a query, then a key, D numbers each: both turned and stored,
    the query scaled. All pointers [BT, D / 2], to the first halves."""
    HALF: tl.constexpr = D // 2
    x = tl.load(raw, mask=keep, other=0.0).to(tl.float32)
    y = tl.load(raw + HALF, mask=keep, other=0.0).to(tl.float32)
    x, y = turn(x, y, angle, scale)
    tl.store(to_query, x.to(to_query.dtype.element_ty), mask=keep)
    tl.store(to_query + HALF, y.to(to_query.dtype.element_ty), mask=keep)
    x = tl.load(raw + D, mask=keep, other=0.0).to(tl.float32)
    y = tl.load(raw + D + HALF, mask=keep, other=0.0).to(tl.float32)
    x, y = turn(x, y, angle, 1.0)
    tl.store(to_key, x.to(to_key.dtype.element_ty), mask=keep_key)
    tl.store(to_key + HALF, y.to(to_key.dtype.element_ty), mask=keep_key)


@triton.jit
def turn_kernel(
    raw, raw_row, raw_step, index, index_row, index_step, queries, frequencies, starts, lengths,
    tokens, scale, D: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """BT of one row's newest `tokens`: raw [B, T, 2 D], query then key, turned by the position; the
    keys go to their position of the index cache, scaled queries to `queries` [B, T, D]."""
    b = tl.program_id(1).to(tl.int64)
    HALF: tl.constexpr = D // 2
    t, i = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, HALF)
    keep = (t < tokens)[:, None] & (i < HALF)[None, :]
    at = tl.load(lengths + b) - tokens + t
    # padding in front of a row counts as its first position, and nothing reads it
    position = tl.maximum(at - tl.load(starts + b), 0)
    angle = position.to(tl.float32)[:, None] * tl.load(frequencies + i)[None, :]
    raw += b * raw_row + t[:, None].to(tl.int64) * raw_step + i[None, :]
    to_query = queries + (b * tokens + t[:, None]) * D + i[None, :]
    to_key = index + b * index_row + at[:, None].to(tl.int64) * index_step + i[None, :]
    turn_both(raw, angle, scale, to_query, to_key, keep, keep, D)


@triton.jit(do_not_specialize=["tokens"])
def turn_slots_kernel(
    raw, raw_step, positions, slots, index, queries, frequencies, tokens, scale,
    D: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """`turn_kernel` for tokens of any rows: each has its position, and its slot of the index cache
    [slots, D]; below 0: the key goes nowhere."""
    HALF: tl.constexpr = D // 2
    t, i = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, HALF)
    live = t < tokens
    keep = live[:, None] & (i < HALF)[None, :]
    position = tl.load(positions + t, mask=live, other=0)
    slot = tl.load(slots + t, mask=live, other=-1).to(tl.int64)
    angle = position.to(tl.float32)[:, None] * tl.load(frequencies + i)[None, :]
    raw += t[:, None].to(tl.int64) * raw_step + i[None, :]
    to_query = queries + t[:, None].to(tl.int64) * D + i[None, :]
    to_key = index + tl.maximum(slot, 0)[:, None] * D + i[None, :]
    turn_both(raw, angle, scale, to_query, to_key, keep, keep & (slot >= 0)[:, None], D)


@triton.jit
def row_scores_kernel(
    queries, index, index_row, index_step, scores, hists, pitch, low, high, active,
    D: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """scores(b, j) = query b . index key j for j in [low, high), fp32, and the top-K's first count;
    BLOCK keys a program, BN at a time.

    A product with fifteen empty columns, because loads that feed one are fetched ahead."""
    b = tl.program_id(1)
    if tl.load(active + b) == 0:
        return
    begin, end = tl.load(low + b), tl.load(high + b)
    first = tl.program_id(0) * BLOCK
    if (first >= end) | (first + BLOCK <= begin):
        return
    d, lane, column = tl.arange(0, D), tl.arange(0, BN), tl.arange(0, 16)
    one = (column == 0)[None, :] & (d >= 0)[:, None]
    query = tl.load(queries + b * D + d[:, None] + column[None, :] * 0, mask=one, other=0.0)
    index += b.to(tl.int64) * index_row
    scores += b.to(tl.int64) * pitch
    for n in tl.range(first, tl.minimum(first + BLOCK, end), BN, num_stages=STAGES):
        at = n + lane
        kk = tl.load(index + at[:, None] * index_step + d[None, :], mask=(at < end)[:, None],
                     other=0.0)  # fmt: skip
        z = tl.sum(tl.dot(kk, query, input_precision=PRECISION), 1)
        tl.store(scores + at, z, mask=(at >= begin) & (at < end))
    # what this program stored, all of its threads may read
    tl.debug_barrier()
    at = first + tl.arange(0, BLOCK)
    keep = (at >= begin) & (at < end)
    counts = tl.histogram(wide_bin(tl.load(scores + at, mask=keep, other=0.0)), COARSE, mask=keep)
    to = hists + b * COARSE + tl.arange(0, COARSE)
    tl.atomic_add(to, counts, mask=counts > 0, sem="relaxed")
