"""The attention-mass top-k oracle of sparse prefill (OSP), and the training-free chooser made of
it: what dense attention itself says is worth reading."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from .ops.reference import best
from .policy.selector import NEG_INF
from .prefilling import SparsePrefill
from .types import BlockSelection


def attention_mass(q: Tensor, k: Tensor, positions: Tensor, start: int, scale: float) -> Tensor:
    """P(t): probabilities of dense causal attention, averaged over the query heads.

    Args:
        q: [H, N, D] queries that stand at `positions` (int64 [N]); k: [Hkv, L, D]; start: first
            position that is no padding.

    Returns:
        fp32 [N, L], each row sums to 1.
    """
    heads, queries, dim = q.shape
    packed = q.reshape(k.shape[0], -1, dim).float()
    logits = torch.matmul(packed, k.float().transpose(1, 2)).mul_(scale)
    logits = logits.view(heads, queries, -1)
    at = torch.arange(k.shape[1], device=k.device)
    hidden = (at[None, :] > positions[:, None]) | (at[None, :] < start)
    return torch.softmax(logits.masked_fill_(hidden, NEG_INF), dim=-1).mean(dim=0)


def step_mass(q: Tensor, k: Tensor, start: int, scale: float, valid: Tensor | None) -> Tensor:
    """P of one decode step, the newest of L positions: q [H, D], k [Hkv, L, D] -> fp32 [L].

    Args:
        start: first position that is no padding; valid: bool [L] where some behind it are.
    """
    packed = q.view(k.shape[0], -1, q.shape[-1]).float()
    logits = torch.matmul(packed, k.float().transpose(1, 2)).mul_(scale).flatten(0, 1)
    logits[:, :start] = NEG_INF
    if valid is not None:
        logits.masked_fill_(~valid, NEG_INF)
    return torch.softmax(logits, dim=-1).mean(dim=0)


def sampled_queries(edges: Sequence[int], samples: int | None) -> list[list[int]]:
    """Per block, the positions of the queries that are asked: all, or `samples` evenly spaced ones,
    the last among them."""
    out = []
    for edge, after in pairwise(edges):
        every = range(edge, after)
        count = len(every) if samples is None else min(samples, len(every))
        out.append([every[(i + 1) * len(every) // count - 1] for i in range(count)])
    return out


class Blocks(Protocol):
    """Blocks of one row's queries: see `prefill.Piece`."""

    @property
    def edges(self) -> tuple[int, ...]: ...
    @property
    def windows(self) -> tuple[int, ...]: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...


def choose(
    q: Tensor, k: Tensor, start: int, blocks: Blocks, config: SparsePrefill, scale: float
) -> BlockSelection:
    """What each block of one row's queries may read besides sink and window.

    Args:
        q: [H, N, D], queries at positions edges[0] to edges[-1]; k: [Hkv, L, D].
    """
    asked = sampled_queries(blocks.edges, None if config.chooser == "oracle" else config.samples)
    positions = torch.tensor([p for block in asked for p in block], device=k.device)
    mass = attention_mass(q[:, positions - blocks.edges[0]], k, positions, start, scale)
    block = torch.repeat_interleave(
        torch.arange(len(asked), device=k.device),
        torch.tensor([len(b) for b in asked], device=k.device),
    )
    means = mass.new_zeros(len(asked), k.shape[1]).index_add_(0, block, mass)
    return best(means, start + config.sink, blocks.windows, blocks.sizes)
