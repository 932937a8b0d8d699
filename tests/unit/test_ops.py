"""The attention ops against loops over positions, with padding, holes and poisoned memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reread import ops
from reread.errors import UnsupportedError
from reread.types import KVView, Selection

from .. import brute

seeds = st.integers(0, 2**31 - 1)
shapes = st.tuples(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 4, 8])
)


def rand(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g)


def make(
    seed: int, rows: int, hkv: int, group: int, dim: int, *, length: int = 20, holes: bool = False
) -> tuple[Tensor, KVView]:
    """A ragged view; everything outside the valid spans is NaN, so that reading it shows."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (
        rand(g, rows, hkv * group, dim),
        rand(g, rows, hkv, length, dim),
        rand(g, rows, hkv, length, dim + 1),
    )
    starts = tuple(int(x) for x in torch.randint(0, 6, (rows,), generator=g))
    valid = None
    if holes:
        valid = torch.rand(rows, length, generator=g) > 0.2
        valid[:, -1] = True
        for b, start in enumerate(starts):
            valid[b, :start] = False
            valid[b, start] = True
    for b, start in enumerate(starts):
        k[b, :, :start], v[b, :, :start] = math.nan, math.nan
    return q, KVView(k, v, starts, (length,) * rows, valid)


def readable(kv: KVView, b: int) -> list[int]:
    span = range(kv.starts[b], kv.lengths[b])
    return [j for j in span if kv.valid is None or bool(kv.valid[b, j])]


def attention(
    q: Tensor, kv: KVView, b: int, head: int, positions: Sequence[int], scale: float
) -> np.ndarray:
    """One query head over a list of positions."""
    h = head // (q.shape[1] // kv.k.shape[1])
    p = brute.softmax(
        [float(q[b, head].double() @ kv.k[b, h, j].double()) * scale for j in positions]
    )
    return np.asarray(
        sum(w * kv.v[b, h, j].double().numpy() for w, j in zip(p, positions, strict=True))
    )


def probabilities(
    q: Tensor, kv: KVView, b: int, h: int, positions: Sequence[int], scale: float
) -> np.ndarray:
    """Mean over the query heads of KV head h of their softmax over `positions`. q: [H, D]"""
    group = q.shape[0] // kv.k.shape[1]
    heads = [q[h * group + i].double() for i in range(group)]
    return np.mean(
        [
            brute.softmax([float(x @ kv.k[b, h, j].double()) * scale for j in positions])
            for x in heads
        ],
        axis=0,
    )


@given(seeds, shapes, st.booleans())
def test_dense_reads_every_valid_position_and_no_other(
    seed: int, shape: tuple[int, int, int, int], holes: bool
) -> None:
    q, kv = make(seed, *shape, holes=holes)
    out, mass = ops.decode_dense(q, kv, scale=0.4)
    assert mass is None
    for b in range(q.shape[0]):
        for head in range(q.shape[1]):
            want = attention(q, kv, b, head, readable(kv, b), 0.4)
            np.testing.assert_allclose(out[b, head].numpy(), want, rtol=1e-4, atol=1e-5)


@given(seeds, shapes, st.booleans())
def test_asking_for_evidence_does_not_change_the_output(
    seed: int, shape: tuple[int, int, int, int], holes: bool
) -> None:
    q, kv = make(seed, *shape, holes=holes)
    plain, _ = ops.decode_dense(q, kv, scale=0.4)
    allowed = [(start + 2, length - 3) for start, length in zip(kv.starts, kv.lengths, strict=True)]
    with_evidence, _ = ops.decode_dense(q, kv, scale=0.4, allowed=allowed)
    torch.testing.assert_close(with_evidence, plain, rtol=1e-4, atol=1e-5)


