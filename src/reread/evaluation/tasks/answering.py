"""Answers of our methods to the questions of a case: its text is read once for all methods that
read it in the same way."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, StoppingCriteriaList

from ...config import Config
from ...errors import ConfigError
from ...integrations.hf.attach import attach
from ...integrations.hf.cache import cache_keyword
from ...integrations.hf.load import Loaded, quiet
from ...integrations.hf.prompt import decode
from ...integrations.hf.session import Session
from ...prefill import share_read
from ...stats import Stats
from ..fidelity import fork
from ..likelihood import continuation_logprob
from ..methods import Method
from ..stopping import Until, cut
from .base import Answer, AnswerTask, Case, Query, Sample

PASS = 1024  # tokens of a pass over a context, about


@dataclass(frozen=True, slots=True)
class Answering:
    """A `Task` made of questions with answers."""

    task: AnswerTask

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def length(self) -> int:
        return self.task.length

    @property
    def numbers(self) -> int:
        return len(self.task.cases)

    @property
    def queries(self) -> Sequence[int]:
        return [len(case.queries) for case in self.task.cases]

    @property
    def digest(self) -> str:
        """Short SHA-256 of what is asked: other data have another one."""
        digest = hashlib.sha256()
        for case in self.task.cases:
            asked = [(query.ids, query.choices, query.new_tokens) for query in case.queries]
            digest.update(json.dumps([case.context, asked]).encode())
        return digest.hexdigest()[:16]

    @property
    def skipped(self) -> list[dict[str, Any]]:
        """What the task left out because it is too long, as a run notes it."""
        if not (count := getattr(self.task, "skipped", 0)):
            return []
        reason = f"longer than {self.length} tokens"
        return [{"task": self.name, "length": self.length, "reason": reason, "samples": count}]

    @property
    def notes(self) -> list[str]:
        """What a reader of the table has to know."""
        found = []
        if count := getattr(self.task, "truncated", 0):
            found.append(f"{self.name} at {self.length}: {count} prompts lost their middle")
        if metric := getattr(self.task, "metric", ""):
            found.append(f"{self.name}: the score is lm-eval's {metric}")
        choices = [c for case in self.task.cases for query in case.queries for c in query.choices]
        if choices and max(map(len, choices)) == 1:
            found.append(
                f"{self.name}: a choice is one token, which a first step that is slow reads like "
                "dense: it says nothing of fast steps"
            )
        return found

    def measure(self, number: int, methods: Sequence[Method], loaded: Loaded) -> Iterator[Sample]:
        """See `Task`."""
        case = self.task.cases[number]
        readings: dict[object, DynamicCache] = {}
        tokens = len(case.context) + min(len(query.ids) for query in case.queries)
        for method in methods:
            try:
                config = method.at(tokens)
            except ConfigError as error:  # a share of a case much shorter than the length
                yield from (
                    failed_sample(self.task, method.name, number, index, error=str(error))
                    for index in range(len(case.queries))
                )
                continue
            with attach(loaded.model, config, tokenizer=loaded.tokenizer) as session, quiet():
                way = _way(config)
                if way not in readings:
                    readings[way] = read(loaded.model, case.context, config)
                for index, query in enumerate(case.queries):
                    began = time.perf_counter()
                    answer = respond(loaded, session, readings[way], case, query)
                    yield sample_of(
                        self.task, method.name, number, index, answer,
                        figures=figures_of(session.stats, config, case, query),
                        extra={"path": f"{session.stats.backend}, {session.stats.runner}"},
                        seconds=time.perf_counter() - began,
                    )  # fmt: skip


def sample_of(
    task: AnswerTask, method: str, number: int, index: int, answer: Answer, **known: Any
) -> Sample:
    """The line of an answer."""
    query = task.cases[number].queries[index]
    said = answer.text or " ".join(f"{value:.4f}" for value in answer.logprobs)
    return Sample(
        task=task.name, length=task.length, method=method, number=number, query=index,
        kind=query.kind, depth=query.depth, expected=query.expected, answer=said,
        score=task.score(query, answer), **known,
    )  # fmt: skip


def failed_sample(task: AnswerTask, method: str, number: int, index: int, **known: Any) -> Sample:
    """The line of a question without an answer."""
    query = task.cases[number].queries[index]
    return Sample(
        task=task.name, length=task.length, method=method, number=number, query=index,
        kind=query.kind, depth=query.depth, expected=query.expected, score=None, **known,
    )  # fmt: skip


def figures_of(stats: Stats, config: Config, case: Case, query: Query) -> dict[str, float]:
    """What an answer cost, by counts of what ran."""
    slow, fast, full = (sum(s) for s in (stats.slow_steps, stats.fast_steps, stats.full_steps))
    tokens = len(case.context) + len(query.ids)
    found = {
        "keys_read_share": stats.keys_read_share,
        "slow_rate": slow / max(1, slow + fast + full),
        "fast_steps": float(fast),
        "full_steps": float(full),
    }
    if stats.drafts is not None:
        found["acceptance"] = stats.drafts.acceptance
    if config.mode != "dense":
        found["fast_keys_share"] = min(1.0, config.budget / tokens)
    if config.prefill is not None:
        found["prefill_keys_share"] = share_read(tokens, config.prefill)
    return found


@torch.no_grad()
def read(model: Any, ids: Sequence[int], config: Config) -> DynamicCache:
    """The cache after reading token ids in passes of whole blocks, as the attached session reads.

    An empty context gives an empty cache.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    block = 1 if config.prefill is None else config.prefill.b_sel
    size = block * max(1, PASS // block)
    row = torch.tensor([list(ids)], dtype=torch.long, device=model.device)
    for first in range(0, len(ids), size):
        piece = row[:, first : first + size]
        model(piece, use_cache=True, logits_to_keep=1, **{cache_keyword(model): cache})
    return cache


def respond(
    loaded: Loaded, session: Session, cache: DynamicCache, case: Case, query: Query
) -> Answer:
    """Answer one question; the cache holds the context before and after."""
    before = len(case.context)
    own = cache if _reusable(cache, session) else fork(cache)
    try:
        if query.choices:
            return _choose(loaded.model, session, own, query)
        return _greedy(loaded, own, case, query)
    finally:
        if own is cache and (extra := cache.get_seq_length() - before) > 0:
            cache.crop(-extra)


def _reusable(cache: DynamicCache, session: Session) -> bool:
    """Whether the newest tokens can be taken away again: all layers hold every token, and no fast
    step needs the last queries before the question, which a crop forgets."""
    if not session.config.triggers.first_step:
        return False
    return all(
        hasattr(layer, "keys") and not getattr(layer, "is_sliding", False) for layer in cache.layers
    )


def _greedy(loaded: Loaded, cache: DynamicCache, case: Case, query: Query) -> Answer:
    model = loaded.model
    ids = torch.tensor([[*case.context, *query.ids]], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=query.new_tokens,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([Until(loaded, query.until, ids.shape[1])]),
        **{cache_keyword(model): cache},
    )
    tokens = out[0, ids.shape[1] :].tolist()
    return Answer(tuple(tokens), cut(decode(loaded, tokens), query.until))


@torch.no_grad()
def _choose(model: Any, session: Session, cache: DynamicCache, query: Query) -> Answer:
    """Each continuation by itself, after the same question."""
    if len(query.ids) > 1:
        row = torch.tensor([query.ids[:-1]], device=model.device)
        model(row, use_cache=True, logits_to_keep=1, **{cache_keyword(model): cache})
    begin, found = cache.get_seq_length(), []
    for choice in query.choices:
        own = cache if _reusable(cache, session) else fork(cache)
        with session.decoding():
            found.append(continuation_logprob(model, own, query.ids[-1], choice))
        if own is cache:
            cache.crop(begin - cache.get_seq_length())
    return Answer(logprobs=tuple(found))


def _way(config: Config) -> object:
    """What of a config decides the cache after reading."""
    indexer = config.indexer_folder if config.uses_indexer else None
    tail = None if config.triggers.first_step else config.selector.tail_queries
    return config.prefill, indexer, tail
