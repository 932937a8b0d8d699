"""An indexer in decode steps on the GPU: same meaning as `indexer.apply`, all rows at once, nothing
read on the host."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from . import index_decode_kernels
from .inputs import Allowed
from .selection import Plan, top_k
from .workspace import CHUNK, Workspace

TILE = 128  # keys that a program scores at a time


def frequencies(width: int, theta: float, device: torch.device) -> Tensor:
    """Of the rotary positions of an indexer, fp32 [d / 2]."""
    half = width // 2
    return theta ** (-torch.arange(half, dtype=torch.float32, device=device) / half)


def turn_and_append(
    raw: Tensor, index: Tensor, turns: Tensor, starts: Tensor, lengths: Tensor
) -> Tensor:
    """Turn index queries and keys by their position, and write the keys to the newest T positions
    of each row.

    Args:
        raw: [B, T, 2 d], W_q x and W_k x of each row's newest tokens; index: [B, 1, L, d]; turns:
            from `frequencies`; starts, lengths: int32 [B].

    Returns:
        the index queries [B, T, d], scaled by 1 / sqrt(d).
    """
    rows, tokens, _ = raw.shape
    width = index.shape[3]
    queries = torch.empty(rows, tokens, width, dtype=index.dtype, device=raw.device)
    assert raw.stride(2) == index.stride(3) == 1
    block = min(32, triton.next_power_of_2(tokens))
    index_decode_kernels.turn_kernel[(triton.cdiv(tokens, block), rows)](
        raw, *raw.stride()[:2], index, index.stride(0), index.stride(2), queries, turns, starts,
        lengths, tokens, math.sqrt(1 / width), D=width, BT=block, num_warps=1 if block < 32 else 4,
    )  # fmt: skip
    return queries


def turn_and_store(
    raw: Tensor, index: Tensor, turns: Tensor, positions: Tensor, slots: Tensor
) -> Tensor:
    """`turn_and_append` for tokens of any rows, whose keys go to slots of pages.

    Args:
        raw: [N, 2 d], W_q x and W_k x; index: [slots, d], contiguous; turns: from `frequencies`;
            positions: int [>= N], each token's in its row; slots: int [>= N], below 0: nowhere.

    Returns:
        the index queries [N, d], scaled by 1 / sqrt(d).
    """
    tokens, width = raw.shape[0], index.shape[1]
    queries = torch.empty(tokens, width, dtype=index.dtype, device=raw.device)
    assert raw.stride(1) == 1
    assert index.is_contiguous()
    index_decode_kernels.turn_slots_kernel[(triton.cdiv(tokens, 32),)](
        raw, raw.stride(0), positions, slots, index, queries, turns, tokens,
        math.sqrt(1 / width), D=width, BT=32, num_warps=4,
    )  # fmt: skip
    return queries


def choose_keys(
    queries: Tensor,
    index: Tensor,
    allowed: Allowed,
    *,
    work: Workspace,
    active: Tensor,
    indices: Tensor,
    counts: Tensor,
) -> None:
    """The highest scores of each active row's candidates, into `indices` int32 [B, 1, K], ascending
    and padded with -1, and `counts` [B, 1]; ties go to the lower position.

    Args:
        queries: [B, d]; index: [B, 1, L, d]; allowed: int32 [B] low and high of the candidates.
        work: of one head and one KV head. active: int32 [B], 0 = leave the row alone.
    """
    rows, _, width, dim = index.shape
    plan = Plan(rows, 1, width, (*allowed, active), 0, 0)
    work.require_scores(plan.heads * plan.pitch)
    assert queries.is_contiguous()
    index_decode_kernels.row_scores_kernel[(triton.cdiv(width, CHUNK), rows)](
        queries, index, index.stride(0), index.stride(2), work.scores, work.hists, plan.pitch,
        *plan.span, D=dim, BLOCK=CHUNK, BN=TILE, STAGES=4,
        PRECISION="ieee" if queries.dtype == torch.float32 else "tf32", num_warps=4,
    )  # fmt: skip
    top_k(plan, work, indices, counts, wide=True)
