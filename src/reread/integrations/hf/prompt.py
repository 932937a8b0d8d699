"""From text to token ids and back: chat templates, length checks and a stream of text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from ...errors import InputError
from .load import Loaded, quiet, quiet_loading


def encode(loaded: Loaded, prompt: str, chat: bool | None = None) -> Tensor:
    """Token ids of a prompt, int64 [1, T] on the model's device.

    Args:
        chat: as for `token_ids`.

    Raises:
        InputError: as `token_ids`.
    """
    ids = token_ids(loaded.tokenizer, loaded.name, prompt, chat)
    return torch.tensor([ids], dtype=torch.long, device=loaded.model.device)


def token_ids(tokenizer: Any, name: str, prompt: str, chat: bool | None = None) -> list[int]:
    """Token ids of a prompt.

    Args:
        name: the model's, for messages.
        chat: True wraps the prompt as a user's turn in the tokenizer's chat template, False takes
            it as it is, None is True where there is a template.

    Raises:
        InputError: an empty prompt, or chat=True without a template.
    """
    if not prompt.strip():
        raise InputError(f"the prompt is empty ({prompt!r}): give some text")
    template = getattr(tokenizer, "chat_template", None)
    if chat and not template:
        raise InputError(f"the tokenizer of {name!r} has no chat template: use --raw")
    with quiet_loading():
        if template and chat is not False:
            turns = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
            # the template writes the special tokens itself
            ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise InputError(f"the prompt {prompt[:40]!r} has no tokens: give some text")
    return ids


def check_length(loaded: Loaded, tokens: int, max_new_tokens: int) -> None:
    """Refuse what does not fit the model's positions.

    Raises:
        InputError: max_new_tokens below 1, or prompt and new tokens exceed the model's positions.
    """
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens={max_new_tokens} is not possible: at least 1")
    config = loaded.model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and tokens + max_new_tokens > limit:
        raise InputError(
            f"prompt of {tokens} tokens plus {max_new_tokens} new ones exceed the {limit}"
            f" positions of {loaded.name!r}: shorten the prompt or lower max_new_tokens"
        )


def decode(loaded: Loaded, ids: list[int]) -> str:
    """Text of new tokens, special tokens left out."""
    with quiet():
        text: str = loaded.tokenizer.decode(ids, skip_special_tokens=True)
    return text


class TokenStream(BaseStreamer):
    """A streamer for one row: hands on each token, and text as soon as its characters are complete.

    The pieces of text joined are what `decode` says of all tokens at once.

    Args:
        on_text: called with each new piece of text.
        on_token: called with each new token id.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        on_text: Callable[[str], None] | None = None,
        on_token: Callable[[int], None] | None = None,
    ) -> None:
        self.ids: list[int] = []
        self._tokenizer = tokenizer
        self._on_text = on_text
        self._on_token = on_token
        self._prompt_seen = False
        # tokens [context, told) are decoded again: a token's text may depend on the one before it
        self._context = 0
        self._told = 0

    def put(self, value: Tensor) -> None:
        """Called by `generate`: first with the prompt [1, T], then with each new token [1]."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        for token in value.flatten().tolist():
            self.ids.append(token)
            if self._on_token is not None:
                self._on_token(token)
        if self._on_text is not None:
            self._tell(self._on_text, final=False)

    def end(self) -> None:
        """Hand on what was held back. `generate` calls it at its end; after an interrupt, you."""
        if self._on_text is not None:
            self._tell(self._on_text, final=True)

    def _tell(self, on_text: Callable[[str], None], *, final: bool) -> None:
        told = self._decode(self.ids[self._context : self._told])
        text = self._decode(self.ids[self._context :])
        # U+FFFD at the end: the bytes of a character are not all there yet
        if len(text) > len(told) and (final or not text.endswith("\ufffd")):
            on_text(text[len(told) :])
            self._context, self._told = self._told, len(self.ids)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text
