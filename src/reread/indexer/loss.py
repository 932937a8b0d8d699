"""The loss of the indexer, KL(P || indexer), layer by layer and in chunks of queries.

The keys of the indexer are projected once per layer. The chunks use them as a leaf whose gradient
they fill, and one pass through the projections follows: the same gradient as of the whole matrix.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .model import Indexer

PIECE_BYTES = 1 << 30  # of fp32 [queries, keys] matrices that exist at a time
ROUND = 256  # keys of a chunk are rounded up, so that few sizes of matrices exist
HIDDEN = -1e30  # score of a key that is not past; finite, so that no gradient becomes NaN
TOP = 256
METRIC_EVERY = 16  # while training, recall is taken of one query in so many
# what scores are multiplied by, tried before the first step
FACTORS = tuple(2.0**-i for i in range(-2, 15))
SUMS = ("queries", "kl", "teacher", "asked", "recall", "mass")


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One layer's attention over a context, as the frozen model runs it.

    Attributes:
        x: [T, hidden], the input of the attention; heads: its query heads.
        mass: the teacher: int64 positions [N] and a number of keys L -> P, fp32 [N, L].
    """

    layer: int
    x: Tensor
    heads: int
    mass: Callable[[Tensor, int], Tensor]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Queries [first, last) of a sorted list of positions, and how many keys they need."""

    first: int
    last: int
    keys: int


def top_of(length: int) -> int:
    """The k of recall@k for a context of that length."""
    return min(TOP, max(1, length // 16))


def draw_stretch(most: float, seed: int, number: int) -> float:
    """How much longer a context is made for the indexer: between 1 and `most`, evenly in the
    logarithm. Seed and number as for `draw_queries`."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + number + 7) % 2**63)
    return float(most ** float(torch.rand((), generator=generator)))