@given(seeds, shapes, st.booleans(), st.integers(0, 4), st.integers(1, 6))
def test_evidence_is_the_group_mean_of_the_softmax_over_j(
    seed: int, shape: tuple[int, int, int, int], holes: bool, sink: int, recent: int
) -> None:
    q, kv = make(seed, *shape, holes=holes)
    allowed = [
        (start + sink, length - recent) for start, length in zip(kv.starts, kv.lengths, strict=True)
    ]
    _, mass = ops.decode_dense(q, kv, scale=0.4, allowed=allowed)
    assert mass is not None
    for b, (low, high) in enumerate(allowed):
        j = [x for x in readable(kv, b) if low <= x < high]
        for h in range(kv.k.shape[1]):
            want = np.zeros(kv.k.shape[2])
            if j:
                want[j] = probabilities(q[b], kv, b, h, j, 0.4)
            np.testing.assert_allclose(mass[b, h].numpy(), want, rtol=1e-4, atol=1e-6)


def test_an_empty_j_gives_no_evidence() -> None:
    q, kv = make(0, 1, 2, 2, 4)
    start = kv.starts[0]
    out, mass = ops.decode_dense(q, kv, scale=1.0, allowed=[(start + 9, start + 9)])
    assert mass is not None
    assert float(mass.abs().sum()) == 0.0
    assert bool(torch.isfinite(out).all())


@given(seeds, shapes, st.booleans(), st.integers(0, 4), st.integers(1, 6), st.integers(0, 5))
def test_sparse_reads_sink_selected_and_recent_once_each(
    seed: int, shape: tuple[int, int, int, int], holes: bool, sink: int, recent: int, k: int
) -> None:
    q, kv = make(seed, *shape, holes=holes)
    rows, hkv = kv.k.shape[:2]
    g = torch.Generator().manual_seed(seed)
    windows = [kv.lengths[b] - recent for b in range(rows)]
    indices = torch.full((rows, hkv, k), -1, dtype=torch.int32)
    counts = torch.zeros(rows, hkv, dtype=torch.int32)
    for b in range(rows):
        j = [x for x in readable(kv, b) if kv.starts[b] + sink <= x < windows[b]]
        for h in range(hkv):
            picked = sorted(j[i] for i in torch.randperm(len(j), generator=g)[:k].tolist())
            counts[b, h] = len(picked)
            indices[b, h, : len(picked)] = torch.tensor(picked, dtype=torch.int32)
    out = ops.decode_sparse(q, kv, Selection(indices, counts), windows, sink=sink, scale=0.4)
    for b in range(rows):
        for head in range(q.shape[1]):
            h = head // (q.shape[1] // hkv)
            picked = indices[b, h, : int(counts[b, h])].tolist()
            read = {j for j in readable(kv, b) if j < kv.starts[b] + sink or j >= windows[b]} | set(
                picked
            )
            want = attention(q, kv, b, head, sorted(read), 0.4)
            np.testing.assert_allclose(out[b, head].numpy(), want, rtol=1e-4, atol=1e-5)


@given(seeds, shapes, st.integers(0, 4), st.integers(1, 6))
def test_selecting_everything_equals_dense(
    seed: int, shape: tuple[int, int, int, int], sink: int, recent: int
) -> None:
    q, kv = make(seed, *shape)
    _rows, hkv = kv.k.shape[:2]
    windows = [length - recent for length in kv.lengths]
    everything = [list(range(start + sink, w)) for start, w in zip(kv.starts, windows, strict=True)]
    width = max(len(j) for j in everything)
    indices = torch.tensor(
        [[j + [-1] * (width - len(j))] * hkv for j in everything], dtype=torch.int32
    )
    counts = torch.tensor([[len(j)] * hkv for j in everything], dtype=torch.int32)
    sparse = ops.decode_sparse(q, kv, Selection(indices, counts), windows, sink=sink, scale=0.4)
    dense, _ = ops.decode_dense(q, kv, scale=0.4)
    torch.testing.assert_close(sparse, dense, rtol=1e-4, atol=1e-5)


