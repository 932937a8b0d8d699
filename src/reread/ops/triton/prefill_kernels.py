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
def spots_of(at, keep, table, page_step, step, PAGE: tl.constexpr):
    """Offsets of positions `at` [N] from position 0, or from page 0: [N, 1]. Of contiguous keys
    they fit 32 bits."""
    if PAGE:
        page = tl.load(table + at // PAGE, mask=keep, other=0).to(tl.int64)
        spots = page * page_step + (at % PAGE).to(tl.int64) * step
    else:
        spots = at * step
    return spots[:, None]


@triton.jit
def walk_chosen(
    qs, k, v, k_page, k_step, v_page, v_step, table, chosen, count, scale2, m, z, acc,
    BN: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to `count` listed positions; whole tiles first, so that those need no mask."""
    d, lane = tl.arange(0, D), tl.arange(0, BN)
    whole = count // BN * BN
    # positions, and where they lie, come one step ahead of the keys that are loaded from there
    listed = lane < whole
    at = tl.load(chosen + lane, mask=listed, other=0)
    to_k = spots_of(at, listed, table, k_page, k_step, PAGE)
    to_v = spots_of(at, listed, table, v_page, v_step, PAGE)
    for n in tl.range(0, whole, BN, num_stages=STAGES):
        listed = n + BN + lane < whole
        at_next = tl.load(chosen + n + BN + lane, mask=listed, other=0)
        kk = tl.load(k + to_k + d[None, :])
        vv = tl.load(v + to_v + d[None, :])
        s = tl.dot(qs, tl.trans(kk), input_precision=PRECISION)
        m, z, acc = absorb_rows(s, vv, scale2, m, z, acc, PRECISION)
        to_k = spots_of(at_next, listed, table, k_page, k_step, PAGE)
        to_v = spots_of(at_next, listed, table, v_page, v_step, PAGE)
    if whole < count:
        keep = whole + lane < count
        at = tl.load(chosen + whole + lane, mask=keep, other=0)
        to_k = spots_of(at, keep, table, k_page, k_step, PAGE)
        to_v = spots_of(at, keep, table, v_page, v_step, PAGE)
        kk = tl.load(k + to_k + d[None, :], mask=keep[:, None], other=0.0)
        vv = tl.load(v + to_v + d[None, :], mask=keep[:, None], other=0.0)
        s = tl.dot(qs, tl.trans(kk), input_precision=PRECISION)
        s = tl.where(keep[None, :], s, float("-inf"))
        m, z, acc = absorb_rows(s, vv, scale2, m, z, acc, PRECISION)
    return m, z, acc


@triton.jit
def walk_window(
    qs, k, v, k_page, k_step, v_page, v_step, table, first, edge, last, position, scale2, m, z,
    acc, BN: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to [first, last), of which queries see up to their `position` [M]; every query sees
    what lies before `edge`."""
    d, lane = tl.arange(0, D), tl.arange(0, BN)
    seen = first + tl.maximum(edge - first, 0) // BN * BN
    for n in tl.range(first, seen, BN, num_stages=STAGES):
        at = n + lane
        to_k = spots_of(at, at < seen, table, k_page, k_step, PAGE)
        to_v = spots_of(at, at < seen, table, v_page, v_step, PAGE)
        kk = tl.load(k + to_k + d[None, :])
        vv = tl.load(v + to_v + d[None, :])
        s = tl.dot(qs, tl.trans(kk), input_precision=PRECISION)
        m, z, acc = absorb_rows(s, vv, scale2, m, z, acc, PRECISION)
    for n in tl.range(seen, last, BN, num_stages=1):
        at = n + lane
        keep = at < last
        to_k = spots_of(at, keep, table, k_page, k_step, PAGE)
        to_v = spots_of(at, keep, table, v_page, v_step, PAGE)
        kk = tl.load(k + to_k + d[None, :], mask=keep[:, None], other=0.0)
        vv = tl.load(v + to_v + d[None, :], mask=keep[:, None], other=0.0)
        s = tl.dot(qs, tl.trans(kk), input_precision=PRECISION)
        s = tl.where(at[None, :] <= position[:, None], s, float("-inf"))
        m, z, acc = absorb_rows(s, vv, scale2, m, z, acc, PRECISION)
    return m, z, acc


@triton.jit(do_not_specialize=["width"])
def prefill_kernel(
    q, k, v, out, q_head, q_step, k_page, k_head, k_step, v_page, v_head, v_step, out_head,
    out_step, table, edges, windows, chosen, counts, width, scale2,
    G: tl.constexpr, HEADS: tl.constexpr, BQ: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
    PAGE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of queries, one KV head, HEADS of its G query heads. Keys and values are those of
    one row, or, with PAGE positions a page, in the pages that `table` lists in order.

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
        qs, k, v, k_page, k_step, v_page, v_step, table, chosen + n.to(tl.int64) * width, count,
        scale2, m, z, acc, BN, D, PAGE, STAGES, PRECISION,
    )  # fmt: skip
    m, z, acc = walk_window(
        qs, k, v, k_page, k_step, v_page, v_step, table, window, edge, after, position, scale2,
        m, z, acc, BN, D, PAGE, STAGES, PRECISION,
    )  # fmt: skip
    to = out + (head * out_head + query * out_step)[:, None] + d[None, :]
    tl.store(to, (acc / z[:, None]).to(out.dtype.element_ty), mask=real[:, None])
