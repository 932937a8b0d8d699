"""Sampled blocks of a sparse prefill against the reference: what they choose, and what attention
gives on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..errors import NumericalError
from ..ops import reference
from ..prefill import Piece, PrefillMeter, pieces, prefill_row
from ..prefilling import SparsePrefill
from ..shapes import Shape
from ..types import BlockSelection
from .prefill_arms import close
from .timing import Record

WIDTH = 64  # of the index queries and keys
MIN_OVERLAP = 0.99
SWAP = 1e-2  # relative difference of scores below which two positions may be swapped
BLOCKS = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One layer's inputs for one row of L tokens, T of which are queries, the last ones.

    Attributes:
        q: [H, T, D]; k, v: [Hkv, L, D].
        iq: [1, T, d] and ik: [1, L, d] of an index, their rotary positions applied.
        backend: of our ops.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    iq: Tensor
    ik: Tensor
    backend: str = "triton"

    @classmethod
    def random(
        cls, shape: Shape, length: int, device: torch.device, dtype: torch.dtype = torch.bfloat16,
        *, queries: int | None = None, backend: str = "triton",
    ) -> Row:  # fmt: skip
        """Standard normal numbers; the index queries are scaled as an indexer scales them."""
        torch.manual_seed(0)
        new = length if queries is None else queries
        sizes = (
            (shape.heads, new, shape.head_dim), (shape.kv_heads, length, shape.head_dim),
            (shape.kv_heads, length, shape.head_dim), (1, new, WIDTH), (1, length, WIDTH),
        )  # fmt: skip
        q, k, v, iq, ik = (torch.randn(size, device=device, dtype=dtype) for size in sizes)
        return cls(q, k, v, iq * WIDTH**-0.5, ik, backend)

    @property
    def length(self) -> int:
        """L."""
        return self.k.shape[1]

    @property
    def scale(self) -> float:
        """Factor on the logits."""
        return float(self.q.shape[2] ** -0.5)

    def first(self, length: int) -> Row:
        """Its first tokens, where all tokens are queries."""
        cut = [x[:, :length].contiguous() for x in (self.q, self.k, self.v, self.iq, self.ik)]
        return Row(cut[0], cut[1], cut[2], cut[3], cut[4], self.backend)

    def attend(self, config: SparsePrefill, meter: PrefillMeter | None = None) -> Tensor:
        """Our sparse attention of all queries: [H, T, D]."""
        return prefill_row(
            self.q, self.k, self.v, 0, config, self.scale, meter or PrefillMeter(),
            index=(self.iq, self.ik), backend=self.backend,
        )  # fmt: skip


def check_sparse(row: Row, config: SparsePrefill) -> Record:
    """Selections and outputs of a few blocks of the whole row.

    Returns:
        the blocks' first positions, the least overlap of their selections with the reference's, the
        largest relative difference of scores that were swapped, the largest error of outputs.

    Raises:
        NumericalError: a block chooses or gives something else.
    """
    offset, blocks = row.length - row.q.shape[1], sampled_blocks(row, config)
    out = row.attend(config)
    found: Record = {"blocks": [], "overlap": 1.0, "swapped": 0.0, "error": 0.0}
    for piece, n in blocks:
        a, b = piece.edges[n], piece.edges[n + 1]
        at = slice(piece.first - offset, piece.last - offset)
        selection = ops.indexer_topk(
            row.iq[:, at], row.ik[:, : piece.last],
            start=0, edges=piece.edges, windows=piece.windows, sizes=piece.sizes,
            sink=config.sink, backend=row.backend,
        )  # fmt: skip
        size, what = piece.sizes[n], f"block of queries {a} to {b - 1}"
        chosen = selection.indices[n, :size]
        block: dict[str, Any] = {
            "start": 0, "edges": (a, b), "windows": piece.windows[n : n + 1], "sink": config.sink,
        }  # fmt: skip
        iq, ik = row.iq[:, a - offset : b - offset].float(), row.ik[:, :b].float()
        want = reference.indexer_topk(iq, ik, sizes=(size,), **block).indices[0, :size]
        scores = torch.matmul(iq[0], ik[0].T).amax(dim=0)
        overlap, swapped = agreement(chosen, want, scores, what)
        attended = reference.prefill_sparse(
            row.q[:, a - offset : b - offset].float(), row.k[:, :b].float(), row.v[:, :b].float(),
            BlockSelection(chosen[None].contiguous(), (size,)), scale=row.scale, **block,
        )  # fmt: skip
        error = close(out[:, a - offset : b - offset], attended, f"attention, {what}")
        found["blocks"].append(a)
        found["overlap"] = min(found["overlap"], overlap)
        found["swapped"] = max(found["swapped"], swapped)
        found["error"] = max(found["error"], error)
    return found


def sampled_blocks(row: Row, config: SparsePrefill) -> list[tuple[Piece, int]]:
    """Blocks that choose something, evenly spaced, the first and the last among them: the piece of
    each, and its place there."""
    first = row.length - row.q.shape[1]
    every = [
        (piece, n)
        for piece in pieces(first, row.length, 0, config, 1)
        for n, size in enumerate(piece.sizes)
        if size
    ]
    if not every:
        raise NumericalError(f"no block of {row.length} tokens leaves anything out")
    last = len(every) - 1
    return [every[i] for i in sorted({round(last * j / (BLOCKS - 1)) for j in range(BLOCKS)})]


def agreement(got: Tensor, want: Tensor, scores: Tensor, what: str) -> tuple[float, float]:
    """How far two choices of equal size agree: share in common, and the largest relative difference
    between the scores of what was swapped and the lowest chosen score.

    Args:
        got, want: positions, int [K]; scores: fp32 [L], the exact ones.

    Raises:
        NumericalError: `got` is no choice, fewer than `MIN_OVERLAP` agree, or scores that differ by
            more than `SWAP` were swapped.
    """
    ours, theirs = set(got.tolist()), set(want.tolist())
    if len(ours) != len(theirs) or min(ours, default=0) < 0 or max(ours, default=0) >= len(scores):
        raise NumericalError(f"{what}: {len(ours)} distinct positions, {len(theirs)} are right")
    if not theirs:
        return 1.0, 0.0
    threshold = float(scores[want.long()].min())
    swapped = max(
        _distance(scores, ours - theirs, threshold, below=True),
        _distance(scores, theirs - ours, threshold, below=False),
    )
    overlap = len(ours & theirs) / len(theirs)
    if overlap < MIN_OVERLAP or swapped > SWAP:
        raise NumericalError(
            f"{what}: {overlap:.4f} of the positions are the reference's (at least {MIN_OVERLAP}), "
            f"scores that differ by {swapped:.3g} were swapped (at most {SWAP})"
        )
    return overlap, swapped


def _distance(
    scores: Tensor, positions: Sequence[int] | set[int], edge: float, below: bool
) -> float:
    """Largest relative distance to the edge, of scores on its wrong side."""
    if not positions:
        return 0.0
    found = scores[torch.tensor(sorted(positions), device=scores.device)]
    gap = edge - found if below else found - edge
    return float(gap.clamp(min=0).max()) / max(abs(edge), 1e-6)
