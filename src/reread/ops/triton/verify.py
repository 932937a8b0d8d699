"""Dense attention of the T newest positions of each row on the GPU, in one pass over the cache:
what verifies drafted tokens.

Same meaning as `ops.reference.verify_dense`. What a graph must not bake in is read on the device
only, as in `decode`; rows that are off keep what `out` held. One pass serves queries times group up
to 128 (more take another pass), at the padded size 16, 32, 64 or 128: on the GPU's matrix units 64
costs hardly more than 16, 128 costs twice 64.

Where `allowed` is given, one query of each row, `asked`, leaves the evidence that `decode_dense`
leaves of its only one; all queries' would have to be stored, or the keys read twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from . import verify_kernels
from .decode import LOG2_E, precision
from .inputs import Allowed, Cache
from .workspace import MAX_TILE, Workspace, check

FP32_TILE = 16  # as MAX_TILE: exact fp32 products run without the matrix units, out of registers


@dataclass(frozen=True, slots=True)
class VerifyTuning:
    """Launch parameters; zeros: by shape and dtype.

    Attributes:
        block: keys per block. warps, stages: of a program.
        programs: what the work is cut into, at most two an SM.
        tile: the least padded size, 16 to 128.
        apart: the asked query's logits by a product of their own, 1 or 2 for no.
    """

    block: int = 0
    warps: int = 0
    stages: int = 0
    programs: int = 0
    tile: int = 0
    apart: int = 0


AUTO = VerifyTuning()


def verify_dense(
    q: Tensor,
    kv: Cache,
    *,
    scale: float,
    work: Workspace,
    active: Tensor | None = None,
    allowed: Allowed | None = None,
    asked: Tensor | None = None,
    out: Tensor | None = None,
    tuning: VerifyTuning = AUTO,
) -> Tensor:
    """Dense attention of the active rows' T newest positions, causal to the token.

    Args:
        q: [B, H, T, D], last stride 1; query t of row b stands at position lengths[b] - T + t.
        kv: with the T positions' keys and values; lengths are one past the last of them.
        work: with `queries` of at least T.
        active: int32 [B], 0 = leave the row alone; None: all rows.
        allowed: int32 [B] low and high of J, together with `asked`; high is at most one past the
            asked query's position.
        asked: int32 [B], which of its T queries leaves each active row's evidence in `work`, as
            `decode_dense` would.
        out: [B, H, T, D], last stride 1.

    Returns:
        out; zero where a query stands before its row's start.
    """
    check(q, kv.k)
    out = torch.empty_like(q) if out is None else out
    assert out.shape == q.shape
    assert out.stride(-1) == kv.v.stride(-1) == 1
    assert (allowed is None) == (asked is None)
    on = work.always[: q.shape[0]] if active is None else active
    queries = q.shape[2]
    for first, after in _passes(q, kv):
        # to a pass that ends before the newest position, what follows does not exist
        behind = queries - after
        lengths = kv.lengths - behind if behind else kv.lengths
        span, ask = slice(first, after), None
        if allowed is not None and asked is not None:
            ask = *allowed, asked - first if first else asked
        _pass(q[:, :, span], kv, out[:, :, span], on, lengths, ask, scale, work, tuning)
    return out


def _pass(
    q: Tensor,
    kv: Cache,
    out: Tensor,
    on: Tensor,
    lengths: Tensor,
    ask: tuple[Tensor, Tensor, Tensor] | None,
    scale: float,
    work: Workspace,
    tuning: VerifyTuning,
) -> None:
    """`verify_dense` for queries that one program can hold.

    ask: low and high of J and the asked query, counted from the first of `q`: outside of them, it
    belongs to another pass, which leaves the evidence.
    """
    evidence = ask is not None
    shape = _shape(q, kv, tuning.tile)
    tuned = resolve(tuning, shape["M"], q.shape[3], q.dtype, work.programs, evidence)
    programs = tuned.programs
    low, high, asked = ask or (kv.starts, kv.starts, kv.starts)
    work.require_queries(q, kv.k, programs, evidence * kv.width)
    shape["BPAD"] = triton.next_power_of_2(q.shape[0])
    shape["BN"] = tuned.block
    verify_kernels.verify_kernel[(programs,)](
        q, *q.stride()[:3], kv.k, kv.v, *kv.strides, work.query_parts, work.query_sums, kv.starts,
        lengths, on, low, high, asked, work.logits, kv.width, scale * LOG2_E, q.shape[0],
        **shape, EVIDENCE=evidence, APART=tuned.apart == 1, PRECISION=precision(q),
        num_warps=tuned.warps, num_stages=tuned.stages,
    )  # fmt: skip
    chunk = min(64, max(32, triton.next_power_of_2(programs // kv.k.shape[1] + 2)))
    verify_kernels.verify_combine_kernel[(q.shape[0] * q.shape[1] * q.shape[2],)](
        out, *out.stride()[:3], work.query_parts, work.query_sums, work.lse, asked, kv.starts,
        lengths, on, q.shape[0], programs, **shape, CHUNK=chunk, EVIDENCE=evidence, num_warps=4,
    )  # fmt: skip


def resolve(
    tuning: VerifyTuning, tile: int, dim: int, dtype: torch.dtype, sms: int, evidence: bool
) -> VerifyTuning:
    """`tuning` with its zeros filled in: what spills no registers, and where it can leaves room for
    two programs an SM (compiled for sm_90)."""
    exact = dtype == torch.float32
    heavy = exact or tile == 128 or (dim == 256 and tile == 64)
    block = tuning.block or (32 if dim == 256 or exact else 64)
    warps = tuning.warps or (8 if heavy else 4)
    programs = tuning.programs or (sms if heavy else 2 * sms)
    apart = tuning.apart or (1 if tile >= 64 and not exact else 2)
    # else logits pass through shared memory, where two programs with three stages no longer fit
    stages = tuning.stages or (2 if evidence and apart == 2 and (dim, tile) == (128, 64) else 3)
    return VerifyTuning(block, warps, stages, programs, tile, apart)


def _passes(q: Tensor, kv: Cache) -> Iterator[tuple[int, int]]:
    """Which queries [first, after) each pass serves: as many as fit, since keys cost the time."""
    limit = FP32_TILE if q.dtype == torch.float32 else MAX_TILE
    size = limit // (q.shape[1] // kv.k.shape[1])
    for first in range(0, q.shape[2], size):
        yield first, min(first + size, q.shape[2])


def _shape(q: Tensor, kv: Cache, tile: int) -> dict[str, int]:
    heads = kv.k.shape[1]
    group, queries = q.shape[1] // heads, q.shape[2]
    padded = max(16, tile, triton.next_power_of_2(group * queries))
    return {"HKV": heads, "G": group, "T": queries, "M": padded, "D": q.shape[3]}
