"""Sparse prefill against loops over single positions in float64."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reread import ops
from reread.config import SparsePrefill
from reread.errors import ConfigError
from reread.oracle import attention_mass, best, choose, sampled_queries
from reread.prefill import Piece, PrefillMeter, covers, pieces, prefill_row
from reread.types import BlockSelection

SCALE = 0.3


def make(length: int, new: int, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(length * 31 + new)
    q = torch.randn(heads, new, 8, generator=g)
    k, v = (torch.randn(kv_heads, length, 8, generator=g) for _ in range(2))
    return 2 * q, k, v


def brute_probabilities(q: Tensor, k: Tensor, t: int, offset: int, start: int) -> np.ndarray:
    """[H, L] of the query at position t."""
    group = q.shape[0] // k.shape[0]
    out = np.zeros((q.shape[0], k.shape[1]))
    for h in range(q.shape[0]):
        logits = [
            SCALE * float(q[h, t - offset].double() @ k[h // group, j].double())
            for j in range(start, t + 1)
        ]
        e = np.exp(np.array(logits) - max(logits))
        out[h, start : t + 1] = e / e.sum()
    return out


def brute_row(
    q: Tensor, k: Tensor, v: Tensor, start: int, config: SparsePrefill
) -> tuple[np.ndarray, dict[int, set[int]]]:
    """Output [H, T, Dv], and per query what it reads."""
    length, new = k.shape[1], q.shape[1]
    offset, group = length - new, q.shape[0] // k.shape[0]
    out = np.zeros((q.shape[0], new, v.shape[2]))
    reads: dict[int, set[int]] = {}
    blocks: dict[int, list[int]] = {}
    for t in range(max(offset, start), length):
        blocks.setdefault((t - start) // config.b_sel, []).append(t)
    for block in blocks.values():
        mass = sum(brute_probabilities(q, k, t, offset, start).mean(0) for t in block)
        assert isinstance(mass, np.ndarray)
        window = block[0] - config.local + 1
        candidates = list(range(start + config.sink, max(window, 0)))
        budget = config.budget(block[-1] + 1 - start)
        chosen = sorted(candidates, key=lambda j: (-mass[j], j))[:budget]
        for t in block:
            always = set(range(start, min(start + config.sink, t + 1)))
            always |= set(range(max(window, start), t + 1))
            reads[t] = {j for j in always | set(chosen) if j <= t}
            p = brute_probabilities(q, k, t, offset, start)
            for h in range(q.shape[0]):
                kept = sorted(reads[t])
                weights = p[h, kept] / p[h, kept].sum()
                out[h, t - offset] = weights @ v[h // group, kept].double().numpy()
    return out, reads


CASES = [
    (40, 40, 0, SparsePrefill(k=5, b_sel=1, sink=2, local=3)),
    (40, 40, 0, SparsePrefill(k=5, b_sel=8, sink=2, local=3)),
    (41, 41, 7, SparsePrefill(k=6, b_sel=8, sink=3, local=1)),
    (60, 23, 0, SparsePrefill(k=9, b_sel=16, sink=0, local=20)),
    (60, 23, 50, SparsePrefill(k=9, b_sel=4, sink=2, local=2)),
    (30, 30, 0, SparsePrefill(k=100, b_sel=4, sink=1, local=1)),
    (33, 1, 0, SparsePrefill(k=4, b_sel=64, sink=4, local=4)),
    (20, 20, 19, SparsePrefill(k=4, b_sel=4, sink=4, local=4)),
]


@pytest.mark.parametrize(("length", "new", "start", "config"), CASES)
def test_the_oracle_is_what_loops_say(
    length: int, new: int, start: int, config: SparsePrefill
) -> None:
    q, k, v = make(length, new)
    meter = PrefillMeter()
    got = prefill_row(q, k, v, start, config, SCALE, meter)
    want, reads = brute_row(q, k, v, start, config)
    np.testing.assert_allclose(got.numpy(), want, atol=2e-5)
    offset = length - new
    share = sum(map(len, reads.values())) / sum(
        t + 1 - start for t in range(max(offset, start), length)
    )
    # what is chosen never lies within a window, so its size is exact; windows grow evenly
    assert meter.share == pytest.approx(share, abs=0.02)


def test_a_budget_for_everything_is_dense_attention() -> None:
    q, k, v = make(50, 50)
    got = prefill_row(q, k, v, 0, SparsePrefill(k=50, b_sel=8), SCALE, PrefillMeter())
    k, v = (x.repeat_interleave(2, dim=0) for x in (k, v))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_what_comes_later_changes_nothing() -> None:
    q, k, v = make(48, 48)
    config = SparsePrefill(k=6, b_sel=8, sink=2, local=4)
    whole = prefill_row(q, k, v, 0, config, SCALE, PrefillMeter())
    for cut in (8, 24, 40):  # at the ends of blocks
        part = prefill_row(q[:, :cut], k[:, :cut], v[:, :cut], 0, config, SCALE, PrefillMeter())
        torch.testing.assert_close(part, whole[:, :cut])


def test_chunks_of_whole_blocks_change_nothing() -> None:
    q, k, v = make(64, 64)
    config = SparsePrefill(k=6, b_sel=8, sink=2, local=4)
    whole = prefill_row(q, k, v, 0, config, SCALE, PrefillMeter())
    parts = [
        prefill_row(q[:, a:b], k[:, :b], v[:, :b], 0, config, SCALE, PrefillMeter())
        for a, b in pairwise((0, 16, 24, 64))
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)


@given(
    first=st.integers(0, 90),
    extra=st.integers(1, 90),
    start=st.integers(0, 40),
    block=st.integers(1, 20),
    local=st.integers(1, 30),
    sink=st.integers(0, 6),
)
@settings(max_examples=200, deadline=None)
def test_pieces_cover_every_query_once(
    first: int, extra: int, start: int, block: int, local: int, sink: int
) -> None:
    first = max(first, start)
    last = first + extra
    config = SparsePrefill(k=3, b_sel=block, local=local, sink=sink)
    edges = [e for piece in pieces(first, last, start, config, 4 * block) for e in piece.edges[:-1]]
    assert edges[0] == first
    assert all((edge - start) % block == 0 for edge in edges[1:])
    assert all(0 < b - a <= block for a, b in pairwise([*edges, last]))
    for piece in pieces(first, last, start, config, 4 * block):
        for window, edge in zip(piece.windows, piece.edges[:-1], strict=True):
            assert start <= window <= edge
            assert window <= max(edge - local + 1, start + sink)


def test_pieces_bound_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reread.prefill.PIECE_BYTES", 4 * 4 * 100 * 16)
    q, k, v = make(100, 100)
    config = SparsePrefill(k=6, b_sel=8, sink=2, local=4)
    assert all(p.last - p.first <= 16 or p.last < 100 for p in pieces(0, 100, 0, config, 32))
    small = prefill_row(q, k, v, 0, config, SCALE, PrefillMeter())
    monkeypatch.undo()
    torch.testing.assert_close(small, prefill_row(q, k, v, 0, config, SCALE, PrefillMeter()))


def test_ties_go_to_the_lower_position() -> None:
    scores = torch.ones(2, 20)
    got = best(scores, 2, (11, 15), (3, 3))
    assert got.indices.tolist() == [[2, 3, 4], [2, 3, 4]]
    assert got.sizes == (3, 3)


def test_blocks_without_candidates_choose_nothing() -> None:
    scores = torch.ones(2, 8)
    got = best(scores, 4, (0, 3), (0, 0))
    assert got.sizes == (0, 0)
    assert bool((got.indices == -1).all())


def test_mass_is_a_distribution_over_the_past() -> None:
    q, k, _ = make(30, 10)
    positions = torch.arange(20, 30)
    mass = attention_mass(q, k, positions, 5, SCALE)
    torch.testing.assert_close(mass.sum(1), torch.ones(10))
    assert bool((mass[:, :5] == 0).all())
    assert all(bool((mass[i, p + 1 :] == 0).all()) for i, p in enumerate(positions.tolist()))


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5), samples=st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_samples_are_within_their_block_and_end_with_its_last(
    sizes: list[int], samples: int
) -> None:
    edges = np.cumsum([3, *sizes]).tolist()
    found = sampled_queries(edges, samples)
    for (edge, after), asked in zip(pairwise(edges), found, strict=True):
        assert len(asked) == min(samples, after - edge)
        assert asked == sorted(set(asked))
        assert edge <= asked[0]
        assert asked[-1] == after - 1


def test_sampling_every_query_is_the_oracle() -> None:
    q, k, _ = make(40, 40)
    blocks = Piece(0, 40, (0, 16, 32, 40), (0, 10, 26), (0, 5, 5))
    oracle = SparsePrefill(k=5, b_sel=16, sink=2, local=7)
    every = SparsePrefill(k=5, b_sel=16, sink=2, local=7, chooser="sampled", samples=16)
    want = choose(q, k, 0, blocks, oracle, SCALE)
    got = choose(q, k, 0, blocks, every, SCALE)
    assert torch.equal(got.indices, want.indices)


def test_the_budget_grows_with_the_length() -> None:
    config = SparsePrefill()
    assert config.budget(1) == config.budget(4096) == 256
    assert config.budget(100_000) == config.budget(10**6) == 2048
    middle = config.budget(round(math.sqrt(4096 * 100_000)))
    assert middle == pytest.approx(math.sqrt(256 * 2048), rel=0.01)
    assert SparsePrefill(k=77).budget(10**6) == 77


def test_short_prompts_leave_nothing_out() -> None:
    config = SparsePrefill(k=10, sink=4, local=16)
    assert covers(0, 30, config)
    assert covers(5, 35, config)
    assert not covers(0, 31, config)


def test_the_op_reads_no_padding_of_the_selection() -> None:
    q, k, v = make(12, 4)
    selection = BlockSelection(torch.full((1, 3), -1, dtype=torch.int32), (0,))
    out = ops.prefill_sparse(
        q, k, v, selection, start=0, edges=(8, 12), windows=(8,), sink=0, scale=SCALE
    )
    torch.testing.assert_close(out[:, 0], v.repeat_interleave(2, dim=0)[:, 8])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"chooser": "magic"}, "prefill.chooser='magic'"),
        ({"k": 0}, "prefill.k=0"),
        ({"b_sel": 0}, "prefill.b_sel=0"),
        ({"local": 0}, "prefill.local=0"),
        ({"sink": -1}, "prefill.sink=-1"),
        ({"samples": 0}, "prefill.samples=0"),
    ],
)
def test_impossible_values_are_named(change: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SparsePrefill(**change)  # type: ignore[arg-type]  # that is the test