@given(seeds, st.integers(1, 5), st.sampled_from([0.5, 1.0, 2.0]), st.integers(1, 12))
def test_tail_evidence_is_causal_and_a_power_mean(
    seed: int, w: int, alpha: float, recent: int
) -> None:
    """J may hold positions in an early tail query's future: they must get nothing from it."""
    _, kv = make(seed, 2, 2, 2, 4)
    q = rand(torch.Generator().manual_seed(seed + 1), 2, 4, w, 4)
    length = kv.k.shape[2]
    positions = [list(range(length - w, length))] * 2
    allowed = [(start + 1, length - recent) for start in kv.starts]
    mass = ops.tail_evidence(q, kv, positions, scale=0.4, allowed=allowed, alpha=alpha)
    for b, (low, high) in enumerate(allowed):
        for h in range(2):
            p = np.zeros((w, length))
            for t, at in enumerate(positions[b]):
                j = [x for x in range(low, high) if x <= at]
                p[t, j] = probabilities(q[b, :, t], kv, b, h, j, 0.4)
            want = np.zeros(length)
            want[low:high] = brute.evidence(p[:, low:high], alpha)
            np.testing.assert_allclose(mass[b, h].numpy(), want, rtol=2e-3, atol=1e-5)


def test_tail_evidence_skips_queries_that_are_padding() -> None:
    _, kv = make(3, 1, 2, 2, 4)
    q = rand(torch.Generator().manual_seed(1), 1, 4, 4, 4)
    length, start = kv.k.shape[2], kv.starts[0]
    allowed = [(start + 1, length - 3)]
    with_padding = ops.tail_evidence(
        q, kv, [[-1, -1, 18, 19]], scale=0.4, allowed=allowed, alpha=0.5
    )
    alone = ops.tail_evidence(q[:, :, 2:], kv, [[18, 19]], scale=0.4, allowed=allowed, alpha=0.5)
    torch.testing.assert_close(with_padding, alone)


@given(seeds, shapes, st.booleans())
def test_a_row_is_bit_equal_alone_and_among_others(
    seed: int, shape: tuple[int, int, int, int], holes: bool
) -> None:
    q, kv = make(seed, *shape, holes=holes)
    allowed = [(start + 1, length - 2) for start, length in zip(kv.starts, kv.lengths, strict=True)]
    out, mass = ops.decode_dense(q, kv, scale=0.4, allowed=allowed)
    for b in range(q.shape[0]):
        one, one_mass = ops.decode_dense(
            q[b : b + 1], kv.row(b), scale=0.4, allowed=allowed[b : b + 1]
        )
        assert mass is not None
        assert one_mass is not None
        assert torch.equal(one[0], out[b])
        assert torch.equal(one_mass[0], mass[b])


def test_half_precision_evidence_is_full_precision() -> None:
    q, kv = make(0, 1, 2, 2, 8)
    half = KVView(kv.k.bfloat16(), kv.v.bfloat16(), kv.starts, kv.lengths)
    out, mass = ops.decode_dense(q.bfloat16(), half, scale=0.4, allowed=[(kv.starts[0] + 1, 17)])
    assert out.dtype == torch.bfloat16
    assert mass is not None
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass.sum(-1), torch.ones(1, 2), rtol=1e-5, atol=1e-5)


def test_a_backend_that_cannot_run_is_refused_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    assert ops.resolve_backend("auto", cpu) == ops.resolve_backend("reference", cpu) == "reference"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnsupportedError, match="needs a CUDA device"):
        ops.resolve_backend("triton", cpu)


def test_wrong_shapes_are_caught_by_our_own_checks() -> None:
    q, kv = make(0, 2, 2, 2, 4)
    with pytest.raises(AssertionError):
        ops.decode_dense(q[:1], kv, scale=1.0)
    with pytest.raises(AssertionError):
        ops.decode_dense(q[:, :3], kv, scale=1.0)
    with pytest.raises(AssertionError):
        ops.decode_dense(q[..., :3], kv, scale=1.0)
