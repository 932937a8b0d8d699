"""Time to the first token and time per token of each method, on the model and lengths that its
quality was measured on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...config import Config
from ...generation import generate
from ...integrations.hf.load import Loaded, quiet
from ...stats import Stats
from ..methods import Method
from ..provenance import describe_device
from ..tasks.answering import PASS, Answering
from ..tasks.base import Task
from .store import Folder

TRANSFORMERS = "transformers"  # nothing attached: the other dense arm
RUNS = 3
NEW_TOKENS = 64
Report = Callable[[str, int, int], None]


def wanted_speed(wanted: str, loaded: Loaded) -> bool:
    """Whether to time."""
    return wanted == "on" or (wanted == "auto" and loaded.model.device.type == "cuda")


def measure_speed(
    folder: Folder, methods: Sequence[Method], tasks: Mapping[tuple[str, int], Task],
    loaded: Loaded, report: Report,
) -> None:  # fmt: skip
    """Add what the folder lacks: each of our methods and transformers' own decoding, at each
    length that has a prompt.

    Arms take turns within a round, so that a machine that slows down slows all of them.
    """
    text = loaded.model.config.get_text_config(decoder=True)
    room = (getattr(text, "max_position_embeddings", None) or 1 << 40) - NEW_TOKENS
    prompts: dict[int, list[int]] = {}
    for (_, length), task in tasks.items():
        if isinstance(task, Answering) and length not in prompts:
            case = task.task.cases[0]
            ids = [*case.context, *case.queries[0].ids]
            if room > 0:
                prompts[length] = ids[:room]
    held = {(line["method"], line["length"]) for line in folder.speeds()}
    arms = {m.name: m for m in methods if m.config is not None}
    for length, ids in prompts.items():
        lacking = [name for name in (TRANSFORMERS, *arms) if (name, length) not in held]
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in lacking}
        total = len(lacking) * (RUNS + 1)
        for turn in range(RUNS + 1):  # the first one warms up
            for at, name in enumerate(lacking):
                report(f"speed at {length}, {name}", turn * len(lacking) + at, total)
                config = arms[name].at(length) if name in arms else None
                one = _time(loaded, ids, config)
                found[name] += [one] if turn else []
        for name, runs in found.items():
            folder.add_speed(_line(name, length, len(ids), runs, loaded))


def _line(
    name: str, length: int, tokens: int, runs: Sequence[Mapping[str, Any]], loaded: Loaded
) -> dict[str, Any]:
    def median(key: str) -> float:
        return float(statistics.median(run[key] for run in runs))

    return {
        "method": name,
        "length": length,
        "ttft_s": median("ttft_s"),
        "ms_per_token": median("ms_per_token"),
        "ms_per_token_runs": [run["ms_per_token"] for run in runs],
        "prefill_tokens": tokens,
        "new_tokens": NEW_TOKENS,
        "runs": len(runs),
        "keys_read_share": runs[-1]["keys_read_share"],
        "slow_rate": runs[-1]["slow_rate"],
        "path": runs[-1]["path"],
        "device": describe_device(loaded.model.device)["name"],
    }


def _time(loaded: Loaded, ids: Sequence[int], config: Config | None) -> dict[str, Any]:
    """One answer of NEW_TOKENS greedy tokens."""
    row = torch.tensor([list(ids)], device=loaded.model.device)
    fixed: dict[str, Any] = {"min_new_tokens": NEW_TOKENS, "do_sample": False}
    with quiet():
        if config is None:
            return _own(loaded.model, row, fixed)
        block = 1 if config.prefill is None else config.prefill.b_sel
        stats = generate(
            loaded.model, row, torch.ones_like(row), config=config, max_new_tokens=NEW_TOKENS,
            tokenizer=loaded.tokenizer, prefill_chunk=block * max(1, PASS // block), **fixed,
        ).stats  # fmt: skip
    return {
        "ttft_s": stats.prefill_s,
        "ms_per_token": 1000 * stats.decode_s / max(1, stats.decode_steps),
        "keys_read_share": stats.keys_read_share,
        "slow_rate": _slow_rate(stats),
        "path": f"{stats.backend}, {stats.runner}",
    }


def _own(model: Any, row: torch.Tensor, fixed: dict[str, Any]) -> dict[str, Any]:
    """transformers' own decoding: the time to the first token is that of a run of one token."""
    mask = torch.ones_like(row)
    first = _seconds(lambda: model.generate(row, attention_mask=mask, max_new_tokens=1,
                                            do_sample=False, prefill_chunk_size=PASS))  # fmt: skip
    whole = _seconds(lambda: model.generate(row, attention_mask=mask, max_new_tokens=NEW_TOKENS,
                                            prefill_chunk_size=PASS, **fixed))  # fmt: skip
    return {
        "ttft_s": first,
        "ms_per_token": 1000 * (whole - first) / (NEW_TOKENS - 1),
        "keys_read_share": 1.0,
        "slow_rate": 0.0,
        "path": f"transformers, {model.config._attn_implementation}",
    }


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _slow_rate(stats: Stats) -> float:
    counts = [sum(s) for s in (stats.slow_steps, stats.fast_steps, stats.full_steps)]
    return counts[0] / max(1, sum(counts))
