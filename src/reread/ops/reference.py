"""The PyTorch meaning of every op. Rows are computed one by one: a row's result cannot depend on
its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..policy.selector import NEG_INF, allowed_probabilities, power_mean, top_k
from ..types import BlockSelection, KVView, Selection


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, keep: Tensor | None = None) -> Tensor:
    """One row, no causality: q [H, D], k [Hkv, N, D], v [Hkv, N, Dv], keep bool [N] or None -> [H,
    Dv].

    The G query heads of a KV head form the rows of one small matrix, so K and V are read once,
    never repeated.
    """
    heads, dim = q.shape
    packed = q.view(1, k.shape[0], heads // k.shape[0], dim)
    mask = None if keep is None else keep.view(1, 1, 1, -1)
    out = scaled_dot_product_attention(packed, k[None], v[None], attn_mask=mask, scale=scale)
    return out.reshape(heads, v.shape[-1])


def decode_dense(
    q: Tensor, kv: KVView, *, scale: float, allowed: Sequence[tuple[int, int]] | None = None
) -> tuple[Tensor, Tensor | None]:
    """See `ops.decode_dense`."""
    rows, heads = q.shape[:2]
    out = q.new_empty(rows, heads, kv.v.shape[-1])
    if allowed is None:
        for b in range(rows):
            span = slice(kv.starts[b], kv.lengths[b])
            keep = None if kv.valid is None else kv.valid[b, span]
            out[b] = attend(q[b], kv.k[b, :, span], kv.v[b, :, span], scale, keep)
        return out, None
    mass = torch.zeros(rows, kv.k.shape[1], kv.k.shape[2], dtype=torch.float32, device=q.device)
    for b in range(rows):
        start, (low, high) = kv.starts[b], allowed[b]
        logits = _row_logits(q[b].unsqueeze(1), kv, b, scale)
        p = torch.softmax(logits[:, :, 0], dim=-1)
        v = kv.v[b, :, start : kv.lengths[b]]
        out[b] = torch.matmul(p.to(v.dtype), v).reshape(heads, -1)
        if high > low:
            mass[b, :, low:high] = allowed_probabilities(logits[..., low - start : high - start])[
                :, 0
            ]
    return out, mass


def verify_dense(
    q: Tensor, kv: KVView, *, scale: float, allowed: Sequence[tuple[int, int]] | None = None
) -> tuple[Tensor, Tensor | None]:
    """See `ops.verify_dense`."""
    rows, heads, queries = q.shape[:3]
    out = q.new_empty(rows, heads, queries, kv.v.shape[-1])
    mass = None
    if allowed is not None:
        shape = (rows, kv.k.shape[1], queries, kv.k.shape[2])
        mass = torch.zeros(shape, dtype=torch.float32, device=q.device)
    for b in range(rows):
        start, end = kv.starts[b], kv.lengths[b]
        if allowed is None and kv.valid is None and end - queries >= start:
            out[b] = _attend_newest(q[b], kv.k[b, :, start:end], kv.v[b, :, start:end], scale)
            continue
        at = torch.arange(start, end, device=q.device)
        seen_from = torch.arange(end - queries, end, device=q.device)
        logits = _row_logits(q[b], kv, b, scale)
        logits = logits.masked_fill_(at[None, :] > seen_from[:, None], NEG_INF)
        # only what sees nothing is zero: NaN in the inputs has to show
        blind = logits.amax(dim=-1, keepdim=True) == NEG_INF
        v = kv.v[b, :, start:end]
        p = torch.softmax(logits, dim=-1).masked_fill_(blind, 0.0).to(v.dtype)
        out[b] = torch.matmul(p.flatten(1, 2), v).view(heads, queries, -1)
        if mass is not None and allowed is not None and allowed[b][1] > allowed[b][0]:
            low, high = allowed[b]
            mass[b, :, :, low:high] = allowed_probabilities(logits[..., low - start : high - start])
    return out, mass


def _attend_newest(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One row whose newest T positions ask: q [H, T, D], k [Hkv, N, D], v [Hkv, N, Dv] -> [H, T,
    Dv]. Packed as in `attend`, so that K and V are read once for all G * T queries."""
    heads, new, dim = q.shape
    group, length = heads // k.shape[0], k.shape[1]
    future = torch.full((new, new), NEG_INF, dtype=q.dtype, device=q.device).triu(1)
    mask = q.new_zeros(group, new, length)
    mask[:, :, length - new :] = future
    packed = q.reshape(1, k.shape[0], group * new, dim)
    out = scaled_dot_product_attention(
        packed, k[None], v[None], attn_mask=mask.view(1, 1, group * new, length), scale=scale
    )
    return out.view(heads, new, v.shape[-1])


def decode_sparse(
    q: Tensor,
    kv: KVView,
    selection: Selection,
    window_start: Sequence[int],
    *,
    sink: int,
    scale: float,
) -> Tensor:
    """See `ops.decode_sparse`."""
    out = q.new_empty(*q.shape[:2], kv.v.shape[-1])
    group = q.shape[1] // kv.k.shape[1]
    for b in range(q.shape[0]):
        for h in range(kv.k.shape[1]):
            chosen = selection.indices[b, h, : int(selection.counts[b, h])].long()
            index = read_positions(kv, b, chosen, window_start[b], sink)
            queries = q[b, h * group : (h + 1) * group]
            out[b, h * group : (h + 1) * group] = attend(
                queries, kv.k[b, h, index][None], kv.v[b, h, index][None], scale
            )
    return out


