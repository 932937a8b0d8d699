"""What requests of lm-eval are made of: a likelihood, and sums over all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from ..errors import InputError
from ..integrations.hf.cache import cache_keyword, sparse_layers
from ..integrations.hf.session import Session
from ..stats import Stats
from .likelihood import Likelihood, continuation_likelihood


@dataclass(slots=True)
class Totals:
    """Sums of `Stats`, one row each.

    Attributes:
        truncated: requests whose context was cut.
        read, cached: keys read in decode steps and keys that dense decoding would have read, for
            each layer and KV head.
        prefill_shares: prefill_keys_share of each prompt that was read sparsely.
    """

    requests: int = 0
    truncated: int = 0
    slow_steps: int = 0
    fast_steps: int = 0
    full_steps: int = 0
    read: float = 0.0
    cached: int = 0
    prefill_shares: list[float] = field(default_factory=list)
    ran: dict[str, None] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)

    def add(self, stats: Stats, context: int) -> None:
        """One request; its first decode step had `context` keys, each later one has one more."""
        self.requests += 1
        self.slow_steps += sum(stats.slow_steps)
        self.fast_steps += sum(stats.fast_steps)
        self.full_steps += sum(stats.full_steps)
        steps = stats.decode_steps
        cached = steps * context + steps * (steps - 1) // 2
        self.cached += cached
        self.read += stats.keys_read_share * cached
        if stats.prefill_backend:
            self.prefill_shares.append(stats.prefill_keys_share)
        self.ran[f"{stats.backend}, {stats.runner}" if stats.runner else stats.backend] = None
        self.notes.update(dict.fromkeys(stats.notes))

    def cut(self, ids: list[int], room: int) -> list[int]:
        """The newest `room` tokens of a context."""
        self.truncated += len(ids) > room
        return ids[-room:]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        shares = self.prefill_shares
        return {
            "requests": self.requests,
            "truncated": self.truncated,
            "slow_steps": self.slow_steps,
            "fast_steps": self.fast_steps,
            "full_steps": self.full_steps,
            "keys_read_share": self.read / self.cached if self.cached else 1.0,
            "sparse_prefills": len(shares),
            "prefill_keys_share": sum(shares) / len(shares) if shares else 1.0,
            "ran": list(self.ran),
            "notes": list(self.notes),
        }


class Reader:
    """Likelihoods in one session; a context that follows itself is read once.

    Args:
        max_length: positions.
        chunk: tokens of a context in one pass.
    """

    def __init__(self, session: Session, max_length: int, chunk: int, totals: Totals) -> None:
        self.session = session
        self.model = session.model
        self.max_length = max_length
        self.chunk = chunk
        self.totals = totals
        self.config = self.model.config.get_text_config(decoder=True)
        # other layers' caches cannot be cut back, and a crop forgets what a first fast step needs
        whole = len(sparse_layers(self.config)) == self.config.num_hidden_layers
        self.again = whole and session.config.triggers.first_step
        self.context: list[int] = []
        self.cache = DynamicCache(config=self.config)

    def likelihood(self, context: list[int], continuation: list[int]) -> Likelihood:
        """Of a continuation after a context of at least one token.

        Raises:
            InputError: a continuation that is empty or exceeds the positions.
        """
        new = len(continuation)
        if new > self.max_length:
            raise InputError(f"a continuation of {new} tokens exceeds {self.max_length} positions")
        # the continuation's last token is predicted and never fed
        context = self.totals.cut(context, self.max_length + 1 - new)
        before = len(context) - 1
        with torch.no_grad(), self.session.decoding():
            if not self.again or not before or context != self.context:
                self._read(context[:-1])
            told = continuation_likelihood(self.model, self.cache, context[-1], continuation)
        self.totals.add(self.session.stats, len(context))
        if self.again and before:
            self.cache.crop(before - self.cache.get_seq_length())
        self.context = context
        return told

    def _read(self, ids: list[int]) -> None:
        self.cache = DynamicCache(config=self.config)
        given = {cache_keyword(self.model): self.cache, "use_cache": True, "logits_to_keep": 1}
        for part in _chunks(ids, self.chunk):
            self.model(torch.tensor([part], device=self.model.device), **given)


def _chunks(ids: list[int], size: int) -> Iterator[list[int]]:
    """Pieces of `size`; the last is longer where a single token would be left, which would be read
    as a decode step."""
    start = 0
    while start < len(ids):
        end = start + size if len(ids) - start - size > 1 else len(ids)
        yield ids[start:end]
        start = end
