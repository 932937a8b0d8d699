"""Public ops: check shapes, choose the backend, run. The PyTorch meaning of each is in
`ops.reference`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import UnsupportedError
from ..types import KVView, Selection
from . import reference

Allowed = Sequence[tuple[int, int]]


def resolve_backend(name: str) -> str:
    """The backend that runs for `name` ("auto", "reference", "triton").

    Raises:
        UnsupportedError: a backend that this version does not have; never a silent fallback.
    """
    if name == "triton":
        raise UnsupportedError(
            "backend='triton' is not available in this version: use 'auto' or 'reference'"
        )
    return "reference"


def decode_dense(
    q: Tensor, kv: KVView, *, scale: float, allowed: Allowed | None = None
) -> tuple[Tensor, Tensor | None]:
    """Dense attention of one query per row over its whole cache, on request with the evidence for
    the Selector.

    Args:
        q: [B, H, D]; H a multiple of the KV heads.
        kv: the cache, the current token's key and value included.
        scale: factor on the logits.
        allowed: per row [low, high), the positions J that evidence is wanted for; None: no
            evidence.

    Returns:
        out [B, H, Dv], and mass fp32 [B, Hkv, L] or None: softmax of the logits over J, averaged
            over the G query
        heads of a KV head, zero outside J (SFI, step 1).
    """
    _check(q, kv)
    return reference.decode_dense(q, kv, scale=scale, allowed=allowed)


def decode_sparse(
    q: Tensor,
    kv: KVView,
    selection: Selection,
    window_start: Sequence[int],
    *,
    sink: int,
    scale: float,
) -> Tensor:
    """Attention of one query per row over sink + selected + everything from `window_start` on.

    Args:
        q: [B, H, D]; kv: the whole cache; selection: positions in [start + sink, window_start) per
            KV head.
        window_start: per row, first position of the recent window.
        sink: how many of the row's first positions are always read.

    Returns:
        out [B, H, Dv].
    """
    _check(q, kv)
    return reference.decode_sparse(q, kv, selection, window_start, sink=sink, scale=scale)


def tail_evidence(
    q: Tensor,
    kv: KVView,
    positions: Sequence[Sequence[int]],
    *,
    scale: float,
    allowed: Allowed,
    alpha: float,
) -> Tensor:
    """Evidence of the last W queries of a prefill (SFI, steps 1 and 2).

    Args:
        q: [B, H, W, D]; positions: per row and query the cache position of that query, -1 for
            padding.
        allowed: per row [low, high) = J.

    Returns:
        mass fp32 [B, Hkv, L], zero outside J, each head's row sums to 1.
    """
    assert q.shape[0] == kv.k.shape[0]
    assert q.shape[1] % kv.k.shape[1] == 0, "query heads must be a multiple of KV heads"
    return reference.tail_evidence(q, kv, positions, scale=scale, allowed=allowed, alpha=alpha)


def _check(q: Tensor, kv: KVView) -> None:
    assert q.dim() == 3, f"q must be [B, H, D], is {tuple(q.shape)}"
    assert (q.shape[0], q.shape[2]) == (kv.k.shape[0], kv.k.shape[3]), (q.shape, kv.k.shape)
    assert q.shape[1] % kv.k.shape[1] == 0, "query heads must be a multiple of KV heads"
