"""The Selector's equations as properties, against the brute force of `tests.brute`."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from reread.config import Config, SelectorConfig, SoftNMS, Span
from reread.policy import selector as S

from .. import brute

PAPER = Config.preset("paper").selector
PLAIN = SelectorConfig(refine=None, lambda_clip=0.0, alpha_cross=0.0)
SELECTORS = {
    "plain": PLAIN,
    "paper": PAPER,
    "default": Config.preset("default").selector,
    "prior only": SelectorConfig(refine=None, lambda_clip=0.3),
    "span and cross": SelectorConfig(refine=Span(back=1, ahead=3), alpha_cross=0.35),
    "strong nms": SelectorConfig(refine=SoftNMS(alpha=2.0, neighbourhood=7)),
}

seeds = st.integers(0, 2**31 - 1)
sizes = st.integers(1, 40)
heads = st.integers(1, 4)


def distribution(seed: int, *shape: int, sharp: float = 3.0) -> Tensor:
    """Random distributions over the last dim, float64, from nearly flat to peaked."""
    g = torch.Generator().manual_seed(seed)
    return torch.softmax(sharp * torch.randn(*shape, generator=g, dtype=torch.float64), dim=-1)


def key_norms(seed: int, *shape: int) -> Tensor:
    return 0.1 + 5 * torch.rand(*shape, generator=torch.Generator().manual_seed(seed + 1))


def kl(a: Tensor, b: Tensor) -> float:
    return float((a * (a / b).log()).sum())


def chosen(indices: Tensor, counts: Tensor) -> list[list[int]]:
    return [row[:count].tolist() for row, count in zip(indices, counts.tolist(), strict=True)]


def all_equal_up_to_rounding(z: np.ndarray, got: list[int], want: list[int], tol: float) -> bool:
    """Two selections may differ only in positions whose scores float32 cannot tell apart."""
    edge = min(z[j] for j in want)
    return all(abs(z[j] - edge) <= tol for j in set(got) ^ set(want))


# ---- step 1 and 2: evidence


@given(seeds, heads, st.integers(1, 3), st.integers(1, 5), sizes)
def test_probabilities_are_the_group_mean_of_softmaxes(
    seed: int, hkv: int, g: int, w: int, n: int
) -> None:
    logits = 4 * torch.randn(hkv, g, w, n, generator=torch.Generator().manual_seed(seed))
    got = S.allowed_probabilities(logits)
    for h in range(hkv):
        for t in range(w):
            want = sum(brute.softmax(logits[h, i, t].double().numpy()) for i in range(g)) / g
            np.testing.assert_allclose(got[h, t].numpy(), want, atol=1e-6)


def test_probabilities_give_no_mass_to_what_a_query_may_not_see() -> None:
    logits = torch.zeros(1, 2, 2, 4)
    logits[:, :, 0, 2:] = -math.inf
    logits[:, :, 1, :] = -math.inf
    got = S.allowed_probabilities(logits)
    assert got[0].tolist() == [[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]


@given(seeds, heads, st.integers(1, 5), sizes, st.sampled_from([0.25, 0.5, 1.0, 2.0]))
def test_evidence_is_the_normalised_power_mean(
    seed: int, hkv: int, w: int, n: int, alpha: float
) -> None:
    p = distribution(seed, hkv, w, n)
    got = S.power_mean(p.float(), alpha)
    for h in range(hkv):
        np.testing.assert_allclose(
            got[h].numpy(), brute.evidence(p[h].numpy(), alpha), rtol=1e-4, atol=1e-6
        )


@given(seeds, heads, sizes, st.sampled_from([0.25, 0.5, 1.0, 2.0]))
def test_evidence_of_one_query_is_its_distribution(
    seed: int, hkv: int, n: int, alpha: float
) -> None:
    p = distribution(seed, hkv, 1, n).float()
    torch.testing.assert_close(S.power_mean(p, alpha), p[:, 0], rtol=1e-6, atol=1e-8)


@given(seeds, heads, st.integers(2, 5), sizes)
def test_evidence_does_not_depend_on_the_order_of_queries(
    seed: int, hkv: int, w: int, n: int
) -> None:
    p = distribution(seed, hkv, w, n).float()
    torch.testing.assert_close(S.power_mean(p.flip(1), 0.5), S.power_mean(p, 0.5))


def test_a_low_alpha_prefers_what_many_queries_agree_on() -> None:
    p = torch.tensor([[[0.9, 0.1, 0.0], [0.0, 0.1, 0.9]]])
    shared = [float(S.power_mean(p, alpha)[0, 1]) for alpha in (0.25, 0.5, 1.0, 2.0)]
    assert shared == sorted(shared, reverse=True)
    assert shared[0] > shared[-1] + 0.1


# ---- step 3: prior


@given(seeds, sizes, st.floats(0, 2), st.floats(0, 3), st.floats(0.5, 3), st.floats(0, 3))
def test_prior_is_key_norm_times_position(
    seed: int, n: int, gamma: float, beta: float, p: float, eta: float
) -> None:
    norms = key_norms(seed, 2, n)
    config = SelectorConfig(gamma=gamma, beta=beta, p=p, eta=eta)
    got = S.prior(norms, config)
    for h in range(2):
        want = brute.prior(norms[h].double().numpy(), gamma, beta, p, eta, config.eps)
        np.testing.assert_allclose(got[h].numpy(), want, rtol=1e-3, atol=1e-6)


@given(seeds, sizes, st.floats(0.1, 2))
def test_key_norm_prior_is_a_power_of_the_norm(seed: int, n: int, gamma: float) -> None:
    norms = key_norms(seed, 1, n)
    got = S.key_norm_prior(norms, gamma, 1e-8)[0].double()
    want = (norms[0].double() + 1e-8) ** -gamma
    torch.testing.assert_close(got, want / want.sum(), rtol=1e-4, atol=1e-7)


def test_key_norm_prior_prefers_small_keys_and_bears_a_zero_key() -> None:
    got = S.key_norm_prior(torch.tensor([[0.0, 1.0, 4.0]]), 0.5, 1e-8)[0]
    assert bool(torch.isfinite(got).all())
    assert got[0] > got[1] > got[2] > 0
    assert float(got[1] / got[2]) == pytest.approx(2.0, rel=1e-4)


def test_position_prior_has_u_from_0_at_the_oldest_to_1_at_the_newest() -> None:
    got = S.position_prior(3, beta=1.0, p=2.0, eta=2.0, eps=1e-2, device=torch.device("cpu"))
    want = [math.exp(-(u**2)) * (1 - u + 1e-2) ** 2 for u in (0.0, 0.5, 1.0)]
    assert got.tolist() == pytest.approx([w / sum(want) for w in want], rel=1e-5)


def test_position_prior_of_a_single_position_is_one() -> None:
    assert S.position_prior(1, 1.0, 1.0, 2.0, 1e-8, torch.device("cpu")).tolist() == [1.0]


@given(seeds, heads, st.integers(1, 4), sizes)
def test_f_r_and_s_are_distributions(seed: int, hkv: int, w: int, n: int) -> None:
    f = S.power_mean(distribution(seed, hkv, w, n).float(), 0.5)
    r = S.prior(key_norms(seed, hkv, n), PAPER)
    s = S.fuse(f, r, S.mixing_weight(f, r, 0.02))
    for x in (f, r, s):
        assert x.shape == (hkv, n)
        assert bool((x >= 0).all())
        torch.testing.assert_close(x.sum(-1), torch.ones(hkv), rtol=1e-5, atol=1e-5)


# ---- step 4 and 5: fusion


def test_fusion_is_the_arithmetic_mixture_of_the_worked_fact() -> None:
    f, r = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.1, 0.9]])
    assert S.fuse(f, r, 0.2)[0].tolist() == pytest.approx([0.74, 0.26], abs=1e-6)


def test_fusion_is_not_the_geometric_mean_that_forward_kl_would_give() -> None:
    f, r, lam = torch.tensor([0.9, 0.1]).double(), torch.tensor([0.1, 0.9]).double(), 0.2
    geometric = f ** (1 - lam) * r**lam
    geometric = geometric / geometric.sum()
    grid = torch.linspace(1e-4, 1 - 1e-4, 20001).double()
    forward = [
        (1 - lam) * kl(s, f) + lam * kl(s, r) for s in torch.stack([grid, 1 - grid], 1)[::50]
    ]
    assert float(grid[::50][int(np.argmin(forward))]) == pytest.approx(
        float(geometric[0]), abs=3e-3
    )
    assert abs(float(S.fuse(f[None], r[None], lam)[0, 0] - geometric[0])) > 0.04


@given(seeds, st.integers(2, 12), st.floats(0.01, 0.99))
def test_fusion_minimises_the_reverse_kl_objective(seed: int, n: int, lam: float) -> None:
    f, r = distribution(seed, n), distribution(seed + 7, n)
    s = S.fuse(f[None], r[None], lam)[0]

    def objective(x: Tensor) -> float:
        return (1 - lam) * kl(f, x) + lam * kl(r, x)

    best = objective(s)
    for step in (1e-1, 1e-2, 1e-3):
        for other in range(5):
            x = (1 - step) * s + step * distribution(seed + 100 + other, n)
            assert objective(x) >= best - 1e-12


@given(seeds, st.integers(2, 12), st.floats(0.01, 0.99))
def test_fusion_is_where_gradient_descent_on_the_objective_ends(
    seed: int, n: int, lam: float
) -> None:
    f, r = distribution(seed, n, sharp=1.0), distribution(seed + 7, n, sharp=1.0)
    logits = torch.zeros(n, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([logits], max_iter=300, tolerance_grad=1e-12, tolerance_change=0)

    def loss() -> Tensor:
        optimiser.zero_grad()
        log_s = torch.log_softmax(logits, 0)
        value = -((1 - lam) * f * log_s).sum() - (lam * r * log_s).sum()
        value.backward()
        return value

    optimiser.step(loss)
    found = torch.softmax(logits.detach(), 0)
    torch.testing.assert_close(S.fuse(f[None], r[None], lam)[0], found, rtol=0, atol=1e-5)


@given(seeds, heads, sizes, st.floats(0.0, 1.0))
def test_lambda_never_raises_the_norm(seed: int, hkv: int, n: int, clip: float) -> None:
    f, r = distribution(seed, hkv, n).float(), distribution(seed + 3, hkv, n).float()
    s = S.fuse(f, r, S.mixing_weight(f, r, clip))
    assert bool((s.norm(dim=-1) <= f.norm(dim=-1) * (1 + 1e-6)).all())


@given(seeds, st.integers(2, 20), st.floats(0.0, 1.0))
def test_lambda_is_the_clipped_minimiser_of_the_norm(seed: int, n: int, clip: float) -> None:
    f, r = distribution(seed, 1, n), distribution(seed + 3, 1, n)
    lam = float(S.mixing_weight(f, r, clip))
    assert 0.0 <= lam <= clip
    grid = torch.linspace(0, clip, 501, dtype=torch.float64)
    norms = ((1 - grid)[:, None] * f + grid[:, None] * r).norm(dim=-1)
    mine = float(((1 - lam) * f + lam * r).norm())
    assert mine <= float(norms.min()) + 1e-12
    assert mine == pytest.approx(float(norms.min()), abs=1e-5)


def test_lambda_is_per_head_and_zero_where_f_is_flatter_than_the_prior() -> None:
    f = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.97, 0.01, 0.01, 0.01]])
    r = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]])
    assert S.mixing_weight(f, r, 0.02)[:, 0].tolist() == pytest.approx([0.0, 0.02])


def test_lambda_is_finite_where_evidence_equals_prior() -> None:
    f = torch.tensor([[0.2, 0.3, 0.5]])
    lam = S.mixing_weight(f, f.clone(), 0.02)
    assert bool(torch.isfinite(lam).all())
    assert 0 <= float(lam) <= 0.02


@given(seeds, st.integers(3, 30))
def test_one_source_alone_can_keep_a_position(seed: int, n: int) -> None:
    f, r = torch.zeros(1, n), torch.full((1, n), 1.0 / n)
    f[0, seed % n] = 1.0
    s = S.fuse(f, r, 0.02)[0]
    assert bool((s > 0).all())
    assert int(s.argmax()) == seed % n


# ---- step 6: refinement


@given(seeds, heads, sizes, st.floats(0.0, 2.0), st.sampled_from([1, 3, 5, 9, 41]))
def test_soft_nms_equals_brute_force(seed: int, hkv: int, n: int, alpha: float, width: int) -> None:
    z = distribution(seed, hkv, n).log().float()
    got = S.soft_nms(z, SoftNMS(alpha=alpha, neighbourhood=width))
    for h in range(hkv):
        want = brute.soft_nms(z[h].double().numpy(), alpha, width)
        np.testing.assert_allclose(got[h].numpy(), want, rtol=1e-5, atol=1e-5)


@given(seeds, sizes)
def test_soft_nms_never_raises_a_score_and_spares_local_maxima(seed: int, n: int) -> None:
    z = distribution(seed, 1, n).log().float()
    got = S.soft_nms(z, SoftNMS(alpha=0.5, neighbourhood=5))
    assert bool((got <= z).all())
    assert float(got[0, int(z.argmax())]) == float(z.max())


@given(seeds, heads, sizes, st.integers(0, 9), st.integers(0, 45))
def test_span_spreads_each_score_back_and_ahead(
    seed: int, hkv: int, n: int, back: int, ahead: int
) -> None:
    z = distribution(seed, hkv, n).log().float()
    got = S.spread(z, Span(back=back, ahead=ahead))
    for h in range(hkv):
        np.testing.assert_array_equal(
            got[h].double().numpy(), brute.spread(z[h].double().numpy(), back, ahead)
        )


def test_span_leans_forward_in_the_text() -> None:
    z = torch.full((1, 12), -9.0)
    z[0, 4] = 0.0
    got = S.spread(z, Span(back=1, ahead=3))[0]
    assert (got == 0.0).nonzero().flatten().tolist() == [3, 4, 5, 6, 7]


@given(seeds, st.integers(1, 5), sizes, st.floats(0.1, 3.0))
def test_cross_head_equals_brute_force(seed: int, hkv: int, n: int, temperature: float) -> None:
    z = distribution(seed, hkv, n).log()
    got = S.cross_head(z, 0.35, temperature, 1e-8)
    np.testing.assert_allclose(
        got.numpy(), brute.cross_head(z.numpy(), 0.35, temperature, 1e-8), atol=1e-9
    )


def test_cross_head_floor_keeps_the_loser_finite() -> None:
    z = torch.tensor([[0.0], [-1000.0]])
    got = S.cross_head(z, 1.0, 1.0, 1e-8)
    assert float(got[0, 0]) == pytest.approx(0.0)
    assert float(got[1, 0]) == pytest.approx(-1000 + math.log(1e-8))


# ---- step 7: top-K


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 50))
def test_ties_go_to_the_lower_index(values: list[int], k: int) -> None:
    f = torch.tensor([values], dtype=torch.float32) / 4
    got = chosen(*S.select(f, None, PLAIN, k, offset=0))[0]
    assert got == sorted(sorted(range(len(values)), key=lambda j: (-values[j], j))[:k])


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 50),
    st.integers(0, 3),
    st.integers(0, 6),
)
def test_ties_that_spreading_makes_go_to_the_lower_index(
    values: list[int], k: int, back: int, ahead: int
) -> None:
    f = torch.tensor([values], dtype=torch.float32) / 4
    config = SelectorConfig(refine=Span(back=back, ahead=ahead))
    wide = brute.spread(np.array(values, dtype=np.float64), back, ahead)
    assert chosen(*S.select(f, None, config, k, offset=0))[0] == brute.top_k(wide, k)


@pytest.mark.parametrize("name", SELECTORS)
@given(seed=seeds, hkv=heads, n=sizes, k=st.integers(1, 60), offset=st.integers(0, 9))
def test_selection_is_sorted_unique_within_j_and_the_budget(
    name: str, seed: int, hkv: int, n: int, k: int, offset: int
) -> None:
    f, norms = distribution(seed, hkv, n).float(), key_norms(seed, hkv, n)
    indices, counts = S.select(f, norms, SELECTORS[name], k, offset)
    assert indices.dtype == counts.dtype == torch.int32
    for h, row in enumerate(chosen(indices, counts)):
        assert len(row) == min(k, n)
        assert row == sorted(set(row))
        assert offset <= row[0]
        assert row[-1] < offset + n
        assert bool((indices[h, len(row) :] == -1).all())


@pytest.mark.parametrize("name", SELECTORS)
@given(seed=seeds, hkv=heads, n=sizes, k=st.integers(1, 45))
def test_selection_equals_brute_force(name: str, seed: int, hkv: int, n: int, k: int) -> None:
    f, norms = distribution(seed, hkv, n).float(), key_norms(seed, hkv, n)
    got = chosen(*S.select(f, norms, SELECTORS[name], k, 0))
    z = brute.scores(f.double().numpy(), norms.double().numpy(), SELECTORS[name])
    want = brute.select(f.double().numpy(), norms.double().numpy(), SELECTORS[name], k)
    for h in range(hkv):
        assert all_equal_up_to_rounding(z[h], got[h], want[h], tol=2e-5)


@pytest.mark.parametrize("name", SELECTORS)
@given(seed=seeds, hkv=st.integers(2, 4), n=sizes, k=st.integers(1, 45))
def test_permuting_kv_heads_permutes_the_selection(
    name: str, seed: int, hkv: int, n: int, k: int
) -> None:
    f, norms = distribution(seed, hkv, n).float(), key_norms(seed, hkv, n)
    order = torch.randperm(hkv, generator=torch.Generator().manual_seed(seed))
    straight = chosen(*S.select(f, norms, SELECTORS[name], k, 0))
    permuted = chosen(*S.select(f[order], norms[order], SELECTORS[name], k, 0))
    assert permuted == [straight[h] for h in order.tolist()]


@pytest.mark.parametrize("name", SELECTORS)
@given(seed=seeds, n=sizes, k=st.integers(1, 45), holes=st.sets(st.integers(0, 39), max_size=30))
def test_positions_that_do_not_exist_are_never_selected(
    name: str, seed: int, n: int, k: int, holes: set[int]
) -> None:
    valid = torch.tensor([j not in holes for j in range(n)])
    f, norms = distribution(seed, 2, n).float() * valid, key_norms(seed, 2, n)
    for row in chosen(*S.select(f, norms, SELECTORS[name], k, 0, valid)):
        assert len(row) == min(k, int(valid.sum()))
        assert not set(row) & holes


@pytest.mark.parametrize("name", SELECTORS)
@given(
    seed=seeds,
    n=st.integers(4, 40),
    k=st.integers(1, 20),
    holes=st.sets(st.integers(1, 38), min_size=1),
)
def test_padding_between_two_turns_does_not_change_what_is_selected(
    name: str, seed: int, n: int, k: int, holes: set[int]
) -> None:
    real = [j for j in range(n) if j not in holes]
    assume(len(real) < n)
    valid = torch.tensor([j not in holes for j in range(n)])
    f, norms = S.normalise(distribution(seed, 2, n).float() * valid), key_norms(seed, 2, n)
    padded = chosen(*S.select(f, norms, SELECTORS[name], k, 0, valid))
    alone = chosen(*S.select(f[:, real], norms[:, real], SELECTORS[name], k, 0))
    assert padded == [[real[j] for j in row] for row in alone]


@given(seeds, sizes)
def test_more_than_there_is_selects_everything(seed: int, n: int) -> None:
    f = distribution(seed, 2, n).float()
    assert (
        chosen(*S.select(f, key_norms(seed, 2, n), PAPER, 10_000, 3)) == [list(range(3, n + 3))] * 2
    )


def test_nothing_allowed_selects_nothing() -> None:
    indices, counts = S.select(torch.zeros(2, 0), torch.zeros(2, 0), PAPER, 5, 4)
    assert indices.numel() == 0
    assert counts.tolist() == [0, 0]


def test_no_evidence_still_selects_in_order() -> None:
    assert chosen(*S.select(torch.zeros(1, 9), None, PLAIN, 4, 2)) == [[2, 3, 4, 5]]


@given(seeds, st.integers(2, 40), st.integers(1, 20))
def test_the_same_evidence_gives_the_same_selection_beside_other_heads(
    seed: int, n: int, k: int
) -> None:
    f = distribution(seed, 3, n).float()
    together = chosen(*S.select(f, None, Config.preset("default").selector, k, 0))
    for h in range(3):
        assert chosen(*S.select(f[h : h + 1], None, Config.preset("default").selector, k, 0)) == [
            together[h]
        ]
