"""Which keys attention looks at, which of them were read, and how long they stay the same.

Everything here is of one row and one layer, and per KV head: the G query heads that share one are
averaged, except where it says "some query head".
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...policy.selector import NEG_INF, top_k
from ...types import KVView, Reading


def probabilities(q: Tensor, kv: KVView, scale: float) -> Tensor:
    """Dense attention of one query over one row, whatever was really read.

    Args:
        q: [H, D]; kv: a view of a single row with L columns.

    Returns:
        fp32 [Hkv, G, L]; 0 where the row has no key.
    """
    k = kv.k[0]
    packed = q.reshape(k.shape[0], -1, q.shape[-1]).float()
    logits = torch.matmul(packed, k.float().transpose(1, 2))
    return torch.softmax(logits.mul_(scale).masked_fill_(~existing(kv), NEG_INF), dim=-1)


def existing(kv: KVView) -> Tensor:
    """Which columns of a single row hold a key, bool [L]."""
    at = torch.arange(kv.k.shape[2], device=kv.k.device)
    exist = (at >= kv.starts[0]) & (at < kv.lengths[0])
    return exist if kv.valid is None else exist & kv.valid[0]


def read_mask(reading: Reading | None, kv: KVView) -> Tensor:
    """Which columns a step read, bool [Hkv, L]; reading: None for a step that reads everything."""
    exist = existing(kv).expand(kv.k.shape[1], -1)
    if reading is None:
        return exist
    at = torch.arange(exist.shape[1], device=exist.device)
    fixed = (at < reading.sink_end) | (at >= reading.window_start)
    return exist & fixed.expand_as(exist).scatter(1, reading.selected.long(), True)


def covered(p: Tensor, read: Tensor) -> Tensor:
    """Share of the attention that falls on columns that were read, fp32 [Hkv].

    Args:
        p: from `probabilities`; read: from `read_mask`.
    """
    return (p.mean(dim=1) * read).sum(dim=-1)


def in_use(p: Tensor, selected: Tensor, keys: int) -> Tensor:
    """Whether some query head gives each selected key more than an even share, 1 / keys.

    Args:
        p: from `probabilities`; selected: whole numbers [Hkv, K]; keys: how many the row has.

    Returns:
        bool [Hkv, K].
    """
    return p.amax(dim=1).gather(1, selected.long()) > 1 / keys


def top_set(p: Tensor, low: int, high: int, k: int) -> Tensor:
    """The k columns of [low, high) with the most attention, int32 [Hkv, k], ascending; ties go to
    the lower one. p: from `probabilities`; k: at most high - low."""
    found, _ = top_k(p.mean(dim=1)[:, low:high], k)
    return found + low


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """Share of each head's set `a` that is in `b`, fp32 [Hkv]; both int32 [Hkv, k], ascending."""
    at = torch.searchsorted(b, a).clamp(max=b.shape[1] - 1)
    return (b.gather(1, at) == a).float().mean(dim=1)


def binned(values: Tensor, edges: Tensor) -> Tensor:
    """Sums of values [L] over the bins [edges[i], edges[i + 1]), fp32 [bins]; columns from L on
    count as 0.

    Args:
        edges: int64 [bins + 1], ascending from 0, the last at least L.
    """
    at = torch.arange(values.shape[0], device=values.device)
    bins = torch.bucketize(at, edges, right=True) - 1
    return values.new_zeros(edges.numel() - 1).float().index_add_(0, bins, values.float())
