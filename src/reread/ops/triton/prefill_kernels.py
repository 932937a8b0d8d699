# mypy: ignore-errors
"""Attention of blocks of prompt queries over gathered tokens, then over what each block always
reads.

The query heads of a KV head are packed into the rows of one tile, row = head * BQ + query, so a
gathered key or value serves all of them. Logits are kept in base 2, as in `tiles`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import FLOOR


@triton.jit
def absorb_rows(s, vv, scale2, m, z, acc, PRECISION: tl.constexpr):
    """One online-softmax step: raw scores s [M, BN], -inf where a key does not count."""
    m_new = tl.maximum(m, tl.max(s, 1) * scale2)
    p = tl.exp2(s * scale2 - m_new[:, None])
    shrink = tl.exp2(m - m_new)
    z = z * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(p.to(vv.dtype), vv, acc, input_precision=PRECISION)
    return m_new, z, acc


@triton.jit
def walk_chosen(
    qs, k, v, k_step, v_step, chosen, count, scale2, m, z, acc,
    BN: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to `count` listed positions; whole tiles first, so that those need no mask."""
    d, lane = tl.arange(0, D), tl.arange(0, BN)
    whole = count // BN * BN
    # positions come one step ahead of the keys that are loaded from them
    at = tl.load(chosen + lane, mask=lane < whole, other=0)
    for n in tl.range(0, whole, BN, num_stages=STAGES):
        at_next = tl.load(chosen + n + BN + lane, mask=n + BN + lane < whole, other=0)
        kk = tl.load(k + at[:, None] * k_step + d[None, :])
        vv = tl.load(v + at[:, None] * v_step + d[None, :])
        s = tl.dot(qs, tl.trans(kk), input_precision=PRECISION)
        m, z, acc = absorb_rows(s, vv, scale2, m, z, acc, PRECISION)
        at = at_next
    if whole < count:
        keep = whole + lane < count
        at = tl.load(chosen + whole + lane, mask=keep, other=0)
        kk = tl.load(k + at[:, None] * k_step + d[None, :], mask=keep[:, None], other=0.0)
        vv = tl.load(v + at[:, None] * v_step + d[None, :], mask=keep[:, None], other=0.0)
        s = tl.dot(qs, tl.trans(kk), input_precision=PRECISION)
        s = tl.where(keep[None, :], s, float("-inf"))
        m, z, acc = absorb_rows(s, vv, scale2, m, z, acc, PRECISION)
    return m, z, acc


@triton.jit
def walk_window(
    qs, k, v, k_step, v_step, first, edge, last, position, scale2, m, z, acc,
    BN: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to [first, last), of which queries see up to their `position` [M]; every query sees
    what lies before `edge`."""
    d, lane = tl.arange(0, D), tl.arange(0, BN)
    seen = first + tl.maximum(edge - first, 0) // BN * BN
    for n in tl.range(first, seen, BN, num_stages=STAGES):
        at = n + lane
        kk = tl.load(k + at[:, None] * k_step + d[None, :])
        vv = tl.load(v + at[:, None] * v_step + d[None, :])
        s = tl.dot(qs, tl.trans(kk), input_precision=PRECISION)
        m, z, acc = absorb_rows(s, vv, scale2, m, z, acc, PRECISION)
    for n in tl.range(seen, last, BN, num_stages=1):
        at = n + lane
        keep = at < last
        kk = tl.load(k + at[:, None] * k_step + d[None, :], mask=keep[:, None], other=0.0)
        vv = tl.load(v + at[:, None] * v_step + d[None, :], mask=keep[:, None], other=0.0)
        s = tl.dot(qs, tl.trans(kk), input_precision=PRECISION)
        s = tl.where(at[None, :] <= position[:, None], s, float("-inf"))
        m, z, acc = absorb_rows(s, vv, scale2, m, z, acc, PRECISION)
    return m, z, acc


@triton.jit
def prefill_kernel(
    q, k, v, out, q_head, q_step, k_head, k_step, v_head, v_step, out_head, out_step,
    edges, windows, chosen, counts, width, scale2,
    G: tl.constexpr, HEADS: tl.constexpr, BQ: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of queries, one KV head, HEADS of its G query heads.

    The grid runs over blocks from the last on, whose windows are never shorter than the first's.
    """
    M: tl.constexpr = HEADS * BQ if HEADS * BQ > 16 else 16
    parts: tl.constexpr = (G + HEADS - 1) // HEADS
    n = tl.program_id(1)
    h = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    edge, after = tl.load(edges + n), tl.load(edges + n + 1)
    window, count = tl.load(windows + n), tl.load(counts + n)
    row, d = tl.arange(0, M), tl.arange(0, D)
    g = part * HEADS + row // BQ
    mine = edge + row % BQ
    real = (row < HEADS * BQ) & (g < G) & (mine < after)
    # rows that are none see what the first query sees
    position = tl.where(real, mine, edge)
    head = (h * G + g).to(tl.int64)
    query = (mine - tl.load(edges)).to(tl.int64)
    qs = tl.load(
        q + (head * q_head + query * q_step)[:, None] + d[None, :], mask=real[:, None], other=0.0
    )
    m = tl.full([M], FLOOR, tl.float32)
    z = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    k += h.to(tl.int64) * k_head
    v += h.to(tl.int64) * v_head
    m, z, acc = walk_chosen(
        qs, k, v, k_step, v_step, chosen + n.to(tl.int64) * width, count, scale2, m, z, acc,
        BN, D, STAGES, PRECISION,
    )  # fmt: skip
    m, z, acc = walk_window(
        qs, k, v, k_step, v_step, window, edge, after, position, scale2, m, z, acc,
        BN, D, STAGES, PRECISION,
    )  # fmt: skip
    to = out + (head * out_head + query * out_step)[:, None] + d[None, :]
    tl.store(to, (acc / z[:, None]).to(out.dtype.element_ty), mask=real[:, None])
