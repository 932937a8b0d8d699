# mypy: ignore-errors
"""Kernel of `append`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def append_kernel(
    k, v, k_from_row, k_from_head, k_from_step, v_from_row, v_from_head, v_from_step,
    k_to, v_to, k_row, k_head, k_step, v_row, v_head, v_step, norms, width, lengths,
    HKV: tl.constexpr, T: tl.constexpr, D: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """One token of one (row, KV head): grid B * HKV * T."""
    tile, t = tl.program_id(0) // T, tl.program_id(0) % T
    b, h = (tile // HKV).to(tl.int64), (tile % HKV).to(tl.int64)
    d = tl.arange(0, D)
    at = tl.load(lengths + b).to(tl.int64) - T + t
    kk = tl.load(k + b * k_from_row + h * k_from_head + t * k_from_step + d)
    tl.store(k_to + b * k_row + h * k_head + at * k_step + d, kk)
    tl.store(
        v_to + b * v_row + h * v_head + at * v_step + d,
        tl.load(v + b * v_from_row + h * v_from_head + t * v_from_step + d),
    )
    if NORMS:
        wide = kk.to(tl.float32)
        tl.store(norms + tile.to(tl.int64) * width + at, tl.sqrt_rn(tl.sum(wide * wide, 0)))
