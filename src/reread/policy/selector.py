"""The Selector of slow-fast decoding (SFI, arXiv 2603.12038), one small function per equation.

All functions work on one batch row. `n` is the size of J, the allowed positions: everything
between the sink and the recent window. Positions count from 0 within J; `select` shifts them back.
Evidence and prior are distributions over J.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..config import SelectorConfig, SoftNMS, Span

NEG_INF = float("-inf")


def allowed_probabilities(logits: Tensor) -> Tensor:
    """Step 1: softmax over J per query and head, averaged over the G query heads of a KV head.

    Args:
        logits: [Hkv, G, W, n] scaled attention logits over J, -inf where a query may not look.

    Returns:
        fp32 [Hkv, W, n]; a query that may look nowhere in J contributes zeros.
    """
    # a row of -inf alone softmaxes to NaN and counts as nothing; NaN logits show in the model's
    # output, which is checked
    return torch.softmax(logits.float(), dim=-1).nan_to_num(0.0).mean(dim=1)


def power_mean(p: Tensor, alpha: float) -> Tensor:
    """Step 2: mu(j) = mean over W of p^alpha; f = mu^(1/alpha), normalised. With W = 1, f is p
    itself.

    Args:
        p: [Hkv, W, n] distributions over J (or zeros).

    Returns:
        f, fp32 [Hkv, n], each head's row sums to 1 (or is all zero where p is).
    """
    f = p[:, 0] if p.shape[1] == 1 else p.pow(alpha).mean(dim=1).pow(1.0 / alpha)
    return normalise(f)


def normalise(x: Tensor) -> Tensor:
    """x / sum(x) over the last dim; rows of zeros stay zeros."""
    total = x.sum(dim=-1, keepdim=True)
    return x / total.where(total > 0, 1.0)


def key_norm_prior(norms: Tensor, gamma: float, eps: float) -> Tensor:
    """Step 3: pi_kn(j) proportional to (||k_j|| + eps)^-gamma.

    Args:
        norms: [Hkv, n] L2 norms of the keys as cached (after RoPE and QK-norm).
    """
    # in the log domain: eps^-gamma of an all-zero key must not drown in fp32
    return torch.softmax(-gamma * torch.log(norms.float() + eps), dim=-1)


def position_prior(
    n: int, beta: float, p: float, eta: float, eps: float, device: torch.device
) -> Tensor:
    """Step 3: pi_pos(j) proportional to exp(-beta u^p) (1 - u + eps)^eta, u = 0 for the oldest and
    1 for the newest.

    Returns:
        fp32 [n], sums to 1.
    """
    u = torch.linspace(0.0, 1.0, n, device=device) if n > 1 else torch.zeros(n, device=device)
    return torch.softmax(-beta * u.pow(p) + eta * torch.log(1.0 - u + eps), dim=-1)


def prior(norms: Tensor, config: SelectorConfig) -> Tensor:
    """Step 3: r proportional to pi_kn * pi_pos over J. norms: [Hkv, n].

    Returns:
        r, fp32 [Hkv, n], each head's row sums to 1.
    """
    positions = position_prior(
        norms.shape[-1], config.beta, config.p, config.eta, config.eps, norms.device
    )
    return normalise(key_norm_prior(norms, config.gamma, config.eps) * positions)


def mixing_weight(f: Tensor, r: Tensor, lambda_clip: float) -> Tensor:
    """Step 5: the lambda that minimises ||(1 - lambda) f + lambda r||_2, clipped to [0,
    lambda_clip].

    lambda* = (||f||^2 - f.r) / (||f||^2 - 2 f.r + ||r||^2), per head; 0 where f equals r.

    Args:
        f, r: [Hkv, n].

    Returns:
        [Hkv, 1].
    """
    cross = (f * r).sum(dim=-1, keepdim=True)
    f2 = (f * f).sum(dim=-1, keepdim=True)
    distance = f2 - 2.0 * cross + (r * r).sum(dim=-1, keepdim=True)
    lam = (f2 - cross) / distance.where(distance > 0, 1.0)
    return lam.where(distance > 0, 0.0).clamp(0.0, lambda_clip)


def fuse(f: Tensor, r: Tensor, lam: Tensor | float) -> Tensor:
    """Step 4: s = (1 - lambda) f + lambda r, the minimiser of (1 - lambda) KL(f||s) + lambda
    KL(r||s)."""
    return (1.0 - lam) * f + lam * r


def soft_nms(z: Tensor, config: SoftNMS) -> Tensor:
    """Step 6: z <- z - alpha * max(0, localmax(z) - z) over a centred neighbourhood. z: [Hkv,
    n]."""
    reach = config.neighbourhood // 2
    excess = window_max(z, reach, reach) - z
    # -inf (a position that may not be chosen) minus -inf is NaN; such a position stays -inf
    return (z - config.alpha * excess.clamp(min=0.0)).where(z > NEG_INF, z)


def spread(z: Tensor, config: Span) -> Tensor:
    """Each position's score spread, by maximum, to `back` positions before and `ahead` after it.
    z: [Hkv, n]."""
    return window_max(z, config.ahead, config.back)


def window_max(z: Tensor, before: int, after: int) -> Tensor:
    """out(i) = max of z over [i - before, i + after], cut at the ends. z: [..., n]. O(n log(before
    + after))."""
    width = before + after + 1
    out = torch.nn.functional.pad(z, (before, after), value=NEG_INF)
    covered = 1
    while covered < width:
        step = min(covered, width - covered)
        out = torch.maximum(out[..., :-step], out[..., step:])
        covered += step
    return out


def cross_head(z: Tensor, alpha_cross: float, temperature: float, eps: float) -> Tensor:
    """Step 6: z <- z + alpha_cross * log max(softmax over KV heads (z / T), eps). z: [Hkv, n]."""
    share = torch.softmax(z / temperature, dim=0).nan_to_num(0.0)
    return z + alpha_cross * torch.log(share.clamp(min=eps))


def top_k(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Step 7: the k highest scores per head, ties to the lower index, indices ascending.

    Args:
        z: [Hkv, n] scores; -inf marks positions that may not be chosen.

    Returns:
        indices int32 [Hkv, min(k, n)] padded with -1, counts int32 [Hkv].
    """
    width = min(k, z.shape[-1])
    if width == 0:
        return z.new_empty(z.shape[0], 0, dtype=torch.int32), z.new_zeros(
            z.shape[0], dtype=torch.int32
        )
    if z.device.type == "cpu":
        return _top_k_by_partition(z, width)
    threshold = torch.topk(z, width, dim=-1).values[:, -1:]
    # Few positions reach the threshold, so the ties are settled among those alone.
    heads, positions = ((z >= threshold) & (z > NEG_INF)).nonzero(as_tuple=True)
    counts = torch.bincount(heads, minlength=z.shape[0])
    if int(counts.max()) > width:
        keep = _lowest_ties(z, threshold, width, heads, positions)
        heads, positions = heads[keep], positions[keep]
        counts = counts.clamp(max=width)
    if positions.numel() == z.shape[0] * width:
        return positions.view(-1, width).to(torch.int32), counts.to(torch.int32)
    slots = torch.arange(positions.numel(), device=z.device) - (counts.cumsum(0) - counts)[heads]
    indices = torch.full((z.shape[0], width), -1, dtype=torch.int32, device=z.device)
    indices[heads, slots] = positions.to(torch.int32)
    return indices, counts.to(torch.int32)


