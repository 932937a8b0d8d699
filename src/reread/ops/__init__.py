"""Public ops: check shapes, choose the backend, run. The PyTorch meaning of each is in
`ops.reference`."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..types import BlockSelection, KVView, Selection
from . import reference

Allowed = Sequence[tuple[int, int]]


MIN_CAPABILITY = (8, 0)
MAX_LENGTH = 262_144  # positions that the GPU kernels address


def resolve_backend(name: str, device: torch.device) -> str:
    """The backend that runs for `name` ("auto", "reference", "triton") on `device`: Triton on CUDA,
    the reference elsewhere; never a silent fallback.

    Raises:
        UnsupportedError: Triton is wanted, and cannot run here.
    """
    if name == "reference" or (name == "auto" and device.type != "cuda"):
        return "reference"
    if importlib.util.find_spec("triton") is None:
        raise UnsupportedError(
            "the GPU kernels need Triton, which is not installed: install it, or set "
            "backend='reference', which is slow"
        )
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            raise UnsupportedError(
                f"compute capability {capability[0]}.{capability[1]} is below 8.0: the GPU kernels "
                "do not run there; set backend='reference', which is slow"
            )
    elif os.environ.get("TRITON_INTERPRET") != "1":
        raise UnsupportedError(
            f"backend='triton' needs a CUDA device, this is {device.type}: use 'auto'"
        )
    return "triton"


def kernels_lack(
    rows: int, heads: int, kv_heads: int, dim: int, positions: int, dtype: torch.dtype
) -> str | None:
    """Why the Triton kernels do not cover a model or a conversation of it; None if they do."""
    from .triton import unsupported

    q = torch.empty(rows, heads, dim, dtype=dtype, device="meta")
    return unsupported(q, torch.empty(rows, kv_heads, positions, dim, dtype=dtype, device="meta"))


def refusal(reason: str) -> str:
    """How a shape that the Triton kernels do not cover is refused."""
    return f"the Triton kernels do not cover {reason}; backend='reference' does, slowly"


def decode_dense(
    q: Tensor,
    kv: KVView,
    *,
    scale: float,
    allowed: Allowed | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Dense attention of one query per row over its whole cache, on request with the evidence for
    the Selector.

    Args:
        q: [B, H, D]; H a multiple of the KV heads.
        kv: the cache, the current token's key and value included.
        scale: factor on the logits.
        allowed: per row [low, high), the positions J that evidence is wanted for; None: no
            evidence.
        backend: as for `resolve_backend`.

    Returns:
        out [B, H, Dv], and mass fp32 [B, Hkv, L] or None: softmax of the logits over J, averaged
            over the G query
        heads of a KV head, zero outside J (SFI, step 1).
    """
    _check(q, kv)
    if resolve_backend(backend, q.device) == "triton":
        from .triton import views

        return views.decode_dense(q, kv, scale=scale, allowed=allowed)
    return reference.decode_dense(q, kv, scale=scale, allowed=allowed)


