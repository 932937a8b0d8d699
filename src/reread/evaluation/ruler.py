"""Synthetic retrieval tasks in English for chat models, after RULER (arXiv 2404.06654).

Neutral sentences fill the text up to its length; between them stands what is asked for at the end.

    niah_single    one number, asked for by its key
    niah_multikey  four numbers with a key each, one of them asked for
    vt             a value handed on from variable to variable; all that hold it are asked for

The assistant's answer is begun for the model, as RULER does: small models find it so.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from ..integrations.hf.load import quiet_loading

NEW_TOKENS = 32
KEYS = 4  # of niah_multikey
HOPS = 3  # of vt: variables besides the first
CHAINS = 2  # of vt: one is asked for, the other must not be named

FILLER = (
    "The grass in the park was cut on Monday.",
    "A narrow road leads from the station to the old mill.",
    "Most of the shops open at nine in the morning.",
    "The river is low at this time of the year.",
    "Two boats were tied to the wooden pier.",
    "The library keeps its maps on the second floor.",
    "Rain fell during the night and stopped before dawn.",
    "The baker puts fresh bread into the window.",
    "A row of poplars stands along the canal.",
    "The bus was a few minutes late again.",
    "She read the newspaper at the kitchen table.",
    "The hills in the north are covered with pines.",
    "Someone had left an umbrella beside the door.",
    "The market is held on the square every week.",
    "The children played in the yard behind the school.",
    "A thin layer of snow lay on the roofs.",
    "The train crosses the valley on a stone bridge.",
    "He watered the plants and closed the shutters.",
    "The lamp on the corner was repaired in spring.",
    "Several letters arrived with the morning post.",
    "The museum is quiet in the early afternoon.",
    "Apples from the garden were stored in the cellar.",
    "The path turns left behind the white house.",
    "A cat slept on the warm stones of the wall.",
    "The meeting was moved to a smaller room.",
    "Fishermen mended their nets near the harbour wall.",
    "The clock in the tower strikes every quarter of an hour.",
    "They painted the fence in a pale shade of green.",
    "The wind came from the west for most of the day.",
    "A carpenter built new shelves for the reading room.",
    "The soup was served with bread and a little butter.",
    "Clouds moved slowly over the fields.",
    "The orchestra rehearses in the hall next door.",
    "A stack of wooden crates stood beside the warehouse.",
    "The village has one inn and two small chapels.",
    "He folded the map and put it back into the drawer.",
)
NOUNS = (
    "harbor", "violin", "lantern", "orchard", "compass", "feather", "glacier", "meadow", "pepper",
    "marble", "saddle", "tunnel", "walnut", "cottage", "magnet", "pillow", "rocket", "spider",
    "thunder", "velvet", "window", "anchor", "basket", "candle", "dragon", "engine", "falcon",
    "guitar", "hammer", "island", "jacket", "kettle",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt and what its answer must contain.

    Attributes:
        ids: of the whole prompt, template and the beginning of the answer included.
    """

    ids: tuple[int, ...]
    expected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Puzzle:
    """What is hidden, in its order in the text, and what is asked."""

    needles: tuple[str, ...]
    intro: str
    question: str
    answer_start: str
    expected: tuple[str, ...]


def _numbers(rng: random.Random, keys: int) -> _Puzzle:
    names = rng.sample(NOUNS, keys)
    values = [str(value) for value in rng.sample(range(10_000, 100_000), keys)]
    at = rng.randrange(keys)
    return _Puzzle(
        tuple(
            f"The special magic number for {name} is {value}."
            for name, value in zip(names, values, strict=True)
        ),
        "A special magic number is hidden within the following text. Memorize it. You will be "
        "asked about it afterwards.",
        f"What is the special magic number for {names[at]} mentioned in the text?",
        f"The special magic number for {names[at]} is",
        (values[at],),
    )


