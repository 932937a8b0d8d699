"""Writing the newest tokens' keys and values into the cache, and the keys' norms beside them where
the prior needs them."""

from __future__ import annotations

from torch import Tensor

from . import append_kernels
from .inputs import Cache


def append(k: Tensor, v: Tensor, kv: Cache, *, norms: Tensor | None = None) -> None:
    """Write k, v [B, Hkv, T, D], or [B, Hkv, D] of one token (after RoPE; last stride 1), to the
    positions lengths - T to lengths - 1 of each row.

    `kv.lengths` already counts the new tokens, so it is at least T. norms: fp32 [B, Hkv, L],
    contiguous, written too.
    """
    rows, heads, dim = k.shape[0], k.shape[1], k.shape[-1]
    several = k.dim() == 4
    tokens = k.shape[2] if several else 1
    assert k.shape == v.shape
    assert k.stride(-1) == v.stride(-1) == 1
    assert norms is None or norms.is_contiguous()
    k_step, v_step = (k.stride(2), v.stride(2)) if several else (0, 0)
    append_kernels.append_kernel[(rows * heads * tokens,)](
        k, v, *k.stride()[:2], k_step, *v.stride()[:2], v_step, kv.k, kv.v, *kv.strides,
        k if norms is None else norms, kv.k.shape[2], kv.lengths,
        HKV=heads, T=tokens, D=dim, NORMS=norms is not None, num_warps=1,
    )  # fmt: skip
