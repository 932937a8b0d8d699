"""The demo's long text, documentation that every Python carries, and a question about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .options import Options, read_text

if TYPE_CHECKING:
    from ..integrations.hf.load import Loaded

TOPIC = "debugger"
QUESTION = "According to the text above, what is pdb and how is it used?"
TEXT_TOKENS = 6000


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
    """Chapters of the Python language reference, as `help()` shows them."""
    from pydoc_data.topics import topics

    return topics[TOPIC]
