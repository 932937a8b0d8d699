"""Teacher-forced fidelity: given the same text, how close are a variant's next-token distributions
to dense ones?"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
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

Tick = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Fidelity:
    """One variant over a batch of texts. All lists have one entry per row.

    Attributes:
        agreement: share of steps whose argmax equals dense's.
        kl: mean KL(dense || variant) in nats.
        slow_rate: slow steps / steps.
        keys_read_share: over all rows.
    """

    agreement: list[float]
    kl: list[float]
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
) -> Stats:
    """Feed ids [B, N] one by one after the cache's content; `observe(step, logits [B, V])` sees
    every output."""
    name = cache_keyword(model)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore" if tokenizer is None else "default")
        with attach(model, config, tokenizer=tokenizer) as session, session.decoding():
            for step in range(ids.shape[1]):
                output = model(ids[:, step : step + 1], **{name: cache}, use_cache=True)
                observe(step, output.logits[:, -1].float())
    return session.stats


def dense_reference(model: Any, cache: DynamicCache, ids: Tensor) -> Tensor:
    """Dense log-probabilities for every step, fp32 [B, N, V]."""
    out: list[Tensor] = []
    step_logits(
        model,
        fork(cache),
        ids,
        Config.preset("dense"),
        None,
        lambda _, logits: out.append(logits.log_softmax(-1)),
    )
    return torch.stack(out, dim=1)


def measure(
    model: Any, cache: DynamicCache, ids: Tensor, reference: Tensor, config: Config, tokenizer: Any
) -> Fidelity:
    """Compare one configuration with the dense reference on the same text.

    Args:
        cache: prefilled with the context; not changed.
        ids: [B, N] the text that follows it.
        reference: from `dense_reference`.
    """
    if reference.shape[:2] != ids.shape:
        raise InputError(
            f"the reference covers {tuple(reference.shape[:2])}, the text is {tuple(ids.shape)}"
        )
    agree = torch.zeros(ids.shape[0], device=ids.device)
    kl = torch.zeros(ids.shape[0], device=ids.device)

    def compare(step: int, logits: Tensor) -> None:
        dense = reference[:, step]
        agree.add_((logits.argmax(-1) == dense.argmax(-1)).float())
        kl.add_((dense.exp() * (dense - logits.log_softmax(-1))).sum(-1))

    stats = step_logits(model, fork(cache), ids, config, tokenizer, compare)
    steps = ids.shape[1]
    return Fidelity(
        agreement=(agree / steps).tolist(),
        kl=(kl / steps).tolist(),
        slow_rate=[n / steps for n in stats.slow_steps],
        keys_read_share=stats.keys_read_share,
    )


def rows_of(tokenizer: Any, texts: Sequence[str], samples: int, length: int) -> Tensor:
    """`samples` pieces of `length` tokens from each text, evenly spread over it: int64 [texts *
    samples, length]."""
    rows = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]
        if ids.numel() < length * samples:
            raise InputError(
                f"a text has {ids.numel()} tokens, {samples} pieces of {length} are needed"
            )
        stride = ids.numel() // samples
        rows += [ids[i * stride : i * stride + length] for i in range(samples)]
    return torch.stack(rows)
