"""The Selector on the GPU: same meaning as `policy.selector.select`, all rows at once, nothing
read on the host."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor

from ...config import SelectorConfig, SoftNMS, Span
from ...errors import UnsupportedError
from . import radix, score
from .inputs import Allowed, Cache
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

    Without prior and cross-head term the positions are exactly those of the reference on the same
    evidence; with them sums run in another order, so that scores that differ by rounding alone may
    swap.

    Args:
        mass: fp32 [B, Hkv, L]; low, high: int32 [B], J of each row.
        indices: int32 [B, Hkv, K], counts: int32 [B, Hkv], written.
        active: int32 [B], 0 = leave the row alone; None: all rows.
        norms: fp32 [B, Hkv, L] key norms, needed where `config.lambda_clip` > 0.
    """
    assert mass.is_contiguous()
    rows, heads, width = mass.shape
    plan = _plan((rows, heads, width), config, (low, high), active, work)
    _scores(mass, 0, norms, plan, config, work)
    top_k(plan, work, indices, counts)


def evidence(
    kv: Cache, *, work: Workspace, allowed: Allowed, active: Tensor | None = None, heads: int
) -> Tensor:
    """The mass of the active rows from what the last attention call with `allowed` left in `work`.

    Args:
        allowed: that call's. active: int32 [B], of its dense rows; None: all. heads: query heads.

    Returns:
        fp32 [B, Hkv, L], zero outside J: a view of the workspace, good until the next call.
    """
    rows, kv_heads, width = allowed[0].shape[0], kv.k.shape[1], kv.width
    on = work.always[:rows] if active is None else active
    assert work.masses
    mass = work.mass.view(-1)[: rows * kv_heads * width].view(rows, kv_heads, width)
    score.evidence_kernel[(triton.cdiv(width, CHUNK), rows * kv_heads)](
        work.logits, work.lse, mass, width, *allowed, on,
        HKV=kv_heads, G=heads // kv_heads, BLOCK=CHUNK, num_warps=8,
    )  # fmt: skip
    return mass


