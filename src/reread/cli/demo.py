"""The demo's long text, documentation that every Python carries, and a question about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .options import Options, read_text

if TYPE_CHECKING:
    from ..integrations.hf.load import Loaded

TOPIC = "string-methods"
QUESTION = (
    "What do the string methods split, strip and zfill do, according to the text above?"
    " Explain each one."
)
TEXT_TOKENS = 6000


def announcement(options: Options) -> str:
    """What the demo is about to do, in two lines."""
    text = options.prompt_file or "the string methods in Python's library reference"
    return f"Text: {text}\nQuestion: {options.prompt or QUESTION}"


def long_prompt(loaded: Loaded, options: Options) -> str:
    """About 6,000 tokens of text and a question; --prompt-file and --prompt replace either.

    Raises:
        InputError: the prompt file cannot be read.
    """
    if options.prompt_file is None:
        text = loaded.tokenizer.decode(loaded.tokenizer(documentation())["input_ids"][:TEXT_TOKENS])
    else:
        text = read_text(options.prompt_file)
    return f"{text}\n\n{options.prompt or QUESTION}"


def documentation() -> str:
    """A chapter of the Python library reference, as `help()` shows it."""
    from pydoc_data.topics import topics

    return topics[TOPIC]
