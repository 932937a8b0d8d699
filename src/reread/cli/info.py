"""`reread info`: what would run, where, and what it would read."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from ..config import Config
from .options import Options
from .report import busy, make_console


def describe(options: Options) -> dict[str, Any]:
    """Everything that `info` knows, as plain values.

    Raises:
        ConfigError, InputError: an option that cannot be right.
    """
    config, prompt = options.config(), options.prompt_text()
    with busy(make_console(), f"reading {options.model}"):
        from ..evaluation.provenance import provenance
        from ..integrations.hf.facts import model_facts
        from ..integrations.hf.load import resolve_device

        device = resolve_device(options.device)
        remote = options.trust_remote_code
        model = model_facts(options.model, dtype=options.dtype, trust_remote_code=remote)
        tokens = None if prompt is None else _count(options, prompt)
    return {
        **provenance(device),
        "model": model,
        "preset": options.preset,
        "config": config.to_dict(),
        "decoding": "greedy" if options.seed is None else f"sampled, seed {options.seed}",
        "prompt": None if tokens is None else _plan(config, model, tokens, options.max_new_tokens),
    }


def _count(options: Options, prompt: str) -> int:
    from ..integrations.hf.load import load_tokenizer
    from ..integrations.hf.prompt import token_ids

    tokenizer = load_tokenizer(options.model, trust_remote_code=options.trust_remote_code)
    return len(token_ids(tokenizer, options.model, prompt, options.chat))


def _plan(config: Config, model: Mapping[str, Any], tokens: int, new: int) -> dict[str, Any]:
    """What this prompt would need: cache bytes at the end, keys that a fast step reads at most."""
    end = tokens + new
    fast = end if config.mode == "dense" else min(end, config.budget)
    positions = model["positions"]
    return {
        "tokens": tokens,
        "max_new_tokens": new,
        "fits": positions is None or end <= positions,
        "kv_bytes": end * model["kv_bytes_per_token"],
        "keys_per_fast_step": fast,
        "keys_per_dense_step": end,
    }


def show(facts: Mapping[str, Any]) -> None:
    """The facts as a table on stdout."""
    table = Table(show_header=False)
    table.add_column("what")
    table.add_column("value", overflow="fold")
    for name, value in _flat(facts):
        table.add_row(name, value)
    Console(file=sys.stdout, highlight=False).print(table)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif name == "sparse_layers":
            yield prefix + name, _ranges(value)
        elif value is not None:
            yield prefix + name, f"{value:,}" if type(value) is int else str(value)


def _ranges(indices: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    runs: list[list[int]] = []
    for i in indices:
        if runs and runs[-1][1] == i - 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"
