"""What the tasks that go through lm-eval share: importing it, its randomness, prompts as ids."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...errors import InputError
from ...integrations.hf.load import quiet_loading

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")  # what Hugging Face's own tools obey


def lm_eval_module(name: str, *, extra: str = "ruler") -> Any:
    """The module `name` of lm-eval, or of what is installed with it.

    Args:
        extra: of lm-eval's optional dependencies, the group that the module needs.

    Raises:
        InputError: lm-eval or what the module needs is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError("lm-eval is not installed: pip install 'reread[eval]'")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(f"{name}: {error}: pip install 'lm_eval[{extra}]'") from error


def is_offline() -> bool:
    """Whether the user forbids downloads."""
    return any(os.environ.get(name, "").upper() in ("1", "TRUE", "YES", "ON") for name in OFFLINE)


@contextmanager
def quiet_lm_eval() -> Iterator[None]:
    """Without lm-eval's notices, which speak of options of its own command."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with quiet_loading():
            yield
    finally:
        logger.setLevel(before)


@contextmanager
def seeded(text: str) -> Iterator[None]:
    """lm-eval draws from the generators that all of a process shares: inside they start from
    `text`, afterwards they go on as if nothing had been drawn."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(text)
    np.random.seed(random.getrandbits(32))
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def drawing_afresh(generator: random.Random | None) -> Iterator[None]:
    """The same for a generator that a module of lm-eval has for itself: inside it starts from a
    number that `random` draws."""
    if generator is None:
        yield
        return
    before = generator.getstate()
    generator.seed(random.getrandbits(64))
    try:
        yield
    finally:
        generator.setstate(before)


def wrapped(tokenizer: Any, text: str, answer_start: str, delimiter: str) -> tuple[str, bool]:
    """The whole prompt as text, and whether the tokenizer adds its special tokens.

    With a chat template `text` is a user's turn and the assistant's answer begins with
    `answer_start`; without one they follow each other, `delimiter` between them.
    """
    if not getattr(tokenizer, "chat_template", None):
        return text + (delimiter + answer_start if answer_start else ""), True
    turns = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    # the template writes the special tokens itself
    return chat + answer_start, False


def encode(tokenizer: Any, text: str, special: bool) -> list[int]:
    """Token ids of a text of any length."""
    with quiet_loading():
        ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids


def split(
    tokenizer: Any, prompt: str, ids: list[int], cut: int, special: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of a prompt as (context, query), cut where the tokens of prompt[:cut] end.

    The two joined are `ids`, the tokens of the whole: a token that reaches over the cut belongs to
    the query. Both have at least one token if there are two.
    """
    before = encode(tokenizer, prompt[:cut], special)
    alike = 0
    for one, other in zip(before, ids, strict=False):
        if one != other:
            break
        alike += 1
    alike = max(1, min(alike, len(ids) - 1))
    return tuple(ids[:alike]), tuple(ids[alike:])
