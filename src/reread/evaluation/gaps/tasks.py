"""The tasks that gaps are measured on: what is read, and the share of it that is answered right.

needle         questions inside the prefill, teacher-forced: see `forced`
needle-greedy  questions after the prefill, greedy answers: see `needle`
niah_single, niah_multikey, vt
               English, for chat models, greedy answers: see `ruler`
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import DynamicCache

from ...config import Config
from ...errors import InputError
from ...indexer.model import Indexer
from ...integrations.hf.attach import attach
from ...integrations.hf.cache import cache_keyword
from ...integrations.hf.load import Loaded, quiet
from ...integrations.hf.prompt import decode
from ...prefill import share_read
from ...stats import Stats
from .. import needle, ruler
from .forced import ForcedText, make_forced, read_forced

FORCED, GREEDY = "needle", "needle-greedy"
TASKS = (FORCED, GREEDY, *ruler.TASKS)
GREEDY_QUESTIONS = 3  # of each kind and text
GREEDY_ROOM = 32  # tokens of a text's length that its question and answer take
FUSED, REFERENCE, DENSE = "fused kernels", "reference path", "dense attention"
PASS = 1024  # tokens per pass of a prefill, about
TTFT_RUNS = 3
Tick = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Way:
    """How a row reads.

    Attributes:
        indexer: in memory, where the config uses one; folder: where it lies.
    """

    config: Config
    indexer: Indexer | None = None
    folder: Path | None = None

    @property
    def chunk(self) -> int:
        """Tokens per pass: a multiple of b_sel."""
        block = 1 if self.config.prefill is None else self.config.prefill.b_sel
        return block * max(1, PASS // block)


@dataclass(slots=True)
class Outcome:
    """What a row's cases gave.

    Attributes:
        shares: per kind of question and case, share of the answer right.
        read: share of keys read in the prefill, per text; paths: what ran, by the stats.
    """

    shares: dict[str, list[float]] = field(default_factory=dict)
    read: list[float] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)

    def count(self, stats: Stats) -> None:
        """What one prefill did."""
        self.read.append(stats.prefill_keys_share)
        self.paths.add(path_of(stats.prefill_backend, stats.prefill_keys_share))


class Task(Protocol):
    """A task at one length, its texts made."""

    @property
    def units(self) -> int:
        """How often `run` ticks."""
        ...

    def run(self, loaded: Loaded, way: Way, tick: Tick) -> Outcome:
        """Read all texts one way."""
        ...

    def sample(self) -> Sequence[int]:
        """Token ids of one text, to time."""
        ...


def make_task(tokenizer: Any, name: str, *, tokens: int, count: int, seed: int) -> Task:
    """A task's texts, of at most `tokens` tokens with what follows them.

    Raises:
        InputError: an unknown task, one that this tokenizer cannot write, or too few tokens.
    """
    if name == FORCED:
        return ForcedTask(make_forced(tokenizer, tokens=tokens, count=count, seed=seed))
    if name == GREEDY:
        texts = needle.make_texts(
            needle.needle_vocabulary(tokenizer),
            tokens=tokens - GREEDY_ROOM, count=count, questions=GREEDY_QUESTIONS, seed=-1 - seed,
        )  # fmt: skip
        return GreedyTask(tokenizer, texts)
    cases = ruler.make_cases(tokenizer, name, tokens=tokens, count=count, seed=seed)
    return RulerTask(name, cases)


def path_of(backend: str, share: float) -> str:
    """What ran in a prefill: by the stats' backend and share of keys read."""
    if share == 1:
        return DENSE
    return FUSED if backend == "triton" else REFERENCE


@dataclass(frozen=True, slots=True)
class ForcedTask:
    """Teacher-forced answers within the prefill."""

    texts: list[ForcedText]

    @property
    def units(self) -> int:
        """Texts."""
        return len(self.texts)

    def run(self, loaded: Loaded, way: Way, tick: Tick) -> Outcome:
        """See `Task`."""
        out = Outcome({kind: [] for kind in needle.KINDS})
        for text in self.texts:
            shares, stats = read_forced(
                loaded.model, text, way.config, indexer=way.indexer, chunk=way.chunk
            )
            for answer, share in zip(text.answers, shares, strict=True):
                out.shares[answer.kind].append(share)
            out.count(stats)
            tick()
        return out

    def sample(self) -> Sequence[int]:
        """See `Task`."""
        return self.texts[0].ids


