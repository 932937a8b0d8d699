"""The public ops on a `KVView`: same names and signatures as in `ops.reference`, scratch made per
call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...types import KVView, Selection
from . import decode, inputs, selection, verify
from .workspace import Workspace


def decode_dense(
    q: Tensor, kv: KVView, *, scale: float, allowed: Sequence[tuple[int, int]] | None = None
) -> tuple[Tensor, Tensor | None]:
    """See `ops.decode_dense`."""
    cache = _cache(kv)
    work = _workspace(q, kv, evidence=allowed is not None)
    if allowed is None:
        return decode.decode_dense(q.contiguous(), cache, scale=scale, work=work), None
    low, high = (_int32(x, q) for x in zip(*allowed, strict=True))
    out = decode.decode_dense(q.contiguous(), cache, scale=scale, work=work, allowed=(low, high))
    mass = selection.evidence(cache, work=work, allowed=(low, high), heads=q.shape[1])
    return out, mass


def decode_sparse(
    q: Tensor,
    kv: KVView,
    chosen: Selection,
    window_start: Sequence[int],
    *,
    sink: int,
    scale: float,
) -> Tensor:
    """See `ops.decode_sparse`."""
    picked = inputs.Chosen(
        chosen.indices.contiguous(), chosen.counts.contiguous(), _int32(window_start, q), sink
    )
    work = _workspace(q, kv, evidence=False)
    return decode.decode_sparse(q.contiguous(), _cache(kv), picked, scale=scale, work=work)


def verify_dense(
    q: Tensor, kv: KVView, *, scale: float, allowed: Sequence[tuple[int, int]] | None = None
) -> tuple[Tensor, Tensor | None]:
    """See `ops.verify_dense`."""
    cache, queries = _cache(kv), q.shape[2]
    work = _workspace(q[:, :, 0], kv, evidence=allowed is not None, queries=queries)
    if allowed is None:
        return verify.verify_dense(q, cache, scale=scale, work=work), None
    low, high = (_int32(x, q) for x in zip(*allowed, strict=True))
    masses = []
    # each query's own, at a call each; whoever wants the evidence of one asks for it
    for t in range(queries):
        asked = torch.full_like(low, t)
        seen = torch.minimum(high, torch.maximum(cache.lengths - queries + 1 + t, low))
        out = verify.verify_dense(
            q, cache, scale=scale, work=work, allowed=(low, seen), asked=asked
        )
        mass = selection.evidence(cache, work=work, allowed=(low, seen), heads=q.shape[1])
        masses.append(mass.clone())
    return out, torch.stack(masses, dim=2)


def _cache(kv: KVView) -> inputs.Cache:
    if kv.valid is not None:
        raise UnsupportedError("the Triton kernels do not cover holes in the cache (valid)")
    if kv.v.shape != kv.k.shape:
        raise UnsupportedError(
            f"the Triton kernels do not cover values {tuple(kv.v.shape)} of another shape than the "
            f"keys {tuple(kv.k.shape)}"
        )
    return inputs.Cache(kv.k, kv.v, _int32(kv.starts, kv.k), _int32(kv.lengths, kv.k))


def _workspace(q: Tensor, kv: KVView, *, evidence: bool, queries: int = 0) -> Workspace:
    rows, heads, dim = q.shape
    return Workspace(
        rows, heads, kv.k.shape[1], dim, kv.k.shape[2], q.device, evidence=evidence, queries=queries
    )


def _int32(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=like.device)
