# mypy: ignore-errors
"""The attention kernels with dense rows: dense alone, both kinds in one launch, and the sum of
their partial results.

Dense work is one flat list of (row, KV head, block) over the active rows, cut into equal runs, one
a program: a single slow row of a batch is spread over the whole card. Program p that meets tile t
(row * Hkv + head) writes slot p + t, which no other pair has, and which makes the slots of a tile
consecutive. Sparse work is a fixed grid of tile x split.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sparse import sparse_piece
from .tiles import (
    FLOOR,
    ROWS,
    combine_slots,
    head_of,
    load_queries,
    next_piece,
    row_blocks,
    save_partial,
    slots_of,
    walk_span,
    walk_span_with_logits,
)


@triton.jit
def dense_run(
    pid, programs, q, k, v, k_row, k_head, k_step, v_row, v_head, v_step, tables, pages, parts,
    sums, starts, lengths, active, logits, width, low, high, scale2, B,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BPAD: tl.constexpr, BN: tl.constexpr,
    EVIDENCE: tl.constexpr, PAGE: tl.constexpr, WALK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Everything that program `pid` of `programs` does of the dense work; tables: each row's pages,
    rows `pages` apart."""
    blocks = row_blocks(starts, lengths, active, B, BPAD, BN) * HKV
    ends = tl.cumsum(blocks, 0)
    total = tl.sum(blocks, 0)
    share = (total + programs - 1) // programs
    work = pid * share
    stop = tl.minimum(work + share, total)
    while work < stop:
        b, h, block, taken = next_piece(work, stop, blocks, ends, BPAD, HKV)
        start = tl.load(starts + b)
        first = start + block * BN
        last = tl.minimum(tl.load(lengths + b), first + taken * BN)
        qs = load_queries(q, b, h, G, D, HKV)
        kb, vb = head_of(k, b, h, k_row, k_head, PAGE), head_of(v, b, h, v_row, v_head, PAGE)
        table = tables + b.to(tl.int64) * pages
        m = tl.full([ROWS], FLOOR, tl.float32)
        z = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D], tl.float32)
        mj, lj = m, z
        tile = b * HKV + h
        if EVIDENCE:
            # J goes first: what the softmax has then is J's own maximum and sum, which may be far
            # below the sink's
            begin = tl.minimum(tl.maximum(tl.load(low + b), first), last)
            end = tl.minimum(tl.maximum(tl.load(high + b), begin), last)
            m, z, acc = walk_span_with_logits(
                qs, kb, vb, k_row, k_step, v_row, v_step, table, begin, end, scale2, m, z, acc,
                logits + tile.to(tl.int64) * G * width, width, BN, D, G, PAGE, WALK, PRECISION,
            )  # fmt: skip
            mj, lj = m, z
            m, z, acc = walk_span(
                qs, kb, vb, k_row, k_step, v_row, v_step, table, first, begin, scale2, m, z, acc,
                BN, D, PAGE, WALK, PRECISION,
            )  # fmt: skip
            m, z, acc = walk_span(
                qs, kb, vb, k_row, k_step, v_row, v_step, table, end, last, scale2, m, z, acc,
                BN, D, PAGE, WALK, PRECISION,
            )  # fmt: skip
        else:
            m, z, acc = walk_span(
                qs, kb, vb, k_row, k_step, v_row, v_step, table, first, last, scale2, m, z, acc,
                BN, D, PAGE, WALK, PRECISION,
            )  # fmt: skip
        save_partial(parts, sums, pid + tile, m, z, acc, mj, lj, G, D, EVIDENCE)
        work += taken


@triton.jit
def dense_kernel(
    q, k, v, k_row, k_head, k_step, v_row, v_head, v_step, tables, pages, parts, sums,
    starts, lengths, active, logits, width, low, high, scale2, B,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BPAD: tl.constexpr, BN: tl.constexpr,
    EVIDENCE: tl.constexpr, PAGE: tl.constexpr, WALK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Dense rows alone: the whole grid shares the pieces of the active rows."""
    dense_run(
        tl.program_id(0), tl.num_programs(0), q, k, v, k_row, k_head, k_step, v_row, v_head,
        v_step, tables, pages, parts, sums,
        starts, lengths, active, logits, width, low, high, scale2, B,
        HKV, G, D, BPAD, BN, EVIDENCE, PAGE, WALK, PRECISION,
    )  # fmt: skip


@triton.jit
def mixed_kernel(
    q, k, v, k_row, k_head, k_step, v_row, v_head, v_step, tables, pages, out, parts, sums,
    starts, lengths, slow, logits, width, low, high, window, chosen, counts, lanes, K, sink, scale2,
    B, programs, splits,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BPAD: tl.constexpr, BN: tl.constexpr,
    EVIDENCE: tl.constexpr, DIRECT: tl.constexpr, SHARED: tl.constexpr, LANES: tl.constexpr,
    PAGE: tl.constexpr, WALK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Slow rows by the first `programs` programs, fast rows by the others.

    Sparse slots lie behind the dense ones.
    """
    pid = tl.program_id(0)
    if pid < programs:
        dense_run(
            pid, programs, q, k, v, k_row, k_head, k_step, v_row, v_head, v_step, tables, pages,
            parts, sums, starts, lengths, slow, logits, width, low, high, scale2, B,
            HKV, G, D, BPAD, BN, EVIDENCE, PAGE, WALK, PRECISION,
        )  # fmt: skip
    else:
        tile = (pid - programs) // splits
        on = tl.load(slow + tile // HKV) == 0
        slots = (programs + B * HKV).to(tl.int64)
        sparse_piece(
            tile, (pid - programs) % splits, splits, on, q, k, v, k_row, k_head, k_step,
            v_row, v_head, v_step, tables, pages, out, parts + slots * (G * D),
            sums + slots * (4 * ROWS),
            starts, lengths, window, chosen, counts, lanes, K, sink, scale2, q, q,
            HKV, G, D, BN, DIRECT, False, SHARED, LANES, PAGE, STAGES, PRECISION,
        )  # fmt: skip


@triton.jit
def combine_kernel(
    out, parts, sums, lse, starts, lengths, slow, B, programs, splits,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BPAD: tl.constexpr, BN: tl.constexpr,
    CHUNK: tl.constexpr, EVIDENCE: tl.constexpr, DENSE: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """One query head of one row. DENSE, SPARSE: which kinds have partials here; `slow` says which
    one a row is."""
    pid = tl.program_id(0)
    head, g = pid // G, pid % G
    b = head // HKV
    is_slow = tl.load(slow + b) != 0
    to = out + pid.to(tl.int64) * D
    if DENSE:
        slot, count = slots_of(head, starts, lengths, slow, B, programs, HKV, BPAD, BN)
        if is_slow & (count > 0):
            combine_slots(slot, count, g, parts, sums, to, lse + pid, G, D, CHUNK, EVIDENCE)
    if SPARSE:
        wanted = tl.load(slow + b) == 0 if DENSE else is_slow
        if wanted:
            slots = programs + B * HKV if DENSE else 0
            combine_slots(
                slots + head * splits, splits, g, parts, sums, to, lse, G, D, CHUNK, False
            )
