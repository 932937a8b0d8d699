# mypy: ignore-errors
"""Scores of an indexer for blocks of queries, and each block's top-K: exact, ties to the lower
position.

The top-K is one program a block, in two launches. The first guesses from a sample of the row which
key (in the order that `radix.ordered` gives scores) about 1.6 K reach, and lists those in one pass;
the second finds the exact K-th largest of the list. Where the guess was wrong it counts the whole
row instead: the result is the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .radix import COARSE, LOWEST, ordered, threshold_bin
from .tiles import FLOOR


# Triton compiles anew for numbers that are 1 or divisible by 16; not for those that differ between
# passes
@triton.jit(do_not_specialize=["count", "first"])
def log_sums_kernel(
    iq, ik, sums, count, iq_step, ik_step, start, first, scale2,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """sums(t) = log2 of the sum over j in [start, first + t] of 2^(scale2 iq(t) . ik(j)).

    The last queries have the most to do, so their programs come first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    d, lane, row = tl.arange(0, D), tl.arange(0, BN), tile * BM + tl.arange(0, BM)
    real = row < count
    qq = tl.load(iq + row[:, None] * iq_step + d[None, :], mask=real[:, None], other=0.0)
    position = first + tl.minimum(row, count - 1)
    edge, last = first + tile * BM, first + tl.minimum(tile * BM + BM, count)
    seen = start + tl.maximum(edge - start, 0) // BN * BN
    m = tl.full([BM], FLOOR, tl.float32)
    z = tl.zeros([BM], tl.float32)
    for n in tl.range(start, seen, BN, num_stages=STAGES):
        kk = tl.load(ik + (n + lane)[:, None] * ik_step + d[None, :])
        s = tl.dot(qq, tl.trans(kk), input_precision=PRECISION)
        m_new = tl.maximum(m, tl.max(s, 1) * scale2)
        z = z * tl.exp2(m - m_new) + tl.sum(tl.exp2(s * scale2 - m_new[:, None]), 1)
        m = m_new
    for n in tl.range(seen, last, BN, num_stages=1):
        at = n + lane
        kk = tl.load(ik + at[:, None] * ik_step + d[None, :], mask=(at < last)[:, None], other=0.0)
        s = tl.dot(qq, tl.trans(kk), input_precision=PRECISION)
        s = tl.where(at[None, :] <= position[:, None], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale2)
        z = z * tl.exp2(m - m_new) + tl.sum(tl.exp2(s * scale2 - m_new[:, None]), 1)
        m = m_new
    tl.store(sums + row, m + tl.log2(z), mask=real)


