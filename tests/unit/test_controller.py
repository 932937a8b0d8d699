"""Which rows are slow, fast or full, from the spec's sentence about the trigger alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reread.config import Config, TriggerConfig
from reread.policy.controller import Controller
from reread.types import StepKind

FAST, SLOW, FULL = StepKind.FAST, StepKind.SLOW, StepKind.FULL
DOT, WORD = 1, 0
BOUNDARY = torch.tensor([False, True, False])


def config(*, k: int = 4, dense_below_budget: bool = True, **triggers: object) -> Config:
    return Config(
        sink=2,
        recent=4,
        k=k,
        triggers=TriggerConfig(**{"boundary": False, "t_max": None, "t_min": 1, **triggers}),  # type: ignore[arg-type]
        dense_below_budget=dense_below_budget,
    )


def run(c: Controller, tokens: list[int], keys: int = 100) -> list[StepKind]:
    """One row, token after token; a row has a selection once it was slow."""
    kinds: list[StepKind] = []
    for i, token in enumerate(tokens):
        (kind,) = c.plan([token], [keys + i], [SLOW in kinds])
        kinds.append(kind)
    return kinds


def expected(
    tokens: list[int], t_max: int | None, boundary: bool, t_min: int = 1
) -> list[StepKind]:
    """Equation 5: slow at first, after a token of the set, or T_max steps after the last slow;
    within t_min steps after a slow one, the first aside, no token makes a step slow."""
    kinds: list[StepKind] = []
    for i, token in enumerate(tokens):
        last = max((j for j, kind in enumerate(kinds) if kind is SLOW), default=None)
        slow = (
            last is None
            or (boundary and token == DOT and (last == 0 or i - last >= t_min))
            or (t_max is not None and i - last >= t_max)
        )
        kinds.append(SLOW if slow else FAST)
    return kinds


def test_without_triggers_only_the_first_step_is_slow() -> None:
    assert run(Controller(config(), None, 1), [WORD] * 5) == [SLOW, FAST, FAST, FAST, FAST]


def test_t_max_1_makes_every_step_slow() -> None:
    assert set(run(Controller(config(t_max=1), None, 1), [WORD] * 5)) == {SLOW}


def test_the_step_after_a_sentence_end_is_slow() -> None:
    c = Controller(config(boundary=True), BOUNDARY, 1)
    assert run(c, [WORD, WORD, DOT, WORD, DOT, DOT]) == [SLOW, FAST, SLOW, FAST, SLOW, SLOW]


def test_a_boundary_table_is_ignored_where_the_trigger_is_off() -> None:
    assert run(Controller(config(boundary=False), BOUNDARY, 1), [DOT] * 4) == [
        SLOW,
        FAST,
        FAST,
        FAST,
    ]


@given(
    st.lists(st.sampled_from([WORD, DOT]), max_size=60),
    st.none() | st.integers(1, 9),
    st.booleans(),
    st.integers(1, 6),
)
def test_the_schedule_is_equation_5(
    tokens: list[int], t_max: int | None, boundary: bool, t_min: int
) -> None:
    c = Controller(config(t_max=t_max, boundary=boundary, t_min=t_min), BOUNDARY, 1)
    assert run(c, tokens) == expected(tokens, t_max, boundary, t_min)


def test_a_line_end_behind_a_full_stop_makes_no_second_slow_step() -> None:
    c = Controller(config(boundary=True, t_min=3), BOUNDARY, 1)
    assert run(c, [WORD, WORD, DOT, DOT, DOT, DOT, WORD, WORD, DOT]) == [
        SLOW, FAST, SLOW, FAST, FAST, SLOW, FAST, FAST, SLOW,
    ]  # fmt: skip


def test_an_uncertain_step_waits_too() -> None:
    c = Controller(config(uncertainty=1.0, t_min=2), None, 1)
    c.plan([WORD], [100], [False])
    c.observe_entropy([2.0])
    assert c.plan([WORD], [101], [True]) == (SLOW,)
    c.observe_entropy([2.0])
    assert c.plan([WORD], [102], [True]) == (FAST,)
    c.observe_entropy([2.0])
    assert c.plan([WORD], [103], [True]) == (SLOW,)


@given(st.integers(1, 4), st.integers(1, 9), st.data())
def test_rows_are_planned_each_on_its_own(rows: int, t_max: int, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, 30))
    texts = [
        data.draw(st.lists(st.sampled_from([WORD, DOT]), min_size=length, max_size=length))
        for _ in range(rows)
    ]
    c = Controller(config(t_max=t_max, boundary=True), BOUNDARY, rows)
    together = [
        c.plan([text[i] for text in texts], [100 + i] * rows, [i > 0] * rows) for i in range(length)
    ]
    for b, text in enumerate(texts):
        assert [kinds[b] for kinds in together] == expected(text, t_max, True)


def test_an_uncertain_step_makes_the_next_one_slow_for_that_row_only() -> None:
    c = Controller(config(uncertainty=1.0), None, 2)
    c.plan([WORD, WORD], [100, 100], [False, False])
    c.observe_entropy([0.5, 1.5])
    assert c.plan([WORD, WORD], [101, 101], [True, True]) == (FAST, SLOW)
    c.observe_entropy([1.0, 0.2])  # "above" the threshold, not at it
    assert c.plan([WORD, WORD], [102, 102], [True, True]) == (FAST, FAST)


def test_uncertainty_is_ignored_where_the_trigger_is_off() -> None:
    c = Controller(config(), None, 1)
    c.plan([WORD], [100], [False])
    c.observe_entropy([9.0])
    assert c.plan([WORD], [101], [True]) == (FAST,)


def test_below_the_budget_steps_are_full_and_the_first_above_it_is_slow() -> None:
    c = Controller(config(t_max=3), None, 1)  # budget 10
    assert run(c, [WORD] * 6, keys=8) == [FULL, FULL, FULL, SLOW, FAST, FAST]


def test_below_the_budget_is_decided_per_row() -> None:
    c = Controller(config(), None, 2)
    assert c.plan([WORD, WORD], [10, 11], [False, False]) == (FULL, SLOW)


def test_the_sparse_path_can_be_forced_below_the_budget() -> None:
    assert run(Controller(config(dense_below_budget=False), None, 1), [WORD] * 3, keys=3) == [
        SLOW,
        FAST,
        FAST,
    ]


def test_dense_mode_is_full_everywhere() -> None:
    c = Controller(Config(mode="dense"), BOUNDARY, 1)
    assert set(run(c, [DOT, WORD, DOT], keys=100_000)) == {FULL}


def test_first_step_off_starts_fast_with_the_prefills_selection() -> None:
    c = Controller(config(first_step=False), None, 1)
    assert c.plan([WORD], [100], [True]) == (FAST,)


@pytest.mark.parametrize("first_step", [True, False])
def test_a_row_without_any_selection_is_slow(first_step: bool) -> None:
    c = Controller(config(first_step=first_step), None, 1)
    assert c.plan([WORD], [100], [False]) == (SLOW,)


def test_a_new_prefill_makes_the_next_step_slow_again() -> None:
    c = Controller(config(t_max=50, uncertainty=1.0), None, 1)
    run(c, [WORD] * 3)
    c.observe_entropy([5.0])
    c.prefilled()
    assert c.plan([WORD], [200], [True]) == (SLOW,)
    assert c.plan([WORD], [201], [True]) == (FAST,)  # the entropy of the last turn is forgotten


def test_unknown_tokens_leave_the_other_triggers_at_work() -> None:
    c = Controller(config(boundary=True, t_max=2), BOUNDARY, 1)
    assert [c.plan(None, [100 + i], [i > 0])[0] for i in range(5)] == [SLOW, FAST, SLOW, FAST, SLOW]


def test_zero_entropy_threshold_is_always_slow_once_something_is_uncertain() -> None:
    c = Controller(config(uncertainty=0.0), None, 1)
    kinds = []
    for i in range(4):
        kinds.extend(c.plan([WORD], [100 + i], [i > 0]))
        c.observe_entropy([1e-3])
    assert kinds == [SLOW] * 4