def read_positions(kv: KVView, b: int, chosen: Tensor, window_start: int, sink: int) -> Tensor:
    """Every position that a fast step of row `b` reads, ascending: sink, chosen, recent. int64
    [N]."""
    start, length = kv.starts[b], kv.lengths[b]
    first = torch.arange(start, min(start + sink, window_start), device=chosen.device)
    last = torch.arange(window_start, length, device=chosen.device)
    if kv.valid is not None:
        first, last = first[kv.valid[b, first]], last[kv.valid[b, last]]
    return torch.cat([first, chosen, last])


def tail_evidence(
    q: Tensor,
    kv: KVView,
    positions: Sequence[Sequence[int]],
    *,
    scale: float,
    allowed: Sequence[tuple[int, int]],
    alpha: float,
) -> Tensor:
    """See `ops.tail_evidence`."""
    rows, width = kv.k.shape[0], kv.k.shape[2]
    mass = torch.zeros(rows, kv.k.shape[1], width, dtype=torch.float32, device=q.device)
    for b in range(rows):
        start, (low, high) = kv.starts[b], allowed[b]
        real = [i for i, position in enumerate(positions[b]) if position >= 0]
        if high <= low or not real:
            continue
        logits = _row_logits(q[b][:, real], kv, b, scale)[..., low - start : high - start]
        seen = [positions[b][i] for i in real]
        seen_from = torch.tensor(seen, device=q.device)
        if min(seen) < high - 1:
            future = torch.arange(low, high, device=q.device)[None, :] > seen_from[:, None]
            logits = logits.masked_fill(future, NEG_INF)
        p = allowed_probabilities(logits)
        # a query older than all of J saw nothing of it and is no evidence
        p = p[:, (seen_from >= low)] if bool((seen_from < low).any()) else p
        if p.shape[1]:
            mass[b, :, low:high] = power_mean(p, alpha)
    return mass


def _row_logits(q: Tensor, kv: KVView, b: int, scale: float) -> Tensor:
    """fp32 logits of row b's queries over its span: q [H, W, D] -> [Hkv, G, W, length - start],
    holes at -inf."""
    span = slice(kv.starts[b], kv.lengths[b])
    k = kv.k[b, :, span]
    heads, queries, dim = q.shape
    packed = q.reshape(k.shape[0], -1, dim).float()
    logits = torch.matmul(packed, k.float().transpose(1, 2)).mul_(scale)
    logits = logits.view(k.shape[0], heads // k.shape[0], queries, -1)
    return logits if kv.valid is None else logits.masked_fill(~kv.valid[b, span], NEG_INF)


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
) -> Tensor:
    """See `ops.prefill_sparse`: dense attention under the mask of what may be read."""
    at = torch.arange(k.shape[1], device=k.device)
    blocks = torch.zeros(len(selection.sizes), k.shape[1] + 1, dtype=torch.bool, device=k.device)
    # what pads a row of the selection lands in a column of its own
    blocks.scatter_(1, selection.indices.long() % (k.shape[1] + 1), True)
    keep = blocks[:, :-1] | ((at >= start) & (at < start + sink))
    keep |= at[None, :] >= torch.tensor(windows, device=k.device)[:, None]
    sizes = [after - edge for edge, after in pairwise(edges)]
    mask = keep.repeat_interleave(torch.tensor(sizes, device=k.device), dim=0)
    positions = torch.arange(edges[0], edges[-1], device=k.device)
    mask &= at[None, :] <= positions[:, None]
    group = q.shape[0] // k.shape[0]
    k, v = (x.repeat_interleave(group, dim=0)[None] for x in (k, v))
    return scaled_dot_product_attention(q[None], k, v, attn_mask=mask, scale=scale)[0]


def indexer_topk(
    iq: Tensor,
    ik: Tensor,
    *,
    start: int,
    edges: Sequence[int],
    windows: Sequence[int],
    sizes: Sequence[int],
    sink: int,
) -> BlockSelection:
    """See `ops.indexer_topk`."""
    scores = torch.matmul(iq.float(), ik.float().transpose(1, 2))
    at = torch.arange(ik.shape[1], device=ik.device)
    seen_from = torch.arange(edges[0], edges[-1], device=ik.device)
    hidden = (at[None, :] > seen_from[:, None]) | (at[None, :] < start)
    logs = torch.log_softmax(scores.masked_fill_(hidden, NEG_INF), dim=-1)
    logs = logs[0] if len(logs) == 1 else logs.logsumexp(dim=0)
    # candidates lie before all of a block's queries, so that causality hides none of them
    blocks = [logs[a - edges[0] : b - edges[0]].amax(dim=0) for a, b in pairwise(edges)]
    return best(torch.stack(blocks), start + sink, windows, sizes)


def best(scores: Tensor, low: int, windows: Sequence[int], sizes: Sequence[int]) -> BlockSelection:
    """The largest scores of each block's candidates, ties to the lower position.

    Args:
        scores: fp32 [Nq, L]; low: first candidate; the block's window ends them.
        sizes: how many each block chooses, at most its candidates.
    """
    width = max([*sizes, 1])
    at = torch.arange(scores.shape[1], device=scores.device)
    ends = torch.tensor(windows, device=scores.device)
    scores = scores.masked_fill((at < low) | (at[None, :] >= ends[:, None]), NEG_INF)
    indices = torch.full((len(sizes), width), -1, dtype=torch.int32, device=scores.device)
    # blocks of one size are chosen together; a schedule gives many blocks the same size
    for size in sorted(set(sizes) - {0}):
        rows = torch.tensor([n for n, s in enumerate(sizes) if s == size], device=scores.device)
        found, _ = top_k(scores[rows], size)
        indices[rows, :size] = found.to(torch.int32)
    return BlockSelection(indices, tuple(sizes))
