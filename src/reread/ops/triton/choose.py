# mypy: ignore-errors
"""The Selector's kernels: evidence from logits, scores from evidence, and a deterministic radix top-K.

Scores become signed 32-bit keys that order as the scores do. Three histogram rounds (11, 11 and 10 bits from the top)
find the K-th largest key; a count per chunk then says where each chunk writes its survivors, so indices come out
ascending and ties go to the lower index, whatever the order in which programs run. Nothing is read on the host.

All kernels run on a grid of (chunks of the capacity, B * Hkv); chunks outside J and rows that are off return at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

BINS = tl.constexpr(2048)


@triton.jit
def evidence_kernel(
    logits, lse, mass, width, low, high, active,
    HKV: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """mass(j) = mean over the G query heads of 2^(logit - lse), zero outside J. logits [B, H, width] base 2."""
    head = tl.program_id(1)
    b = head // HKV
    if tl.load(active + b) == 0:
        return
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (at >= tl.load(low + b)) & (at < tl.load(high + b))
    total = tl.zeros([BLOCK], tl.float32)
    for g in tl.static_range(G):
        row = head.to(tl.int64) * G + g
        t = tl.load(logits + row * width + at, mask=inside, other=float("-inf"))
        total += tl.exp2(t - tl.load(lse + row))
    tl.store(
        mass + head.to(tl.int64) * width + at, tl.where(inside, total / G, 0.0), mask=at < width
    )


@triton.jit
def log_score_kernel(
    mass, norms, prior_sums, scores, width, low, high, active, eps, gamma, beta, power, eta, clip,
    HKV: tl.constexpr, CHUNKS: tl.constexpr, PRIOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """z = log(s + eps) with s the evidence, or its mixture with the prior (steps 3 to 6)."""
    head = tl.program_id(1)
    b = head // HKV
    begin, end = tl.load(low + b), tl.load(high + b)
    origin = tl.program_id(0) * BLOCK
    if (tl.load(active + b) == 0) | (origin >= end) | (origin + BLOCK <= begin):
        return
    at = origin + tl.arange(0, BLOCK)
    inside = (at >= begin) & (at < end)
    s = tl.load(mass + head.to(tl.int64) * width + at, mask=inside, other=0.0)
    if PRIOR:
        norm = tl.load(norms + head.to(tl.int64) * width + at, mask=inside, other=1.0)
        t = log_prior(norm, tl.where(inside, at - begin, 0), end - begin, eps, gamma, beta, power, eta)
        top, lam, scale = mixture(prior_sums + head * (CHUNKS * 5), clip, CHUNKS)
        s = (1.0 - lam) * s + lam * (tl.exp(tl.minimum(t - top, 0.0)) * scale)
    tl.store(scores + head.to(tl.int64) * width + at, tl.log(s + eps), mask=inside)


@triton.jit
def log_prior(norm, i, n, eps, gamma, beta, power, eta):
    """Logarithm of key-norm prior times position prior, not normalised; i counts from 0 within J."""
    u = i.to(tl.float32) / tl.maximum(n - 1, 1).to(tl.float32)
    bent = tl.where(
        u > 0, tl.exp(power * tl.log(tl.maximum(u, 1e-30))), tl.where(power == 0, 1.0, 0.0)
    )
    # J's newest position has 1 - u = 0 exactly; rounding below zero would make a NaN
    return -gamma * tl.log(norm + eps) - beta * bent + eta * tl.log(tl.maximum(1.0 - u, 0.0) + eps)


@triton.jit
def prior_sums_kernel(
    mass, norms, sums, width, low, high, active, eps, gamma, beta, power, eta,
    HKV: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per chunk: maximum of the log prior, then sum w, sum w^2, sum f w, sum f^2 with w = exp(log prior - maximum)."""
    head = tl.program_id(1)
    b = head // HKV
    if tl.load(active + b) == 0:
        return
    begin, end = tl.load(low + b), tl.load(high + b)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (at >= begin) & (at < end)
    f = tl.load(mass + head.to(tl.int64) * width + at, mask=inside, other=0.0)
    norm = tl.load(norms + head.to(tl.int64) * width + at, mask=inside, other=1.0)
    t = log_prior(norm, tl.where(inside, at - begin, 0), end - begin, eps, gamma, beta, power, eta)
    top = tl.max(tl.where(inside, t, -1.0e30), 0)
    w = tl.where(inside, tl.exp(tl.minimum(t - top, 0.0)), 0.0)
    to = sums + head * (CHUNKS * 5) + tl.program_id(0)
    tl.store(to, top)
    tl.store(to + CHUNKS, tl.sum(w, 0))
    tl.store(to + 2 * CHUNKS, tl.sum(w * w, 0))
    tl.store(to + 3 * CHUNKS, tl.sum(f * w, 0))
    tl.store(to + 4 * CHUNKS, tl.sum(f * f, 0))


