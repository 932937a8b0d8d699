# mypy: ignore-errors
"""A deterministic top-K in two launches behind the scores, same grid in both.

Whoever writes the scores counts them in steps of 1/8 (`count_coarse`), or for scores of any scale
in eight steps an octave (WIDE). `list_kernel` finds the step that holds the K-th largest and lists
its members, few in any real distribution of attention; `gather_kernel` finds the K-th largest among
those, 8 bits of an order-preserving integer key a pass, and writes the survivors. Counts per chunk
say where each chunk writes, so indices come out ascending and ties go to the lower index. Atomics
decide in which order members are listed, and only sums over the list are used: the result does not
depend on the order in which programs run.

A step that holds very many (a field of ties) is right too, and slower: every program of the head
walks the list.
"""

from __future__ import annotations

import triton
import triton.language as tl

COARSE = tl.constexpr(256)
LOWEST = tl.constexpr(-2147483648)
HIGHEST = tl.constexpr(2147483647)


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
def wide_bin(z):
    """Eight steps an octave of 1 + |z|, negative scores below positive ones: for scores of any
    scale, as those of an indexer."""
    # exponent and three bits of the mantissa: exact, so that this never falls as z grows
    bits = (1.0 + tl.abs(z)).to(tl.int32, bitcast=True) >> 20
    step = tl.minimum(bits - (127 << 3), 127)
    return tl.where(z < 0, 127 - step, 128 + step)


@triton.jit
def bin_of(z, WIDE: tl.constexpr):
    """The bin that the first count puts a score in."""
    if WIDE:
        return wide_bin(z)
    return coarse_bin(z)


@triton.jit
def keys_of_bin(found):
    """First and last key of a coarse bin; those at the ends reach as far as keys do."""
    edge = (found - 192).to(tl.float32) * 0.125
    first = tl.where(found == 0, LOWEST, ordered(edge))
    last = tl.where(found == COARSE - 1, HIGHEST, ordered(edge + 0.125) - 1)
    return first, last


@triton.jit
def threshold_bin(counts, wanted):
    """The bin of [COARSE] that holds the `wanted`-th largest, and how many of that bin are
    wanted."""
    at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    found = tl.sum((at_least >= wanted).to(tl.int32), 0) - 1
    above = tl.sum(tl.where(tl.arange(0, COARSE) == found, at_least - counts, 0), 0)
    return found, wanted - above


