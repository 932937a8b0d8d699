"""What attention looks at and what was read of it, against loops over positions; and the watches
that add it up, on steps made by hand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reread.evaluation.tasks import support
from reread.evaluation.tasks.watch import DenseWatch, MethodWatch, Picture, Support
from reread.types import KVView, Reading, StepKind, Watched

from .. import brute

SCALE = 0.5
seeds = st.integers(0, 2**31 - 1)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Tensor, KVView]:
    """A query and a row's cache, with padding in front, behind and, sometimes, between."""
    hkv, group, dim = draw(st.integers(1, 3)), draw(st.integers(1, 3)), 4
    width = draw(st.integers(1, 30))
    start = draw(st.integers(0, width - 1))
    end = draw(st.integers(start + 1, width))
    g = torch.Generator().manual_seed(draw(seeds))
    k, v = torch.randn(2, 1, hkv, width, dim, generator=g)
    valid = None
    if draw(st.booleans()):
        valid = torch.rand(1, width, generator=g) < 0.7
        valid[:, end - 1] = True  # the current token
    q = 3 * torch.randn(hkv * group, dim, generator=g)
    return q, KVView(k, v, (start,), (end,), valid)


def positions_of(kv: KVView) -> list[int]:
    span = range(kv.starts[0], kv.lengths[0])
    return [j for j in span if kv.valid is None or bool(kv.valid[0, j])]


@given(steps())
def test_probabilities_are_dense_attention(step: tuple[Tensor, KVView]) -> None:
    q, kv = step
    got = support.probabilities(q, kv, SCALE)
    hkv, group, width = got.shape
    where = positions_of(kv)
    for h in range(hkv):
        for g in range(group):
            keys = kv.k[0, h, where].double().numpy()
            want = np.zeros(width)
            want[where] = brute.softmax(keys @ q[h * group + g].double().numpy() * SCALE)
            np.testing.assert_allclose(got[h, g].numpy(), want, atol=1e-5)


@given(steps(), st.data())
def test_covered_is_the_sum_over_what_was_read(
    step: tuple[Tensor, KVView], data: st.DataObject
) -> None:
    q, kv = step
    where, hkv = positions_of(kv), kv.k.shape[1]
    sink = data.draw(st.integers(kv.starts[0], kv.lengths[0]))
    window = data.draw(st.integers(sink, kv.lengths[0]))
    between = [j for j in where if sink <= j < window]
    size = data.draw(st.integers(0, len(between)))
    chosen = [sorted(data.draw(st.permutations(between))[:size]) for _ in range(hkv)]
    reading = Reading(torch.tensor(chosen).reshape(hkv, size), sink, window)
    p = support.probabilities(q, kv, SCALE)
    read = support.read_mask(reading, kv)
    for h in range(hkv):
        want = [j for j in where if j < sink or j >= window or j in chosen[h]]
        assert read[h].nonzero().flatten().tolist() == want
        mass = sum(float(p[h, :, j].mean()) for j in want)
        assert float(support.covered(p, read)[h]) == pytest.approx(mass, abs=1e-5)


@given(steps())
def test_a_step_that_reads_everything_covers_everything(step: tuple[Tensor, KVView]) -> None:
    q, kv = step
    p = support.probabilities(q, kv, SCALE)
    covered = support.covered(p, support.read_mask(None, kv))
    torch.testing.assert_close(covered, torch.ones_like(covered))


@given(steps(), st.integers(0, 9))
def test_a_key_is_in_use_where_some_head_gives_it_more_than_its_share(
    step: tuple[Tensor, KVView], size: int
) -> None:
    q, kv = step
    where, hkv = positions_of(kv), kv.k.shape[1]
    selected = torch.tensor(where[:size]).expand(hkv, -1)
    p = support.probabilities(q, kv, SCALE)
    got = support.in_use(p, selected.int(), len(where))
    for h in range(hkv):
        for i, j in enumerate(where[:size]):
            assert bool(got[h, i]) == any(float(x) > 1 / len(where) for x in p[h, :, j])


@given(steps(), st.data())
def test_the_top_set_holds_the_largest(step: tuple[Tensor, KVView], data: st.DataObject) -> None:
    q, kv = step
    low = data.draw(st.integers(kv.starts[0], kv.lengths[0] - 1))
    high = data.draw(st.integers(low + 1, kv.lengths[0]))
    k = data.draw(st.integers(1, high - low))
    p = support.probabilities(q, kv, SCALE)
    got = support.top_set(p, low, high, k)
    for h, mass in enumerate(p.mean(dim=1).tolist()):
        ranked = sorted((-mass[j], j) for j in range(low, high))
        assert got[h].tolist() == sorted(j for _, j in ranked[:k])


