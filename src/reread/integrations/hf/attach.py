"""`reread.attach`: what users of transformers call."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

from ...config import Config
from ...errors import ConfigError, UnsupportedError
from ...indexer.model import Indexer
from . import guard, interface
from .session import Progress, Session
from .vocabulary import boundary_tokens, find_tokenizer

IN_MEMORY = "(in memory)"  # in the place of the folder of an indexer that was never saved
NO_TOKENIZER = (
    "the boundary trigger is off: no tokenizer was given and none lies beside the model, so slow "
    "steps come from the other triggers alone (pass tokenizer=, or set triggers.boundary=false)"
)


def attach(
    model: Any,
    config: Config | None = None,
    *,
    tokenizer: Any = None,
    indexer: Indexer | None = None,
    progress: Progress | None = None,
) -> Session:
    """Attach `model` to reread for the length of a `with` block; `model.generate` then decodes
    slow-fast.

    Works by mechanism: full-attention layers whose attention goes through transformers' attention
        interface are made
    sparse, all others run as they are. Leaving the block restores the model. Greedy decoding and
    sampling, streamers, stopping criteria, logits processors and ragged left-padded batches work
    as without reread.

    Args:
        model: a decoder-only transformers model.
        config: what to do; None is `Config.preset("default")`.
        tokenizer: the model's tokenizer, for the boundary trigger. None: the one saved beside the
            model, if any.
        indexer: one in memory, for a config that uses an indexer, or for drafts of mode "exact";
            None: from the config's folder.
        progress: called as progress(phase, done, total): phase "prefill" or "decode", tokens done
            of total (0: unknown).

    Returns:
        a `Session` to use as a context manager; `session.stats` describes the latest `generate`.

    Raises:
        UnsupportedError: the model's attention or cache cannot be served; also raised by
            `generate` for decoding modes such as beam search, always before the first token.
        ConfigError: `config` is no Config.
        InputError: the tokenizer is not this model's, or the model is attached already.
    """
    config = Config.preset("default") if config is None else config
    if not isinstance(config, Config):
        raise ConfigError(f"config={config!r} is not possible: a reread.Config or None")
    guard.check_model(model)
    interface.require_free(model)
    config = _checked(model, config, indexer)
    boundary, note = None, ""
    if config.mode not in ("dense", "exact") and config.triggers.boundary:
        tokenizer = tokenizer if tokenizer is not None else find_tokenizer(model)
        if tokenizer is None:
            note = NO_TOKENIZER
            warnings.warn(note, stacklevel=2)
        else:
            boundary = boundary_tokens(tokenizer, model.get_input_embeddings().weight.shape[0])
    session = Session(model, config, boundary, progress, indexer)
    if note:
        session.notes.append(note)
    return session


def _checked(model: Any, config: Config, indexer: Indexer | None) -> Config:
    """What a mode asks of the model and of the rest of the config."""
    if config.mode == "exact" and indexer is not None and config.indexer is None:
        config = dataclasses.replace(config, indexer=IN_MEMORY)
    if config.mode == "exact" and model.config.get_text_config(decoder=True) is not model.config:
        raise UnsupportedError(
            f"{type(model).__name__} is no text-only model, whose positions mode 'exact' could not "
            "continue: use another mode"
        )
    if config.mode != "oracle":
        return config
    if config.backend == "triton":
        raise ConfigError("backend='triton' has no mode 'oracle', which is a reference")
    if config.runner == "graph":
        raise ConfigError("runner='graph' has no mode 'oracle', which is a reference")
    return dataclasses.replace(config, backend="reference")