def refresh(
    kv: Cache,
    config: SelectorConfig,
    *,
    heads: int,
    work: Workspace,
    allowed: Allowed,
    active: Tensor,
    indices: Tensor,
    counts: Tensor,
    norms: Tensor | None = None,
    lanes: Tensor | None = None,
) -> None:
    """`evidence` and `select` in one: the same positions, and no mass is written where there is no
    prior.

    Args:
        heads: query heads. allowed: as in the attention call before this one. active: int32 [B],
            which of that call's dense rows choose again. The others as for `select`.
        lanes: int32 [B], which of the lists in `indices` and `counts` is a row's, as in `Chosen`;
            not with a prior.
    """
    if config.lambda_clip > 0:
        assert lanes is None
        mass = evidence(kv, work=work, allowed=allowed, active=active, heads=heads)
        select(
            mass, *allowed, config,
            work=work, indices=indices, counts=counts, active=active, norms=norms,
        )  # fmt: skip
        return
    rows, kv_heads, width = allowed[0].shape[0], kv.k.shape[1], kv.width
    plan = _plan((rows, kv_heads, width), config, allowed, active, work)
    _scores(work.logits, heads // kv_heads, None, plan, config, work)
    top_k(plan, work, indices, counts, lanes=lanes)


@dataclass(frozen=True, slots=True)
class Plan:
    """Of one call: rows times KV heads, row pitch of the scores, J and active rows, refinement
    window."""

    heads: int
    kv_heads: int
    width: int
    span: tuple[Tensor, Tensor, Tensor]
    before: int
    after: int

    @property
    def rows(self) -> int:
        """B."""
        return self.heads // self.kv_heads

    @property
    def grid(self) -> tuple[int, int]:
        """Of the kernels whose programs are one chunk of one head."""
        return triton.cdiv(self.width, CHUNK), self.heads

    @property
    def pitch(self) -> int:
        """Distance of two rows of scores, whole chunks."""
        return self.grid[0] * CHUNK


def _plan(
    shape: tuple[int, int, int],
    config: SelectorConfig,
    allowed: Allowed,
    active: Tensor | None,
    work: Workspace,
) -> Plan:
    """shape: B, Hkv, L."""
    rows, kv_heads, width = shape
    on = work.always[:rows] if active is None else active
    plan = Plan(rows * kv_heads, kv_heads, width, (*allowed, on), *_window(config))
    work.require_scores(plan.heads * plan.pitch)
    return plan


def _window(config: SelectorConfig) -> tuple[int, int]:
    """How far before and after a position its refinement looks."""
    before = after = 0
    if isinstance(config.refine, Span):
        before, after = config.refine.ahead, config.refine.back
    elif isinstance(config.refine, SoftNMS):
        before = after = config.refine.neighbourhood // 2
    # blocks of CHUNK positions overlap by the window
    if before + after > CHUNK // 2:
        raise UnsupportedError(
            f"the Triton kernels do not cover a refinement over {before + after + 1} positions: "
            f"at most {CHUNK // 2 + 1}"
        )
    return before, after


def _scores(
    source: Tensor,
    group: int,
    norms: Tensor | None,
    plan: Plan,
    config: SelectorConfig,
    work: Workspace,
) -> None:
    """Refined scores of `source`, the mass or for a group > 0 the logits, and the top-K's first
    count."""
    prior, cross = config.lambda_clip > 0, config.alpha_cross > 0
    constants = (config.eps, config.gamma, config.beta, config.p, config.eta)
    if prior:
        assert norms is not None, "the prior needs key norms"
        assert norms.is_contiguous()
        # the chunks beyond the grid are read too
        score.prior_sums_kernel[(work.chunks, plan.heads)](
            source, norms, work.prior_sums, plan.width, *plan.span, *constants,
            HKV=plan.kv_heads, CHUNKS=work.chunks, BLOCK=CHUNK, num_warps=8,
        )  # fmt: skip
    nms = config.refine if isinstance(config.refine, SoftNMS) else None
    window = plan.before + plan.after
    # for NMS a fused multiply-add would round once where the reference rounds twice
    score.score_kernel[(work.choosers,)](
        source, work.lse, norms if prior else source, work.prior_sums, work.scores, work.hists,
        plan.width, plan.pitch, *plan.span, *constants, config.lambda_clip,
        nms.alpha if nms else 0.0, plan.rows,
        BPAD=triton.next_power_of_2(plan.rows), HKV=plan.kv_heads, G=group, CHUNKS=work.chunks,
        PRIOR=prior, BEFORE=plan.before, AFTER=plan.after, LOG=(window + 1).bit_length() - 1,
        NMS=nms is not None, COUNT=not cross, BLOCK=CHUNK, num_warps=8,
        enable_fp_fusion=nms is None,
    )  # fmt: skip
    if cross:
        _cross_heads(plan, config, work)


def _cross_heads(plan: Plan, config: SelectorConfig, work: Workspace) -> None:
    """The cross-head term, in place, and the count."""
    block = 256
    score.cross_head_kernel[(plan.pitch // block, plan.heads // plan.kv_heads)](
        work.scores, plan.pitch, *plan.span, config.alpha_cross, config.temperature, config.eps,
        HKV=plan.kv_heads, HPAD=triton.next_power_of_2(plan.kv_heads), BLOCK=block, num_warps=4,
    )  # fmt: skip
    radix.coarse_kernel[plan.grid](
        work.scores, work.hists, plan.pitch, *plan.span,
        HKV=plan.kv_heads, BLOCK=CHUNK, num_warps=8,
    )  # fmt: skip


def top_k(
    plan: Plan,
    work: Workspace,
    indices: Tensor,
    counts: Tensor,
    *,
    wide: bool = False,
    lanes: Tensor | None = None,
) -> None:
    """The K largest of `work.scores`, whose first count is made; wide: with wide bins; lanes: as
    for `refresh`."""
    assert indices.is_contiguous()
    assert counts.is_contiguous()
    shared = (work.scores, work.hists, work.cursors, work.cuts, work.tallies, *work.members)
    tail = (plan.pitch, *plan.span, indices.shape[2], plan.rows)
    fixed = {"HKV": plan.kv_heads, "CHUNKS": work.chunks, "BLOCK": CHUNK, "num_warps": 8}
    fixed |= {"WIDE": wide, "BPAD": triton.next_power_of_2(plan.rows)}
    radix.list_kernel[(work.choosers,)](*shared, *tail, **fixed)
    to = (indices, counts, counts if lanes is None else lanes)
    radix.gather_kernel[(work.choosers,)](*shared, *to, *tail, **fixed, LANES=lanes is not None)
