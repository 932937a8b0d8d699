# mypy: ignore-errors
"""A deterministic radix top-K, same grid as `score`.

Scores become signed 32-bit keys that order as the scores do. Four histogram rounds find the K-th
largest key: one over the score in steps of 1/8, which leaves few candidates, then 11, 11 and 10
bits of the key among those. A count per chunk then says where each chunk writes its survivors, so
indices come out ascending and ties go to the lower index, whatever the order in which programs run.

The first round, over everything, counts in the block (few bins, so that this is fast); the others
take one atomic a candidate, or one for all of a block that share a bin (a field of ties).
"""

from __future__ import annotations

import triton
import triton.language as tl

BINS = tl.constexpr(2048)
COARSE = tl.constexpr(256)
ROUNDS = tl.constexpr(4)


@triton.jit
def ordered(z):
    """Signed integer that orders as the float does; both zeros are one key."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def coarse_bin(z):
    """Steps of 1/8 from -24 to 8: scaling by a power of two is exact, so this grows with z."""
    return tl.floor(tl.minimum(tl.maximum(z, -24.0), 7.9) * 8.0).to(tl.int32) + 192


@triton.jit
def candidates(z, key, keep, cuts, found, ROUND: tl.constexpr):
    """Which of `keep` agree with what the rounds before ROUND `found` and noted."""
    if ROUND == 1:
        return keep & (coarse_bin(z) == found)
    keep &= coarse_bin(z) == tl.load(cuts)
    return keep & ((key >> (21 if ROUND == 2 else 10)) == found)


@triton.jit
def digit_of(key, ROUND: tl.constexpr):
    """The bin of a score in one round; it grows with the key among the round's candidates."""
    if ROUND == 1:
        return (key >> 21) + 1024
    if ROUND == 2:
        return (key >> 10) & 0x7FF
    return key & 0x3FF


@triton.jit
def threshold_bin(hist, wanted, WIDTH: tl.constexpr):
    """The bin that holds the `wanted`-th largest entry, and how many of that bin are wanted."""
    bins = tl.arange(0, WIDTH)
    counts = tl.load(hist + bins)
    at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    found = tl.sum((at_least >= wanted).to(tl.int32), 0) - 1
    above = tl.sum(tl.where(bins == found, at_least - counts, 0), 0)
    return found, wanted - above


