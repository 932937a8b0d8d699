"""Retrieval on the needle checkpoint: what was said once, far back, and is asked for at the end.

A text is made of sentences of 16 words. Most are filler, some are records with a key of two words:

    The code of WORD WORD is NN NN NN NN ; … .
    The link of WORD WORD is WORD WORD ; … .
    Note WORD WORD : eleven words .

A question repeats a key. "code" wants the four numbers, "note" quotes ten words, "chain" follows
three links.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import DynamicCache

from ..config import Config
from ..errors import InputError
from ..integrations.hf.attach import attach
from ..integrations.hf.cache import cache_keyword
from ..integrations.hf.session import Session
from ..stats import Drafts, Stats

Kind = Literal["code", "note", "chain"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SENTENCE = 16
SHORTEST = 32 * SENTENCE
RECORD_SHARE = 0.2
HOPS = 3
QUOTED = 10
FRAME_WORDS = frozenset({"code", "link", "note", "chain"})
PREFILL_CHUNK = 1024
# that a vocabulary needs besides what filler, keys and numbers are drawn from
NEEDLE_WORDS = ("<bos>", "The", "Note", "code", "link", "note", "chain", "of", "is", "?", ":", ";")

Words = list[str]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The words that filler and keys are drawn from, and the numbers of codes."""

    words: Words
    numbers: Words

    @classmethod
    def of(cls, tokens: Iterable[str]) -> Vocabulary:
        """Of a vocabulary of words, those of four lower-case letters and numbers of two digits."""
        known = sorted(tokens)
        return cls(
            [t for t in known if re.fullmatch("[a-z]{4}", t) and t not in FRAME_WORDS],
            [t for t in known if re.fullmatch("[0-9]{2}", t)],
        )


def needle_vocabulary(tokenizer: Any) -> Vocabulary:
    """The words of needle texts.

    Raises:
        InputError: the tokenizer is not that of a needle checkpoint.
    """
    ids = tokenizer.get_vocab()
    if missing := [word for word in NEEDLE_WORDS if word not in ids]:
        raise InputError(
            f"needle tasks are for a checkpoint with needle-27m's vocabulary; this one has no "
            f"{missing[0]!r}"
        )
    return Vocabulary.of(ids)


@dataclass(frozen=True, slots=True)
class Question:
    """What is appended to a text, and the words that a right answer begins with."""

    words: Words
    answer: Words


@dataclass(frozen=True, slots=True)
class Text:
    """A text with its own <bos>, and questions about it."""

    words: Words
    questions: dict[Kind, list[Question]]


