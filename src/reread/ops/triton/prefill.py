"""Sparse attention of blocks of prompt queries on the GPU; same meaning as
`reference.prefill_sparse`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
from torch import Tensor

from ...errors import UnsupportedError
from ...types import BlockSelection
from . import prefill_kernels
from .decode import LOG2_E
from .index import MAX_BLOCK, MAX_CHOSEN, on_device
from .workspace import HEAD_DIMS, MAX_GROUP


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """Launch parameters: rows of a tile at most, keys a step, warps, pipeline stages."""

    rows: int = 256
    keys: int = 64
    warps: int = 8
    stages: int = 3


def tuning_for(dim: int, dtype: torch.dtype) -> PrefillTuning:
    """What was fastest on an H200: benchmarks/results/gpu_prefill.json."""
    if dtype == torch.float32:
        return PrefillTuning(rows=64, keys=32, warps=4, stages=2)
    if dim == 256:
        return PrefillTuning(rows=128, keys=32, warps=8, stages=4)
    return PrefillTuning()


def prefill_refusal(group: int, block: int, k: int) -> str | None:
    """Why the kernels do not cover so many query heads a KV head, queries a block, or positions
    that an indexer chooses for it; None if they do."""
    if group > MAX_GROUP:
        return f"{group} query heads a KV head: at most {MAX_GROUP}"
    if block > MAX_BLOCK:
        return f"{block} queries that share a choice: at most {MAX_BLOCK}"
    if k > MAX_CHOSEN:
        return f"k={k} of a sparse prefill: at most {MAX_CHOSEN}"
    return None


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
    out: Tensor | None = None,
    table: Tensor | None = None,
    block: int = 0,
    tuning: PrefillTuning | None = None,
) -> Tensor:
    """See `ops.prefill_sparse`.

    Raises:
        UnsupportedError: a shape that the kernel does not cover.
    """
    heads, count, dim = q.shape
    block = max(block, *(b - a for a, b in pairwise(edges)))
    kv_heads = k.shape[-3]
    reason = prefill_refusal(heads // kv_heads, block, 0)
    if dim not in HEAD_DIMS or v.shape[-1] != dim:
        wanted = ", ".join(map(str, HEAD_DIMS))
        reason = f"head dims {dim} of keys and {v.shape[-1]} of values: the same, one of {wanted}"
    if reason is not None:
        raise UnsupportedError(f"the Triton kernels do not cover {reason}")
    assert q.stride(2) == k.stride(-1) == v.stride(-1) == 1
    assert table is not None or max(k.stride(1), v.stride(1)) * k.shape[1] < 1 << 31
    tuned = tuning_for(dim, q.dtype) if tuning is None else tuning
    group = heads // kv_heads
    queries = triton.next_power_of_2(block)
    packed = max(1, min(triton.next_power_of_2(group), tuned.rows // queries))
    chosen, counts = _with_sink(selection, start, windows, sink, q.device)
    if out is None:
        out = torch.empty(heads, count, dim, dtype=q.dtype, device=q.device)
    assert out.shape == q.shape
    assert out.stride(2) == 1
    grid = (kv_heads * triton.cdiv(group, packed), len(windows))
    # contiguous keys have no pages; the kernel then reads no table, so any pointer will do
    page, strides = (0, (0, *k.stride()[:2], 0, *v.stride()[:2]))
    if table is not None:
        page, strides = k.shape[2], (*k.stride()[:3], *v.stride()[:3])
    prefill_kernels.prefill_kernel[grid](
        q, k, v, out, *q.stride()[:2], *strides, *out.stride()[:2],
        counts if table is None else table,
        on_device(tuple(edges), q.device), on_device(tuple(windows), q.device), chosen, counts,
        chosen.shape[1], scale * LOG2_E,
        G=group, HEADS=packed, BQ=queries, D=dim, BN=tuned.keys, PAGE=page, STAGES=tuned.stages,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=tuned.warps,
        num_stages=tuned.stages,
    )  # fmt: skip
    return out


def _with_sink(
    selection: BlockSelection, start: int, windows: Sequence[int], sink: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Each block's list, the sink in front: int32 [Nq, sink + K], and how many are valid [Nq].

    A block whose window begins within the sink chooses nothing, so the sinks that its window holds
    are just not counted.
    """
    sinks = on_device(tuple(range(start, start + sink)), device)
    chosen = torch.cat([sinks.expand(len(windows), -1), selection.indices], dim=1)
    counts = tuple(
        min(sink, window - start) + size
        for window, size in zip(windows, selection.sizes, strict=True)
    )
    return chosen, on_device(counts, device)