def _top_k_by_partition(z: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The same on the CPU, where NumPy's selection takes a quarter of the time of torch's."""
    heads = z.numpy(force=True)
    indices = np.full((len(heads), width), -1, dtype=np.int32)
    counts = np.zeros(len(heads), dtype=np.int32)
    for h, row in enumerate(heads):
        threshold = np.partition(row, row.size - width)[row.size - width]
        chosen = np.flatnonzero(row > threshold)
        if threshold > NEG_INF:
            ties = np.flatnonzero(row == threshold)[: width - chosen.size]
            chosen = np.sort(np.concatenate([chosen, ties]))
        indices[h, : chosen.size] = chosen
        counts[h] = chosen.size
    return torch.from_numpy(indices), torch.from_numpy(counts)


def _lowest_ties(
    z: Tensor, threshold: Tensor, width: int, heads: Tensor, positions: Tensor
) -> Tensor:
    """Which of the candidates (`heads`, `positions`, in order) stay: all above the threshold, then
    the lowest ties."""
    above = z[heads, positions] > threshold[heads, 0]
    taken = torch.zeros(z.shape[0], dtype=torch.long, device=z.device).index_add_(
        0, heads, above.long()
    )
    ties = (~above).long()
    seen = ties.cumsum(0)
    before = torch.zeros_like(taken).index_add_(0, heads, ties)
    rank = seen - (before.cumsum(0) - before)[heads]
    return above | (rank <= (width - taken)[heads])


def scores(f: Tensor, norms: Tensor | None, config: SelectorConfig) -> Tensor:
    """Steps 3 to 6: from evidence to refined log-scores.

    Args:
        f: fp32 [Hkv, n] evidence; norms: [Hkv, n] key norms, needed where `config.lambda_clip` > 0.

    Returns:
        z, fp32 [Hkv, n].
    """
    s = f
    if config.lambda_clip > 0:
        assert norms is not None, "the prior needs key norms"
        r = prior(norms, config)
        s = fuse(f, r, mixing_weight(f, r, config.lambda_clip))
    z = torch.log(s + config.eps)
    if isinstance(config.refine, SoftNMS):
        z = soft_nms(z, config.refine)
    elif isinstance(config.refine, Span):
        z = spread(z, config.refine)
    if config.alpha_cross > 0:
        z = cross_head(z, config.alpha_cross, config.temperature, config.eps)
    return z


def select(
    f: Tensor,
    norms: Tensor | None,
    config: SelectorConfig,
    k: int,
    offset: int,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The whole Selector for one row: which k positions each KV head keeps until the next slow
    step.

    Args:
        f: fp32 [Hkv, n] evidence; norms: [Hkv, n] key norms or None, as for `scores`.
        offset: cache position of the first element of J.
        valid: bool [n], positions that exist (None: all). The others are taken out before anything
            is computed: neighbours are neighbours in the text, not in the cache.

    Returns:
        indices int32 [Hkv, min(k, n)] cache positions, ascending, padded with -1; counts int32
            [Hkv].
    """
    if valid is None:
        indices, counts = top_k(scores(f, norms, config), k)
        return torch.where(indices >= 0, indices + offset, indices), counts
    exist = valid.nonzero().flatten()
    norms = None if norms is None else norms[:, exist]
    indices, counts = top_k(scores(normalise(f[:, exist]), norms, config), k)
    positions = exist.to(torch.int32) + offset
    return torch.where(indices >= 0, positions[indices.clamp(min=0).long()], indices), counts