@triton.jit
def mixture(sums, clip, CHUNKS: tl.constexpr):
    """lambda* (step 5) from the chunks' sums; also the prior's maximum and 1 / sum w."""
    lane = tl.arange(0, CHUNKS)
    tops = tl.load(sums + lane)
    top = tl.max(tops, 0)
    weight = tl.exp(tops - top)
    w = tl.sum(tl.load(sums + CHUNKS + lane) * weight, 0)
    scale = tl.where(w > 0, 1.0 / w, 0.0)
    r2 = tl.sum(tl.load(sums + 2 * CHUNKS + lane) * weight * weight, 0) * scale * scale
    cross = tl.sum(tl.load(sums + 3 * CHUNKS + lane) * weight, 0) * scale
    f2 = tl.sum(tl.load(sums + 4 * CHUNKS + lane), 0)
    distance = f2 - 2.0 * cross + r2
    lam = tl.where(distance > 0, (f2 - cross) / tl.where(distance > 0, distance, 1.0), 0.0)
    return top, tl.minimum(tl.maximum(lam, 0.0), clip), scale


@triton.jit
def refine_kernel(
    scores, refined, width, low, high, active, alpha, before, after,
    HKV: tl.constexpr, NMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Maximum over [i - before, i + after] within J; NMS: the score minus alpha times what it lacks to that."""
    head = tl.program_id(1)
    b = head // HKV
    begin, end = tl.load(low + b), tl.load(high + b)
    origin = tl.program_id(0) * BLOCK
    if (tl.load(active + b) == 0) | (origin >= end) | (origin + BLOCK <= begin):
        return
    at = origin + tl.arange(0, BLOCK)
    inside = (at >= begin) & (at < end)
    scores += head.to(tl.int64) * width
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for shift in range(-before, after + 1):
        near = at + shift
        best = tl.maximum(
            best, tl.load(scores + near, mask=(near >= begin) & (near < end), other=float("-inf"))
        )
    if NMS:
        z = tl.load(scores + at, mask=inside, other=0.0)
        best = z - alpha * tl.maximum(best - z, 0.0)
    tl.store(refined + head.to(tl.int64) * width + at, best, mask=inside)


@triton.jit
def cross_head_kernel(
    scores, refined, width, low, high, active, alpha, temperature, eps,
    HKV: tl.constexpr, HPAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """z + alpha log max(softmax over KV heads (z / T), eps); grid (chunks, B)."""
    b = tl.program_id(1)
    begin, end = tl.load(low + b), tl.load(high + b)
    origin = tl.program_id(0) * BLOCK
    if (tl.load(active + b) == 0) | (origin >= end) | (origin + BLOCK <= begin):
        return
    at, h = origin + tl.arange(0, BLOCK), tl.arange(0, HPAD)
    inside = (h < HKV)[:, None] & ((at >= begin) & (at < end))[None, :]
    offset = (b * HKV + h)[:, None].to(tl.int64) * width + at[None, :]
    z = tl.load(scores + offset, mask=inside, other=-1.0e30)
    e = tl.exp((z - tl.max(z, 0)[None, :]) / temperature)
    share = e / tl.sum(e, 0)[None, :]
    tl.store(refined + offset, z + alpha * tl.log(tl.maximum(share, eps)), mask=inside)


@triton.jit
def ordered(z):
    """Signed integer that orders as the float does; both zeros are one key."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def digit_of(key, ROUND: tl.constexpr):
    """11, 11 and 10 bits of a key from the top, as a bin that grows with the key."""
    if ROUND == 0:
        return (key >> 21) + 1024
    if ROUND == 1:
        return (key >> 10) & 0x7FF
    return key & 0x3FF


@triton.jit
def threshold_bin(hist, wanted):
    """The bin that holds the `wanted`-th largest entry, and how many of that bin are wanted."""
    counts = tl.load(hist + tl.arange(0, BINS))
    at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    found = tl.sum((at_least >= wanted).to(tl.int32), 0) - 1
    here = tl.arange(0, BINS) == found
    above = tl.sum(tl.where(here, at_least - counts, 0), 0)
    return found, wanted - above


@triton.jit
def boundary(hists, cuts, k, ROUND: tl.constexpr):
    """High bits of the K-th largest key after round ROUND, and how many keys with these bits are wanted.

    Noted in `cuts` [3, 2] for the next round; every program of a head notes the same.
    """
    wanted = k if ROUND == 0 else tl.load(cuts + (ROUND - 1) * 2 + 1)
    found, wanted = threshold_bin(hists + ROUND * BINS, wanted)
    if ROUND == 0:
        prefix = found - 1024
    elif ROUND == 1:
        prefix = (tl.load(cuts) << 11) | found
    else:
        prefix = (tl.load(cuts + 2) << 10) | found
    tl.store(cuts + ROUND * 2, prefix)
    tl.store(cuts + ROUND * 2 + 1, wanted)
    return prefix, wanted


@triton.jit
def histogram_kernel(
    scores, hists, cuts, width, low, high, active, k,
    HKV: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Round ROUND: histogram of the next digit of all keys that agree with the boundary so far. hists: [.., 3, BINS]"""
    head = tl.program_id(1)
    b = head // HKV
    begin, end = tl.load(low + b), tl.load(high + b)
    origin = tl.program_id(0) * BLOCK
    if (tl.load(active + b) == 0) | (origin >= end) | (origin + BLOCK <= begin):
        return
    at = origin + tl.arange(0, BLOCK)
    keep = (at >= begin) & (at < end)
    key = ordered(tl.load(scores + head.to(tl.int64) * width + at, mask=keep, other=0.0))
    hists += head * (3 * BINS)
    if ROUND > 0:
        prefix, _ = boundary(hists, cuts + head * 6, tl.minimum(k, end - begin), ROUND - 1)
        keep &= (key >> (21 if ROUND == 1 else 10)) == prefix
    # most chunks hold few keys near the boundary, many none
    if tl.sum(keep.to(tl.int32), 0) > 0:
        counts = tl.histogram(digit_of(key, ROUND), BINS, mask=keep)
        tl.atomic_add(
            hists + ROUND * BINS + tl.arange(0, BINS), counts, mask=counts > 0, sem="relaxed"
        )


@triton.jit
def count_kernel(
    scores, hists, cuts, tallies, width, low, high, active, k,
    HKV: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The boundary key and how many of its ties are wanted (cuts); per chunk, keys above it and ties (tallies)."""
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
        key = ordered(tl.load(scores + head.to(tl.int64) * width + at, mask=keep, other=0.0))
        cut, _ = boundary(hists + head * (3 * BINS), cuts + head * 6, tl.minimum(k, end - begin), 2)
        above = tl.sum((keep & (key > cut)).to(tl.int32), 0)
        ties = tl.sum((keep & (key == cut)).to(tl.int32), 0)
    tl.store(tallies + head * (2 * CHUNKS) + chunk, above)
    tl.store(tallies + head * (2 * CHUNKS) + CHUNKS + chunk, ties)


@triton.jit
def gather_kernel(
    scores, hists, cuts, tallies, indices, counts, width, low, high, active, k,
    HKV: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the survivors in ascending order, -1 behind them, and leave the histograms at zero for the next call."""
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
        for r in tl.static_range(3):
            tl.store(hists + (head * 3 + r) * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
    # the padding is shared out among the chunks
    for i in range(chunk * BLOCK, k, tl.num_programs(0) * BLOCK):
        slot = i + tl.arange(0, BLOCK)
        tl.store(indices + slot, -1, mask=(slot >= total) & (slot < k))
    origin = chunk * BLOCK
    if (origin >= end) | (origin + BLOCK <= begin):
        return
    cut, wanted = tl.load(cuts + head * 6 + 4), tl.load(cuts + head * 6 + 5)
    lane = tl.arange(0, CHUNKS)
    tallies += head * (2 * CHUNKS)
    earlier = lane < chunk
    above_before = tl.sum(tl.load(tallies + lane, mask=earlier, other=0), 0)
    ties_before = tl.sum(tl.load(tallies + CHUNKS + lane, mask=earlier, other=0), 0)
    at = origin + tl.arange(0, BLOCK)
    keep = (at >= begin) & (at < end)
    key = ordered(tl.load(scores + head.to(tl.int64) * width + at, mask=keep, other=0.0))
    tie = keep & (key == cut)
    taken = tie & (ties_before + tl.cumsum(tie.to(tl.int32), 0) <= wanted)
    chosen = (keep & (key > cut)) | taken
    slot = above_before + tl.minimum(ties_before, wanted) + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(indices + slot, at, mask=chosen)
