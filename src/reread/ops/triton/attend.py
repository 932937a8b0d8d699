# mypy: ignore-errors
"""The attention kernels: dense, sparse, both in one launch, and the sum of their partial results.

Dense work is one flat list of (row, KV head, block) over the active rows, cut into equal runs, one
a program: a single slow row of a batch is spread over the whole card. Program p that meets tile t
(row * Hkv + head) writes slot p + t, which no other pair has, and which makes the slots of a tile
consecutive. Sparse work is a fixed grid of tile x split.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import (
    FLOOR,
    ROWS,
    load_queries,
    row_blocks,
    save_partial,
    walk_list,
    walk_span,
    walk_span_with_logits,
)


@triton.jit
def combine_slots(
    slot, count, g, parts, sums, to, lse,
    G: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, EVIDENCE: tl.constexpr,
):  # fmt: skip
    """Sum `count` partials from `slot` on into one query head's output; EVIDENCE: also its log-sum
    over J."""
    lane, d = tl.arange(0, CHUNK), tl.arange(0, D)
    m = tl.full([], FLOOR, tl.float32)
    z = tl.full([], 0.0, tl.float32)
    mj, lj = m, z
    acc = tl.zeros([D], tl.float32)
    for i in range(0, count, CHUNK):
        real = i + lane < count
        at = (slot + i + lane).to(tl.int64)
        ms = tl.load(sums + at * (4 * ROWS) + g, mask=real, other=FLOOR)
        ls = tl.load(sums + at * (4 * ROWS) + ROWS + g, mask=real, other=0.0)
        os = tl.load(parts + (at[:, None] * G + g) * D + d[None, :], mask=real[:, None], other=0.0)
        m_new = tl.maximum(m, tl.max(ms, 0))
        weight = tl.exp2(ms - m_new)
        shrink = tl.exp2(m - m_new)
        z = z * shrink + tl.sum(ls * weight, 0)
        acc = acc * shrink + tl.sum(os * weight[:, None], 0)
        m = m_new
        if EVIDENCE:
            mjs = tl.load(sums + at * (4 * ROWS) + 2 * ROWS + g, mask=real, other=FLOOR)
            ljs = tl.load(sums + at * (4 * ROWS) + 3 * ROWS + g, mask=real, other=0.0)
            mj_new = tl.maximum(mj, tl.max(mjs, 0))
            lj = lj * tl.exp2(mj - mj_new) + tl.sum(ljs * tl.exp2(mjs - mj_new), 0)
            mj = mj_new
    tl.store(to + d, (acc / z).to(to.dtype.element_ty))
    if EVIDENCE:
        # an empty J leaves the floor, and nothing reads it
        tl.store(lse, mj + tl.log2(tl.maximum(lj, 1.0e-30)))


@triton.jit
def dense_run(
    pid, programs, q, k, v, k_row, k_head, k_step, v_row, v_head, v_step, parts, sums,
    starts, lengths, active, logits, width, low, high, scale2, B,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BPAD: tl.constexpr, BN: tl.constexpr,
    EVIDENCE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Everything that program `pid` of `programs` does of the dense work."""
    rows = tl.arange(0, BPAD)
    blocks = row_blocks(starts, lengths, active, B, BPAD, BN) * HKV
    ends = tl.cumsum(blocks, 0)
    total = tl.sum(blocks, 0)
    share = (total + programs - 1) // programs
    work = pid * share
    stop = tl.minimum(work + share, total)
    while work < stop:
        b = tl.sum((ends <= work).to(tl.int32), 0)
        mine = rows == b
        per_head = tl.sum(tl.where(mine, blocks, 0), 0) // HKV
        local = work - tl.sum(tl.where(rows < b, blocks, 0), 0)
        h = local // per_head
        block = local % per_head
        taken = tl.minimum(per_head - block, stop - work)
        start = tl.load(starts + b)
        first = start + block * BN
        last = tl.minimum(tl.load(lengths + b), first + taken * BN)
        qs = load_queries(q, b, h, G, D, HKV)
        kb = k + b.to(tl.int64) * k_row + h.to(tl.int64) * k_head
        vb = v + b.to(tl.int64) * v_row + h.to(tl.int64) * v_head
        m = tl.full([ROWS], FLOOR, tl.float32)
        z = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D], tl.float32)
        mj, lj = m, z
        tile = b * HKV + h
        if EVIDENCE:
            # J goes first: what the softmax has then is J's own maximum and sum, which may be far
            # below the sink's
            begin = tl.minimum(tl.maximum(tl.load(low + b), first), last)
            end = tl.minimum(tl.maximum(tl.load(high + b), begin), last)
            m, z, acc = walk_span_with_logits(
                qs, kb, vb, k_step, v_step, begin, end, scale2, m, z, acc,
                logits + tile.to(tl.int64) * G * width, width, BN, D, G, PRECISION,
            )  # fmt: skip
            mj, lj = m, z
            m, z, acc = walk_span(
                qs, kb, vb, k_step, v_step, first, begin, scale2, m, z, acc, BN, D, PRECISION
            )
            m, z, acc = walk_span(
                qs, kb, vb, k_step, v_step, end, last, scale2, m, z, acc, BN, D, PRECISION
            )
        else:
            m, z, acc = walk_span(
                qs, kb, vb, k_step, v_step, first, last, scale2, m, z, acc, BN, D, PRECISION
            )
        save_partial(parts, sums, pid + tile, m, z, acc, mj, lj, G, D, EVIDENCE)
        work += taken


