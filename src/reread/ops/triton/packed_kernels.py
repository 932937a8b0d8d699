# mypy: ignore-errors
"""Kernels of `packed`."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import FLOOR, ROWS, load_queries, save_partial, walk_span


@triton.jit
def pack_kernel(
    k, v, k_row, k_head, k_step, v_row, v_head, v_step, k_to, v_to, room, starts, active, window,
    chosen, counts, K, sink,
    HKV: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Entries of sink | chosen of one tile, 64 a program."""
    tile = tl.program_id(1)
    b, h = tile // HKV, tile % HKV
    if tl.load(active + b) == 0:
        return
    start = tl.load(starts + b)
    sinks = tl.maximum(tl.minimum(sink, tl.load(window + b) - start), 0)
    fixed = sinks + tl.load(counts + tile)
    i, d = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, D)
    keep = i < fixed
    picked = tl.load(chosen + tile.to(tl.int64) * K + i - sinks, mask=keep & (i >= sinks), other=0)
    at = tl.where(i < sinks, start + i, picked).to(tl.int64)[:, None]
    k += b.to(tl.int64) * k_row + h.to(tl.int64) * k_head
    v += b.to(tl.int64) * v_row + h.to(tl.int64) * v_head
    to = tile.to(tl.int64) * room * D + i[:, None] * D + d[None, :]
    tl.store(
        k_to + to, tl.load(k + at * k_step + d[None, :], mask=keep[:, None]), mask=keep[:, None]
    )
    tl.store(
        v_to + to, tl.load(v + at * v_step + d[None, :], mask=keep[:, None]), mask=keep[:, None]
    )


@triton.jit
def packed_kernel(
    q, k, v, k_row, k_head, k_step, v_row, v_head, v_step, k_packed, v_packed, room, out, parts,
    sums,
    starts, lengths, active, window, counts, sink, scale2, splits,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
    DIRECT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `attend.sparse_piece`, in two contiguous walks."""
    tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    b, h = tile // HKV, tile % HKV
    if tl.load(active + b) == 0:
        return
    start, recent = tl.load(starts + b), tl.load(window + b)
    fixed = tl.maximum(tl.minimum(sink, recent - start), 0) + tl.load(counts + tile)
    total = fixed + tl.maximum(tl.load(lengths + b) - recent, 0)
    share = (total + splits * BN - 1) // (splits * BN) * BN
    first = split * share
    last = tl.minimum(first + share, total)
    qs = load_queries(q, b, h, G, D, HKV)
    m = tl.full([ROWS], FLOOR, tl.float32)
    z = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    base = tile.to(tl.int64) * room * D
    m, z, acc = walk_span(
        qs, k_packed + base, v_packed + base, D, D, first, tl.minimum(last, fixed), scale2, m, z,
        acc,
        BN, D, PRECISION,
    )  # fmt: skip
    m, z, acc = walk_span(
        qs, k + b.to(tl.int64) * k_row + h.to(tl.int64) * k_head,
        v + b.to(tl.int64) * v_row + h.to(tl.int64) * v_head, k_step, v_step,
        recent + tl.maximum(first - fixed, 0), recent + last - fixed, scale2, m, z, acc, BN, D,
        PRECISION,
    )  # fmt: skip
    if DIRECT:
        g, d = tl.arange(0, ROWS), tl.arange(0, D)
        to = out + tile.to(tl.int64) * (G * D) + g[:, None] * D + d[None, :]
        tl.store(to, (acc / z[:, None]).to(out.dtype.element_ty), mask=(g < G)[:, None])
    else:
        save_partial(parts, sums, tile * splits + split, m, z, acc, m, z, G, D, False)