@triton.jit
def count_coarse(hists, head, z, keep):
    """Add one block to the counts [heads, COARSE]; few bins, so that this is fast."""
    counts = tl.histogram(coarse_bin(z), COARSE, mask=keep)
    to = hists + head * COARSE + tl.arange(0, COARSE)
    tl.atomic_add(to, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def chunks_of(low, high, active, B, BPAD: tl.constexpr, BLOCK: tl.constexpr):
    """Of each row: its first chunk of J, and how many; at least one of a row that is on, none of
    one that is off. int32 [BPAD] each."""
    rows = tl.arange(0, BPAD)
    real = rows < B
    on = real & (tl.load(active + rows, mask=real, other=0) != 0)
    first = tl.load(low + rows, mask=on, other=0) // BLOCK
    last = (tl.load(high + rows, mask=on, other=0) + BLOCK - 1) // BLOCK
    return first, tl.where(on, tl.maximum(last - first, 1), 0)


@triton.jit
def chunk_at(item, first, count, HKV: tl.constexpr, BPAD: tl.constexpr):
    """The chunk at place `item` of a flat list of (row, KV head, chunk): row * HKV + head, and
    which; first and count: of `chunks_of`."""
    rows = tl.arange(0, BPAD)
    ends = tl.cumsum(count, 0) * HKV
    b = tl.sum((ends <= item).to(tl.int32), 0)
    mine = rows == b
    per_head = tl.sum(tl.where(mine, count, 0), 0)
    local = item - tl.sum(tl.where(rows < b, count, 0), 0) * HKV
    chunk = tl.sum(tl.where(mine, first, 0), 0) + local % per_head
    return b * HKV + local // per_head, chunk


@triton.jit
def coarse_kernel(scores, hists, pitch, low, high, active, HKV: tl.constexpr, BLOCK: tl.constexpr):
    """`count_coarse` alone, where the kernel that writes the scores sees several heads at once."""
    head = tl.program_id(1)
    b = head // HKV
    if tl.load(active + b) == 0:
        return
    begin, end = tl.load(low + b), tl.load(high + b)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = (at >= begin) & (at < end)
    z = tl.load(scores + head.to(tl.int64) * pitch + at, mask=keep, other=0.0)
    count_coarse(hists, head, z, keep)


@triton.jit
def list_piece(
    head, chunk, scores, hists, cursors, cuts, tallies, keys, places, pitch, low, high, k,
    HKV: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One chunk of one head of `list_kernel`."""
    begin, end = tl.load(low + head // HKV), tl.load(high + head // HKV)
    origin = chunk * BLOCK
    row = head.to(tl.int64) * pitch
    at = origin + tl.arange(0, BLOCK)
    keep = (at >= begin) & (at < end)
    z = tl.load(scores + row + at, mask=keep, other=0.0)
    counts = tl.load(hists + head * COARSE + tl.arange(0, COARSE))
    found, wanted = threshold_bin(counts, tl.minimum(k, end - begin))
    # every program of a head notes the same
    tl.store(cuts + head * 2, found)
    tl.store(cuts + head * 2 + 1, wanted)
    bins = bin_of(z, WIDE)
    member = keep & (bins == found)
    above = tl.sum((keep & (bins > found)).to(tl.int32), 0)
    members = tl.sum(member.to(tl.int32), 0)
    if members > 0:
        slot = tl.atomic_add(cursors + head, members, sem="relaxed")
        slot += tl.cumsum(member.to(tl.int32), 0) - 1
        tl.store(keys + row + slot, ordered(z), mask=member)
        tl.store(places + row + slot, at, mask=member)
    # an empty J may begin behind the last chunk there is room for
    tl.store(tallies + head * (2 * CHUNKS) + chunk, above, mask=begin < end)
    tl.store(tallies + head * (2 * CHUNKS) + CHUNKS + chunk, members, mask=begin < end)


@triton.jit
def list_kernel(
    scores, hists, cursors, cuts, tallies, keys, places, pitch, low, high, active, k, B,
    BPAD: tl.constexpr, HKV: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The boundary bin and how many of it are wanted (cuts [.., 2]), its members (keys, places),
    and per chunk how many lie above it and in it (tallies [.., 2, CHUNKS])."""
    first, count = chunks_of(low, high, active, B, BPAD, BLOCK)
    total = tl.sum(count, 0) * HKV
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        head, chunk = chunk_at(item, first, count, HKV, BPAD)
        list_piece(
            head, chunk, scores, hists, cursors, cuts, tallies, keys, places, pitch, low, high, k,
            HKV, CHUNKS, BLOCK, WIDE,
        )  # fmt: skip


@triton.jit
def listed_span(keys, members, BLOCK: tl.constexpr):
    """First and last of the listed keys; those of a wide bin have one sign."""
    first, last = tl.full([], HIGHEST, tl.int32), tl.full([], LOWEST, tl.int32)
    for i in range(0, members, BLOCK):
        at = i + tl.arange(0, BLOCK)
        first = tl.minimum(first, tl.min(tl.load(keys + at, mask=at < members, other=HIGHEST), 0))
        last = tl.maximum(last, tl.max(tl.load(keys + at, mask=at < members, other=LOWEST), 0))
    return first, last


@triton.jit
def boundary_key(keys, members, found, wanted, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """The `wanted`-th largest of the listed keys of bin `found`, and how many of its ties are
    wanted."""
    if WIDE:
        base, last = listed_span(keys, members, BLOCK)
    else:
        base, last = keys_of_bin(found)
    span = last - base
    while span > 0:
        shift = tl.where(span >= 1 << 16, tl.where(span >= 1 << 24, 24, 16), 8)
        shift = tl.where(span >= 1 << 8, shift, 0)
        counts = tl.zeros([COARSE], tl.int32)
        for i in range(0, members, BLOCK):
            at = i + tl.arange(0, BLOCK)
            offset = tl.load(keys + at, mask=at < members, other=0) - base
            keep = (at < members) & (offset >= 0) & (offset <= span)
            counts += tl.histogram(tl.where(keep, offset >> shift, 0), COARSE, mask=keep)
        digit, wanted = threshold_bin(counts, wanted)
        base += digit << shift
        span = (1 << shift) - 1
    return base, wanted


@triton.jit
def listed_before(keys, places, members, cut, origin, BLOCK: tl.constexpr):
    """How many members in front of `origin` lie above the cut, and how many are its ties."""
    above, ties = 0, 0
    for i in range(0, members, BLOCK):
        at = i + tl.arange(0, BLOCK)
        key = tl.load(keys + at, mask=at < members, other=LOWEST)
        before = tl.load(places + at, mask=at < members, other=origin) < origin
        above += tl.sum((before & (key > cut)).to(tl.int32), 0)
        ties += tl.sum((before & (key == cut)).to(tl.int32), 0)
    return above, ties


@triton.jit
def write_chosen(
    chunk, scores, keys, places, indices, cuts, tallies, begin, end,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The survivors of one chunk, all pointers those of its head: none where it has none."""
    lane = tl.arange(0, CHUNKS)
    mine = (lane >= begin // BLOCK) & (lane * BLOCK < end)
    aboves = tl.load(tallies + lane, mask=mine, other=0)
    listed = tl.load(tallies + CHUNKS + lane, mask=mine, other=0)
    if tl.sum(tl.where(lane == chunk, aboves + listed, 0), 0) > 0:
        origin, members = chunk * BLOCK, tl.sum(listed, 0)
        at = origin + tl.arange(0, BLOCK)
        keep = (at >= begin) & (at < end)
        key = ordered(tl.load(scores + at, mask=keep, other=0.0))
        found, wanted = tl.load(cuts), tl.load(cuts + 1)
        cut, wanted = boundary_key(keys, members, found, wanted, BLOCK, WIDE)
        above_before, ties_before = listed_before(keys, places, members, cut, origin, BLOCK)
        above_before += tl.sum(tl.where(lane < chunk, aboves, 0), 0)
        tie = keep & (key == cut)
        taken = tie & (ties_before + tl.cumsum(tie.to(tl.int32), 0) <= wanted)
        chosen = (keep & (key > cut)) | taken
        slot = above_before + tl.minimum(ties_before, wanted)
        slot += tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(indices + slot, at, mask=chosen)


@triton.jit
def gather_kernel(
    scores, hists, cursors, cuts, tallies, keys, places, indices, counts, lanes, pitch, low, high,
    active, k, B,
    BPAD: tl.constexpr, HKV: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the survivors in ascending order, -1 behind them, and leave histogram and cursor at
    zero for the next call. LANES: row b's go to the lists of lanes[b]."""
    firsts, count = chunks_of(low, high, active, B, BPAD, BLOCK)
    items = tl.sum(count, 0) * HKV
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        head, chunk = chunk_at(item, firsts, count, HKV, BPAD)
        b = head // HKV
        begin, end = tl.load(low + b), tl.load(high + b)
        to = tl.load(lanes + b) * HKV + head % HKV if LANES else head
        total = tl.maximum(tl.minimum(k, end - begin), 0)
        if chunk == begin // BLOCK:
            tl.store(counts + to, total)
            tl.store(cursors + head, 0)
            tl.store(hists + head * COARSE + tl.arange(0, COARSE), tl.zeros([COARSE], tl.int32))
            for i in range(total // BLOCK * BLOCK, k, BLOCK):
                slot = i + tl.arange(0, BLOCK)
                behind = (slot >= total) & (slot < k)
                tl.store(indices + to.to(tl.int64) * k + slot, -1, mask=behind)
        row = head.to(tl.int64) * pitch
        write_chosen(
            chunk, scores + row, keys + row, places + row, indices + to.to(tl.int64) * k,
            cuts + head * 2, tallies + head * (2 * CHUNKS), begin, end, CHUNKS, BLOCK, WIDE,
        )  # fmt: skip
