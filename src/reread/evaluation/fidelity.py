"""Teacher-forced fidelity: given the same text, how close are a variant's next-token distributions
to dense ones?"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ..config import Config
from ..errors import InputError
from ..integrations.hf.attach import attach
from ..integrations.hf.cache import cache_keyword
from ..stats import Stats
from .tasks.watch import See, watching

Tick = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Fidelity:
    """One variant over a batch of texts. All lists have one entry per row.

    Attributes:
        agreement: share of steps whose argmax equals dense's.
        kl, kl_max: KL(dense || variant) in nats, mean and largest.
        loss: mean -log p of the text's own next tokens, in nats; NaN for a text of one step.
        slow_rate: slow steps / steps.
        keys_read_share: over all rows.
    """

    agreement: list[float]
    kl: list[float]
    kl_max: list[float]
    loss: list[float]
    slow_rate: list[float]
    keys_read_share: float


def prefill(
    model: Any, ids: Tensor, config: Config, *, chunk: int = 512, tick: Tick | None = None
) -> DynamicCache:
    """Write ids [B, P] into a new cache, dense, in chunks; it can be forked with `fork` for any
    number of variants."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    name = cache_keyword(model)
    with torch.no_grad(), attach(model, config.updated({"triggers.boundary": False})):
        for start in range(0, ids.shape[1], chunk):
            part = ids[:, start : start + chunk]
            model(part, **{name: cache}, use_cache=True, logits_to_keep=1)
            if tick is not None:
                tick(min(start + chunk, ids.shape[1]), ids.shape[1])
    return cache


def fork(cache: DynamicCache) -> DynamicCache:
    """An independent copy of a cache and of what reread remembers in it."""
    return copy.deepcopy(cache)


def step_logits(
    model: Any,
    cache: DynamicCache,
    ids: Tensor,
    config: Config,
    tokenizer: Any,
    observe: Callable[[int, Tensor], None],
    watch: See | None = None,
) -> Stats:
    """Feed ids [B, N] one by one after the cache's content; `observe(step, logits [B, V])` sees
    every output, `watch` every layer's attention on the reference path."""
    name = cache_keyword(model)
    watched = nullcontext() if watch is None else watching(model, cache, watch)
    with warnings.catch_warnings(), torch.no_grad(), watched:
        warnings.simplefilter("ignore" if tokenizer is None else "default")
        with attach(model, config, tokenizer=tokenizer) as session, session.decoding():
            for step in range(ids.shape[1]):
                output = model(ids[:, step : step + 1], **{name: cache}, use_cache=True)
                observe(step, output.logits[:, -1].float())
    return session.stats


def dense_reference(
    model: Any, cache: DynamicCache, ids: Tensor, watch: See | None = None
) -> Tensor:
    """Dense log-probabilities for every step, fp32 [B, N, V]; watch: see `step_logits`."""
    out: list[Tensor] = []

    def keep(_: int, logits: Tensor) -> None:
        out.append(logits.log_softmax(-1))

    step_logits(model, fork(cache), ids, Config.preset("dense"), None, keep, watch)
    return torch.stack(out, dim=1)


def loss(log_p: Tensor, ids: Tensor) -> Tensor:
    """Mean -log p of the text's own next tokens, [B], NaN for one step: log_p [B, N, V] after each
    of ids [B, N]; what follows the last one is not known."""
    return -log_p[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1).mean(dim=1)


def measure(
    model: Any,
    cache: DynamicCache,
    ids: Tensor,
    reference: Tensor,
    config: Config,
    tokenizer: Any,
    watch: See | None = None,
) -> Fidelity:
    """Compare one configuration with the dense reference on the same text.

    Args:
        cache: prefilled with the context; not changed.
        ids: [B, N] the text that follows it.
        reference: from `dense_reference`.
        watch: see `step_logits`.
    """
    if reference.shape[:2] != ids.shape:
        raise InputError(
            f"the reference covers {tuple(reference.shape[:2])}, the text is {tuple(ids.shape)}"
        )
    agree, kl, own = (torch.zeros(ids.shape, device=ids.device) for _ in range(3))

    def compare(step: int, logits: Tensor) -> None:
        dense, log_p = reference[:, step], logits.log_softmax(-1)
        agree[:, step] = (logits.argmax(-1) == dense.argmax(-1)).float()
        kl[:, step] = (dense.exp() * (dense - log_p)).sum(-1)
        if step + 1 < ids.shape[1]:
            own[:, step] = log_p.gather(-1, ids[:, step + 1, None])[:, 0]

    stats = step_logits(model, fork(cache), ids, config, tokenizer, compare, watch)
    return Fidelity(
        agreement=agree.mean(dim=1).tolist(),
        kl=kl.mean(dim=1).tolist(),
        kl_max=kl.amax(dim=1).tolist(),
        loss=(-own[:, :-1].mean(dim=1)).tolist(),
        slow_rate=[n / ids.shape[1] for n in stats.slow_steps],
        keys_read_share=stats.keys_read_share,
    )


def rows_of(
    tokenizer: Any,
    texts: Sequence[str],
    samples: int,
    length: int,
    *,
    names: Sequence[str] | None = None,
    seed: int | None = None,
) -> Tensor:
    """`samples` pieces of `length` tokens from each text, spread over it: int64 [texts * samples,
    length].

    Args:
        names: of the texts; None: their numbers.
        seed: of where a piece begins in its part of the text; None: where that begins.

    Raises:
        InputError: a text is too short.
    """
    rows = []
    for number, text in enumerate(texts):
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]
        stride, name = ids.numel() // samples, names[number] if names else str(number)
        if stride < length:
            raise InputError(
                f"text {name!r} has {ids.numel()} tokens: {samples} pieces of {length} are needed"
            )
        place = random.Random(f"pieces {seed} {name}")
        for i in range(samples):
            first = i * stride + (0 if seed is None else place.randrange(stride - length + 1))
            rows.append(ids[first : first + length])
    return torch.stack(rows)
