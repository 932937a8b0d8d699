"""The Selector on the GPU: same meaning as `policy.selector.select`, all rows at once, nothing
read on the host."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor

from ...config import SelectorConfig, SoftNMS, Span
from ...errors import UnsupportedError
from . import radix, score
from .workspace import CHUNK, ROUNDS, Workspace


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

    Without prior and cross-head term the positions are exactly those of the reference on the same
    evidence; with them
    sums run in another order, so that scores that differ by rounding alone may swap.

    Args:
        mass: fp32 [B, Hkv, L]; low, high: int32 [B], J of each row.
        indices: int32 [B, Hkv, K], counts: int32 [B, Hkv], written.
        active: int32 [B], 0 = leave the row alone; None: all rows.
        norms: fp32 [B, Hkv, L] key norms, needed where `config.lambda_clip` > 0.
    """
    assert all(x.is_contiguous() for x in (mass, indices, counts))
    before, after = _window(config)
    rows, heads, width = mass.shape
    on = work.always[:rows] if active is None else active
    blocks = triton.cdiv(width, CHUNK)
    plan = Plan(
        (blocks, rows * heads),
        blocks * CHUNK,
        (low, high, on),
        before,
        after,
        config.alpha_cross > 0,
    )
    work.require_scores(rows * heads * plan.pitch)
    scores = _log_scores(mass, norms, plan, config, work)
    _top_k(_refine(*scores, heads, plan, config, work), heads, plan, work, indices, counts)


@dataclass(frozen=True, slots=True)
class Plan:
    """Of one call: grid, row pitch of the scores, J and active rows, refinement window."""

    grid: tuple[int, int]
    pitch: int
    span: tuple[Tensor, Tensor, Tensor]
    before: int
    after: int
    cross: bool

    @property
    def stride(self) -> int:
        """Largest power of two in the window."""
        return 1 << ((self.before + self.after + 1).bit_length() - 1)

    @property
    def counted(self) -> bool:
        """Whether refinement comes last, and so does the top-K's first round too."""
        return self.stride > 1 and not self.cross


def _window(config: SelectorConfig) -> tuple[int, int]:
    """How far before and after a position its refinement looks."""
    before = after = 0
    if isinstance(config.refine, Span):
        before, after = config.refine.ahead, config.refine.back
    elif isinstance(config.refine, SoftNMS):
        before = after = config.refine.neighbourhood // 2
    if before + after >= 2 * CHUNK - 1:
        raise UnsupportedError(
            f"the Triton kernels do not cover a refinement over {before + after + 1} positions: "
            f"at most {2 * CHUNK - 1}"
        )
    return before, after


def _log_scores(
    mass: Tensor, norms: Tensor | None, plan: Plan, config: SelectorConfig, work: Workspace
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, and their maxima within groups."""
    prior = config.lambda_clip > 0
    heads, width = mass.shape[1:]
    constants = (config.eps, config.gamma, config.beta, config.p, config.eta)
    if prior:
        assert norms is not None, "the prior needs key norms"
        assert norms.is_contiguous()
        # the chunks beyond the grid are read too
        score.prior_sums_kernel[(work.chunks, plan.grid[1])](
            mass, norms, work.prior_sums, width, *plan.span, *constants,
            HKV=heads, CHUNKS=work.chunks, BLOCK=CHUNK, num_warps=8,
        )  # fmt: skip
    scores, prefix, suffix = work.scores
    score.log_score_kernel[plan.grid](
        mass, norms if prior else mass, work.prior_sums, scores, prefix, suffix, width, plan.pitch,
        *plan.span, *constants, config.lambda_clip,
        HKV=heads, CHUNKS=work.chunks, PRIOR=prior, STRIDE=plan.stride, BLOCK=CHUNK, num_warps=8,
    )  # fmt: skip
    return scores, prefix, suffix


def _refine(
    scores: Tensor,
    prefix: Tensor,
    suffix: Tensor,
    heads: int,
    plan: Plan,
    config: SelectorConfig,
    work: Workspace,
) -> Tensor:
    """Returns the tensor that holds the refined scores."""
    if plan.stride > 1:
        nms = config.refine if isinstance(config.refine, SoftNMS) else None
        # a fused multiply-add would round once where the reference rounds twice
        score.refine_kernel[plan.grid](
            scores, prefix, suffix, work.hists, plan.pitch, *plan.span, nms.alpha if nms else 0.0,
            BEFORE=plan.before, AFTER=plan.after, STRIDE=plan.stride,
            HKV=heads, NMS=nms is not None, COUNT=plan.counted, BLOCK=CHUNK,
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    if plan.cross:
        padded, block = triton.next_power_of_2(heads), 256
        rows = plan.grid[1] // heads
        score.cross_head_kernel[(plan.pitch // block, rows)](
            scores, prefix, plan.pitch, *plan.span,
            config.alpha_cross, config.temperature, config.eps,
            HKV=heads, HPAD=padded, BLOCK=block, num_warps=4,
        )  # fmt: skip
        return prefix
    return scores


def _top_k(
    scores: Tensor, heads: int, plan: Plan, work: Workspace, indices: Tensor, counts: Tensor
) -> None:
    k, span = indices.shape[2], (plan.pitch, *plan.span)
    for turn in range(1 if plan.counted else 0, ROUNDS):
        radix.histogram_kernel[plan.grid](
            scores, work.hists, work.cuts, *span, k,
            HKV=heads, ROUND=turn, BLOCK=CHUNK, num_warps=8,
        )  # fmt: skip
    radix.count_kernel[plan.grid](
        scores, work.hists, work.cuts, work.tallies, *span, k,
        HKV=heads, CHUNKS=work.chunks, BLOCK=CHUNK, num_warps=8,
    )  # fmt: skip
    radix.gather_kernel[plan.grid](
        scores, work.hists, work.cuts, work.tallies, indices, counts, *span, k,
        HKV=heads, CHUNKS=work.chunks, BLOCK=CHUNK, num_warps=8,
    )  # fmt: skip
