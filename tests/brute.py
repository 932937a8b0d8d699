"""The Selector written out position by position in float64: slow, and obviously right.

Nothing here calls reread. Lists and numpy only, one loop per "for all j" of the text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def softmax(x: Sequence[float] | Array) -> Array:
    values = np.asarray(x, dtype=np.float64)
    e = np.exp(values - values.max())
    return np.asarray(e / e.sum())


def evidence(p: Array, alpha: float) -> Array:
    """p [W, n] -> f [n]: mu(j) = 1/W sum p^alpha; f = mu^(1/alpha), normalised."""
    mu = [
        sum(float(p[w, j]) ** alpha for w in range(p.shape[0])) / p.shape[0]
        for j in range(p.shape[1])
    ]
    f = np.array([m ** (1.0 / alpha) for m in mu])
    return np.asarray(f / f.sum())


def prior(norms: Array, gamma: float, beta: float, p: float, eta: float, eps: float) -> Array:
    """r(j) ~ (norm_j + eps)^-gamma * exp(-beta u^p) (1 - u + eps)^eta, newest u = 1; [n] -> [n]."""
    n = len(norms)
    out = []
    for j in range(n):
        u = j / (n - 1) if n > 1 else 0.0
        kn = (float(norms[j]) + eps) ** -gamma
        out.append(kn * math.exp(-beta * u**p) * (1.0 - u + eps) ** eta)
    return np.asarray(np.array(out) / sum(out))


def mixing_weight(f: Array, r: Array, clip: float) -> float:
    top = float(f @ f - f @ r)
    bottom = float(f @ f - 2 * (f @ r) + r @ r)
    return 0.0 if bottom <= 0 else min(max(top / bottom, 0.0), clip)


def soft_nms(z: Array, alpha: float, neighbourhood: int) -> Array:
    half = neighbourhood // 2
    out = []
    for j in range(len(z)):
        local = max(z[max(0, j - half) : j + half + 1])
        out.append(z[j] - alpha * max(0.0, local - z[j]))
    return np.array(out)


def spread(z: Array, back: int, ahead: int) -> Array:
    """Each position offers its score to `back` before and `ahead` after it; the highest stays."""
    out = np.full(len(z), -math.inf)
    for j, score in enumerate(z):
        for i in range(max(0, j - back), min(len(z), j + ahead + 1)):
            out[i] = max(out[i], score)
    return out


def cross_head(z: Array, alpha_cross: float, temperature: float, eps: float) -> Array:
    """z [Hkv, n]"""
    out = z.copy()
    for j in range(z.shape[1]):
        share = softmax(z[:, j] / temperature)
        for h in range(z.shape[0]):
            out[h, j] = z[h, j] + alpha_cross * math.log(max(float(share[h]), eps))
    return out


def top_k(z: Array, k: int) -> list[int]:
    """The k best, ties to the lower index, ascending."""
    return sorted(sorted(range(len(z)), key=lambda j: (-z[j], j))[:k])


def scores(f: Array, norms: Array, selector: Any) -> Array:
    """f, norms [Hkv, n] -> z [Hkv, n], for a `SelectorConfig`."""
    rows = []
    for h in range(f.shape[0]):
        s = f[h]
        if selector.lambda_clip > 0:
            r = prior(
                norms[h], selector.gamma, selector.beta, selector.p, selector.eta, selector.eps
            )
            lam = mixing_weight(s, r, selector.lambda_clip)
            s = (1 - lam) * s + lam * r
        z = np.log(s + selector.eps)
        refine = type(selector.refine).__name__
        if refine == "SoftNMS":
            z = soft_nms(z, selector.refine.alpha, selector.refine.neighbourhood)
        elif refine == "Span":
            z = spread(z, selector.refine.back, selector.refine.ahead)
        rows.append(z)
    z = np.stack(rows)
    if selector.alpha_cross > 0:
        z = cross_head(z, selector.alpha_cross, selector.temperature, selector.eps)
    return z


def select(f: Array, norms: Array, selector: Any, k: int) -> list[list[int]]:
    """Per KV head the chosen elements of J, counted from 0."""
    z = scores(f, norms, selector)
    return [top_k(z[h], k) for h in range(z.shape[0])]
