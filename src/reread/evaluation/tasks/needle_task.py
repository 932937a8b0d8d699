"""Retrieval in the words of needle-27m, as a task: see `evaluation.needle`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InputError
from .. import needle
from .base import Answer, Case, Query

NAME = "needle"
QUESTIONS = 3  # of each kind and text, fewer where a text has fewer records
ROOM = 32  # tokens that the longest question and its answer take
FIRST_WORD = {"code": "code", "note": "Note", "chain": "link"}  # of a record, before its key


@dataclass(frozen=True, slots=True)
class NeedleTask:
    """Greedy answers, the share of words that stand at their place."""

    tokenizer: Any
    length: int
    cases: Sequence[Case]
    name: str = NAME

    def score(self, query: Query, answer: Answer) -> float:
        """Words are tokens here."""
        words = self.tokenizer.convert_ids_to_tokens(list(answer.tokens))
        return needle.share_right(query.expected, words)


def make(tokenizer: Any, *, tokens: int, count: int, seed: int) -> NeedleTask:
    """`count` texts with up to QUESTIONS questions of each kind; text, question and answer fit
    `tokens`.

    Raises:
        InputError: another tokenizer than that of needle-27m, or too few tokens.
    """
    vocabulary = needle.needle_vocabulary(tokenizer)
    # the texts that indexers learn from have seeds from 0 on
    body = tokens - ROOM
    if body < needle.SHORTEST:
        least = needle.SHORTEST + ROOM
        raise InputError(f"tokens={tokens} is too short for task {NAME!r}: at least {least}")
    records = round(needle.RECORD_SHARE * (body // needle.SENTENCE - 1))
    questions = min(QUESTIONS, records // len(needle.KINDS))
    texts = needle.make_texts(
        vocabulary, tokens=body, count=count, questions=questions, seed=-1 - seed
    )
    return NeedleTask(tokenizer, tokens, [_case(tokenizer, text) for text in texts])


def _case(tokenizer: Any, text: needle.Text) -> Case:
    queries = [
        Query(
            tuple(tokenizer.convert_tokens_to_ids(question.words)),
            len(question.answer),
            kind,
            tuple(question.answer),
            depth_of(text.words, kind, question.words),
        )
        for kind in needle.KINDS
        for question in text.questions[kind]
    ]
    return Case(tuple(tokenizer.convert_tokens_to_ids(text.words)), tuple(queries))


def depth_of(words: Sequence[str], kind: str, question: Sequence[str]) -> float:
    """Where the record of a question stands (of a chain, its first): 0 to 1."""
    key = list(question[-3:-1])  # "? code of WORD WORD :"
    first = FIRST_WORD[kind]
    before = [first] if kind == "note" else [first, "of"]
    wanted = [*before, *key]
    size = len(wanted)
    at = next(i for i in range(len(words)) if list(words[i : i + size]) == wanted)
    return at / len(words)