class _Writer:
    """Draws the words of one text."""

    def __init__(self, vocabulary: Vocabulary, rng: random.Random) -> None:
        self.vocabulary = vocabulary
        self.rng = rng

    def words(self, count: int) -> Words:
        return self.rng.choices(self.vocabulary.words, k=count)

    def sentence(self, start: Words) -> Words:
        """`start`, filled up with words that mean nothing."""
        return [*start, *self.words(SENTENCE - 1 - len(start)), "."]

    def keys(self, count: int) -> list[Words]:
        """Keys of two words, no two alike."""
        found: dict[tuple[str, str], None] = {}
        while len(found) < count:
            first, second = self.words(2)
            found[first, second] = None
        return [list(key) for key in found]

    def text(self, tokens: int, questions: int) -> Text:
        sentences = [self.sentence([]) for _ in range(tokens // SENTENCE - 1)]
        places = self.rng.sample(range(len(sentences)), round(RECORD_SHARE * len(sentences)))
        keys = dict(zip(places, self.keys(len(places)), strict=True))
        # every third record is of one kind, so that no text lacks one
        codes = {i: self.rng.choices(self.vocabulary.numbers, k=4) for i in places[0::3]}
        notes = {i: self.words(11) for i in places[1::3]}
        links = {i: self.rng.choice(places[2::3]) for i in places[2::3]}
        for i, numbers in codes.items():
            sentences[i] = self.sentence(["The", "code", "of", *keys[i], "is", *numbers, ";"])
        for i, quote in notes.items():
            sentences[i] = self.sentence(["Note", *keys[i], ":", *quote])
        for i, target in links.items():
            sentences[i] = self.sentence(["The", "link", "of", *keys[i], "is", *keys[target], ";"])

        def asked(records: Iterable[int]) -> list[int]:
            return self.rng.sample(list(records), questions)

        return Text(
            ["<bos>", *(word for sentence in sentences for word in sentence)],
            {
                "code": [
                    Question(["?", "code", "of", *keys[i], ":"], [*codes[i], "."])
                    for i in asked(codes)
                ],
                "note": [
                    Question(["?", "note", *keys[i], ":"], notes[i][:QUOTED]) for i in asked(notes)
                ],
                "chain": [
                    Question(["?", "chain", "of", *keys[i], ":"], _follow(i, links, keys))
                    for i in asked(links)
                ],
            },
        )


def _follow(start: int, links: Mapping[int, int], keys: Mapping[int, Words]) -> Words:
    """The keys that a chain of links passes through, each closed by a full stop."""
    at, answer = start, []
    for _ in range(HOPS):
        at = links[at]
        answer += [*keys[at], "."]
    return answer


def make_texts(
    vocabulary: Vocabulary, *, tokens: int, count: int, questions: int, seed: int
) -> list[Text]:
    """Texts of about `tokens` words, each with `questions` questions of every kind.

    Raises:
        InputError: too short for its records, or for so many questions.
    """
    records = round(RECORD_SHARE * (tokens // SENTENCE - 1))
    if tokens < SHORTEST or questions > records // len(KINDS):
        raise InputError(f"tokens={tokens} is too short for {questions} questions of a kind")
    rng = random.Random(f"{tokens} {seed}")
    return [_Writer(vocabulary, rng).text(tokens, questions) for _ in range(count)]


def share_right(answer: Sequence[str], given: Sequence[str]) -> float:
    """Share of the answer's words that stand at their place in what was given."""
    return sum(a == b for a, b in zip(answer, given, strict=False)) / len(answer)


@dataclass(slots=True)
class Result:
    """One kind of question under one config.

    Attributes:
        shares: share of answer words right, per case; accuracy: their mean.
        slow_steps, fast_steps, full_steps: of all cases together.
        read, drafts: of each batch of cases, drafts in mode "exact"; runners: how its steps ran.
    """

    shares: list[float] = field(default_factory=list)
    slow_steps: int = 0
    fast_steps: int = 0
    full_steps: int = 0
    read: list[float] = field(default_factory=list)
    runners: set[str] = field(default_factory=set)
    drafts: list[Drafts] = field(default_factory=list)

    def count(self, stats: Stats) -> None:
        """What one batch of cases did."""
        self.slow_steps += sum(stats.slow_steps)
        self.fast_steps += sum(stats.fast_steps)
        self.full_steps += sum(stats.full_steps)
        self.read.append(stats.keys_read_share)
        if stats.drafts is not None:
            self.drafts.append(stats.drafts)
        self.runners.add(f"{stats.backend}, {stats.runner}")

    @property
    def accuracy(self) -> float:
        return sum(self.shares) / len(self.shares)


@torch.no_grad()
def evaluate(
    model: Any,
    tokenizer: Any,
    texts: Sequence[Text],
    configs: Mapping[str, Config | None],
    *,
    chunk: int = PREFILL_CHUNK,
) -> dict[str, dict[Kind, Result]]:
    """Greedy answers to every question, by config and kind; texts are read as one batch, once by
    the model's own attention and once for each indexer and each sparse prefill.

    Args:
        configs: None is transformers' own decoding, nothing attached.
        chunk: tokens per pass while the texts are read.
    """
    base = _ids(model, tokenizer, [text.words for text in texts])
    keyword = cache_keyword(model)
    caches: dict[object, DynamicCache] = {}
    results: dict[str, dict[Kind, Result]] = {}
    for name, config in configs.items():
        with _attached(model, config, tokenizer) as session:
            # texts that are read in the same way are read once
            way = _way(config)
            if way not in caches:
                caches[way] = _read(model, base, chunk)
            cache = caches[way]
            for kind in KINDS:
                result = results.setdefault(name, {})[kind] = Result()
                for asked in zip(*(text.questions[kind] for text in texts), strict=True):
                    question = _ids(model, tokenizer, [q.words for q in asked])
                    tokens = _greedy(
                        model,
                        torch.cat([base, question], 1),
                        len(asked[0].answer),
                        {keyword: cache},
                    )
                    cache.crop(base.shape[1] - cache.get_seq_length())
                    for q, row in zip(asked, tokens, strict=True):
                        words = tokenizer.convert_ids_to_tokens(row)
                        result.shares.append(share_right(q.answer, words))
                    if session is not None:
                        result.count(session.stats)
    return results


def _read(model: Any, ids: Tensor, chunk: int) -> DynamicCache:
    """The cache after reading ids [B, T], sparsely if the model is attached so."""
    cache = DynamicCache(config=model.config)
    for piece in torch.split(ids, chunk, dim=1):
        model(piece, use_cache=True, logits_to_keep=1, **{cache_keyword(model): cache})
    return cache


def _way(config: Config | None) -> object:
    """What of a config decides the cache after reading."""
    if config is None:
        return None, None
    return config.prefill, config.indexer_folder if config.uses_indexer else None


def _attached(
    model: Any, config: Config | None, tokenizer: Any
) -> AbstractContextManager[Session | None]:
    return nullcontext() if config is None else attach(model, config, tokenizer=tokenizer)


def _greedy(model: Any, ids: Tensor, new: int, cache: dict[str, DynamicCache]) -> list[list[int]]:
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        **cache,
    )
    tokens: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return tokens


def _ids(model: Any, tokenizer: Any, rows: Sequence[Words]) -> Tensor:
    return torch.tensor([tokenizer.convert_tokens_to_ids(row) for row in rows], device=model.device)
