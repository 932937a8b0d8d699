"""Retrieval cases for the needle checkpoint: what was said once, far back, and is asked for at the end.

A text is made of sentences of 16 words. Most are filler, some are records with a key of two words:

    The code of WORD WORD is NN NN NN NN ; … .
    The link of WORD WORD is WORD WORD ; … .
    Note WORD WORD : eleven words .

The question repeats a key. "code" wants the four numbers, "note" quotes ten words, "chain" follows three links.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import DynamicCache

from ..config import Config
from ..errors import InputError
from ..integrations.hf.attach import attach
from ..stats import Stats

Kind = Literal["code", "note", "chain"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SENTENCE = 16
RECORD_SHARE = 0.2
HOPS = 3
QUOTED = 10
FRAME_WORDS = frozenset({"code", "link", "note", "chain"})

Words = list[str]


@dataclass(frozen=True, slots=True)
class Case:
    """Prompt and answer as words split by one space; the prompt carries its own <bos>."""

    kind: Kind
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The words that filler and keys are drawn from, and the numbers of codes."""

    words: Words
    numbers: Words

    @classmethod
    def of(cls, tokens: Iterable[str]) -> Vocabulary:
        """From a word-level vocabulary: lower-case words of four letters and numbers of two digits."""
        known = sorted(tokens)
        return cls(
            [t for t in known if re.fullmatch("[a-z]{4}", t) and t not in FRAME_WORDS],
            [t for t in known if re.fullmatch("[0-9]{2}", t)],
        )


class _Writer:
    """Draws words, and writes one text around one question."""

    def __init__(self, vocabulary: Vocabulary, rng: random.Random) -> None:
        self.vocabulary = vocabulary
        self.rng = rng

    def words(self, count: int) -> Words:
        return self.rng.choices(self.vocabulary.words, k=count)

    def closed(self, start: Words) -> Words:
        """`start`, filled up to a whole sentence."""
        return [*start, *self.words(SENTENCE - 1 - len(start)), "."]

    def case(self, kind: Kind, tokens: int) -> Case:
        sentences = [self.closed([]) for _ in range(tokens // SENTENCE - 1)]
        places = self.rng.sample(range(len(sentences)), max(HOPS + 1, round(RECORD_SHARE * len(sentences))))
        # every kind of record occurs in every text, and links enough for a chain
        of_kind = {"code": places[0::3], "link": places[1::3], "note": places[2::3]}
        keys = dict(zip(places, self._keys(len(places)), strict=True))
        codes = {i: self.rng.choices(self.vocabulary.numbers, k=4) for i in of_kind["code"]}
        notes = {i: self.words(11) for i in of_kind["note"]}
        after = {i: self.rng.choice(of_kind["link"]) for i in of_kind["link"]}
        for i, numbers in codes.items():
            sentences[i] = self.closed(["The", "code", "of", *keys[i], "is", *numbers, ";"])
        for i, target in after.items():
            sentences[i] = self.closed(["The", "link", "of", *keys[i], "is", *keys[target], ";"])
        for i, quote in notes.items():
            sentences[i] = self.closed(["Note", *keys[i], ":", *quote])
        text = ["<bos>", *(word for sentence in sentences for word in sentence)]
        asked = self.rng.choice(of_kind["link" if kind == "chain" else kind])
        if kind == "code":
            return _case(kind, text, ["?", "code", "of", *keys[asked], ":"], [*codes[asked], "."])
        if kind == "note":
            return _case(kind, text, ["?", "note", *keys[asked], ":"], notes[asked][:QUOTED])
        answer: Words = []
        at = asked
        for _ in range(HOPS):
            at = after[at]
            answer += [*keys[at], "."]
        return _case(kind, text, ["?", "chain", "of", *keys[asked], ":"], answer)

    def _keys(self, count: int) -> list[Words]:
        """Keys of two words, no two alike."""
        found: dict[tuple[str, str], None] = {}
        while len(found) < count:
            first, second = self.words(2)
            found[first, second] = None
        return [list(key) for key in found]


def _case(kind: Kind, text: Words, question: Words, answer: Words) -> Case:
    return Case(kind, " ".join(text + question), " ".join(answer))


def make_cases(vocabulary: Vocabulary, kind: Kind, *, tokens: int, count: int, seed: int) -> list[Case]:
    """Cases of one kind, all with prompts of the same length.

    Args:
        tokens: about how many words each prompt has; at least 32 sentences.

    Raises:
        InputError: an unknown kind, or a text too short for its records.
    """
    if kind not in KINDS:
        raise InputError(f"kind={kind!r} is unknown: one of {', '.join(KINDS)}")
    if tokens < 32 * SENTENCE:
        raise InputError(f"tokens={tokens} is too short: at least {32 * SENTENCE}")
    rng = random.Random(f"{kind} {tokens} {seed}")
    return [_Writer(vocabulary, rng).case(kind, tokens) for _ in range(count)]


def share_right(answer: Sequence[str], given: Sequence[str]) -> float:
    """Share of the answer's words that stand at their place in what was given."""
    return sum(a == b for a, b in zip(answer, given, strict=False)) / len(answer)


@dataclass(frozen=True, slots=True)
class Result:
    """One kind under one config: mean share of answer words right, each case's share, and what the run cost."""

    accuracy: float
    shares: list[float]
    stats: Stats


@torch.no_grad()
def evaluate(
    model: Any, tokenizer: Any, cases: Sequence[Case], configs: Mapping[str, Config], *, prefill_chunk: int = 512
) -> dict[str, Result]:
    """Greedy answers of one batch of equally long prompts, under each config, after one shared prefill.

    Raises:
        InputError: prompts of different lengths.
    """
    prompts = [tokenizer(case.prompt, add_special_tokens=False)["input_ids"] for case in cases]
    if len({len(prompt) for prompt in prompts}) != 1:
        raise InputError(f"prompts must be equally long, got {sorted({len(p) for p in prompts})} tokens")
    ids = torch.tensor(prompts, device=model.device)
    new = max(len(case.answer.split()) for case in cases)
    cache = _prefill(model, ids[:, :-1], prefill_chunk)
    results = {}
    for name, config in configs.items():
        with attach(model, config, tokenizer=tokenizer) as session:
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
            )
        cache.crop(ids.shape[1] - 1 - cache.get_seq_length())
        given = [tokenizer.convert_ids_to_tokens(row) for row in out[:, ids.shape[1] :].tolist()]
        shares = [share_right(case.answer.split(), words) for case, words in zip(cases, given, strict=True)]
        results[name] = Result(sum(shares) / len(shares), shares, session.stats)
    return results


def _prefill(model: Any, ids: Tensor, chunk: int) -> DynamicCache:
    """A cache that holds `ids`, so that every config starts from the same keys."""
    cache = DynamicCache(config=model.config)
    for piece in ids.split(chunk, dim=1):
        model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache
