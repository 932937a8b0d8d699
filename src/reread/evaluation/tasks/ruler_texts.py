"""The texts of RULER's tasks, written by lm-eval's generators at a size that the caller chooses."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .lm_common import drawing_afresh, lm_eval_module
from .ruler_data import essay_words, hotpot, squad

MODULES = "lm_eval.tasks.ruler"
HOPS = 4  # of vt, as RULER
EXAMPLE_TOKENS = 500  # of vt's worked example, as RULER
LEAST_NOISE = 5  # sentences around vt's assignments
LEAST_COMMON = 10  # words of cwe: those that are asked for
LEAST_CODED = 60  # words of fwe: below, the third place is no longer a place of its own
CHARS_PER_WORD = 50  # of fwe: tokens for each word of its vocabulary, as RULER
ANSWERED = " Answer: "  # where a template begins the answer


@dataclass(frozen=True, slots=True)
class Puzzle:
    """One text and what is asked about it.

    Attributes:
        text: what the user says; text[question:] is the question.
        answer_start: the beginning of the answer, written for the model.
        depth: of what is asked for, 0 to 1, if it stands in one place.
    """

    text: str
    question: int
    answer_start: str
    expected: tuple[str, ...]
    depth: float | None = None


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes puzzles of a task.

    Attributes:
        write: (units, number) -> puzzle; units: sentences, words or documents of its text.
        least, most: units that are possible.
        limit: how many different puzzles there are; None: any number.
    """

    write: Callable[[int, int], Puzzle]
    least: int
    most: int
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where and how long: the task's name for messages, the data folder, the whole length, and how
    many tokens a text has."""

    task: str
    data: Path | None
    tokens: int
    count: Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Maker:
    """One of RULER's tasks.

    Attributes:
        new_tokens: of an answer, as lm-eval's task has it.
        delimiter: between the question and the answer's beginning, without a chat template.
        part: scored by the share of reference answers instead.
    """

    open: Callable[[Place], Writer]
    new_tokens: int
    delimiter: str = " "
    part: bool = False


def _generator(name: str) -> Any:
    return lm_eval_module(f"{MODULES}.{name}")


@functools.cache
def _niah_module() -> Any:
    """lm-eval's module, which downloads an NLTK model when it is imported, unless it runs as a
    worker other than the first."""
    for needed in ("nltk", "wonderwords", "datasets", f"{MODULES}.common_utils"):
        lm_eval_module(needed)  # before the variable is set, so that none of them sees it
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = "1"
    try:
        return _generator("prepare_niah")
    finally:
        if before is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = before


def _niah(haystack: str, keys: str, values: str, *, k: int = 1, v: int = 1, q: int = 1) -> Maker:
    """k needles, q of them asked for, with v values each."""
    k = max(k, q)

    def opened(place: Place) -> Writer:
        module, utils = _niah_module(), _generator("niah_utils")
        essays = haystack == "essay"
        hay = (
            essay_words(module, place.task, place.data) if essays else module.get_haystack(haystack)
        )
        most = place.tokens if not essays else max(place.tokens, k * v)

        def write(units: int, number: int) -> Puzzle:
            # a text longer than all essays goes on with the first
            used = hay * -(-units // len(hay)) if essays else hay
            text, expected, asked = module.generate_input_output(
                units, used, type_haystack=haystack, type_needle_k=keys, type_needle_v=values,
                num_needle_k=k, num_needle_v=v, num_needle_q=q, template=utils.TEMPLATE,
            )  # fmt: skip
            kind, verb = (values[:-1], "is") if q * v == 1 else (values, "are")
            start = f"The special magic {kind} for {asked} mentioned in the provided text {verb}"
            depth = text.index(expected[0]) / len(text) if q * v == 1 else None
            return Puzzle(text, text.rindex("\nWhat ") + 1, start, tuple(expected), depth)

        return Writer(write, max(1, k * v), max(most, k * v))

    return Maker(opened, 128)


def _asked(text: str, answered: str, expected: list[str]) -> Puzzle:
    """A puzzle of a text that ends with its question and the answer's beginning."""
    at = text.rindex(answered)
    asked = text[:at].strip()
    return Puzzle(asked, asked.rindex("\nQuestion:") + 1, text[at:].strip(), tuple(expected))


