"""One layer's attention in a sparse prefill: blocks of queries, what each may read, attention over
that."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .layer import LayerState
from .ops import indexer_topk, prefill_sparse
from .oracle import choose
from .prefilling import SparsePrefill
from .types import BlockSelection

# blocks that end before it are faster dense on the GPU: benchmarks/results/gpu_prefill.json
CROSSOVER = 6144
PIECE_BYTES = 1 << 29  # of fp32 logits at a time: 128K keys of 32 heads by 32 queries


@dataclass(slots=True)
class PrefillMeter:
    """Keys read by sparse layers in a prefill against those that dense attention would read, per
    query and layer."""

    read: int = 0
    cached: int = 0
    backend: str = ""  # of the attention that was sparse; "" where none was

    def dense(self, first: int, last: int, start: int) -> None:
        """Queries [first, last) of a row read everything from `start` on."""
        queries = max(0, last - max(first, start))
        both = queries * (max(first, start) + last + 1 - 2 * start)  # twice, as in `_count`
        self.read, self.cached = self.read + both, self.cached + both

    @property
    def share(self) -> float:
        """1 where nothing was sparse."""
        return self.read / self.cached if self.cached else 1.0


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive queries of one row: whole blocks, but for the ends of a chunk.

    Attributes:
        first, last: [first, last) cache positions of the queries.
        edges: first position of each block, then `last`.
        windows: per block, where what is always read begins.
        sizes: per block, how many positions before its window it chooses.
    """

    first: int
    last: int
    edges: tuple[int, ...]
    windows: tuple[int, ...]
    sizes: tuple[int, ...]


def resolved(config: SparsePrefill, backend: str) -> SparsePrefill:
    """`config` with the length up to which this backend reads densely."""
    if config.dense_below is not None:
        return config
    return replace(config, dense_below=CROSSOVER if backend == "triton" else 0)


def prefill_step(
    state: LayerState,
    q: Tensor,
    starts: tuple[int, ...],
    config: SparsePrefill,
    scale: float,
    meter: PrefillMeter,
    iq: Tensor | None = None,
    backend: str = "reference",
) -> Tensor | None:
    """Attention of the newest T positions of every row; their keys and values are in `state.kv`.

    Args:
        q: [B, H, T, D]; starts: per row, the first position that is no padding.
        iq: [B, n, T, d] index queries, for the chooser "indexer"; the index keys are in `state.kv`.

    Returns:
        [B, T, H, Dv]; None where no query would leave anything out, so that dense may run.
    """
    kv = state.kv
    if all(covers(start, kv.length, config) for start in starts):
        for start in starts:
            meter.dense(kv.length - q.shape[2], kv.length, start)
        return None
    rows, heads, new = q.shape[:3]
    # as transformers wants it, so that nothing is copied behind the kernels
    out = torch.empty(rows, new, heads, kv.values.shape[3], dtype=q.dtype, device=q.device)
    for b, start in enumerate(starts):
        index = None if iq is None else (iq[b], kv.index[b])
        row = (q[b], kv.keys[b], kv.values[b], start, config, scale, meter)
        prefill_row(*row, index=index, backend=backend, out=out[b].transpose(0, 1))
    return out


