# mypy: ignore-errors
"""The Selector's kernels up to refined scores: evidence from logits, prior, fusion, refinement.

Scores, and the top-K behind them, run on a fixed grid whose programs share a flat list of the
chunks of J of the rows that are on, so that a step in which few rows choose costs little; the
others run on a grid of (chunks of the capacity, B * Hkv), and what is off returns at once. Nothing
is read on the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .radix import chunk_at, chunks_of, count_coarse


@triton.jit
def mean_mass(logits, lse, head, at, inside, width, G: tl.constexpr):
    """Mean over the G query heads of 2^(logit - lse); logits [B, H, width] base 2."""
    total = tl.zeros_like(at).to(tl.float32)
    for g in tl.static_range(G):
        row = head.to(tl.int64) * G + g
        t = tl.load(logits + row * width + at, mask=inside, other=float("-inf"))
        total += tl.exp2(t - tl.load(lse + row))
    return total / G


@triton.jit
def evidence_kernel(
    logits, lse, mass, width, low, high, active,
    HKV: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """mass(j), zero outside J."""
    head = tl.program_id(1)
    b = head // HKV
    if tl.load(active + b) == 0:
        return
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (at >= tl.load(low + b)) & (at < tl.load(high + b))
    p = mean_mass(logits, lse, head, at, inside, width, G)
    tl.store(mass + head.to(tl.int64) * width + at, tl.where(inside, p, 0.0), mask=at < width)


@triton.jit
def score_piece(
    head, chunk, source, lse, norms, prior_sums, scores, hists, width, pitch, begin, end,
    eps, gamma, beta, power, eta, clip, alpha,
    G: tl.constexpr, CHUNKS: tl.constexpr, PRIOR: tl.constexpr, BEFORE: tl.constexpr,
    AFTER: tl.constexpr, LOG: tl.constexpr, NMS: tl.constexpr, COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk of one head of `score_kernel`."""
    origin = chunk * (BLOCK - BEFORE - AFTER)
    lane = tl.arange(0, BLOCK)
    at = origin - BEFORE + lane
    inside = (at >= begin) & (at < end)
    if G:
        s = mean_mass(source, lse, head, at, inside, width, G)
    else:
        s = tl.load(source + head.to(tl.int64) * width + at, mask=inside, other=0.0)
    if PRIOR:
        norm = tl.load(norms + head.to(tl.int64) * width + at, mask=inside, other=1.0)
        i = tl.where(inside, at - begin, 0)
        t = log_prior(norm, i, end - begin, eps, gamma, beta, power, eta)
        top, lam, scale = mixture(prior_sums + head * (CHUNKS * 5), clip, CHUNKS)
        s = (1.0 - lam) * s + lam * (tl.exp(tl.minimum(t - top, 0.0)) * scale)
    z = tl.where(inside, tl.log(s + eps), float("-inf"))
    best = window_max(z, lane, BEFORE + AFTER + 1, LOG, BLOCK)
    at = origin + lane
    mine = (lane < BLOCK - BEFORE - AFTER) & (at >= begin) & (at < end)
    if NMS:
        z = tl.where(mine, tl.gather(z, tl.minimum(lane + BEFORE, BLOCK - 1), 0), 0.0)
        best = z - alpha * tl.maximum(best - z, 0.0)
    tl.store(scores + head.to(tl.int64) * pitch + at, best, mask=mine)
    if COUNT:
        count_coarse(hists, head, tl.where(mine, best, 0.0), mine)


@triton.jit
def score_kernel(
    source, lse, norms, prior_sums, scores, hists, width, pitch, low, high, active,
    eps, gamma, beta, power, eta, clip, alpha, B,
    BPAD: tl.constexpr, HKV: tl.constexpr, G: tl.constexpr, CHUNKS: tl.constexpr,
    PRIOR: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, LOG: tl.constexpr,
    NMS: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Steps 3 to 6 but for the cross-head term: z = log(s + eps), s the evidence or its mixture
    with the prior, then the maximum over [i - BEFORE, i + AFTER] within J; NMS: the score minus
    alpha times what it lacks to that. Rows of `scores` are `pitch` apart.

    `source` holds the logits, or for G = 0 the mass. COUNT: also the top-K's first count. Blocks
    overlap by the window, so that nothing passes between programs.
    """
    first, count = chunks_of(low, high, active, B, BPAD, BLOCK - BEFORE - AFTER)
    total = tl.sum(count, 0) * HKV
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        head, chunk = chunk_at(item, first, count, HKV, BPAD)
        begin, end = tl.load(low + head // HKV), tl.load(high + head // HKV)
        score_piece(
            head, chunk, source, lse, norms, prior_sums, scores, hists, width, pitch, begin, end,
            eps, gamma, beta, power, eta, clip, alpha,
            G, CHUNKS, PRIOR, BEFORE, AFTER, LOG, NMS, COUNT, BLOCK,
        )  # fmt: skip


@triton.jit
def window_max(z, lane, WIDTH: tl.constexpr, LOG: tl.constexpr, BLOCK: tl.constexpr):
    """Of lane i: the maximum over lanes i to i + WIDTH - 1; 2^LOG is the largest power of two in
    WIDTH. The last WIDTH - 1 lanes see less."""
    for i in tl.static_range(LOG):
        z = tl.maximum(z, tl.gather(z, tl.minimum(lane + (1 << i), BLOCK - 1), 0))
    if WIDTH > (1 << LOG):
        z = tl.maximum(z, tl.gather(z, tl.minimum(lane + (WIDTH - (1 << LOG)), BLOCK - 1), 0))
    return z


@triton.jit
def log_prior(norm, i, n, eps, gamma, beta, power, eta):
    """Logarithm of key-norm prior times position prior, not normalised; i counts from 0 within
    J."""
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
    """Per chunk: maximum of the log prior, then sum w, sum w^2, sum f w, sum f^2 with w = exp(log
    prior - maximum)."""
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
def cross_head_kernel(
    scores, pitch, low, high, active, alpha, temperature, eps,
    HKV: tl.constexpr, HPAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """z + alpha log max(softmax over KV heads (z / T), eps), in place; grid (chunks, B)."""
    b = tl.program_id(1)
    if tl.load(active + b) == 0:
        return
    begin, end = tl.load(low + b), tl.load(high + b)
    origin = tl.program_id(0) * BLOCK
    if (origin >= end) | (origin + BLOCK <= begin):
        return
    at, h = origin + tl.arange(0, BLOCK), tl.arange(0, HPAD)
    inside = (h < HKV)[:, None] & ((at >= begin) & (at < end))[None, :]
    offset = (b * HKV + h)[:, None].to(tl.int64) * pitch + at[None, :]
    z = tl.load(scores + offset, mask=inside, other=-1.0e30)
    e = tl.exp((z - tl.max(z, 0)[None, :]) / temperature)
    share = e / tl.sum(e, 0)[None, :]
    tl.store(scores + offset, z + alpha * tl.log(tl.maximum(share, eps)), mask=inside)
