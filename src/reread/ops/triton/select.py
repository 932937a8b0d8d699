"""The Selector on the GPU: same meaning as `policy.selector.select`, all rows at once, nothing read on the host."""

from __future__ import annotations

import triton
from torch import Tensor

from ...config import SelectorConfig, SoftNMS, Span
from . import choose
from .workspace import CHUNK, Workspace


def select(
    mass: Tensor,
    low: Tensor,
    high: Tensor,
    config: SelectorConfig,
    *,
    work: Workspace,
    indices: Tensor,
    counts: Tensor,
    active: Tensor | None = None,
    norms: Tensor | None = None,
) -> None:
    """Choose again for the active rows, into `indices` and `counts`; other rows keep what they had.

    Without prior and cross-head term the positions are exactly those of the reference on the same evidence; with them
    sums run in another order, so that scores that differ by rounding alone may swap.

    Args:
        mass: fp32 [B, Hkv, L]; low, high: int32 [B], J of each row.
        indices: int32 [B, Hkv, K], counts: int32 [B, Hkv], written.
        active: int32 [B], 0 = leave the row alone; None: all rows.
        norms: fp32 [B, Hkv, L] key norms, needed where `config.lambda_clip` > 0.
    """
    assert mass.is_contiguous() and indices.is_contiguous() and counts.is_contiguous()
    rows, heads, width = mass.shape
    on = work.always[:rows] if active is None else active
    grid = (triton.cdiv(width, CHUNK), rows * heads)
    span = (width, low, high, on)
    first, second = (x.view(-1)[: mass.numel()].view_as(mass) for x in work.scores)
    _log_scores(mass, norms, first, grid, span, config, work)
    refined = _refine(first, second, grid, span, config)
    _top_k(refined, grid, span, work, indices, counts)


Grid = tuple[int, int]
Span_ = tuple[int, Tensor, Tensor, Tensor]


def _log_scores(
    mass: Tensor,
    norms: Tensor | None,
    scores: Tensor,
    grid: Grid,
    span: Span_,
    config: SelectorConfig,
    work: Workspace,
) -> None:
    prior = config.lambda_clip > 0
    heads = mass.shape[1]
    constants = (config.eps, config.gamma, config.beta, config.p, config.eta)
    if prior:
        assert norms is not None and norms.is_contiguous(), "the prior needs key norms"
        # the chunks beyond the grid are read too
        choose.prior_sums_kernel[(work.chunks, grid[1])](
            mass, norms, work.prior_sums, *span, *constants,
            HKV=heads, CHUNKS=work.chunks, BLOCK=CHUNK, num_warps=8,
        )  # fmt: skip
    choose.log_score_kernel[grid](
        mass, norms if prior else mass, work.prior_sums, scores, *span, *constants,
        config.lambda_clip, HKV=heads, CHUNKS=work.chunks, PRIOR=prior, BLOCK=CHUNK, num_warps=8,
    )  # fmt: skip


def _refine(
    scores: Tensor, spare: Tensor, grid: Grid, span: Span_, config: SelectorConfig
) -> Tensor:
    """Returns the tensor that holds the refined scores."""
    rows, heads = scores.shape[:2]
    if config.refine is not None:
        alpha, nms = 0.0, isinstance(config.refine, SoftNMS)
        if isinstance(config.refine, Span):
            before, after = config.refine.ahead, config.refine.back
        else:
            before = after = config.refine.neighbourhood // 2
            alpha = config.refine.alpha
        # a fused multiply-add would round once where the reference rounds twice
        choose.refine_kernel[grid](
            scores, spare, *span, alpha, before, after,
            HKV=heads, NMS=nms, BLOCK=CHUNK, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
        scores, spare = spare, scores
    if config.alpha_cross > 0:
        padded, block = triton.next_power_of_2(heads), 256
        choose.cross_head_kernel[(triton.cdiv(scores.shape[2], block), rows)](
            scores, spare, *span, config.alpha_cross, config.temperature, config.eps,
            HKV=heads, HPAD=padded, BLOCK=block, num_warps=4,
        )  # fmt: skip
        scores = spare
    return scores


def _top_k(
    scores: Tensor, grid: Grid, span: Span_, work: Workspace, indices: Tensor, counts: Tensor
) -> None:
    k, heads = indices.shape[2], scores.shape[1]
    for turn in range(3):
        choose.histogram_kernel[grid](
            scores, work.hists, work.cuts, *span, k,
            HKV=heads, ROUND=turn, BLOCK=CHUNK, num_warps=8,
        )  # fmt: skip
    choose.count_kernel[grid](
        scores, work.hists, work.cuts, work.tallies, *span, k,
        HKV=heads, CHUNKS=work.chunks, BLOCK=CHUNK, num_warps=8,
    )  # fmt: skip
    choose.gather_kernel[grid](
        scores, work.hists, work.cuts, work.tallies, indices, counts, *span, k,
        HKV=heads, CHUNKS=work.chunks, BLOCK=CHUNK, num_warps=8,
    )  # fmt: skip
