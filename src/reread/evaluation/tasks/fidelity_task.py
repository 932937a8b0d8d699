"""The task `fidelity`: on any text, how close are a method's next-token distributions to dense
ones, and what did it read of what attention looks at?

A piece of the text is read but for its last steps; these go in one by one, whatever was predicted.
Dense attention of the same tokens is the reference of all methods.

figures of a sample (those that cannot be said are left out):

    agreement, kl, kl_max, ppl, ppl_dense   of the outputs; KL(dense || method) in nats
    slow_rate, keys_read_share              of the method's steps
    mass_fast        dense attention of the method's own queries that falls on keys its fast steps
                     read, mean over steps, layers and KV heads
    useless_share    of selected keys, those that no query head ever gave more than an even share
                     until the next slow step
    stability_inside, stability_across      in dense steps, the share of a step's top set outside
                     sink and window that was in the set of the step before: inside a sentence, and
                     where a new one begins; mean over layers and KV heads
    stability_k      size of those sets: the method's k, at most an eighth of the candidates
    sentences        tokens among the steps that end a sentence or a line
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ... import ops
from ...config import Config
from ...errors import InputError
from ...integrations.hf.load import Loaded
from ...integrations.hf.vocabulary import boundary_tokens
from ...types import Watched
from .. import fidelity
from .. import texts as known_texts
from ..methods import Method
from .base import Sample
from .watch import MOST_RECENT, DenseWatch, MethodWatch, Picture, See, Support

NAME = "fidelity"
WATCHED = 32  # steps on a GPU, where a watched step runs row by row beside the measured one
PICTURED = 128  # steps of a picture
MAX_BINS = 192
MAX_CELLS = 10_000  # bins x steps: some 130 KB of JSON
TOKEN_LETTERS = 12  # of a token's text in a picture


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a text: its kind, its tokens, and whether a picture is made of it."""

    kind: str
    ids: tuple[int, ...]
    pictured: bool


