"""Prompt in, tokens out: prefill, then slow-fast decoding, then what it cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .checks import is_int
from .config import Config
from .errors import InputError
from .indexer.model import Indexer
from .integrations.hf.attach import attach
from .stats import Stats


@dataclass(frozen=True, slots=True)
class Output:
    """What `generate` returns.

    Attributes:
        sequences: int64 [B, T + new], prompt and continuation, as transformers returns them.
        stats: what it cost.
    """

    sequences: Tensor
    stats: Stats


def generate(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    config: Config | None = None,
    max_new_tokens: int,
    tokenizer: Any = None,
    indexer: Indexer | None = None,
    prefill_chunk: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> Output:
    """Generate with slow-fast decoding: `attach` and transformers' own `generate` in one call.

    Args:
        model: a decoder-only transformers model.
        input_ids: int64 [B, T], rows padded on the left.
        attention_mask: [B, T], 0 for padding; None: no padding.
        config: None is `Config.preset("default")`.
        max_new_tokens: at most this many new tokens per row, at least 1.
        tokenizer, indexer, progress: as for `attach`.
        prefill_chunk: tokens per prefill pass, None for all at once; the result does not depend on
            it, in a sparse prefill as long as it is a multiple of `prefill.b_sel`.
        options: further arguments of transformers' `generate` (do_sample, streamer,
            past_key_values, ...).

    Raises:
        InputError, UnsupportedError, NumericalError: as `attach`; always before a wrong token
            could be returned.
    """
    _require_count("max_new_tokens", max_new_tokens)
    if prefill_chunk is not None:
        _require_count("prefill_chunk", prefill_chunk)
        options["prefill_chunk_size"] = prefill_chunk
    if options.get("return_dict_in_generate"):
        raise InputError(
            "return_dict_in_generate: use `attach` and model.generate for transformers' own output"
        )
    with attach(model, config, tokenizer=tokenizer, indexer=indexer, progress=progress) as session:
        sequences = model.generate(
            input_ids, attention_mask=attention_mask, max_new_tokens=max_new_tokens, **options
        )
    return Output(sequences, session.stats)


def _require_count(name: str, value: object) -> None:
    if not is_int(value) or value < 1:
        raise InputError(f"{name}={value!r} is not possible: an integer of at least 1")
