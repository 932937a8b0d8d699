"""An indexer at work: index keys cached as they are written, and what it chooses for a decode
step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kv import GrowingKV
from ..policy.selector import NEG_INF, top_k
from .model import Indexer, predicted_mass


@torch.no_grad()
def read(indexer: Indexer, layer: int, x: Tensor, kv: GrowingKV, starts: Sequence[int]) -> Tensor:
    """Cache the index keys of the newest T positions, whose keys are in `kv` already.

    Args:
        x: [B, T, hidden], the layer's input; starts: per row, the first position that is no
            padding: the indexer counts from there. In a pass with a placement, B are its rows.

    Returns:
        their index queries [B, n, T, d], in the dtype of the cache.
    """
    new, rows = x.shape[1], len(starts)
    columns = (kv.length - new,) * rows if kv.placement is None else kv.placement.columns
    begins, first = (torch.tensor(values, device=x.device)[:, None] for values in (columns, starts))
    positions = (begins + torch.arange(new, device=x.device) - first).clamp(min=0)
    x = x.to(next(indexer.parameters()).dtype)
    dtype = kv.keys.dtype
    kv.append_index(indexer.keys(layer, x, positions).to(dtype))
    return indexer.queries(layer, x, positions).to(dtype)


def step_scores(iq: Tensor, ik: Tensor, low: int, high: int, start: int) -> Tensor:
    """Of the candidates [low, high) of one decode step of one row, fp32 [high - low].

    Args:
        iq: [n, 1, d], of the newest position; ik: [n, L, d]; start: first position that is no
            padding.
    """
    if len(iq) == 1:
        return (iq[0].float() @ ik[0, low:high].float().T)[0]
    return predicted_mass(iq, ik, [ik.shape[1] - 1], start)[0, low:high]


def best_keys(scores: Tensor, low: int, k: int, valid: Tensor | None = None) -> Tensor:
    """The k highest of the candidates from position `low` on: int32 [min(k, candidates)],
    ascending; ties go to the lower position. valid: bool, False for padding."""
    if valid is not None:
        scores = scores.masked_fill(~valid, NEG_INF)
    found, counts = top_k(scores[None], k)
    return found[0, : int(counts[0])] + low