@dataclass(frozen=True, slots=True)
class GreedyTask:
    """Greedy answers to questions after the text; the share read is by the text's length."""

    tokenizer: Any
    texts: list[needle.Text]

    @property
    def units(self) -> int:
        """Texts."""
        return len(self.texts)

    def run(self, loaded: Loaded, way: Way, tick: Tick) -> Outcome:
        """See `Task`."""
        config = way.config
        if way.folder is not None:
            config = config.updated({"prefill.indexer": str(way.folder)})
        out = Outcome({kind: [] for kind in needle.KINDS})
        length = len(self.sample())
        share = 1.0 if config.prefill is None else share_read(length, config.prefill)
        for text in self.texts:
            found = needle.evaluate(
                loaded.model, loaded.tokenizer, [text], {"": config}, chunk=way.chunk
            )[""]
            for kind in needle.KINDS:
                out.shares[kind] += found[kind].shares
                out.paths |= {path_of(r.partition(",")[0], share) for r in found[kind].runners}
            out.read.append(share)
            tick()
        return out

    def sample(self) -> Sequence[int]:
        """See `Task`."""
        ids: list[int] = self.tokenizer.convert_tokens_to_ids(self.texts[0].words)
        return ids


@dataclass(frozen=True, slots=True)
class RulerTask:
    """Greedy answers to prompts, scored by the strings that they must contain."""

    name: str
    cases: list[ruler.Case]

    @property
    def units(self) -> int:
        """Prompts."""
        return len(self.cases)

    def run(self, loaded: Loaded, way: Way, tick: Tick) -> Outcome:
        """See `Task`."""
        out = Outcome({self.name: []})
        with attach(loaded.model, way.config, indexer=way.indexer) as session, quiet():
            for case in self.cases:
                ids = torch.tensor([case.ids], device=loaded.model.device)
                tokens = loaded.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=ruler.NEW_TOKENS,
                    do_sample=False,
                    prefill_chunk_size=way.chunk,
                )
                answer = decode(loaded, tokens[0, ids.shape[1] :].tolist())
                out.shares[self.name].append(ruler.recall(case.expected, answer))
                out.count(session.stats)
                tick()
        return out

    def sample(self) -> Sequence[int]:
        """See `Task`."""
        return self.cases[0].ids


def ttft(loaded: Loaded, ids: Sequence[int], way: Way) -> float | None:
    """Seconds until the first token is chosen, of one row in one pass: the median of TTFT_RUNS
    after a warm-up; None without a GPU. Dense is timed with nothing attached."""
    if loaded.model.device.type != "cuda":
        return None
    return statistics.median(prefill_seconds(loaded.model, ids, way, 1 + TTFT_RUNS)[1:])


@torch.no_grad()
def prefill_seconds(model: Any, ids: Sequence[int], way: Way, runs: int) -> list[float]:
    """Seconds of each prefill of one row in one pass."""
    row, keyword, times = torch.tensor([ids], device=model.device), cache_keyword(model), []
    dense = way.config.prefill is None
    with nullcontext() if dense else attach(model, way.config, indexer=way.indexer):
        for _ in range(runs):
            # without a cache of its own, an attached model would read densely
            cache = DynamicCache(config=model.config.get_text_config(decoder=True))
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)
            began = time.perf_counter()
            output = model(row, use_cache=True, logits_to_keep=1, **{keyword: cache})
            int(output.logits[0, -1].argmax())  # waits for the GPU
            times.append(time.perf_counter() - began)
            del output, cache
    return times


def check_tasks(names: Sequence[str]) -> None:
    """Refuse names that are no tasks, and none at all.

    Raises:
        InputError: names the task.
    """
    for name in names:
        if name not in TASKS:
            raise InputError(f"task {name!r} is unknown: one of {', '.join(TASKS)}")
    if not names:
        raise InputError(f"no task: give some of {', '.join(TASKS)}")