@triton.jit
def sparse_piece(
    tile, split, splits, on, q, k, v, k_row, k_head, k_step, v_row, v_head, v_step, out,
    parts, sums,
    starts, lengths, window, chosen, counts, K, sink, scale2,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
    DIRECT: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Split `split` of `splits` of one tile; DIRECT (a single split) writes the output, otherwise
    a partial."""
    b, h = tile // HKV, tile % HKV
    # loaded before the branch, so that these loads overlap
    start, recent, length = tl.load(starts + b), tl.load(window + b), tl.load(lengths + b)
    count = tl.load(counts + tile)
    qs = load_queries(q, b, h, G, D, HKV)
    if on:
        sinks = tl.maximum(tl.minimum(sink, recent - start), 0)
        total = sinks + count + tl.maximum(length - recent, 0)
        share = (total + splits * BN - 1) // (splits * BN) * BN
        first = split * share
        last = tl.minimum(first + share, total)
        m = tl.full([ROWS], FLOOR, tl.float32)
        z = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D], tl.float32)
        m, z, acc = walk_list(
            qs, k + b.to(tl.int64) * k_row + h.to(tl.int64) * k_head,
            v + b.to(tl.int64) * v_row + h.to(tl.int64) * v_head, k_step, v_step,
            chosen + tile.to(tl.int64) * K, start, sinks, count, recent, first, last, scale2,
            m, z, acc, BN, D, STAGES, PRECISION,
        )  # fmt: skip
        if DIRECT:
            g, d = tl.arange(0, ROWS), tl.arange(0, D)
            to = out + tile.to(tl.int64) * (G * D) + g[:, None] * D + d[None, :]
            tl.store(to, (acc / z[:, None]).to(out.dtype.element_ty), mask=(g < G)[:, None])
        else:
            slot = tile * splits
            save_partial(parts, sums, slot + split, m, z, acc, m, z, G, D, False)


@triton.jit
def dense_kernel(
    q, k, v, k_row, k_head, k_step, v_row, v_head, v_step, parts, sums,
    starts, lengths, active, logits, width, low, high, scale2, B,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BPAD: tl.constexpr, BN: tl.constexpr,
    EVIDENCE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Dense rows alone: the whole grid shares the pieces of the active rows."""
    dense_run(
        tl.program_id(0), tl.num_programs(0), q, k, v, k_row, k_head, k_step, v_row, v_head,
        v_step, parts, sums,
        starts, lengths, active, logits, width, low, high, scale2, B,
        HKV, G, D, BPAD, BN, EVIDENCE, PRECISION,
    )  # fmt: skip


@triton.jit
def sparse_finish(
    on, tile, splits, out, parts, sums, arrivals,
    G: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The last program of a tile to come here adds all partials into the output."""
    if on:
        # all threads' stores come before the one atomic that tells of them
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == splits - 1:
            to = out + tile.to(tl.int64) * (G * D)
            for g in tl.static_range(G):
                combine_slots(
                    tile * splits, splits, g, parts, sums, to + g * D, sums, G, D, CHUNK, False
                )
            tl.store(arrivals + tile, 0)


@triton.jit
def sparse_kernel(
    q, k, v, k_row, k_head, k_step, v_row, v_head, v_step, out, parts, sums, arrivals,
    starts, lengths, active, window, chosen, counts, K, sink, scale2, splits,
    k_new, v_new, k_new_row, k_new_head, v_new_row, v_new_head,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
    DIRECT: tl.constexpr, CHUNK: tl.constexpr, NEW: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sparse rows alone: `splits` programs for each row and KV head; the last of them to arrive
    adds their partials, in the order of the splits.

    NEW: the newest position is not in the cache yet. Every program writes it (the same bytes), so
    that whichever of them reads it has it.
    """
    pid = tl.program_id(0)
    tile = pid // splits
    b, h = (tile // HKV).to(tl.int64), (tile % HKV).to(tl.int64)
    on = tl.load(active + b) != 0
    if NEW:
        d = tl.arange(0, D)
        at = tl.load(lengths + b).to(tl.int64) - 1
        kk = tl.load(k_new + b * k_new_row + h * k_new_head + d)
        vv = tl.load(v_new + b * v_new_row + h * v_new_head + d)
        tl.store(k + b * k_row + h * k_head + at * k_step + d, kk)
        tl.store(v + b * v_row + h * v_head + at * v_step + d, vv)
        tl.debug_barrier()
    sparse_piece(
        tile, pid % splits, splits, on, q, k, v, k_row, k_head, k_step, v_row, v_head, v_step,
        out, parts, sums,
        starts, lengths, window, chosen, counts, K, sink, scale2,
        HKV, G, D, BN, DIRECT, STAGES, PRECISION,
    )  # fmt: skip
    if not DIRECT:
        sparse_finish(on, tile, splits, out, parts, sums, arrivals, G, D, CHUNK)


@triton.jit
def mixed_kernel(
    q, k, v, k_row, k_head, k_step, v_row, v_head, v_step, out, parts, sums,
    starts, lengths, slow, logits, width, low, high, window, chosen, counts, K, sink, scale2,
    B, programs, splits,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BPAD: tl.constexpr, BN: tl.constexpr,
    EVIDENCE: tl.constexpr, DIRECT: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Slow rows by the first `programs` programs, fast rows by the others.

    Sparse slots lie behind the dense ones.
    """
    pid = tl.program_id(0)
    if pid < programs:
        dense_run(
            pid, programs, q, k, v, k_row, k_head, k_step, v_row, v_head, v_step, parts, sums,
            starts, lengths, slow, logits, width, low, high, scale2, B,
            HKV, G, D, BPAD, BN, EVIDENCE, PRECISION,
        )  # fmt: skip
    else:
        tile = (pid - programs) // splits
        on = tl.load(slow + tile // HKV) == 0
        slots = (programs + B * HKV).to(tl.int64)
        sparse_piece(
            tile, (pid - programs) % splits, splits, on, q, k, v, k_row, k_head, k_step,
            v_row, v_head, v_step, out, parts + slots * (G * D), sums + slots * (4 * ROWS),
            starts, lengths, window, chosen, counts, K, sink, scale2,
            HKV, G, D, BN, DIRECT, STAGES, PRECISION,
        )  # fmt: skip


@triton.jit
def combine_kernel(
    out, parts, sums, lse, starts, lengths, slow, B, programs, splits,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BPAD: tl.constexpr, BN: tl.constexpr,
    CHUNK: tl.constexpr, EVIDENCE: tl.constexpr, DENSE: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """One query head of one row. DENSE, SPARSE: which kinds have partials here; `slow` says which
    one a row is."""
    pid = tl.program_id(0)
    head, g = pid // G, pid % G
    b, h = head // HKV, head % HKV
    is_slow = tl.load(slow + b) != 0
    to = out + pid.to(tl.int64) * D
    if DENSE:
        blocks = row_blocks(starts, lengths, slow, B, BPAD, BN) * HKV
        rows = tl.arange(0, BPAD)
        share = tl.maximum((tl.sum(blocks, 0) + programs - 1) // programs, 1)
        per_head = tl.sum(tl.where(rows == b, blocks, 0), 0) // HKV
        begin = tl.sum(tl.where(rows < b, blocks, 0), 0) + h * per_head
        if is_slow & (per_head > 0):
            first = begin // share
            count = (begin + per_head - 1) // share - first + 1
            combine_slots(first + head, count, g, parts, sums, to, lse + pid, G, D, CHUNK, EVIDENCE)
    if SPARSE:
        wanted = tl.load(slow + b) == 0 if DENSE else is_slow
        if wanted:
            slots = programs + B * HKV if DENSE else 0
            combine_slots(
                slots + head * splits, splits, g, parts, sums, to, lse, G, D, CHUNK, False
            )
