"""RULER-style prompts: they fit, they hold what they ask for, and the same seed gives the same."""

from __future__ import annotations

import random
from typing import Any

import pytest

from reread.errors import InputError
from reread.evaluation import ruler
from reread.evaluation.ruler import NEW_TOKENS, TASKS, make_cases, recall

from . import tiny_checkpoint

TOKENS = 1500  # characters here: the tokenizer has one token for each


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_checkpoint.tokenizer()


def text_of(tokenizer: Any, case: ruler.Case) -> str:
    text: str = tokenizer.decode(case.ids)
    return text


@pytest.mark.parametrize("task", TASKS)
def test_prompts_fill_their_length_and_leave_room_for_the_answer(tokenizer: Any, task: str) -> None:
    longest = max(map(len, ruler.FILLER)) + 1
    for case in make_cases(tokenizer, task, tokens=TOKENS, count=3, seed=0):
        assert TOKENS - NEW_TOKENS - longest <= len(case.ids) <= TOKENS - NEW_TOKENS


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_gives_the_same_prompts_and_another_gives_others(
    tokenizer: Any, task: str
) -> None:
    first, again, other = (
        make_cases(tokenizer, task, tokens=TOKENS, count=3, seed=seed) for seed in (0, 0, 1)
    )
    assert first == again
    assert len({*first, *other}) == 6


@pytest.mark.parametrize(("task", "keys"), [("niah_single", 1), ("niah_multikey", ruler.KEYS)])
def test_the_number_stands_in_the_text_once_with_the_key_that_is_asked_for(
    tokenizer: Any, task: str, keys: int
) -> None:
    for case in make_cases(tokenizer, task, tokens=TOKENS, count=5, seed=0):
        text, (number,) = text_of(tokenizer, case), case.expected
        asked = text.rpartition("number for ")[2].removesuffix(" is")
        assert text.count(f"The special magic number for {asked} is {number}.") == 1
        assert text.count(number) == 1
        assert text.count("The special magic number for") == keys + 1  # and the answer's beginning


def test_every_variable_that_is_asked_for_follows_from_the_value(tokenizer: Any) -> None:
    for case in make_cases(tokenizer, "vt", tokens=TOKENS, count=5, seed=0):
        body, _, asked = text_of(tokenizer, case).partition("Find all variables")
        value = asked.split("value ")[1].split(" ")[0]
        lines = [line.split(" = ") for line in body.split("VAR ", 1)[1].split(".") if " = " in line]
        known = {name.split()[-1]: source.split()[-1] for name, source in lines}
        holding = []
        for name in known:
            at = name
            while at in known:
                at = known[at]
            if at == value:
                holding.append(name)
        # the first one is given away by the beginning of the answer
        assert len(holding) == ruler.HOPS + 1
        assert set(case.expected) == set(holding) - {asked.rpartition(": ")[2].rstrip(",")}


def test_needles_stand_at_their_depths_in_their_order() -> None:
    text = ruler._hide(["A", "B"], [str(i) for i in range(10)], [0.0, 0.999])
    assert text == "A 0 1 2 3 4 5 6 7 8 9 B"


def test_chat_is_the_template_where_there_is_one(tokenizer: Any) -> None:
    plain = tiny_checkpoint.tokenizer(template=False)
    chat, raw = (
        text_of(tokenizer, make_cases(t, "vt", tokens=TOKENS, count=1, seed=0)[0])
        for t in (tokenizer, plain)
    )
    assert chat.startswith("<user>")
    assert "<assistant>The variables" in chat
    assert "<" not in raw
    with pytest.raises(InputError, match="no chat template"):
        make_cases(plain, "vt", tokens=TOKENS, count=1, seed=0, chat=True)


def test_what_cannot_be_made_is_refused(tokenizer: Any) -> None:
    with pytest.raises(InputError, match="task 'niah' is unknown: one of niah_single"):
        make_cases(tokenizer, "niah", tokens=TOKENS, count=1, seed=0)
    with pytest.raises(InputError, match="tokens=100 is too short"):
        make_cases(tokenizer, "niah_single", tokens=100, count=1, seed=0)


def test_recall_is_the_share_of_expected_strings() -> None:
    assert recall(("12", "34"), "it is 12.") == 0.5
    assert recall(("12",), "no") == 0.0


def test_a_puzzle_draws_everything_from_its_random_numbers() -> None:
    for make in TASKS.values():
        assert make(random.Random(1)) == make(random.Random(1))
