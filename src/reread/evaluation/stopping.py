"""Answers that end at given strings: while they are generated, and afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from ..integrations.hf.load import Loaded
from ..integrations.hf.prompt import decode

MARGIN = 4  # tokens that a character or a space at the edge of a window may hang on


class Until(StoppingCriteria):
    """Stops one row once its new text holds one of some strings.

    transformers' own `stop_strings` needs a tokenizer whose tokens join to text, which one of words
    is not.

    Args:
        until: empty strings do not count.
        prompt: tokens before the new text.
    """

    def __init__(self, loaded: Loaded, until: Sequence[str], prompt: int) -> None:
        self._loaded, self._prompt = loaded, prompt
        self._until = tuple(filter(None, until))
        # no token of text is shorter than a byte
        self._window = max((len(stop.encode()) for stop in self._until), default=0) + MARGIN

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        said = False
        if self._until:
            tokens = input_ids[0, max(self._prompt, input_ids.shape[1] - self._window) :]
            text = decode(self._loaded, tokens.tolist())
            said = any(stop in text for stop in self._until)
        return torch.full((input_ids.shape[0],), said, device=input_ids.device)


def cut(text: str, until: Sequence[str]) -> str:
    """A text up to the first of some strings; empty ones do not count."""
    ends = [at for stop in filter(None, until) if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text