def make_fidelity(
    tokenizer: Any,
    *,
    tokens: int,
    count: int,
    seed: int,
    texts: Mapping[str, str],
    steps: int = 128,
) -> FidelityTask:
    """The task on `count` pieces of `tokens` tokens of each text.

    Args:
        texts: by name, which is the samples' kind; empty: all of `evaluation.texts`, with sentence
            marks and without.
        steps: the last tokens of each piece, which go in one by one.

    Raises:
        InputError: a text is too short, or there are too few steps or tokens.
    """
    if count < 1:
        raise InputError(f"count={count} is not possible: at least 1 piece of each text")
    if not 2 <= steps < tokens:
        raise InputError(
            f"{steps} steps of {tokens} tokens are not possible: at least 2 steps, and fewer than "
            "tokens"
        )
    if not texts:
        texts = {k: make() for k, make in (known_texts.KINDS | known_texts.UNMARKED).items()}
    names, whole = list(texts), list(texts.values())
    rows = fidelity.rows_of(tokenizer, whole, count, tokens, names=names, seed=seed)
    pieces = [
        Piece(names[i // count], tuple(row), i % count == 0) for i, row in enumerate(rows.tolist())
    ]
    return FidelityTask(tokens, steps, pieces)


@dataclass(slots=True)
class FidelityTask:
    """Made by `make_fidelity`; one case is one piece of a text."""

    length: int
    steps: int
    pieces: Sequence[Piece]
    name: str = NAME

    @property
    def numbers(self) -> int:
        """How many pieces there are."""
        return len(self.pieces)

    @property
    def queries(self) -> Sequence[int]:
        """One sample of each piece."""
        return [1] * len(self.pieces)

    def measure(self, number: int, methods: Sequence[Method], loaded: Loaded) -> Iterator[Sample]:
        """One sample per method; the dense steps are made once for all of them.

        Raises:
            ConfigError: a method that is not possible at this length, or a baseline.
        """
        configs = [method.at(self.length) for method in methods]
        read = self.length - self.steps
        supports = [s for s in dict.fromkeys(map(self._support, configs)) if s is not None]
        piece = self.pieces[number]
        case = _Case.of(loaded, piece.ids, read, supports)
        for method, config in zip(methods, configs, strict=True):
            began = time.perf_counter()
            figures, extra = case.figures(config, self._support(config), pictured=piece.pictured)
            yield Sample(
                task=self.name,
                length=self.length,
                method=method.name,
                number=number,
                kind=piece.kind,
                score=figures["agreement"],
                figures=figures,
                extra=extra,
                seconds=time.perf_counter() - began,
            )

    def _support(self, config: Config) -> Support | None:
        return Support.of(config.sink, config.recent, config.k, self.length - self.steps + 1)


@dataclass(slots=True)
class _Case:
    """A piece, read densely, and its dense steps.

    Attributes:
        ids: int64 [1, tokens]; read: how many of them came before the steps.
        ends: per step, whether the token that goes in ends a sentence.
        reference: dense log-probabilities, fp32 [1, steps, V].
        prefills: caches that hold what was read, by the way it was; the dense one and the latest.
    """

    loaded: Loaded
    ids: Tensor
    read: int
    ends: list[bool]
    reference: Tensor
    dense: DenseWatch
    prefills: dict[str, DynamicCache] = field(default_factory=dict)

    @classmethod
    def of(
        cls, loaded: Loaded, ids: Sequence[int], read: int, supports: Sequence[Support]
    ) -> _Case:
        model, config = loaded.model, Config.preset("dense")
        row = torch.tensor([ids], device=model.device)
        table = boundary_tokens(loaded.tokenizer, model.get_input_embeddings().weight.shape[0])
        ends = table[torch.tensor(ids[read:])].tolist()
        cache = fidelity.prefill(model, row[:, :read], config)
        recent = min(Config().recent, (read + 1) // MOST_RECENT)
        watch = DenseWatch(supports, (Config().sink, recent), ends)
        following = row[:, read:]
        if _row_by_row(config, model):
            reference = fidelity.dense_reference(model, cache, following, watch)
        else:
            reference = fidelity.dense_reference(model, cache, following)
            _watched_apart(loaded, cache, following, config, watch)
        return cls(loaded, row, read, ends, reference, watch, {_way(config): cache})

    def figures(
        self, config: Config, support: Support | None, *, pictured: bool
    ) -> tuple[dict[str, float], dict[str, Any]]:
        """What a sample of a method holds: figures and extra."""
        model, following = self.loaded.model, self.ids[:, self.read :]
        cache, watch = self._prefilled(config), MethodWatch()
        picture = self._picture() if pictured else None

        def see(layer: int, watched: Watched) -> None:
            watch(layer, watched)
            if picture is not None:
                picture(layer, watched)

        apart = not _row_by_row(config, model)
        of = cache, following, self.reference, config, self.loaded.tokenizer
        found = fidelity.measure(model, *of, None if apart else see)
        if apart:
            _watched_apart(self.loaded, cache, following, config, see)
        figures: dict[str, float | None] = {
            "agreement": found.agreement[0],
            "kl": found.kl[0],
            "kl_max": found.kl_max[0],
            "ppl": math.exp(found.loss[0]),
            "ppl_dense": math.exp(float(fidelity.loss(self.reference, following))),
            "slow_rate": found.slow_rate[0],
            "keys_read_share": found.keys_read_share,
            "mass_fast": watch.mass.value,
            "useless_share": watch.useless,
            **self._stability(support),
            "sentences": sum(self.ends),
        }
        extra = {} if picture is None else {"picture": self._drawn(picture)}
        return {name: value for name, value in figures.items() if value is not None}, extra

    def _prefilled(self, config: Config) -> DynamicCache:
        """The cache that a method starts from; not to be changed."""
        way, dense = _way(config), _way(Config.preset("dense"))
        if way not in self.prefills:
            self.prefills = {dense: self.prefills[dense]}
            self.prefills[way] = fidelity.prefill(
                self.loaded.model, self.ids[:, : self.read], config
            )
        return self.prefills[way]

    def _stability(self, support: Support | None) -> dict[str, float | None]:
        if support is None or self.dense.fetching is None:
            return {}
        inside, across = self.dense.stability[support]
        return {
            "stability_inside": inside.value,
            "stability_across": across.value,
            "stability_k": support.k,
        }

    def _picture(self) -> Picture | None:
        """Of the layer and KV head that fetches most from far away: one for all methods."""
        if self.dense.fetching is None:
            return None
        total = self.ids.shape[1]
        steps = min(total - self.read, PICTURED)
        bins = min(MAX_BINS, total, MAX_CELLS // steps)
        edges = torch.arange(bins + 1) * total // bins
        return Picture(self.dense.fetching, edges, steps)

    def _drawn(self, picture: Picture) -> dict[str, Any]:
        """A picture as plain values.

        layer, head: of which attention; read: tokens before the first step; positions: the first
        of each bin. By step: tokens (text of what went in), ends (whether that ends a sentence),
        kinds (slow, fast or full), mass (dense attention by bin, adds up to 1), kept (share of the
        bin's keys that were read, by bin), missed (of a fast step, attention not read).
        """
        steps = len(picture.kinds)
        decode = self.loaded.tokenizer.decode
        new = self.ids[0, self.read : self.read + steps].tolist()
        return {
            "layer": picture.at[0],
            "head": picture.at[1],
            "read": self.read,
            "positions": picture.edges[:-1].tolist(),
            "tokens": [decode([token])[:TOKEN_LETTERS] for token in new],
            "ends": self.ends[:steps],
            "kinds": picture.kinds,
            "mass": picture.mass,
            "kept": picture.kept,
            "missed": picture.missed,
        }


def _way(config: Config) -> str:
    """What decides how a method's prefill goes and what it leaves for the steps."""
    indexer = config.indexer_folder if config.uses_indexer else None
    prefill = config.to_dict()["prefill"]
    return json.dumps([prefill, indexer, config.selector.tail_queries])


def _row_by_row(config: Config, model: Any) -> bool:
    """Whether a method's own steps can be watched."""
    reference = ops.resolve_backend(config.backend, model.device) == "reference"
    return config.mode == "oracle" or reference


def _watched_apart(
    loaded: Loaded, cache: DynamicCache, ids: Tensor, config: Config, see: See
) -> None:
    """The first steps once more, on the reference path, for `see` alone."""
    config = config.updated({"backend": "reference", "runner": "auto"})
    of = fidelity.fork(cache), ids[:, :WATCHED], config, loaded.tokenizer
    fidelity.step_logits(loaded.model, *of, lambda step, logits: None, see)
