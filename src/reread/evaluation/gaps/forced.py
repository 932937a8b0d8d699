"""Retrieval inside the prefill: a needle text with all of its questions and their right answers
behind it, read in one go, and the model's prediction of every answer word.

A text that is read sparsely and questions that are asked afterwards measure little: reading filler
needs no other tokens. Here the questions are part of what is read, so each of them has to find its
record with the keys that its block of queries chose; blocks hold many different questions.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from ...config import Config
from ...errors import InputError
from ...indexer.model import Indexer
from ...integrations.hf.attach import attach
from ...integrations.hf.cache import cache_keyword
from ...stats import Stats
from ..corpus import QUESTION_WORDS
from ..needle import KINDS, RECORD_SHARE, SENTENCE, SHORTEST, Kind, make_texts, needle_vocabulary
from ..needle import share_right as share_right_words


@dataclass(frozen=True, slots=True)
class Answer:
    """Where an answer stands: words [first, last) of the whole text."""

    kind: Kind
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ForcedText:
    """A text, its questions and their answers, as one list of token ids.

    Attributes:
        focus: position of the first question.
    """

    ids: tuple[int, ...]
    focus: int
    answers: tuple[Answer, ...]


def make_forced(tokenizer: Any, *, tokens: int, count: int, seed: int) -> list[ForcedText]:
    """Texts that fill `tokens` as far as whole sentences do; a seventh or so of each is questions.

    None of them is among the contexts that `reread distill` learns from, whatever its seed.

    Raises:
        InputError: too short, or another vocabulary.
    """
    vocabulary = needle_vocabulary(tokenizer)
    body, questions = _sizes(tokens)
    # the distillation's texts have seeds from 0 on
    texts = make_texts(vocabulary, tokens=body, count=count, questions=questions, seed=-1 - seed)
    ids = tokenizer.get_vocab()
    found = []
    for number, text in enumerate(texts):
        asked = [(kind, question) for kind in KINDS for question in text.questions[kind]]
        random.Random(f"forced {seed} {number}").shuffle(asked)
        words, answers = list(text.words), []
        for kind, question in asked:
            words += question.words
            answers.append(Answer(kind, len(words), len(words) + len(question.answer)))
            words += question.answer
        found.append(ForcedText(tuple(ids[w] for w in words), len(text.words), tuple(answers)))
    return found


def _sizes(tokens: int) -> tuple[int, int]:
    """Tokens of the longest text that leaves room for all of its questions, and how many of these
    a kind has."""
    for body in range(tokens // SENTENCE * SENTENCE, SHORTEST - 1, -SENTENCE):
        sentences = body // SENTENCE - 1
        questions = round(RECORD_SHARE * sentences) // len(KINDS)
        if 1 + sentences * SENTENCE + questions * QUESTION_WORDS <= tokens:
            return body, questions
    raise InputError(f"tokens={tokens} is too short for a needle text with its questions")


@torch.no_grad()
def read_forced(
    model: Any, text: ForcedText, config: Config, *, indexer: Indexer | None = None, chunk: int
) -> tuple[list[float], Stats]:
    """Read a text under `config` and compare the likeliest next tokens with its answers.

    Args:
        chunk: tokens per pass, a multiple of the prefill's b_sel, so that no block is cut.

    Returns:
        share of words right of each of `text.answers`, and the stats of the prefill.
    """
    keyword = cache_keyword(model)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    ids = torch.tensor([text.ids], device=model.device)
    given: list[int] = []  # predictions of the tokens from `focus` on
    with attach(model, config, indexer=indexer) as session, session.decoding():
        for first, last in passes(len(text.ids), chunk):
            # the last token before `focus` predicts the first one behind it
            keep = last - max(first, text.focus - 1)
            part = ids[:, first:last]
            output = model(part, use_cache=True, logits_to_keep=max(1, keep), **{keyword: cache})
            if keep > 0:
                given += output.logits[0].argmax(-1).tolist()
    at = text.focus
    return [
        share_right_words(
            _strings(text.ids[a.first : a.last]), _strings(given[a.first - at : a.last - at])
        )
        for a in text.answers
    ], session.stats


def passes(length: int, chunk: int) -> Iterator[tuple[int, int]]:
    """[first, last) of each pass; none of a single token, which would be a decode step."""
    first = 0
    while first < length:
        last = min(first + chunk, length)
        last = length if length - last == 1 else last
        yield first, last
        first = last


def _strings(ids: Sequence[int]) -> list[str]:
    return [str(i) for i in ids]
