"""The needle tasks in English, for chat models: a code, a quoted note, a chain of three places.

Neutral sentences fill the text; twelve records stand among them. The assistant's answer is begun
for the model, as RULER does: small models find it so.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InputError
from ...integrations.hf.load import quiet_loading
from ..needle import share_right
from ..ruler import FILLER, NOUNS
from .base import Answer, Case, Query

NAME = "needle_en"
RECORDS = 12  # of a text, a third of each kind
QUESTIONS = 3  # of each kind and text
HOPS = 3
NEW_TOKENS = {"code": 16, "note": 24, "chain": 48}
ROOM = 96  # tokens that the longest question and its answer take, about
COLOURS = (
    "red", "blue", "green", "white", "black", "yellow", "brown", "silver", "golden", "purple",
    "pink", "grey",
)  # fmt: skip
QUOTED = 10
INTRO = "Read the following text carefully. You will be asked about it afterwards."


@dataclass(frozen=True, slots=True)
class _Question:
    kind: str
    asked: str
    start: str  # of the answer
    expected: tuple[str, ...]
    sentence: str  # that holds the answer, of a chain the first


@dataclass(frozen=True, slots=True)
class EnglishTask:
    """Greedy answers; code and note by words at their place, chain by the places it names."""

    length: int
    cases: Sequence[Case]
    name: str = NAME

    def score(self, query: Query, answer: Answer) -> float:
        """Case and punctuation do not count."""
        if query.kind == "chain":
            said = " ".join(_words(answer.text))
            return sum(text in said for text in query.expected) / len(query.expected)
        return share_right(query.expected, _words(answer.text))


def make(tokenizer: Any, *, tokens: int, count: int, seed: int) -> EnglishTask:
    """`count` texts with QUESTIONS questions of each kind; text, question and answer fit `tokens`.

    Raises:
        InputError: too few tokens for the records alone.
    """
    cases = []
    for number in range(count):
        rng = random.Random(f"{NAME} {tokens} {seed} {number}")
        records, questions = _records(rng)
        filler = rng.choices(FILLER, k=max(1, tokens // 4))
        depths = sorted(rng.random() for _ in records)
        cases.append(_fitted(tokenizer, records, questions, filler, depths, tokens))
    return EnglishTask(tokens, cases)


def _records(rng: random.Random) -> tuple[list[str], list[_Question]]:
    """Sentences in their order in the text, and the questions about them."""
    each = RECORDS // 3
    names = [f"{colour} {noun}" for colour in COLOURS for noun in NOUNS]
    keys = rng.sample(names, 3 * each + 1)
    questions = []
    for key in keys[:each]:
        numbers = " ".join(f"{n:02d}" for n in rng.sample(range(10, 100), 4))
        start = f"The code of the {key} is"
        questions.append(
            _Question("code", f"What is the code of the {key}?", start, tuple(numbers.split()),
                      f"{start} {numbers}.")
        )  # fmt: skip
    for key in keys[each : 2 * each]:
        quote = " ".join(rng.sample(NOUNS, QUOTED))
        start = f"The note of the {key} says:"
        questions.append(
            _Question("note", f"Quote the note of the {key} word by word.", start,
                      tuple(quote.split()), f"{start} {quote}.")
        )  # fmt: skip
    ring = keys[2 * each :]
    for i, key in enumerate(ring[:-1]):
        places = [ring[(i + hop) % len(ring)] for hop in range(1, HOPS + 1)]
        start = f"The key of the {key} is in the"
        asked = (
            f"Where is the key of the {key}? Name its place, then the place of that thing's key, "
            "and so on, three times."
        )
        questions.append(_Question("chain", asked, start, tuple(places), f"{start} {places[0]}."))
    closing = f"The key of the {ring[-1]} is in the {ring[0]}."
    sentences = [*(question.sentence for question in questions), closing]
    rng.shuffle(sentences)
    chosen = []
    for kind in ("code", "note", "chain"):
        of_kind = [question for question in questions if question.kind == kind]
        chosen += rng.sample(of_kind, QUESTIONS)
    return sentences, chosen


def _fitted(
    tokenizer: Any, records: Sequence[str], questions: Sequence[_Question], filler: Sequence[str],
    depths: Sequence[float], tokens: int,
) -> Case:  # fmt: skip
    """The longest text that leaves ROOM."""
    low, high = 0, len(filler)
    best: Case | None = None
    while low <= high:
        middle = (low + high) // 2
        text = list(filler[:middle])
        for record, depth in reversed(list(zip(records, depths, strict=True))):
            text.insert(int(depth * (middle + 1)), record)
        case = _case(tokenizer, text, questions)
        longest = max(len(query.ids) + query.new_tokens for query in case.queries)
        if len(case.context) + longest <= tokens:
            best, low = case, middle + 1
        else:
            high = middle - 1
    if best is None:
        raise InputError(f"tokens={tokens} is too short for task {NAME!r}")
    return best


def _case(tokenizer: Any, sentences: Sequence[str], questions: Sequence[_Question]) -> Case:
    body = f"{INTRO}\n\n{' '.join(sentences)}\n\n"
    mark = "@@"  # where the question goes
    with quiet_loading():
        if getattr(tokenizer, "chat_template", None):
            turns = [{"role": "user", "content": body + mark}]
            before, after = _around(tokenizer, turns, mark)
            context = tokenizer(before, add_special_tokens=False, verbose=False)["input_ids"]
        else:
            after = "\n"
            context = tokenizer(body, verbose=False)["input_ids"]
        queries = []
        for question in questions:
            asked = f"{question.asked}{after}{question.start}"
            ids = tokenizer(asked, add_special_tokens=False, verbose=False)["input_ids"]
            depth = sentences.index(question.sentence) / len(sentences)
            queries.append(
                Query(
                    tuple(ids), NEW_TOKENS[question.kind], question.kind, question.expected, depth
                )
            )
    return Case(tuple(context), tuple(queries))


def _around(tokenizer: Any, turns: list[dict[str, str]], mark: str) -> tuple[str, str]:
    """What the chat template writes before and after the mark."""
    try:
        whole = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        before, after = whole.split(mark)
    except Exception as error:  # a template raises whatever its author wrote
        raise InputError(
            f"task {NAME!r}: the chat template does not take a user's turn as it is ({error})"
        ) from error
    return before, after


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())