@triton.jit
def count_coarse(hists, head, z, keep):
    """Round 0 of one block: few bins, counted in the block first."""
    counts = tl.histogram(coarse_bin(z), COARSE, mask=keep)
    bins = tl.arange(0, COARSE)
    to = hists + head * (ROUNDS * BINS) + bins
    tl.atomic_add(to, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def note_boundary(hists, cuts, k, ROUND: tl.constexpr):
    """What round ROUND's histogram says of the K-th largest: its bin, later its leading bits.

    Noted in `cuts` [ROUNDS, 2] with how many candidates of that bin are wanted; every program of a
    head notes the same.
    """
    WIDTH: tl.constexpr = COARSE if ROUND == 0 else BINS
    wanted = k if ROUND == 0 else tl.load(cuts + (ROUND - 1) * 2 + 1)
    found, wanted = threshold_bin(hists + ROUND * BINS, wanted, WIDTH)
    if ROUND == 1:
        found = found - 1024
    if ROUND == 2:
        found = (tl.load(cuts + 2) << 11) | found
    if ROUND == 3:
        found = (tl.load(cuts + 4) << 10) | found
    tl.store(cuts + ROUND * 2, found)
    tl.store(cuts + ROUND * 2 + 1, wanted)
    return found


@triton.jit
def histogram_kernel(
    scores, hists, cuts, pitch, low, high, active, k,
    HKV: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Round ROUND: histogram of the next digit of all keys that agree with the boundary so far.
    hists: [.., ROUNDS, BINS]"""
    head = tl.program_id(1)
    b = head // HKV
    begin, end = tl.load(low + b), tl.load(high + b)
    origin = tl.program_id(0) * BLOCK
    if (tl.load(active + b) == 0) | (origin >= end) | (origin + BLOCK <= begin):
        return
    at = origin + tl.arange(0, BLOCK)
    keep = (at >= begin) & (at < end)
    z = tl.load(scores + head.to(tl.int64) * pitch + at, mask=keep, other=0.0)
    if ROUND == 0:
        count_coarse(hists, head, z, keep)
        return
    key = ordered(z)
    hists += head * (ROUNDS * BINS)
    cuts += head * (ROUNDS * 2)
    found = note_boundary(hists, cuts, tl.minimum(k, end - begin), ROUND - 1)
    keep = candidates(z, key, keep, cuts, found, ROUND)
    digit = digit_of(key, ROUND)
    hists += ROUND * BINS
    top = tl.max(tl.where(keep, digit, -1), 0)
    if top >= 0:
        if top == tl.min(tl.where(keep, digit, BINS), 0):
            tl.atomic_add(hists + top, tl.sum(keep.to(tl.int32), 0), sem="relaxed")
        else:
            tl.atomic_add(hists + digit, 1, mask=keep, sem="relaxed")


@triton.jit
def count_kernel(
    scores, hists, cuts, tallies, pitch, low, high, active, k,
    HKV: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The boundary key and how many of its ties are wanted (cuts); per chunk, keys above it and
    ties (tallies)."""
    head = tl.program_id(1)
    b = head // HKV
    if tl.load(active + b) == 0:
        return
    begin, end = tl.load(low + b), tl.load(high + b)
    chunk = tl.program_id(0)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    keep = (at >= begin) & (at < end)
    above, ties = 0, 0
    if end > begin:
        key = ordered(tl.load(scores + head.to(tl.int64) * pitch + at, mask=keep, other=0.0))
        cut = note_boundary(
            hists + head * (ROUNDS * BINS),
            cuts + head * (ROUNDS * 2),
            tl.minimum(k, end - begin),
            3,
        )
        above = tl.sum((keep & (key > cut)).to(tl.int32), 0)
        ties = tl.sum((keep & (key == cut)).to(tl.int32), 0)
    tl.store(tallies + head * (2 * CHUNKS) + chunk, above)
    tl.store(tallies + head * (2 * CHUNKS) + CHUNKS + chunk, ties)


@triton.jit
def gather_kernel(
    scores, hists, cuts, tallies, indices, counts, pitch, low, high, active, k,
    HKV: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the survivors in ascending order, -1 behind them, and leave the histograms at zero for
    the next call."""
    head = tl.program_id(1)
    b = head // HKV
    if tl.load(active + b) == 0:
        return
    begin, end = tl.load(low + b), tl.load(high + b)
    chunk = tl.program_id(0)
    indices += head.to(tl.int64) * k
    total = tl.maximum(tl.minimum(k, end - begin), 0)
    if chunk == 0:
        tl.store(counts + head, total)
        for r in tl.static_range(ROUNDS):
            tl.store(
                hists + (head * ROUNDS + r) * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int32)
            )
    # the padding is shared out among the chunks
    for i in range(chunk * BLOCK, k, tl.num_programs(0) * BLOCK):
        slot = i + tl.arange(0, BLOCK)
        tl.store(indices + slot, -1, mask=(slot >= total) & (slot < k))
    origin = chunk * BLOCK
    if (origin >= end) | (origin + BLOCK <= begin):
        return
    cut, wanted = tl.load(cuts + head * 8 + 6), tl.load(cuts + head * 8 + 7)
    lane = tl.arange(0, CHUNKS)
    tallies += head * (2 * CHUNKS)
    earlier = lane < chunk
    above_before = tl.sum(tl.load(tallies + lane, mask=earlier, other=0), 0)
    ties_before = tl.sum(tl.load(tallies + CHUNKS + lane, mask=earlier, other=0), 0)
    at = origin + tl.arange(0, BLOCK)
    keep = (at >= begin) & (at < end)
    key = ordered(tl.load(scores + head.to(tl.int64) * pitch + at, mask=keep, other=0.0))
    tie = keep & (key == cut)
    taken = tie & (ties_before + tl.cumsum(tie.to(tl.int32), 0) <= wanted)
    chosen = (keep & (key > cut)) | taken
    slot = above_before + tl.minimum(ties_before, wanted) + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(indices + slot, at, mask=chosen)