@triton.jit(do_not_specialize=["blocks", "low"])
def scores_kernel(
    iq, ik, sums, scores, edges, windows, blocks, iq_step, ik_step, low, pitch, scale2,
    D: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr,
    GROUP: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """scores(n, j) = max over the queries t of block n of log2 P(t, j), for j in [low, windows[n]):
    scale2 iq(t) . ik(j) minus the query's log-sum.

    A program has GROUP blocks and TILES * BN keys. Keys are the rows of the product, so that the
    maximum over a block's queries stays within few threads.
    """
    group = tl.program_id(1) * GROUP
    first = tl.program_id(0) * (TILES * BN)
    d, lane, row = tl.arange(0, D), tl.arange(0, BN), tl.arange(0, GROUP * BQ)
    mine = tl.minimum(group + tl.arange(0, GROUP), blocks - 1)
    windows_of = tl.load(windows + mine)
    end = tl.max(windows_of, 0)
    if (first >= end) | (first + TILES * BN <= low):
        return
    # a block that is cut short repeats its last query, the last group its last block
    n = tl.minimum(group + row // BQ, blocks - 1)
    query = tl.minimum(tl.load(edges + n) + row % BQ, tl.load(edges + n + 1) - 1)
    query -= tl.load(edges)
    qq = tl.load(iq + query[None, :] * iq_step + d[:, None])
    total = tl.load(sums + query)
    to = scores + mine.to(tl.int64) * pitch
    last = tl.minimum(first + TILES * BN, end)
    for origin in tl.range(first, last, BN, num_stages=STAGES):
        at = origin + lane
        kk = tl.load(ik + at[:, None] * ik_step + d[None, :], mask=(at < end)[:, None], other=0.0)
        s = tl.dot(kk, qq, input_precision=PRECISION) * scale2 - total[None, :]
        best = tl.max(tl.reshape(s, [BN, GROUP, BQ]), 2)
        keep = (at >= low)[:, None] & (at[:, None] < windows_of[None, :])
        tl.store(to[None, :] + at[:, None], best, mask=keep)


@triton.jit
def distance(keys, base):
    """How far keys lie above `base` in their order, unsigned; below it, very far."""
    return keys.to(tl.uint32, bitcast=True) - base.to(tl.uint32, bitcast=True)


@triton.jit
def raised(base, digit, shift: tl.constexpr):
    """`base` plus digit << shift, as the integer that wraps."""
    return base + (digit << shift)


@triton.jit
def guess(scores, low, n, size, SAMPLE: tl.constexpr):
    """A key that about 1.6 `size` of the row's n scores should reach, by a sample."""
    lane = tl.arange(0, SAMPLE)
    # n is below 2^18 and SAMPLE at most 2^12
    at = low + (lane.to(tl.uint32) * n.to(tl.uint32) // SAMPLE).to(tl.int32)
    keys = ordered(tl.load(scores + at))
    rank = (size.to(tl.float32) * (1.6 * SAMPLE) / n.to(tl.float32)).to(tl.int32) + 16
    wanted = tl.minimum(rank, SAMPLE)
    base = tl.full([], LOWEST, tl.int32)
    counts = tl.histogram((distance(keys, base) >> 24).to(tl.int32), COARSE)
    digit, wanted = threshold_bin(counts, wanted)
    base = raised(base, digit, 24)
    offset = distance(keys, base) >> 16
    inside = offset < COARSE
    counts = tl.histogram(tl.where(inside, offset, 0).to(tl.int32), COARSE, mask=inside)
    digit, _ = threshold_bin(counts, wanted)
    return raised(base, digit, 16)


@triton.jit(do_not_specialize=["low"])
def list_row_kernel(
    scores, windows, sizes, keys, places, totals, low, pitch,
    CAP: tl.constexpr, SAMPLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per block: the keys and places of what reaches the guess, in order of position, as far as
    CAP entries hold them, and how many there are."""
    n = tl.program_id(0)
    size, end = tl.load(sizes + n), tl.load(windows + n)
    total = 0
    if size > 0:
        scores += n.to(tl.int64) * pitch
        keys += n.to(tl.int64) * CAP
        places += n.to(tl.int64) * CAP
        lane = tl.arange(0, BLOCK)
        floor = tl.full([], LOWEST, tl.int32)
        if end - low > CAP:
            floor = guess(scores, low, end - low, size, SAMPLE)
        z = tl.load(scores + low + lane, mask=low + lane < end, other=0.0)
        for i in range(low, end, BLOCK):
            at = i + lane
            # what comes next is on its way while this is counted
            ahead = at + BLOCK
            z_next = tl.load(scores + ahead, mask=ahead < end, other=0.0)
            key = ordered(z)
            listed = (at < end) & (key >= floor)
            slot = total + tl.cumsum(listed.to(tl.int32), 0) - 1
            fits = listed & (slot < CAP)
            tl.store(keys + slot, key, mask=fits)
            tl.store(places + slot, at, mask=fits)
            total += tl.sum(listed.to(tl.int32), 0)
            z = z_next
    tl.store(totals + n, total)


@triton.jit
def read_keys(source, at, live, LISTED: tl.constexpr):
    """Keys as they were listed, or of scores."""
    if LISTED:
        return tl.load(source + at, mask=live, other=LOWEST)
    return ordered(tl.load(source + at, mask=live, other=0.0))


@triton.jit
def choose_from(
    source, places, first, last, wanted, indices, BLOCK: tl.constexpr, LISTED: tl.constexpr
):
    """Write the positions of the `wanted` largest of entries [first, last): the K-th largest key
    8 bits a pass, then what lies above it and its first ties."""
    lane = tl.arange(0, BLOCK)
    base = tl.full([], LOWEST, tl.int32)
    for step in tl.static_range(4):
        counts = tl.zeros([COARSE], tl.int32)
        for i in range(first, last, BLOCK):
            live = i + lane < last
            offset = distance(read_keys(source, i + lane, live, LISTED), base) >> (24 - 8 * step)
            inside = live & (offset < COARSE)
            counts += tl.histogram(tl.where(inside, offset, 0).to(tl.int32), COARSE, mask=inside)
        digit, wanted = threshold_bin(counts, wanted)
        base = raised(base, digit, 24 - 8 * step)
    done, ties = 0, 0
    for i in range(first, last, BLOCK):
        live = i + lane < last
        key = read_keys(source, i + lane, live, LISTED)
        tie = live & (key == base)
        rank = ties + tl.cumsum(tie.to(tl.int32), 0)
        chosen = (live & (key > base)) | (tie & (rank <= wanted))
        slot = done + tl.cumsum(chosen.to(tl.int32), 0) - 1
        place = i + lane
        if LISTED:
            place = tl.load(places + place, mask=live, other=0)
        tl.store(indices + slot, place, mask=chosen)
        done += tl.sum(chosen.to(tl.int32), 0)
        ties += tl.sum(tie.to(tl.int32), 0)


@triton.jit(do_not_specialize=["low", "width"])
def choose_row_kernel(
    scores, windows, sizes, keys, places, totals, indices, low, pitch, width,
    CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per block: the `sizes[n]` largest of scores[n, low:windows[n]], ascending, -1 behind them;
    from the list where it holds them all, else from the whole row."""
    n = tl.program_id(0)
    size, end, total = tl.load(sizes + n), tl.load(windows + n), tl.load(totals + n)
    indices += n.to(tl.int64) * width
    for i in range(0, width, BLOCK):
        slot = i + tl.arange(0, BLOCK)
        tl.store(indices + slot, -1, mask=(slot >= size) & (slot < width))
    if size > 0:
        if (total >= size) & (total <= CAP):
            to = n.to(tl.int64) * CAP
            choose_from(keys + to, places + to, 0, total, size, indices, BLOCK, True)
        else:
            scores += n.to(tl.int64) * pitch
            choose_from(scores, places, low, end, size, indices, BLOCK, False)
