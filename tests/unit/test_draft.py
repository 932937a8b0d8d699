"""How much mode "exact" drafts: the choice of a length, its memory, and its configuration."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reread import Config, ConfigError, DraftConfig
from reread.policy import acceptance
from reread.policy.draft import (
    FIRST_WAIT,
    GAIN,
    HIGHEST,
    LONGEST_WAIT,
    LOWEST,
    PRIOR,
    TRIAL,
    Costs,
    DraftLength,
    best_length,
    expected_tokens,
    speedup,
)
from reread.prefilling import SparsePrefill

CHEAP = Costs(fast=0.1, query=0.01)
DEAR = Costs(fast=1.0, query=0.01)
rates = st.floats(LOWEST, HIGHEST)
costs = st.builds(
    Costs, fast=st.floats(0.0, 1.2), query=st.floats(0.0, 0.2), choose=st.floats(0.0, 1.0)
)

# ---- the best length


@given(rates, st.integers(0, 16))
def test_expected_tokens_are_those_of_independent_drafts(rate: float, drafted: int) -> None:
    """Written down as the sum it is: n drafts stand and one does not, or all stand."""
    chances = [rate**n * (1 - rate) for n in range(drafted)] + [rate**drafted]
    want = sum((n + 1) * chance for n, chance in enumerate(chances))
    assert expected_tokens(rate, drafted) == pytest.approx(want, rel=1e-9)


@given(rates, st.integers(1, 16), costs)
def test_the_best_length_is_the_one_that_trying_all_finds(
    rate: float, longest: int, at: Costs
) -> None:
    gains = []
    for n in range(longest + 1):
        tokens = sum(rate**i for i in range(n + 1))
        gains.append(tokens / (1 + n * (at.fast + at.query) + (at.choose if n else 0)))
    found = best_length(rate, longest, at)
    if max(gains) < GAIN * (1 - 1e-9):
        assert found == 0
    elif max(gains) > GAIN * (1 + 1e-9):
        assert gains[found] == pytest.approx(max(gains), rel=1e-9)


@given(rates, st.integers(1, 16), st.floats(0.98, 1.2))
def test_where_a_sparse_step_saves_nothing_nothing_is_drafted(
    rate: float, longest: int, fast: float
) -> None:
    assert best_length(rate, longest, Costs(fast=fast, query=0.01)) == 0


@given(costs, st.integers(1, 16))
def test_more_acceptance_never_makes_drafts_shorter(at: Costs, longest: int) -> None:
    found = [best_length(rate / 100, longest, at) for rate in range(5, 99)]
    assert found == sorted(found)


def test_dense_decoding_has_a_speedup_of_one() -> None:
    assert speedup(0.8, 0, CHEAP) == 1.0


def test_ties_go_to_the_shorter_draft() -> None:
    # free drafts that never stand: every length promises the same
    assert best_length(0.0, 16, Costs(fast=0.0, query=0.0)) == 0


# ---- one row


def told(length: DraftLength, pairs: list[tuple[int, int]]) -> DraftLength:
    for accepted, drafted in pairs:
        length.observe(accepted, drafted)
    return length


@given(st.lists(st.integers(0, 16).flatmap(lambda d: st.tuples(st.integers(0, d), st.just(d)))))
def test_the_rate_stays_within_its_bounds_and_the_length_within_the_config(
    pairs: list[tuple[int, int]],
) -> None:
    length = DraftLength(DraftConfig(tokens=5))
    for accepted, drafted in pairs:
        length.observe(accepted, drafted)
        assert LOWEST <= length.rate <= HIGHEST
        assert 0 <= length.next(CHEAP) <= 5
        assert length.next(DEAR) == 0


@given(st.lists(st.tuples(st.integers(0, 4), st.just(4)), max_size=40))
def test_what_was_seen_decides_alone(pairs: list[tuple[int, int]]) -> None:
    """Deterministic: no clock, no random number, nothing of another row."""
    one, other = (DraftLength(DraftConfig()) for _ in range(2))
    told(DraftLength(DraftConfig()), [(0, 8)] * 50)
    assert told(one, pairs).rate == told(other, pairs).rate
    assert [one.next(CHEAP) for _ in range(3)] == [other.next(CHEAP)] * 3


def test_a_row_begins_with_the_prior() -> None:
    length = DraftLength(DraftConfig(tokens=16))
    assert length.next(CHEAP) == best_length(PRIOR, 16, CHEAP) > 0


def test_drafts_that_stand_make_longer_drafts_and_refused_ones_shorter() -> None:
    good = told(DraftLength(DraftConfig(tokens=16)), [(8, 8)] * 10)
    bad = told(DraftLength(DraftConfig(tokens=16)), [(0, 8)] * 4)
    middle = DraftLength(DraftConfig(tokens=16))
    assert good.next(CHEAP) > middle.next(CHEAP) > bad.next(CHEAP) > 0
    assert told(good, [(8, 8)] * 100).rate == HIGHEST
    assert told(bad, [(0, 8)] * 100).rate == LOWEST


def test_tokens_behind_the_first_refused_one_tell_nothing() -> None:
    short, long = (DraftLength(DraftConfig(tokens=16)) for _ in range(2))
    assert told(short, [(2, 3)]).rate == told(long, [(2, 16)]).rate


def given_up() -> DraftLength:
    length = told(DraftLength(DraftConfig()), [(0, 1)] * 60)
    assert length.next(Costs(fast=0.4, query=0.05)) == 0
    return length


def test_trials_that_fail_come_after_ever_longer_waits() -> None:
    # not even the prior pays, so that every draft is a trial
    at, length = Costs(fast=0.6, query=0.08, choose=0.5), DraftLength(DraftConfig())
    lengths = []
    for _ in range(700):
        lengths.append(length.next(at))
        length.observe(0, lengths[-1])
    trials = [n for n, drafted in enumerate(lengths) if drafted]
    waits = [second - first - 1 for first, second in itertools.pairwise(trials)]
    assert waits[:4] == [FIRST_WAIT * 2**n for n in range(4)]
    assert set(waits[4:]) == {LONGEST_WAIT}
    assert {lengths[n] for n in trials} == {TRIAL}


def test_a_row_begins_with_a_trial_where_the_prior_does_not_pay() -> None:
    at, length = Costs(fast=0.6, query=0.08, choose=0.5), DraftLength(DraftConfig())
    assert best_length(PRIOR, 8, at) == 0
    assert length.next(at) == TRIAL
    length.observe(TRIAL, TRIAL)
    assert length.next(at) > 0  # what stands is followed by another


def test_a_row_whose_trials_stand_drafts_again() -> None:
    at, length = Costs(fast=0.4, query=0.05), given_up()
    for n in itertools.count():
        drafted = length.next(at)
        length.observe(drafted, drafted)
        if drafted > TRIAL:
            break
        assert n < 2 * LONGEST_WAIT
    assert length.rate > 0.5


def test_a_row_that_cannot_gain_makes_no_trial() -> None:
    length = told(given_up(), [(0, 0)] * 10 * LONGEST_WAIT)
    assert length.next(DEAR) == 0
    assert not length.may_draft(DEAR)


@pytest.mark.parametrize("at", [CHEAP, Costs(fast=0.4, query=0.05), DEAR])
def test_a_row_that_drafts_was_told_before_that_it_may(at: Costs) -> None:
    """Otherwise nothing would have left the draft its evidence."""
    length = given_up()
    for _ in range(3 * LONGEST_WAIT):
        may = length.may_draft(at)
        length.observe(0, 0)
        assert may or length.next(at) == 0


def test_without_adaptation_every_draft_has_the_length_of_the_config() -> None:
    length = told(DraftLength(DraftConfig(tokens=7, adapt=False)), [(0, 7)] * 100)
    assert length.next(DEAR) == 7
    assert length.may_draft(DEAR)


def test_a_trial_is_no_longer_than_the_config_allows() -> None:
    length = told(DraftLength(DraftConfig(tokens=1)), [(0, 1)] * 60 + [(0, 0)] * LONGEST_WAIT)
    assert length.next(Costs(fast=0.4, query=0.05)) == 1


# ---- greedy acceptance


def test_greedy_accepts_denses_choice_alone_and_gives_it_in_any_case() -> None:
    scores = torch.tensor([0.1, 2.0, 2.0, -1.0])
    assert acceptance.greedy(scores, 1) == (True, 1)
    assert acceptance.greedy(scores, 2) == (False, 1)  # ties go to the lower token
    assert acceptance.greedy(scores, None) == (False, 1)


# ---- configuration


@pytest.mark.parametrize(
    "bad",
    [
        {"tokens": 0},
        {"tokens": 17},
        {"tokens": -1},
        {"tokens": True},
        {"tokens": 4.0},
        {"tokens": "4"},
        {"tokens": None},
        {"adapt": 1},
        {"adapt": None},
        {"min_probability": 2},
        {"min_probability": 1.01},
        {"min_probability": -0.1},
        {"min_probability": float("nan")},
        {"min_probability": True},
        {"min_probability": "0.3"},
    ],
)
def test_impossible_values_raise_and_are_named_however_they_come(bad: dict[str, Any]) -> None:
    ((name, value),) = bad.items()
    ways = (
        lambda: DraftConfig(**bad),
        lambda: Config.from_dict({"draft": bad}),
        lambda: Config().updated({f"draft.{name}": value}),
    )
    for way in ways:
        with pytest.raises(ConfigError, match=rf"draft\.{name}") as error:
            way()
        assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    "good", [{"tokens": 1}, {"tokens": 16}, {"min_probability": 0}, {"min_probability": 1}]
)
def test_the_ends_of_every_range_are_possible(good: dict[str, Any]) -> None:
    changed = Config.preset("exact").updated({f"draft.{k}": v for k, v in good.items()})
    assert dataclasses.asdict(changed.draft).items() >= good.items()


def test_unknown_keys_are_refused_and_named() -> None:
    with pytest.raises(ConfigError, match=r"draft\.gamma"):
        Config.from_dict({"draft": {"gamma": 4}})
    with pytest.raises(ConfigError, match=r"draft\.gama"):
        Config().updated({"draft.gama": 4})
    with pytest.raises(ConfigError, match="draft"):
        Config.from_dict({"draft": 4})
    with pytest.raises(ConfigError, match="draft"):
        Config(draft={"tokens": 4})  # type: ignore[arg-type]


def test_a_sparse_prefill_is_refused_in_mode_exact() -> None:
    with pytest.raises(ConfigError, match=r"prefill.*exact"):
        Config(mode="exact", prefill=SparsePrefill(chooser="oracle"))
    with pytest.raises(ConfigError, match=r"prefill.*exact"):
        Config.preset("exact").updated({"prefill": "oracle"})


def test_the_preset_is_exact_and_survives_a_trip_through_json() -> None:
    config = Config.preset("exact").updated({"draft.tokens": 3, "adapt": False})
    assert config.mode == "exact"
    assert (config.draft.tokens, config.draft.adapt) == (3, False)
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert Config.from_dict({"mode": "exact"}).draft == DraftConfig()


# ---- what ends a text, and what a step tells


def test_common_criteria_need_no_text_and_others_get_it() -> None:
    from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria

    from reread.integrations.hf.exact.ending import Ending

    class Seven(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> torch.Tensor:
            return input_ids[:, -1] == 7

    given = [MaxLengthCriteria(9), EosTokenCriteria([3, 4]), Seven()]
    ending = Ending(given)
    assert ending.hard
    assert list(ending.others) == given[2:]
    for token, count in itertools.product(range(8), (1, 8, 9, 10)):
        text = torch.full((1, count), token)
        want = any(bool(criterion(text, None)[0]) for criterion in given)
        assert (ending.by_token(token, count) or ending.by_text(text)) == want
    assert not Ending([]).hard
    assert not Ending([]).by_text(torch.zeros(1, 1))


def test_the_likeliest_token_and_its_probability() -> None:
    scores = torch.tensor([[0.0, 2.0, 1.0], [torch.nan, 0.0, 0.0]])
    token, chance = acceptance.likeliest(scores)
    assert int(token[0]) == 1
    assert float(chance[0]) == pytest.approx(float(scores[0].softmax(0)[1]))
    assert bool(chance[1].isnan())
