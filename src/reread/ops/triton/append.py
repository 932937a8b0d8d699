"""Writing the new token's key and value into the cache, and the key's norm beside them where the
prior needs it."""

from __future__ import annotations

from torch import Tensor

from . import append_kernels
from .decode import Cache


def append(k: Tensor, v: Tensor, kv: Cache, *, norms: Tensor | None = None) -> None:
    """Write k, v [B, Hkv, D] (after RoPE; contiguous in D) to position lengths - 1 of each row.

    `kv.lengths` already counts the new token. norms: fp32 [B, Hkv, L], contiguous, written too.
    """
    rows, heads, dim = k.shape
    assert k.stride(2) == v.stride(2) == 1
    assert norms is None or norms.is_contiguous()
    append_kernels.append_kernel[(rows * heads,)](
        k, v, *k.stride()[:2], *v.stride()[:2], kv.k, kv.v, *kv.strides,
        k if norms is None else norms, kv.k.shape[2], kv.lengths,
        HKV=heads, D=dim, NORMS=norms is not None, num_warps=1,
    )  # fmt: skip
