# mypy: ignore-errors
"""The kernels of verification: attention of T new positions a row, and the Selector's evidence from
one of them.

The T queries of the G query heads of a KV head are the rows of one matrix of M (row g * T + t), so
that a block of keys and values is read once for all of them. Work is cut and partial results are
kept as in `attend`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import (
    FLOOR,
    ROWS,
    absorb,
    combine_slots,
    next_piece,
    row_blocks,
    save_partial,
    slots_of,
)


@triton.jit
def load_tile(
    q, head, q_row, q_head, q_step,
    HKV: tl.constexpr, G: tl.constexpr, T: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The queries of tile `head` (row * HKV + head), q [B, H, T, D] of any strides -> [M, D]."""
    r, d = tl.arange(0, M), tl.arange(0, D)
    b, h = (head // HKV).to(tl.int64), (head % HKV).to(tl.int64)
    at = b * q_row + (h * G + r // T) * q_head + (r % T) * q_step
    return tl.load(q + at[:, None] + d[None, :], mask=(r < G * T)[:, None], other=0.0)


@triton.jit
def load_asked(
    q, head, t, q_row, q_head, q_step, HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr
):
    """Query t of tile `head`, of every query head: [16, D]."""
    g, d = tl.arange(0, ROWS), tl.arange(0, D)
    b, h = (head // HKV).to(tl.int64), (head % HKV).to(tl.int64)
    at = b * q_row + (h * G + g) * q_head + t * q_step
    return tl.load(q + at[:, None] + d[None, :], mask=(g < G)[:, None], other=0.0)


@triton.jit
def walk_causal(
    qs, qa, k, v, k_step, v_step, first, last, seen, scale2, m, z, acc, logits, width, asks,
    T: tl.constexpr, G: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
    EVIDENCE: tl.constexpr, APART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to positions [first, last) of one head, each row to those before seen [M].

    EVIDENCE: store the logits (fp32, one query of each query head, `width` apart) of the rows asks
    [M]; APART: of the queries qa [16, D] instead, at the positions before asks.
    """
    d, lane = tl.arange(0, D), tl.arange(0, BN)
    limit = tl.minimum(seen, last)
    to = tl.arange(0, M) // T * width
    g = tl.arange(0, ROWS)
    for n in range(first, last, BN):
        at = n + lane
        keep = (at < last)[:, None]
        where = at.to(tl.int64)
        kk = tl.load(k + where[:, None] * k_step + d[None, :], mask=keep, other=0.0)
        vv = tl.load(v + where[:, None] * v_step + d[None, :], mask=keep, other=0.0)
        t = tl.dot(qs, tl.trans(kk), input_precision=PRECISION) * scale2
        t = tl.where(at[None, :] < limit[:, None], t, float("-inf"))
        if EVIDENCE and APART:
            # a product of its own costs less than to bring few of many rows together for a store
            ta = tl.dot(qa, tl.trans(kk), input_precision=PRECISION) * scale2
            real = (g < G)[:, None] & (at < tl.minimum(asks, last))[None, :]
            tl.store(logits + (g[:, None] * width + at[None, :]), ta, mask=real)
        elif EVIDENCE:
            # 32-bit offsets: pointers would take twice the registers
            wanted = asks[:, None] & (at < last)[None, :]
            tl.store(logits + (to[:, None] + at[None, :]), t, mask=wanted)
        m, z, acc = absorb(t, vv, m, z, acc, PRECISION)
    return m, z, acc


@triton.jit
def verify_kernel(
    q, q_row, q_head, q_step, k, v, k_row, k_head, k_step, v_row, v_head, v_step, parts, sums,
    starts, lengths, active, low, high, asked, logits, width, scale2, B,
    HKV: tl.constexpr, G: tl.constexpr, T: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    BPAD: tl.constexpr, BN: tl.constexpr, EVIDENCE: tl.constexpr, APART: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The active rows' pieces, shared by the whole grid. EVIDENCE: also the sums over J, which is
    walked first (see `attend.dense_run`), and there the logits of query asked[b]."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    blocks = row_blocks(starts, lengths, active, B, BPAD, BN) * HKV
    ends = tl.cumsum(blocks, 0)
    total = tl.sum(blocks, 0)
    share = (total + programs - 1) // programs
    work = pid * share
    stop = tl.minimum(work + share, total)
    while work < stop:
        b, h, block, taken = next_piece(work, stop, blocks, ends, BPAD, HKV)
        length = tl.load(lengths + b)
        first = tl.load(starts + b) + block * BN
        last = tl.minimum(length, first + taken * BN)
        tile = b * HKV + h
        qs = load_tile(q, tile, q_row, q_head, q_step, HKV, G, T, M, D)
        r = tl.arange(0, M)
        seen = length - T + 1 + r % T
        to = logits + tile.to(tl.int64) * G * width
        kb = k + b.to(tl.int64) * k_row + h.to(tl.int64) * k_head
        vb = v + b.to(tl.int64) * v_row + h.to(tl.int64) * v_head
        m = tl.full([M], FLOOR, tl.float32)
        z = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, D], tl.float32)
        mj, lj = m, z
        if EVIDENCE:
            begin = tl.minimum(tl.maximum(tl.load(low + b), first), last)
            end = tl.minimum(tl.maximum(tl.load(high + b), begin), last)
            ask = tl.load(asked + b)
            if APART:
                # outside of these queries: another pass leaves the evidence
                asks = tl.where((ask >= 0) & (ask < T), end, 0)
                one = tl.minimum(tl.maximum(ask, 0), T - 1)
                qa = load_asked(q, tile, one, q_row, q_head, q_step, HKV, G, D)
            else:
                asks = (r % T == ask) & (r < G * T)
                qa = qs
            # J, what is before it, what is behind it; one copy of the walk keeps registers free
            for part in tl.range(0, 3, num_stages=1):
                here = tl.where(part == 0, asks, 0) if APART else asks & (part == 0)
                since = tl.where(part == 0, begin, tl.where(part == 1, first, end))
                until = tl.where(part == 0, end, tl.where(part == 1, begin, last))
                m, z, acc = walk_causal(
                    qs, qa, kb, vb, k_step, v_step, since, until, seen, scale2, m, z, acc,
                    to, width, here, T, G, M, BN, D, True, APART, PRECISION,
                )  # fmt: skip
                mj, lj = tl.where(part == 0, m, mj), tl.where(part == 0, z, lj)
        else:
            m, z, acc = walk_causal(
                qs, qs, kb, vb, k_step, v_step, first, last, seen, scale2, m, z, acc,
                to, width, r, T, G, M, BN, D, False, False, PRECISION,
            )  # fmt: skip
        save_partial(parts, sums, pid + tile, m, z, acc, mj, lj, G * T, D, EVIDENCE, M)
        work += taken


@triton.jit
def verify_combine_kernel(
    out, o_row, o_head, o_step, parts, sums, lse, asked, starts, lengths, active, B, programs,
    HKV: tl.constexpr, G: tl.constexpr, T: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    BPAD: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr, EVIDENCE: tl.constexpr,
):  # fmt: skip
    """One query of one query head: grid B * H * T. lse [B, H], of query asked[b]."""
    pid = tl.program_id(0)
    head, r = pid // (G * T), pid % (G * T)
    g, t = r // T, r % T
    b, h = (head // HKV).to(tl.int64), head % HKV
    # a row that is on and has nothing to read gets zeros
    if tl.load(active + b) != 0:
        slot, count = slots_of(head, starts, lengths, active, B, programs, HKV, BPAD, BN)
        to = out + b * o_row + (h * G + g).to(tl.int64) * o_head + t * o_step
        norm = lse + head * G + g
        asks = (tl.load(asked + b) == t) if EVIDENCE else False
        if asks:
            combine_slots(slot, count, r, parts, sums, to, norm, G * T, D, CHUNK, EVIDENCE, M)
        else:
            combine_slots(slot, count, r, parts, sums, to, norm, G * T, D, CHUNK, False, M)
