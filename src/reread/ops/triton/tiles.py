# mypy: ignore-errors
"""Device functions that all attention kernels share: one online-softmax step, loops over keys,
partial results.

Logits are kept in base 2 (scale times log2 e), because the hardware's exponential is 2^x. The G
query heads of a KV
head are the rows of one matrix of 16, the smallest that tensor cores take; surplus rows are zero
and never stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

# below every finite logit, yet finite: a maximum over nothing must not make inf - inf
FLOOR = tl.constexpr(-1.0e30)
ROWS = tl.constexpr(16)


@triton.jit
def load_queries(q, b, h, G: tl.constexpr, D: tl.constexpr, HKV: tl.constexpr):
    """The G queries of KV head h of row b, q [B, H, D] contiguous -> [16, D]."""
    g, d = tl.arange(0, ROWS), tl.arange(0, D)
    base = q + (b * HKV + h).to(tl.int64) * (G * D)
    return tl.load(base + g[:, None] * D + d[None, :], mask=(g < G)[:, None], other=0.0)


@triton.jit
def logits_of(qs, kk, keep, scale2, PRECISION: tl.constexpr):
    """Base-2 logits [16, BN]; minus infinity where a key does not count."""
    t = tl.dot(qs, tl.trans(kk), input_precision=PRECISION) * scale2
    return tl.where(keep[None, :], t, float("-inf"))


@triton.jit
def absorb(t, vv, m, z, acc, PRECISION: tl.constexpr):
    """One online-softmax step: logits t [16, BN] and values vv [BN, D] into maximum m, sum z and
    weighted sum acc."""
    m_new = tl.maximum(m, tl.max(t, 1))
    p = tl.exp2(t - m_new[:, None])
    shrink = tl.exp2(m - m_new)
    z = z * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None] + tl.dot(p.to(vv.dtype), vv, input_precision=PRECISION)
    return m_new, z, acc


@triton.jit
def head_of(x, b, h, row, head, PAGE: tl.constexpr):
    """Where head h of row b begins in keys or values x; of paged ones (PAGE positions a page),
    where it begins in page 0."""
    base = x + h.to(tl.int64) * head
    if PAGE == 0:
        base += b.to(tl.int64) * row
    return base


@triton.jit
def places_of(at, keep, table, page_row, step, PAGE: tl.constexpr):
    """Offsets of positions `at` from there; table: the row's pages in order, `page_row` apart."""
    if PAGE:
        page = tl.load(table + at // PAGE, mask=keep, other=0).to(tl.int64)
        return page * page_row + (at % PAGE).to(tl.int64) * step
    return at.to(tl.int64) * step


@triton.jit
def walk_span(
    qs, k, v, k_row, k_step, v_row, v_step, table, first, last, scale2, m, z, acc,
    BN: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to positions [first, last) of one head; k and v point at its position 0, or page 0."""
    d, lane = tl.arange(0, D), tl.arange(0, BN)
    for n in tl.range(first, last, BN, num_stages=STAGES):
        at = n + lane
        keep = at < last
        to_k = places_of(at, keep, table, k_row, k_step, PAGE)
        to_v = places_of(at, keep, table, v_row, v_step, PAGE)
        kk = tl.load(k + to_k[:, None] + d[None, :], mask=keep[:, None], other=0.0)
        vv = tl.load(v + to_v[:, None] + d[None, :], mask=keep[:, None], other=0.0)
        m, z, acc = absorb(logits_of(qs, kk, keep, scale2, PRECISION), vv, m, z, acc, PRECISION)
    return m, z, acc


@triton.jit
def walk_span_with_logits(
    qs, k, v, k_row, k_step, v_row, v_step, table, first, last, scale2, m, z, acc, logits, width,
    BN: tl.constexpr, D: tl.constexpr, G: tl.constexpr, PAGE: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`walk_span` that also stores the logits (fp32, rows `width` apart)."""
    d, lane, g = tl.arange(0, D), tl.arange(0, BN), tl.arange(0, ROWS)
    for n in tl.range(first, last, BN, num_stages=STAGES):
        at = n + lane
        keep = at < last
        to_k = places_of(at, keep, table, k_row, k_step, PAGE)
        to_v = places_of(at, keep, table, v_row, v_step, PAGE)
        kk = tl.load(k + to_k[:, None] + d[None, :], mask=keep[:, None], other=0.0)
        vv = tl.load(v + to_v[:, None] + d[None, :], mask=keep[:, None], other=0.0)
        t = logits_of(qs, kk, keep, scale2, PRECISION)
        store = keep[None, :] & (g < G)[:, None]
        tl.store(logits + g[:, None].to(tl.int64) * width + at[None, :], t, mask=store)
        m, z, acc = absorb(t, vv, m, z, acc, PRECISION)
    return m, z, acc


@triton.jit
def walk_list(
    qs, k, v, k_row, k_step, v_row, v_step, table, chosen, start, sinks, count, window, first, last,
    scale2, m, z, acc,
    BN: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to entries [first, last) of the list sink | chosen | recent of one head, straight
    from the full cache.

    Entry i is start + i in the sink, chosen[i - sinks] behind it, and window + (i - sinks - count)
    after those.
    """
    d, lane = tl.arange(0, D), tl.arange(0, BN)
    fixed = sinks + count
    # a load whose address was loaded takes two stages for one of distance
    for n in tl.range(first, last, BN, num_stages=STAGES):
        i = n + lane
        keep = i < last
        picked = tl.load(chosen + i - sinks, mask=(i >= sinks) & (i < fixed) & keep, other=0)
        at = tl.where(i < sinks, start + i, tl.where(i < fixed, picked, window + i - fixed))
        to_k = places_of(at, keep, table, k_row, k_step, PAGE)
        to_v = places_of(at, keep, table, v_row, v_step, PAGE)
        kk = tl.load(k + to_k[:, None] + d[None, :], mask=keep[:, None], other=0.0)
        vv = tl.load(v + to_v[:, None] + d[None, :], mask=keep[:, None], other=0.0)
        m, z, acc = absorb(logits_of(qs, kk, keep, scale2, PRECISION), vv, m, z, acc, PRECISION)
    return m, z, acc


@triton.jit
def save_partial(
    parts, sums, slot, m, z, acc, mj, lj,
    G: tl.constexpr, D: tl.constexpr, EVIDENCE: tl.constexpr, M: tl.constexpr = ROWS,
):  # fmt: skip
    """Unfinished softmax of one piece of work, M rows of which G are real: parts [slots, G, D],
    sums [slots, 4, M] = m, z and those of J."""
    g, d = tl.arange(0, M), tl.arange(0, D)
    parts += slot.to(tl.int64) * (G * D)
    tl.store(parts + g[:, None] * D + d[None, :], acc, mask=(g < G)[:, None])
    sums += slot.to(tl.int64) * (4 * M)
    tl.store(sums + g, m)
    tl.store(sums + M + g, z)
    if EVIDENCE:
        tl.store(sums + 2 * M + g, mj)
        tl.store(sums + 3 * M + g, lj)


@triton.jit
def row_blocks(starts, lengths, active, B, BPAD: tl.constexpr, BN: tl.constexpr):
    """Blocks of BN positions in each active row, int32 [BPAD]; rows that are off have none."""
    rows = tl.arange(0, BPAD)
    real = rows < B
    on = real & (tl.load(active + rows, mask=real, other=0) != 0)
    span = tl.load(lengths + rows, mask=on, other=0) - tl.load(starts + rows, mask=on, other=0)
    return (tl.maximum(span, 0) + BN - 1) // BN


@triton.jit
def next_piece(work, stop, blocks, ends, BPAD: tl.constexpr, HKV: tl.constexpr):
    """The piece at place `work` of a flat list of (row, KV head, block), up to `stop` and within
    one head: row, head, first block, how many. blocks, ends [BPAD]: per row over all its heads."""
    rows = tl.arange(0, BPAD)
    b = tl.sum((ends <= work).to(tl.int32), 0)
    per_head = tl.sum(tl.where(rows == b, blocks, 0), 0) // HKV
    local = work - tl.sum(tl.where(rows < b, blocks, 0), 0)
    block = local % per_head
    return b, local // per_head, block, tl.minimum(per_head - block, stop - work)


@triton.jit
def slots_of(head, starts, lengths, active, B, programs, HKV: tl.constexpr, BPAD: tl.constexpr,
             BN: tl.constexpr):  # fmt: skip
    """Partials of one tile (row * HKV + head) of that list, cut into equal runs for `programs`:
    first slot, how many; none where the row is off."""
    b, h = head // HKV, head % HKV
    blocks = row_blocks(starts, lengths, active, B, BPAD, BN) * HKV
    rows = tl.arange(0, BPAD)
    share = tl.maximum((tl.sum(blocks, 0) + programs - 1) // programs, 1)
    per_head = tl.sum(tl.where(rows == b, blocks, 0), 0) // HKV
    begin = tl.sum(tl.where(rows < b, blocks, 0), 0) + h * per_head
    first = begin // share
    count = tl.where(per_head > 0, (begin + per_head - 1) // share - first + 1, 0)
    return first + head, count


@triton.jit
def combine_slots(
    slot, count, g, parts, sums, to, lse,
    G: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, EVIDENCE: tl.constexpr,
    M: tl.constexpr = ROWS,
):  # fmt: skip
    """Sum `count` partials from `slot` on into one query head's output; EVIDENCE: also its log-sum
    over J. G and M as for `save_partial`."""
    lane, d = tl.arange(0, CHUNK), tl.arange(0, D)
    m = tl.full([], FLOOR, tl.float32)
    z = tl.full([], 0.0, tl.float32)
    mj, lj = m, z
    acc = tl.zeros([D], tl.float32)
    for i in range(0, count, CHUNK):
        real = i + lane < count
        at = (slot + i + lane).to(tl.int64)
        ms = tl.load(sums + at * (4 * M) + g, mask=real, other=FLOOR)
        ls = tl.load(sums + at * (4 * M) + M + g, mask=real, other=0.0)
        os = tl.load(parts + (at[:, None] * G + g) * D + d[None, :], mask=real[:, None], other=0.0)
        m_new = tl.maximum(m, tl.max(ms, 0))
        weight = tl.exp2(ms - m_new)
        shrink = tl.exp2(m - m_new)
        z = z * shrink + tl.sum(ls * weight, 0)
        acc = acc * shrink + tl.sum(os * weight[:, None], 0)
        m = m_new
        if EVIDENCE:
            mjs = tl.load(sums + at * (4 * M) + 2 * M + g, mask=real, other=FLOOR)
            ljs = tl.load(sums + at * (4 * M) + 3 * M + g, mask=real, other=0.0)
            mj_new = tl.maximum(mj, tl.max(mjs, 0))
            lj = lj * tl.exp2(mj - mj_new) + tl.sum(ljs * tl.exp2(mjs - mj_new), 0)
            mj = mj_new
    # of several queries one may have nothing to read
    tl.store(to + d, (acc / tl.where(z > 0, z, 1.0)).to(to.dtype.element_ty))
    if EVIDENCE:
        # an empty J leaves the floor, and nothing reads it
        tl.store(lse, mj + tl.log2(tl.maximum(lj, 1.0e-30)))