def draw_queries(length: int, count: int, focus: int, seed: int, number: int) -> list[int]:
    """Sorted random positions of a context, no two alike; all where `count` is not less.

    Args:
        focus: half of them stand at or after it; 0: no part is preferred.
        seed, number: of the run and of the context; the same give the same positions.
    """
    if count >= length:
        return list(range(length))
    generator = torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)
    late = min(count // 2, length - focus) if focus else 0
    early = count - late if focus else count
    if focus and early > focus:
        early, late = focus, count - focus
    found = torch.randperm(focus or length, generator=generator)[:early]
    if late:
        after = torch.randperm(length - focus, generator=generator)[:late] + focus
        found = torch.cat([found, after])
    positions: list[int] = found.sort().values.tolist()
    return positions


def chunks(
    positions: Sequence[int], length: int, heads: int, index_heads: int, budget: int = PIECE_BYTES
) -> Iterator[Chunk]:
    """Cut sorted positions so that no chunk's matrices take more than `budget` bytes."""
    last = len(positions)
    # logits and probabilities of the teacher; scores, logarithms and gradients of the indexer
    each = 4 * (2 * heads + 4 * index_heads + 4)
    while last:
        keys = min(length, -(-(positions[last - 1] + 1) // ROUND) * ROUND)
        first = max(0, last - max(1, budget // (each * keys)))
        yield Chunk(first, last, keys)
        last = first


def log_prediction(iq: Tensor, ik: Tensor, positions: Tensor) -> Tensor:
    """Logarithm of the indexer's P; see `predicted_mass`.

    Args:
        iq: [n, N, d] of queries at `positions` (int64 [N]); ik: [n, L, d].

    Returns:
        fp32 [N, L]; about -1e30 where a key is not past.
    """
    at = torch.arange(ik.shape[1], device=ik.device)
    scores = torch.matmul(iq.float(), ik.float().transpose(1, 2))
    logs = torch.log_softmax(scores.masked_fill(at > positions[:, None], HIDDEN), dim=-1)
    if logs.shape[0] == 1:
        return logs[0]
    return torch.logsumexp(logs, dim=0) - math.log(logs.shape[0])


def divergence(p: Tensor, log_s: Tensor) -> Tensor:
    """KL(P || indexer) in nats, [N]; both fp32 [N, L]."""
    return (torch.xlogy(p, p) - p * log_s).sum(dim=-1)


def overlap(p: Tensor, log_s: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """What the indexer's top-k has of the oracle's, for rows [N, L] with more than k past keys.

    Returns:
        recall@k: share of P's top-k that the indexer's top-k holds; and mass@k: P's mass in the
        indexer's top-k over P's mass in its own; both [N].
    """
    best, theirs = p.topk(k, dim=-1)
    ours = log_s.topk(k, dim=-1).indices
    held = torch.zeros_like(p, dtype=torch.bool).scatter_(1, theirs, True)
    return held.gather(1, ours).float().mean(-1), p.gather(1, ours).sum(-1) / best.sum(-1)


def layer_loss(
    indexer: Indexer,
    call: LayerCall,
    positions: Sequence[int],
    *,
    weight: float | None,
    every: int = 1,
    stretch: float = 1.0,
    budget: int = PIECE_BYTES,
) -> Tensor:
    """One layer's loss over the queries at `positions`, back-propagated into the indexer.

    Args:
        positions: sorted.
        weight: factor of the summed KL whose gradient is added to the weights' `grad`; None: no
            gradient.
        every: take recall of one query in so many.
        stretch: factor of the positions that the indexer is told.

    Returns:
        the sums named by SUMS, fp32, on the device of x.
    """
    length, k = call.x.shape[0], top_of(call.x.shape[0])
    device = call.x.device
    asked = torch.tensor(positions, device=device)
    x = call.x.float()
    totals = torch.zeros(len(SUMS), device=device)
    with torch.set_grad_enabled(weight is not None):
        ik = indexer.keys(call.layer, x, torch.arange(length, device=device) * stretch)
        iq = indexer.queries(call.layer, x[asked], asked * stretch)
        leaves = [part.detach().requires_grad_(weight is not None) for part in (iq, ik)]
        for chunk in chunks(positions, length, call.heads, indexer.card.heads, budget):
            at = asked[chunk.first : chunk.last]
            p = call.mass(at, chunk.keys)
            log_s = log_prediction(
                leaves[0][:, chunk.first : chunk.last], leaves[1][:, : chunk.keys], at
            )
            kl = divergence(p, log_s).sum()
            if weight is not None:
                torch.autograd.backward(kl * weight)
            past = bisect.bisect_left(positions, k, chunk.first, chunk.last) - chunk.first
            totals += _sums(p, log_s.detach(), kl.detach(), k, slice(past, None, every))
        if weight is not None:
            torch.autograd.backward([iq, ik], [leaf.grad for leaf in leaves])
    return totals


@torch.no_grad()
def best_factor(indexer: Indexer, call: LayerCall, positions: Sequence[int]) -> float:
    """The one of FACTORS that gives the least KL when a layer's scores are multiplied by it.

    Weights drawn from the layer's own do not know of its QK-norm or of the mean over heads.
    """
    asked = torch.tensor(positions, device=call.x.device)
    at = torch.arange(call.x.shape[0], device=call.x.device)
    x = call.x.float()
    ik, iq = indexer.keys(call.layer, x, at), indexer.queries(call.layer, x[asked], asked)
    totals = torch.zeros(len(FACTORS), device=call.x.device)
    for chunk in chunks(positions, len(at), call.heads, indexer.card.heads):
        rows = slice(chunk.first, chunk.last)
        p = call.mass(asked[rows], chunk.keys)
        for i, factor in enumerate(FACTORS):
            log_s = log_prediction(iq[:, rows] * factor, ik[:, : chunk.keys], asked[rows])
            totals[i] += divergence(p, log_s).sum()
    return FACTORS[int(totals.nan_to_num(nan=torch.inf).argmin())]


def _sums(p: Tensor, log_s: Tensor, kl: Tensor, k: int, rows: slice) -> Tensor:
    """What a chunk adds to SUMS; `rows` are those that recall is taken of."""
    asked = len(range(p.shape[0])[rows])
    recall, mass = overlap(p[rows], log_s[rows], k) if asked else (p[0, :0], p[0, :0])
    counts = p.new_tensor([p.shape[0], asked])
    return torch.stack([counts[0], kl, p.sum(), counts[1], recall.sum(), mass.sum()])
