"""Attention of one new token per row on the GPU: dense, sparse, or each row its own kind in one
launch.

Same meaning as `ops.reference`; what a graph must not bake in (starts, lengths, windows, which
rows run) are int32 tensors on the device, read there only. Rows that are off keep what `out` held.

Where `allowed` is given, dense rows also leave their evidence in the workspace: the logits (base 2)
and their log-sum over J, until the next call with `allowed`. `selection` makes of them what it
needs, on whatever stream its caller has ordered behind this one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from . import attend, sparse
from .inputs import Allowed, Cache, Chosen
from .workspace import Workspace, check

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Tuning:
    """Launch parameters: keys per block, warps, pipeline stages, and pieces per SM (dense) or per
    tile (sparse).

    Zero programs or splits: what the workspace says. Zero block: by the length of a piece.
    """

    block: int = 64
    warps: int = 4
    stages: int = 3
    programs: int = 0
    splits: int = 0


DENSE = Tuning(stages=4)
SPARSE = Tuning(block=0, stages=5)
PAGED = Tuning(block=32)  # of fast steps, too: benchmarks/results/paged_tuning.json
PIECE = 128  # keys that a program of those reads at least
MIXED = Tuning()


def decode_dense(
    q: Tensor,
    kv: Cache,
    *,
    scale: float,
    work: Workspace,
    active: Tensor | None = None,
    allowed: Allowed | None = None,
    out: Tensor | None = None,
    tuning: Tuning = DENSE,
) -> Tensor:
    """Dense attention of the active rows, their work split evenly over the whole card.

    Args:
        q: [B, H, D] contiguous. active: int32 [B], 0 = leave the row alone; None: all rows.
        allowed: int32 [B] low and high of J; leaves the evidence of the active rows in `work`.

    Returns:
        out [B, H, D].
    """
    check(q, kv.k)
    out = torch.empty_like(q) if out is None else out
    on = work.always[: q.shape[0]] if active is None else active
    # with evidence there is more than loads to do, which a second program an SM hides
    programs = tuning.programs or (work.programs if allowed is None else 2 * work.programs)
    stages = tuning.stages if allowed is None else min(tuning.stages, 3)
    shape = _shape(q, kv)
    low, high = allowed or (kv.starts, kv.starts)
    evidence = allowed is not None
    work.require(q, kv.k, programs, 1, evidence * kv.width)
    attend.dense_kernel[(programs,)](
        q, kv.k, kv.v, *kv.strides, *kv.paging, work.parts, work.sums, kv.starts, kv.lengths,
        on, work.logits, kv.width, low, high, scale * LOG2_E, q.shape[0], **shape,
        BN=tuning.block, EVIDENCE=evidence, PAGE=kv.page, WALK=_walk(kv, stages),
        PRECISION=precision(q),
        num_warps=tuning.warps, num_stages=stages,
    )  # fmt: skip
    _combine(q, kv, out, work, on, programs, 1, tuning.block, evidence, dense=True, sparse=False)
    return out


def decode_sparse(
    q: Tensor,
    kv: Cache,
    chosen: Chosen,
    *,
    scale: float,
    work: Workspace,
    active: Tensor | None = None,
    new: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
    tuning: Tuning | None = None,
) -> Tensor:
    """Attention of the active rows over sink + selected + recent, gathered from the full cache.

    Args:
        new: the newest position's key and value, [B, Hkv, D] each, which are not in the cache yet:
            written by the same launch, for every row. None: they are there.

    Returns:
        [B, H, D].
    """
    check(q, kv.k)
    out = torch.empty_like(q) if out is None else out
    on = work.always[: q.shape[0]] if active is None else active
    tiles = q.shape[0] * kv.k.shape[1]
    tuning = tuning or (SPARSE if kv.tables is None else PAGED)
    splits = tuning.splits or work.splits(tiles)
    if kv.tables is not None and not tuning.splits:
        # with sink and recent a list is about half as long again as what was chosen
        splits = min(splits, max(1, 3 * chosen.indices.shape[2] // (2 * PIECE)))
    assert new is None or kv.tables is None, "new keys go into a contiguous cache"
    block = tuning.block or sparse_block(chosen.indices.shape[2], splits)
    shape = _shape(q, kv)
    del shape["BPAD"]
    work.require(q, kv.k, 0, splits, evidence=0)
    k_new, v_new = new or (kv.k[:, :, 0], kv.v[:, :, 0])
    assert k_new.stride(2) == v_new.stride(2) == 1
    sparse.sparse_kernel[(tiles * splits,)](
        q, kv.k, kv.v, *kv.strides, *kv.paging, out, work.parts, work.sums, kv.starts, kv.lengths,
        on, chosen.window_start, chosen.indices, chosen.counts, _lanes(chosen),
        chosen.indices.shape[2], chosen.sink,
        scale * LOG2_E, splits, k_new, v_new, *k_new.stride()[:2], *v_new.stride()[:2],
        **shape, BN=block, DIRECT=splits == 1, NEW=new is not None,
        SHARED=chosen.shared, LANES=chosen.lanes is not None, PAGE=kv.page,
        STAGES=_deep(kv, tuning.stages),
        PRECISION=precision(q), num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip
    if splits > 1:
        _combine(q, kv, out, work, on, 0, splits, block, False, dense=False, sparse=True)
    return out


def decode_mixed(
    q: Tensor,
    kv: Cache,
    chosen: Chosen,
    slow: Tensor,
    *,
    scale: float,
    work: Workspace,
    allowed: Allowed | None = None,
    out: Tensor | None = None,
    tuning: Tuning = MIXED,
) -> Tensor:
    """Each row its own kind: dense where `slow` (int32 [B]) is not 0, sparse elsewhere, in one
    launch. `allowed` as for `decode_dense`: the slow rows leave their evidence.

    Returns:
        out [B, H, D].
    """
    check(q, kv.k)
    out = torch.empty_like(q) if out is None else out
    tiles = q.shape[0] * kv.k.shape[1]
    # dense and sparse programs share the SMs, so each kind gets one an SM
    splits = tuning.splits or max(1, work.splits(tiles) // 2)
    programs = tuning.programs or work.programs
    block = tuning.block or 64
    low, high = allowed or (kv.starts, kv.starts)
    evidence = allowed is not None
    work.require(q, kv.k, programs, splits, evidence * kv.width)
    attend.mixed_kernel[(programs + tiles * splits,)](
        q, kv.k, kv.v, *kv.strides, *kv.paging, out, work.parts, work.sums, kv.starts, kv.lengths,
        slow, work.logits, kv.width, low, high, chosen.window_start, chosen.indices, chosen.counts,
        _lanes(chosen), chosen.indices.shape[2], chosen.sink, scale * LOG2_E, q.shape[0], programs,
        splits, **_shape(q, kv), BN=block, EVIDENCE=evidence, DIRECT=splits == 1,
        SHARED=chosen.shared, LANES=chosen.lanes is not None, PAGE=kv.page,
        WALK=_walk(kv, tuning.stages), STAGES=_deep(kv, 2 * tuning.stages - 1),
        PRECISION=precision(q),
        num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip
    sparse = splits > 1
    _combine(q, kv, out, work, slow, programs, splits, block, evidence, dense=True, sparse=sparse)
    return out


def _lanes(chosen: Chosen) -> Tensor:
    return chosen.counts if chosen.lanes is None else chosen.lanes


def _walk(kv: Cache, stages: int) -> int:
    """Stages of a loop over positions in order."""
    # a load whose address was loaded takes two stages for one of distance
    return stages if kv.tables is None else 2 * stages - 1


def _deep(kv: Cache, stages: int) -> int:
    """Stages of a loop over chosen positions, `stages` of which suffice in a contiguous cache."""
    return stages if kv.tables is None else stages + 2


def _shape(q: Tensor, kv: Cache) -> dict[str, int]:
    heads = kv.k.shape[1]
    padded = triton.next_power_of_2(q.shape[0])
    return {"HKV": heads, "G": q.shape[1] // heads, "D": q.shape[2], "BPAD": padded}


def sparse_block(k: int, splits: int) -> int:
    """Short pieces run faster in small blocks (measured: benchmarks/results)."""
    return 32 if k <= 256 * splits else 64


def precision(q: Tensor) -> str:
    """Of products of `q`."""
    # tf32, the default for fp32 inputs, has half precision's error
    return "ieee" if q.dtype == torch.float32 else "tf32"


def _combine(
    q: Tensor,
    kv: Cache,
    out: Tensor,
    work: Workspace,
    slow: Tensor,
    programs: int,
    splits: int,
    block: int,
    evidence: bool,
    *,
    dense: bool,
    sparse: bool,
) -> None:
    chunk = triton.next_power_of_2(max(2, splits))
    if dense:
        # a single active row has the most pieces: all of them in one step
        chunk = min(64, max(32, triton.next_power_of_2(programs // kv.k.shape[1] + 2)))
    attend.combine_kernel[(q.shape[0] * q.shape[1],)](
        out, work.parts, work.sums, work.lse, kv.starts, kv.lengths, slow, q.shape[0], programs,
        splits, **_shape(q, kv), BN=block, CHUNK=chunk,
        EVIDENCE=evidence, DENSE=dense, SPARSE=sparse, num_warps=4,
    )  # fmt: skip