def _open_vt(place: Place) -> Writer:
    vt = _generator("vt_utils")

    def plain(units: int, example: bool) -> tuple[str, list[str]]:
        text, names = vt.generate_input_output(units, 1, HOPS, is_icl=example)
        return text, list(names)

    def solved(units: int) -> str:
        text, names = plain(units, True)
        return f"{text} {' '.join(names)}\n\n"

    units, example = LEAST_NOISE, solved(LEAST_NOISE)
    while place.count(longer := solved(units := units + LEAST_NOISE)) <= EXAMPLE_TOKENS:
        example = longer

    def write(units: int, number: int) -> Puzzle:
        text, names = plain(units, False)
        return _asked(vt.randomize_icl(example) + "\n\n" + text, ANSWERED + "According", names)

    return Writer(write, LEAST_NOISE, place.tokens)


def _open_cwe(place: Place) -> Writer:
    cwe = _generator("cwe_utils")

    def write(units: int, number: int) -> Puzzle:
        with drawing_afresh(cwe.RNG):
            _, text, common = cwe.generate_input_output(units, place.tokens)
        return _asked(text, ANSWERED, common)

    return Writer(write, LEAST_COMMON, len(cwe.WORDS))


def _open_fwe(place: Place) -> Writer:
    fwe = _generator("fwe_utils")
    vocabulary = max(5, place.tokens // CHARS_PER_WORD)

    def write(units: int, number: int) -> Puzzle:
        # lm-eval shortens a text that is too long; as many words as here are asked for
        text, common, _ = fwe.generate_input_output(
            place.tokens, lambda _: SimpleNamespace(input_ids=()), num_words=units,
            vocab_size=vocabulary,
        )  # fmt: skip
        return _asked(text, ANSWERED, common)

    return Writer(write, LEAST_CODED, place.tokens)


def _qa(read: Callable[[Any, str, Path | None], tuple[list[dict[str, Any]], list[str]]]) -> Maker:
    def opened(place: Place) -> Writer:
        qa = _generator("qa_utils")
        questions, documents = read(qa, place.task, place.data)
        order = random.sample(range(len(questions)), len(questions))

        def write(units: int, number: int) -> Puzzle:
            index = order[number]
            # with fewer, the answer would not be in the text
            units = max(units, len(questions[index]["context"]))
            # lm-eval shuffles the list that it is given
            text, expected = qa.generate_input_output(index, units, questions, list(documents))
            return Puzzle(text, text.rindex("\nQuestion:") + 1, "Answer:", tuple(expected))

        return Writer(write, 1, len(documents), limit=len(questions))

    return Maker(opened, 32, part=True)


MAKERS: dict[str, Maker] = {
    "niah_single_1": _niah("repeat", "words", "numbers"),
    "niah_single_2": _niah("essay", "words", "numbers"),
    "niah_single_3": _niah("essay", "words", "uuids"),
    "niah_multikey_1": _niah("essay", "words", "numbers", k=4),
    "niah_multikey_2": _niah("needle", "words", "numbers"),
    "niah_multikey_3": _niah("needle", "uuids", "uuids"),
    "niah_multivalue": _niah("essay", "words", "numbers", v=4),
    "niah_multiquery": _niah("essay", "words", "numbers", q=4),
    "vt": Maker(_open_vt, 30),
    "cwe": Maker(_open_cwe, 120, delimiter="\n\n"),
    "fwe": Maker(_open_fwe, 50),
    "qa_squad": _qa(squad),
    "qa_hotpot": _qa(hotpot),
}