@given(seeds, st.integers(1, 3), st.integers(1, 20), st.integers(20, 40))
def test_overlap_counts_what_both_sets_hold(seed: int, heads: int, k: int, width: int) -> None:
    g = torch.Generator().manual_seed(seed)
    a, b = (
        torch.stack([torch.randperm(width, generator=g)[:k].sort().values for _ in range(heads)])
        for _ in range(2)
    )
    want = [len(set(x) & set(y)) / k for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert support.overlap(a.int(), b.int()).tolist() == pytest.approx(want)
    assert support.overlap(a.int(), a.int()).tolist() == [1.0] * heads


@given(seeds, st.integers(1, 40), st.integers(1, 12), st.integers(0, 10))
def test_bins_add_up_what_lies_in_them(seed: int, width: int, bins: int, room: int) -> None:
    values = torch.rand(width, generator=torch.Generator().manual_seed(seed))
    total = max(width + room, bins)
    edges = torch.arange(bins + 1) * total // bins
    got = support.binned(values, edges)
    want = [float(values[a:b].sum()) for a, b in pairwise(edges)]
    assert got.tolist() == pytest.approx(want, abs=1e-5)


# ---- watches, on steps of one KV head whose attention is given


def seen(
    mass: list[float], kind: StepKind = StepKind.FAST, reading: Reading | None = None
) -> Watched:
    """A step with exactly this attention over its keys: the logits are the logarithms."""
    logs = torch.tensor(mass).clamp(min=1e-30).log()
    kv = KVView(logs.view(1, 1, -1, 1), logs.view(1, 1, -1, 1), (0,), (len(mass),))
    return Watched(0, kind, torch.ones(1, 1), kv, 1.0, reading)


def selects(*positions: int, window: int) -> Reading:
    return Reading(torch.tensor([positions]), 1, window)


def test_useless_keys_by_hand() -> None:
    """Positions 1, 2 and 3 of five are selected; an even share is 0.2, then 1/6. Position 1 gets
    more at the first step, 3 at the second, 2 at neither; at the slow step it is too late."""
    watch, reading = MethodWatch(), selects(1, 2, 3, window=4)
    watch(0, seen([0.5, 0.1, 0.1, 0.1, 0.2], StepKind.SLOW))
    watch(0, seen([0.5, 0.3, 0.1, 0.05, 0.05], reading=reading))
    watch(0, seen([0.5, 0.05, 0.15, 0.2, 0.05, 0.05], reading=reading))
    assert watch.useless == pytest.approx(1 / 3)  # nothing else yet: the cut period counts
    watch(0, seen([0.1, 0.1, 0.6, 0.1, 0.05, 0.03, 0.02], StepKind.SLOW))
    assert watch.useless == pytest.approx(1 / 3)
    assert watch.mass.value == pytest.approx((1.0 + 1.0) / 2)


def test_a_period_that_the_end_cuts_short_is_left_out_beside_a_whole_one() -> None:
    watch = MethodWatch()
    watch(0, seen([0.5, 0.3, 0.1, 0.1], reading=selects(1, window=3)))
    watch(0, seen([0.5, 0.3, 0.1, 0.1], StepKind.SLOW))
    watch(0, seen([0.5, 0.1, 0.3, 0.1], reading=selects(1, window=3)))
    assert watch.useless == 0.0


def test_each_layer_and_each_new_selection_has_its_own_period() -> None:
    watch = MethodWatch()
    for layer, mass in ((0, [0.5, 0.3, 0.1, 0.1]), (1, [0.5, 0.1, 0.3, 0.1])):
        watch(layer, seen(mass, reading=selects(1, window=3)))  # used in layer 0 alone
        watch(layer, seen([0.4, 0.3, 0.2, 0.1], reading=selects(2, window=3)))  # used in neither
        watch(layer, seen([0.7, 0.1, 0.1, 0.1], StepKind.FULL))
    assert watch.useless == pytest.approx(3 / 4)


def test_mass_counts_fast_steps_only() -> None:
    watch = MethodWatch()
    watch(0, seen([0.4, 0.3, 0.2, 0.1], StepKind.SLOW))
    assert watch.mass.value is None
    assert watch.useless is None
    watch(0, seen([0.4, 0.3, 0.2, 0.1], reading=selects(2, window=3)))
    assert watch.mass.value == pytest.approx(0.7)


def test_stability_by_hand() -> None:
    """The best of three candidates: 1, 1, 2, 1; the token of the second step ends a sentence."""
    of = Support(sink=1, recent=1, k=1)
    watch = DenseWatch([of], (1, 1), [False, True, False, False])
    for best in (1, 1, 2, 1):
        mass = [0.1] * 5
        mass[best] = 0.6
        watch(0, seen(mass, StepKind.FULL))
    inside, across = watch.stability[of]
    assert inside.value == pytest.approx(1 / 2)  # steps 1 and 3
    assert across.value == 0.0  # step 2
    assert watch.fetching == (0, 0)


def test_the_layer_that_fetches_most_is_drawn() -> None:
    watch = DenseWatch([], (1, 1), [False])
    watch(0, seen([0.7, 0.1, 0.1, 0.1], StepKind.FULL))
    watch(3, seen([0.1, 0.4, 0.4, 0.1], StepKind.FULL))
    watch(5, seen([0.1, 0.2, 0.4, 0.3], StepKind.FULL))
    assert watch.fetching == (3, 0)


def test_sets_are_capped_and_a_short_text_has_none() -> None:
    assert Support.of(4, 256, 512, 10_000) == Support(4, 256, 512)
    assert Support.of(4, 256, 512, 1_000) == Support(4, 250, (1000 - 4 - 250) // 8)
    assert Support.of(4, 256, 512, 12) is None


def test_a_picture_by_hand() -> None:
    picture = Picture((2, 0), torch.tensor([0, 2, 4, 6]), steps=2)
    picture(1, seen([1.0]))  # another layer
    picture(2, seen([0.4, 0.3, 0.2, 0.1], reading=selects(2, window=3)))
    picture(2, seen([0.3, 0.3, 0.2, 0.1, 0.1], StepKind.SLOW))
    picture(2, seen([0.3, 0.3, 0.2, 0.1, 0.05, 0.05], StepKind.SLOW))  # beyond its steps
    assert picture.mass == [[0.7, 0.3, 0.0], [0.6, 0.3, 0.1]]
    assert picture.kept == [[0.5, 1.0, 0.0], [1.0, 1.0, 1.0]]
    assert picture.kinds == ["fast", "slow"]
    assert picture.missed == [0.3, None]