def verify_dense(
    q: Tensor,
    kv: KVView,
    *,
    scale: float,
    allowed: Allowed | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Dense attention of each row's T newest positions, causal to the token: what verifies drafted
    tokens in one pass over the cache.

    Args:
        q: [B, H, T, D], any strides; query t of row b stands at position lengths[b] - T + t.
        kv: the cache, the T positions' keys and values included: lengths are one past the last.
        scale, allowed, backend: as for `decode_dense`.

    Returns:
        out [B, H, T, Dv], zero where a query has nothing to read (before the row's start), and mass
        fp32 [B, Hkv, T, L] or None: per query as for `decode_dense`, zero also behind the query's
        own position.
    """
    assert q.dim() == 4, f"q must be [B, H, T, D], is {tuple(q.shape)}"
    _check(q[:, :, 0], kv)
    if resolve_backend(backend, q.device) == "triton":
        from .triton import views

        return views.verify_dense(q, kv, scale=scale, allowed=allowed)
    return reference.verify_dense(q, kv, scale=scale, allowed=allowed)


def decode_sparse(
    q: Tensor,
    kv: KVView,
    selection: Selection,
    window_start: Sequence[int],
    *,
    sink: int,
    scale: float,
    backend: str = "auto",
) -> Tensor:
    """Attention of one query per row over sink + selected + everything from `window_start` on.

    Args:
        q: [B, H, D]; kv: the whole cache; selection: positions in [start + sink, window_start) per
            KV head.
        window_start: per row, first position of the recent window.
        sink: how many of the row's first positions are always read.
        backend: as for `resolve_backend`.

    Returns:
        out [B, H, Dv].
    """
    _check(q, kv)
    if resolve_backend(backend, q.device) == "triton":
        from .triton import views

        return views.decode_sparse(q, kv, selection, window_start, sink=sink, scale=scale)
    return reference.decode_sparse(q, kv, selection, window_start, sink=sink, scale=scale)


def prefill_sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: BlockSelection,
    *,
    start: int,
    edges: Sequence[int],
    windows: Sequence[int],
    sink: int,
    scale: float,
    backend: str = "auto",
    out: Tensor | None = None,
    table: Tensor | None = None,
    block: int = 0,
) -> Tensor:
    """Attention of consecutive queries of one row, each block of them over sink + selected +
    everything from its window on, causal to the token.

    Args:
        q: [H, N, D], the queries at positions edges[0] to edges[-1]; k: [Hkv, L, D]; v:
            [Hkv, L, Dv]; L is edges[-1], one past the last query.
        start: first position that is no padding.
        edges: first position of each block, then one past the last query.
        windows: per block, first position of what it always reads, at most the block's first.
        sink: how many of the row's first positions are always read.
        backend: as for `resolve_backend`.
        out: [H, N, Dv] to write to; None: made.
        table: int32 [pages], the row's pages in order; k and v are then [pages, Hkv, page size, D]
            of all rows, of any strides but the last.
        block: queries of the largest block of any call; kernels are compiled for the larger of it
            and the blocks at hand, so that short ones need none of their own.

    Returns:
        [H, N, Dv].
    """
    assert q.shape[1] == edges[-1] - edges[0], "a query for each position"
    if table is None:
        assert k.shape[1] == edges[-1], "keys up to the last query"
    else:
        assert table.shape[0] * k.shape[2] >= edges[-1], "pages up to the last query"
    assert len(windows) == len(selection.sizes) == len(edges) - 1
    spans: dict[str, Any] = {"start": start, "edges": edges, "windows": windows, "sink": sink}
    if resolve_backend(backend, q.device) == "triton":
        from . import triton

        own: dict[str, Any] = {"scale": scale, "out": out, "table": table, "block": block}
        return triton.prefill_sparse(q, k, v, selection, **spans, **own)
    if table is not None:
        k, v = (_row_of(x, table, edges[-1]) for x in (k, v))
    made = reference.prefill_sparse(q, k, v, selection, **spans, scale=scale)
    return made if out is None else out.copy_(made)


def indexer_topk(
    iq: Tensor,
    ik: Tensor,
    *,
    start: int,
    edges: Sequence[int],
    windows: Sequence[int],
    sizes: Sequence[int],
    sink: int,
    backend: str = "auto",
    block: int = 0,
) -> BlockSelection:
    """What an indexer chooses for each block of consecutive queries of one row: the positions in
    [start + sink, window) of which any query of the block is predicted to give the largest share of
    its attention.

    The prediction is the softmax of iq . ik over the query's past, averaged over index heads (the
    kernels cover one). Ties go to the lower position.

    Args:
        iq: [n, N, d] index queries at positions edges[0] to edges[-1]; ik: [n, L, d], L is
            edges[-1].
        start, edges, windows, sink: as for `prefill_sparse`.
        sizes: per block, how many to choose, at most window - start - sink.
        backend: as for `resolve_backend`.
        block: as for `prefill_sparse`.
    """
    assert iq.shape[1] == edges[-1] - edges[0], "an index query for each position"
    assert ik.shape[1] == edges[-1], "index keys up to the last query"
    assert len(windows) == len(sizes) == len(edges) - 1
    run: Callable[..., BlockSelection] = reference.indexer_topk
    if resolve_backend(backend, iq.device) == "triton":
        from . import triton

        run = functools.partial(triton.indexer_topk, block=block)
    return run(iq, ik, start=start, edges=edges, windows=windows, sizes=sizes, sink=sink)


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


def _row_of(pages: Tensor, table: Tensor, length: int) -> Tensor:
    """The first `length` positions that lie in the pages of a table: [Hkv, length, D]."""
    return pages[table.long()].transpose(0, 1).flatten(1, 2)[:, :length]


def _check(q: Tensor, kv: KVView) -> None:
    assert q.dim() == 3, f"q must be [B, H, D], is {tuple(q.shape)}"
    assert (q.shape[0], q.shape[2]) == (kv.k.shape[0], kv.k.shape[3]), (q.shape, kv.k.shape)
    assert q.shape[1] % kv.k.shape[1] == 0, "query heads must be a multiple of KV heads"