def _variables(rng: random.Random, hops: int = HOPS) -> _Puzzle:
    letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
    names: dict[str, None] = {}
    while len(names) < CHAINS * (hops + 1):
        names["".join(rng.choices(letters, k=4))] = None
    values = [str(value) for value in rng.sample(range(10_000, 100_000), CHAINS)]
    chains = [list(names)[i::CHAINS] for i in range(CHAINS)]
    lines = []
    for step in range(hops + 1):
        for chain, value in zip(chains, values, strict=True):
            source = value if step == 0 else f"VAR {chain[step - 1]}"
            lines.append(f"VAR {chain[step]} = {source}.")
    return _Puzzle(
        tuple(lines),
        "Memorize and track the chain of variable assignments hidden in the following text.",
        f"Find all variables that are assigned the value {values[0]} in the text above.",
        f"The variables that are assigned the value {values[0]} are: {chains[0][0]},",
        tuple(chains[0][1:]),
    )


TASKS: dict[str, Callable[[random.Random], _Puzzle]] = {
    "niah_single": lambda rng: _numbers(rng, 1),
    "niah_multikey": lambda rng: _numbers(rng, KEYS),
    "vt": _variables,
}


def make_cases(
    tokenizer: Any, task: str, *, tokens: int, count: int, seed: int, chat: bool | None = None
) -> list[Case]:
    """Prompts that with NEW_TOKENS of answer fill `tokens` as far as whole sentences do; the same
    for the same tokenizer and arguments.

    Args:
        chat: True: the prompt is a user's turn in the tokenizer's chat template; False: plain text;
            None: True where there is a template.

    Raises:
        InputError: an unknown task, chat=True without a template, or too few tokens for the
            question alone.
    """
    if task not in TASKS:
        raise InputError(f"task {task!r} is unknown: one of {', '.join(TASKS)}")
    template = getattr(tokenizer, "chat_template", None)
    if chat and not template:
        raise InputError("the tokenizer has no chat template: chat=True is not possible")
    wrapped = bool(template) if chat is None else chat
    found = []
    for number in range(count):
        rng = random.Random(f"{task} {tokens} {seed} {number}")
        puzzle = TASKS[task](rng)
        # more filler than can fit, drawn once, so that the search below only shortens it
        filler = rng.choices(FILLER, k=max(1, tokens // 4))
        depths = sorted(rng.random() for _ in puzzle.needles)
        ids = _fitted(tokenizer, puzzle, filler, depths, tokens - NEW_TOKENS, wrapped)
        if ids is None:
            raise InputError(f"tokens={tokens} is too short for task {task!r}")
        found.append(Case(tuple(ids), puzzle.expected))
    return found


def _fitted(
    tokenizer: Any, puzzle: _Puzzle, filler: Sequence[str], depths: list[float], room: int,
    chat: bool,
) -> list[int] | None:  # fmt: skip
    """The longest prompt of at most `room` tokens; None where even no filler fits."""
    low, high, best = 0, len(filler), None
    while low <= high:
        middle = (low + high) // 2
        ids = _encode(tokenizer, puzzle, _hide(puzzle.needles, filler[:middle], depths), chat)
        if len(ids) <= room:
            best, low = ids, middle + 1
        else:
            high = middle - 1
    return best


def _hide(needles: Sequence[str], filler: Sequence[str], depths: Sequence[float]) -> str:
    """The filler with each needle at its depth, 0 to 1."""
    text = list(filler)
    for needle, depth in reversed(list(zip(needles, depths, strict=True))):
        text.insert(int(depth * (len(filler) + 1)), needle)
    return " ".join(text)


def _encode(tokenizer: Any, puzzle: _Puzzle, text: str, chat: bool) -> list[int]:
    asked = f"{puzzle.intro}\n{text}\n{puzzle.question}"
    with quiet_loading():
        if not chat:
            ids: list[int] = tokenizer(f"{asked} {puzzle.answer_start}", verbose=False)["input_ids"]
            return ids
        turns = [{"role": "user", "content": asked}]
        wrapped = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        # the template writes the special tokens itself
        ids = tokenizer(wrapped + puzzle.answer_start, add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
    return ids


def recall(expected: Sequence[str], answer: str) -> float:
    """Share of the expected strings that stand in an answer."""
    return sum(text in answer for text in expected) / len(expected)
