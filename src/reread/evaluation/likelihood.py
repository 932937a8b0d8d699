"""Log-likelihood of given text under a method: each of its tokens is fed as a decode step, so that
sparse decoding decides what the model sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..errors import InputError
from ..integrations.hf.cache import cache_keyword


@dataclass(frozen=True, slots=True)
class Likelihood:
    """How likely a continuation is.

    Attributes:
        logprob: sum over its tokens of log p(token | everything before it), nats.
        greedy: whether each of its tokens is the most likely one at its place.
    """

    logprob: float
    greedy: bool


@torch.no_grad()
def continuation_likelihood(
    model: Any, cache: Cache, last: int, continuation: Sequence[int]
) -> Likelihood:
    """Feed `last` and then continuation[:-1] one by one after what the cache holds.

    To be called in a `session.decoding()` block of an attached model; there each forward is a
    decode step of the session's config.

    Args:
        cache: one row; all of the context but its last token. It is extended by
            len(continuation) tokens: fork or crop it to use it again.
        last: the context's last token.
        continuation: token ids, at least one.

    Raises:
        InputError: no continuation.
    """
    if not continuation:
        raise InputError("a continuation without tokens has no likelihood: give at least one")
    name, device = cache_keyword(model), model.device
    found: list[Tensor] = []
    greedy: list[Tensor] = []
    for token, target in zip([last, *continuation], continuation, strict=False):
        step = torch.tensor([[token]], dtype=torch.long, device=device)
        logits = model(step, **{name: cache}, use_cache=True).logits[0, -1].float()
        # a captured step overwrites its logits next time: only copies are kept
        found.append(logits.log_softmax(-1)[target])
        greedy.append(logits.argmax() == target)
    return Likelihood(float(torch.stack(found).double().sum()), bool(torch.stack(greedy).all()))


def continuation_logprob(model: Any, cache: Cache, last: int, continuation: Sequence[int]) -> float:
    """The `logprob` of `continuation_likelihood`; see there."""
    return continuation_likelihood(model, cache, last, continuation).logprob