@torch.no_grad()
def prefill_row(
    q: Tensor, k: Tensor, v: Tensor, start: int, config: SparsePrefill, scale: float,
    meter: PrefillMeter, *, index: tuple[Tensor, Tensor] | None = None,
    backend: str = "reference", out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of the newest T positions of one row, the last of L.

    Args:
        q: [H, T, D]; k: [Hkv, L, D]; v: [Hkv, L, Dv]: original projections, so that only what is
            read differs from dense attention.
        start: first position that is no padding.
        index: queries [n, T, d] and keys [n, L, d] of an indexer.
        out: [H, T, Dv] to write to; None: made.

    Returns:
        [H, T, Dv]; zeros where the query is padding.
    """
    length = k.shape[1]
    offset = length - q.shape[1]
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    out[:, : max(0, start - offset)] = 0
    meter.backend = backend
    # kernels keep one row of scores for a block
    fused = backend == "triton" and config.chooser == "indexer"
    rows = 1 if fused else q.shape[0] * config.b_sel
    first = max(offset, start)
    if backend == "triton" and first == start:
        # what a row's first blocks read is plain causal attention
        first = min(length, start + (config.dense_below or 0) // config.b_sel * config.b_sel)
        if first > start:
            at, own = slice(start - offset, first - offset), slice(start, first)
            out[:, at] = _causal(q[:, at], k[:, own], v[:, own], scale)
            meter.dense(start, first, start)
    for piece in pieces(first, length, start, config, rows):
        at = slice(piece.first - offset, piece.last - offset)
        seen = slice(0, piece.last)
        if index is not None and config.chooser == "indexer":
            asked = index[0][:, at], index[1][:, seen]
            selection = _predicted(*asked, start, piece, config, backend)
        else:
            selection = choose(q[:, at], k[:, seen], start, piece, config, scale)
        prefill_sparse(
            q[:, at], k[:, seen], v[:, seen], selection,
            start=start, edges=piece.edges, windows=piece.windows, sink=config.sink, scale=scale,
            backend=backend, out=out[:, at], block=config.b_sel,
        )  # fmt: skip
        _count(piece, start, config.sink, meter)
    return out


@torch.no_grad()
def prefill_pages(
    q: Tensor, pages: tuple[Tensor, Tensor], table: Tensor, last: int, config: SparsePrefill,
    scale: float, meter: PrefillMeter, *, index: tuple[Tensor, Tensor],
    backend: str = "reference", out: Tensor,
) -> None:  # fmt: skip
    """`prefill_row` of a row without padding whose keys and values lie in pages; an indexer
    chooses.

    Args:
        q, out: [H, T, D], the queries at positions up to `last`, one past the newest.
        pages: keys and values, each [pages, Hkv, page size, D]; table: int32, the row's in order.
        index: queries [n, T, d] and keys [n, L, d] of the row, L at least `last`.
    """
    offset = last - q.shape[1]
    meter.backend = backend
    rows = 1 if backend == "triton" else q.shape[0] * config.b_sel
    for piece in pieces(offset, last, 0, config, rows):
        at = slice(piece.first - offset, piece.last - offset)
        own = index[0][:, at], index[1][:, : piece.last]
        prefill_sparse(
            q[:, at], *pages, _predicted(*own, 0, piece, config, backend), table=table,
            start=0, edges=piece.edges, windows=piece.windows, sink=config.sink, scale=scale,
            backend=backend, out=out[:, at], block=config.b_sel,
        )  # fmt: skip
        _count(piece, 0, config.sink, meter)


def _predicted(
    iq: Tensor, ik: Tensor, start: int, piece: Piece, config: SparsePrefill, backend: str
) -> BlockSelection:
    """What an indexer chooses for a piece: iq [n, N, d] of its queries, ik [n, L, d] up to it."""
    return indexer_topk(
        iq, ik, start=start, edges=piece.edges, windows=piece.windows, sizes=piece.sizes,
        sink=config.sink, backend=backend, block=config.b_sel,
    )  # fmt: skip


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Dense causal attention of the first N positions: q [H, N, D], k and v [Hkv, N, D]."""
    grouped = q.shape[0] != k.shape[0]
    return scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=grouped
    )[0]


def pieces(
    first: int, last: int, start: int, config: SparsePrefill, rows: int
) -> tuple[Piece, ...]:
    """Cut [first, last) into pieces of whole blocks whose scores fit PIECE_BYTES, at least one
    block each.

    Args:
        rows: fp32 scores of a block and a key that lie in memory at once.
    """
    return _pieces(first, last, start, config, max(1, PIECE_BYTES // (4 * rows * max(1, last))))


@functools.lru_cache(maxsize=64)
def _pieces(
    first: int, last: int, start: int, config: SparsePrefill, blocks: int
) -> tuple[Piece, ...]:
    """Of `blocks` blocks each; cached, because every layer has the same."""
    found = []
    while first < last:
        end = min(last, start + ((first - start) // config.b_sel + blocks) * config.b_sel)
        found.append(_piece(first, end, start, config))
        first = end
    return tuple(found)


def _piece(first: int, end: int, start: int, config: SparsePrefill) -> Piece:
    edges = [first]
    while edges[-1] < end:
        after = start + ((edges[-1] - start) // config.b_sel + 1) * config.b_sel
        edges.append(min(end, after))
    low, dense = start + config.sink, config.dense_below or 0
    windows, sizes = [], []
    for edge, after in pairwise(edges):
        # a block near the row's beginning reads everything
        sparse = after - start > dense
        window = max(min(low, edge), edge - config.local + 1) if sparse else start
        windows.append(window)
        sizes.append(max(0, min(config.budget(after - start), window - low)))
    return Piece(first, end, tuple(edges), tuple(windows), tuple(sizes))


def covers(start: int, length: int, config: SparsePrefill) -> bool:
    """Whether every query up to `length` reads everything: nothing would be left out."""
    candidates = length - start - config.sink - config.local
    read_all = length - start <= (config.dense_below or 0)
    return read_all or candidates <= config.budget(length - start)


def share_read(length: int, config: SparsePrefill) -> float:
    """Share of the keys of dense causal attention that a prefill of `length` tokens reads."""
    meter = PrefillMeter()
    for piece in pieces(0, length, 0, config, 1):
        _count(piece, 0, config.sink, meter)
    return meter.share


def _count(piece: Piece, start: int, sink: int, meter: PrefillMeter) -> None:
    """Everything is known on the host."""
    read, cached = _reads(piece, start, sink)
    meter.read, meter.cached = meter.read + read, meter.cached + cached


@functools.lru_cache(maxsize=64)
def _reads(piece: Piece, start: int, sink: int) -> tuple[int, int]:
    """Twice the keys that the queries of a piece read, and twice those that they could."""
    read = cached = 0
    for n, (edge, after) in enumerate(pairwise(piece.edges)):
        window = piece.windows[n]
        fixed = min(sink, window - start) + piece.sizes[n]
        for position in (edge, after - 1):  # the mean of first and last, times the queries
            read += (fixed + position + 1 - window) * (after - edge)
            cached += (position + 1 - start) * (after - edge)
    return read, cached
