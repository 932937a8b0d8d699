# mypy: ignore-errors
"""The kernel of fast steps: sink, selected and recent positions straight from the full cache."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import (
    FLOOR,
    ROWS,
    absorb,
    head_of,
    load_queries,
    logits_of,
    save_partial,
    walk_list,
)


@triton.jit
def sparse_piece(
    tile, split, splits, on, q, k, v, k_row, k_head, k_step, v_row, v_head, v_step, tables, pages,
    out, parts, sums,
    starts, lengths, window, chosen, counts, lanes, K, sink, scale2, k_new, v_new,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
    DIRECT: tl.constexpr, NEW: tl.constexpr, SHARED: tl.constexpr, LANES: tl.constexpr,
    PAGE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Split `split` of `splits` of one tile; DIRECT (a single split) writes the output, otherwise
    a partial. NEW: the newest position is at k_new and v_new, not in the cache; split 0 has it.
    SHARED: all KV heads of a row have one list; LANES: a row's lists are those of lanes[b]."""
    b, h = tile // HKV, tile % HKV
    owner = tl.load(lanes + b) if LANES else b
    which = owner if SHARED else owner * HKV + h
    # loaded before the branch, so that these loads overlap
    start, recent, length = tl.load(starts + b), tl.load(window + b), tl.load(lengths + b)
    count = tl.load(counts + which)
    qs = load_queries(q, b, h, G, D, HKV)
    if NEW:
        length -= 1
        recent = tl.minimum(recent, length)
    if on:
        sinks = tl.maximum(tl.minimum(sink, recent - start), 0)
        total = sinks + count + tl.maximum(length - recent, 0)
        share = (total + splits * BN - 1) // (splits * BN) * BN
        first = split * share
        last = tl.minimum(first + share, total)
        m = tl.full([ROWS], FLOOR, tl.float32)
        z = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D], tl.float32)
        if NEW:
            # a product has at least 16 columns; the others are masked, as all are in later splits
            one = tl.arange(0, ROWS) < tl.where(split == 0, 1, 0)
            d = tl.arange(0, D)
            at = tl.zeros([ROWS, 1], tl.int32) + d[None, :]
            kk = tl.load(k_new + at, mask=one[:, None], other=0.0)
            vv = tl.load(v_new + at, mask=one[:, None], other=0.0)
            m, z, acc = absorb(logits_of(qs, kk, one, scale2, PRECISION), vv, m, z, acc, PRECISION)
        m, z, acc = walk_list(
            qs, head_of(k, b, h, k_row, k_head, PAGE), head_of(v, b, h, v_row, v_head, PAGE),
            k_row, k_step, v_row, v_step, tables + b.to(tl.int64) * pages,
            chosen + which.to(tl.int64) * K, start, sinks, count, recent, first, last, scale2,
            m, z, acc, BN, D, PAGE, STAGES, PRECISION,
        )  # fmt: skip
        if DIRECT:
            g, d = tl.arange(0, ROWS), tl.arange(0, D)
            to = out + tile.to(tl.int64) * (G * D) + g[:, None] * D + d[None, :]
            # a row that is padding reads nothing
            whole = acc / tl.where(z > 0, z, 1.0)[:, None]
            tl.store(to, whole.to(out.dtype.element_ty), mask=(g < G)[:, None])
        else:
            slot = tile * splits
            save_partial(parts, sums, slot + split, m, z, acc, m, z, G, D, False)


@triton.jit
def sparse_kernel(
    q, k, v, k_row, k_head, k_step, v_row, v_head, v_step, tables, pages, out, parts, sums,
    starts, lengths, active, window, chosen, counts, lanes, K, sink, scale2, splits,
    k_new, v_new, k_new_row, k_new_head, v_new_row, v_new_head,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
    DIRECT: tl.constexpr, NEW: tl.constexpr, SHARED: tl.constexpr, LANES: tl.constexpr,
    PAGE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sparse rows alone: `splits` programs for each row and KV head.

    NEW: the newest position is not in the cache yet. Split 0 writes it there, and attends to it
    from where it is: no program of this launch reads it from the cache.
    """
    pid = tl.program_id(0)
    tile = pid // splits
    b, h = (tile // HKV).to(tl.int64), (tile % HKV).to(tl.int64)
    on = tl.load(active + b) != 0
    k_new += b * k_new_row + h * k_new_head
    v_new += b * v_new_row + h * v_new_head
    sparse_piece(
        tile, pid % splits, splits, on, q, k, v, k_row, k_head, k_step, v_row, v_head, v_step,
        tables, pages, out, parts, sums,
        starts, lengths, window, chosen, counts, lanes, K, sink, scale2, k_new, v_new,
        HKV, G, D, BN, DIRECT, NEW, SHARED, LANES, PAGE, STAGES, PRECISION,
    )  # fmt: skip
    if NEW:
        d = tl.arange(0, D)
        first = d < tl.where(pid % splits == 0, D, 0)
        at = tl.load(lengths + b).to(tl.int64) - 1
        tl.store(k + b * k_row + h * k_head + at * k_step + d, tl.load(k_new + d), mask=first)
        tl.store(v + b * v_row + h * v_head + at * v_step + d, tl.load(v_new + d), mask=first)
