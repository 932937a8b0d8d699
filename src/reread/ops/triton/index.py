"""What an indexer chooses for blocks of queries, on the GPU; same meaning as
`reference.indexer_topk`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
from torch import Tensor

from ...errors import UnsupportedError
from ...types import BlockSelection
from . import index_kernels
from .decode import LOG2_E

INDEX_DIMS = (16, 32, 64, 128)
MAX_BLOCK = 128  # queries that share a choice
MAX_CHOSEN = 16_384
SAMPLE = 4096


@dataclass(frozen=True, slots=True)
class Tuning:
    """Launch parameters: keys a tile and tiles of a program, query blocks a program, warps, stages;
    and of the top-K, scores a step, and warps of its two launches."""

    keys: int = 64
    tiles: int = 64
    group: int = 4
    warps: int = 4
    stages: int = 3
    block: int = 2048
    topk_warps: int = 8
    select_warps: int = 4


DEFAULT = Tuning()


def index_refusal(heads: int, dim: int, block: int, dtype: torch.dtype) -> str | None:
    """Why the kernels do not cover an indexer, or so many queries to a block; None if they do."""
    if heads != 1:
        return f"an indexer of {heads} heads: one head"
    if dim not in INDEX_DIMS:
        return f"an indexer of width {dim}: one of {', '.join(map(str, INDEX_DIMS))}"
    if block > MAX_BLOCK:
        return f"{block} queries that share a choice: at most {MAX_BLOCK}"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype {dtype}: bfloat16, float16 or float32"
    return None


@functools.lru_cache(maxsize=256)
def on_device(values: tuple[int, ...], device: torch.device) -> Tensor:
    """int32; cached, because every layer of a prefill has the same blocks."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def log_sums(iq: Tensor, ik: Tensor, *, start: int, first: int) -> Tensor:
    """log2 of the sum of e^(iq . ik) over the past of each query: iq [N, d] at positions from
    `first` on, ik [L, d] from `start` on -> fp32 [N]."""
    count, width = iq.shape
    sums = torch.empty(count, dtype=torch.float32, device=iq.device)
    block = 64 if iq.dtype == torch.float32 else 128
    index_kernels.log_sums_kernel[(triton.cdiv(count, block),)](
        iq, ik, sums, count, iq.stride(0), ik.stride(0), start, first, LOG2_E,
        D=width, BM=block, BN=64 if block == 64 else 128, STAGES=3,
        PRECISION="ieee" if iq.dtype == torch.float32 else "tf32", num_warps=8,
    )  # fmt: skip
    return sums


def index_scores(
    iq: Tensor,
    ik: Tensor,
    *,
    start: int,
    edges: Sequence[int],
    windows: Sequence[int],
    sink: int,
    block: int = 0,
    tuning: Tuning = DEFAULT,
) -> Tensor:
    """The highest log2 P of any query of each block: iq [N, d], ik [L, d] -> fp32 [Nq, L], defined
    on [start + sink, window) of each row.

    Raises:
        UnsupportedError: a shape that the kernels do not cover.
    """
    block = max(block, *(b - a for a, b in pairwise(edges)))
    reason = index_refusal(1, iq.shape[1], block, iq.dtype)
    if reason is not None:
        raise UnsupportedError(f"the Triton kernels do not cover {reason}")
    assert iq.stride(1) == ik.stride(1) == 1
    blocks, length, device = len(windows), ik.shape[0], iq.device
    # rows begin at multiples of 16, so that loads are wide whatever the length
    pitch = triton.cdiv(length, 16) * 16
    scores = torch.empty(blocks, pitch, dtype=torch.float32, device=device)[:, :length]
    span, group = tuning.keys * tuning.tiles, tuning.group
    grid = (triton.cdiv(max(windows), span), triton.cdiv(blocks, group))
    if max(windows) > start + sink:
        sums = log_sums(iq, ik, start=start, first=edges[0])
        index_kernels.scores_kernel[grid](
            iq, ik, sums, scores,
            on_device(tuple(edges), device), on_device(tuple(windows), device),
            blocks, iq.stride(0), ik.stride(0), start + sink, pitch, LOG2_E,
            D=iq.shape[1], BQ=max(16, triton.next_power_of_2(block)), BN=tuning.keys,
            TILES=tuning.tiles, GROUP=group, STAGES=tuning.stages,
            PRECISION="ieee" if iq.dtype == torch.float32 else "tf32", num_warps=tuning.warps,
        )  # fmt: skip
    return scores


def block_topk(
    scores: Tensor,
    *,
    low: int,
    windows: Sequence[int],
    sizes: Sequence[int],
    tuning: Tuning = DEFAULT,
) -> Tensor:
    """The `sizes[n]` largest of scores[n, low:windows[n]]: int32 [Nq, K], ascending, padded with
    -1; ties to the lower position.

    Raises:
        UnsupportedError: more than MAX_CHOSEN of them.
    """
    width, device = max([*sizes, 1]), scores.device
    if width > MAX_CHOSEN:
        raise UnsupportedError(
            f"the Triton kernels do not cover k={width} of a sparse prefill: at most {MAX_CHOSEN}"
        )
    blocks = scores.shape[0]
    indices = torch.empty(blocks, width, dtype=torch.int32, device=device)
    # about 1.6 K are wanted in the list; a sample of SAMPLE is off by a tenth of that
    cap = max(1024, triton.next_power_of_2(3 * width))
    keys, places = (torch.empty(blocks, cap, dtype=torch.int32, device=device) for _ in range(2))
    totals = torch.empty(blocks, dtype=torch.int32, device=device)
    spans = on_device(tuple(windows), device), on_device(tuple(sizes), device)
    index_kernels.list_row_kernel[(blocks,)](
        scores, *spans, keys, places, totals, low, scores.stride(0),
        CAP=cap, SAMPLE=min(SAMPLE, cap), BLOCK=tuning.block, num_warps=tuning.topk_warps,
    )  # fmt: skip
    index_kernels.choose_row_kernel[(blocks,)](
        scores, *spans, keys, places, totals, indices, low, scores.stride(0), width,
        CAP=cap, BLOCK=1024, num_warps=tuning.select_warps,
    )  # fmt: skip
    return indices


def indexer_topk(
    iq: Tensor,
    ik: Tensor,
    *,
    start: int,
    edges: Sequence[int],
    windows: Sequence[int],
    sizes: Sequence[int],
    sink: int,
    block: int = 0,
) -> BlockSelection:
    """See `ops.indexer_topk`.

    Raises:
        UnsupportedError: an indexer of several heads, or another shape that is not covered.
    """
    if iq.shape[0] != 1:
        reason = index_refusal(iq.shape[0], iq.shape[2], 1, iq.dtype)
        raise UnsupportedError(f"the Triton kernels do not cover {reason}")
    scores = index_scores(
        iq[0], ik[0], start=start, edges=edges, windows=windows, sink=sink, block=block
    )
    indices = block_topk(scores, low=start + sink, windows=windows, sizes=sizes)
    return BlockSelection(indices, tuple(sizes))
