"""Decode speed on the CPU: slow-fast against dense arms, SmolLM2 in fp32 on real text.

    python -m benchmarks.decode_cpu --json

Every arm continues the same prefilled cache greedily. Arms are interleaved over several rounds and
medians reported.
Two dense arms have a preallocated cache: transformers' own attention over it, and reread's
(`Config.preset("dense")`), which reads keys without repeating them per
query head. `speedup` is against the faster of the two, `speedup_over_transformers` against the
former. Correctness is checked before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

import reread
from benchmarks.common import console, save, show
from reread.evaluation.fidelity import fork, prefill
from reread.evaluation.provenance import provenance
from reread.evaluation.texts import digest, prose
from reread.integrations.hf.cache import adopt, cache_keyword, sparse_layers
from reread.integrations.hf.load import Loaded, load

STOCK, PREALLOCATED, DENSE = (
    "transformers, growing cache",
    "transformers, preallocated",
    "reread dense",
)
DENSE_ARMS = (PREALLOCATED, DENSE)
VARIANTS = {
    DENSE: reread.Config.preset("dense"),
    "default": reread.Config.preset("default"),
    "paper": reread.Config.preset("paper"),
}


def stock_arm(loaded: Loaded, cache: DynamicCache, ids: Tensor, new: int) -> tuple[Tensor, float]:
    """transformers' own generate on `cache`: new tokens and seconds after the first one."""
    clock = _FirstToken()
    sequences = loaded.model.generate(
        ids, **{cache_keyword(loaded.model): cache}, streamer=clock, **greedy(new)
    )
    return sequences[0, ids.shape[1] :], time.perf_counter() - clock.at


class _FirstToken:
    """A streamer that notes when the first new token came."""

    def __init__(self) -> None:
        self.at = 0.0
        self._seen = 0

    def put(self, _: Tensor) -> None:
        self._seen += 1
        if self._seen == 2:  # the prompt comes first
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


def greedy(new: int) -> dict[str, Any]:
    """Options for exactly `new` greedy tokens."""
    return {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new}


def plain(cache: DynamicCache, config: Any) -> DynamicCache:
    """The same keys in transformers' own growing cache."""
    copy = DynamicCache(config=config)
    for i, layer in enumerate(cache.layers):
        copy.layers[i].update(layer.keys, layer.values)
    return copy


def run(loaded: Loaded, cache: DynamicCache, ids: Tensor, arm: str, new: int) -> dict[str, Any]:
    """One timed run of one arm on a fork of `cache`."""
    config = loaded.model.config
    if arm in (STOCK, PREALLOCATED):
        own = plain(cache, config) if arm == STOCK else fork(cache)
        if arm == PREALLOCATED:
            for state in adopt(own, config, sparse_layers(config)).values():
                state.kv.reserve(ids.shape[1] + new)
        tokens, seconds = stock_arm(loaded, own, ids, new)
        return {"tokens": tokens, "tokens_per_s": (new - 1) / seconds}
    output = reread.generate(
        loaded.model,
        ids,
        config=VARIANTS[arm],
        tokenizer=loaded.tokenizer,
        **{cache_keyword(loaded.model): fork(cache)},
        **greedy(new),
    )
    stats = output.stats
    return {
        "tokens": output.sequences[0, ids.shape[1] :],
        "tokens_per_s": stats.tokens_per_s,
        "slow_steps": sum(stats.slow_steps),
        "fast_steps": sum(stats.fast_steps),
        "full_steps": sum(stats.full_steps),
        "keys_read_share": stats.keys_read_share,
    }


def check(loaded: Loaded, cache: DynamicCache, ids: Tensor) -> None:
    """Always-slow and select-everything must give dense's tokens, or nothing is timed."""
    new = 16
    expected, _ = stock_arm(loaded, plain(cache, loaded.model.config), ids, new)
    base = VARIANTS["default"]
    for name, config in {
        "dense": VARIANTS[DENSE],
        "always slow": base.updated({"t_max": 1}),
        "select everything": base.updated({"k": ids.shape[1], "dense_below_budget": False}),
    }.items():
        options = {cache_keyword(loaded.model): fork(cache), **greedy(new)}
        got = reread.generate(
            loaded.model, ids, config=config, tokenizer=loaded.tokenizer, **options
        )
        if not torch.equal(got.sequences[0, ids.shape[1] :], expected):
            raise SystemExit(
                f"{name} does not give dense's tokens at {ids.shape[1]} tokens: nothing was timed"
            )


def measure(
    loaded: Loaded, text: Tensor, context: int, new: int, rounds: int, note: Callable[[str], None]
) -> list[dict[str, Any]]:
    """All arms at one context length (prompt + new tokens)."""
    ids = text[:, : context - new]
    note(f"context {context}: prefill")
    cache = prefill(loaded.model, ids[:, :-1], reread.Config(), chunk=1024)
    check(loaded, cache, ids)
    arms = (STOCK, *DENSE_ARMS, *(name for name in VARIANTS if name != DENSE))
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for i in range(rounds):
        for arm in arms:
            runs[arm].append(run(loaded, cache, ids, arm, new))
            speed = runs[arm][-1]["tokens_per_s"]
            note(f"context {context}, round {i + 1}/{rounds}, {arm}: {speed:.2f} tokens/s")
    dense_tokens = runs[DENSE][0]["tokens"]
    median = {arm: statistics.median(r["tokens_per_s"] for r in runs[arm]) for arm in arms}
    strongest = max(median[arm] for arm in DENSE_ARMS)
    rows = []
    for arm in arms:
        first, speeds = runs[arm][0], [r["tokens_per_s"] for r in runs[arm]]
        rows.append(
            {
                "context": context,
                "arm": arm,
                "tokens_per_s": median[arm],
                "speedup": median[arm] / strongest,
                "speedup_over_transformers": median[arm] / median[PREALLOCATED],
                "min": min(speeds),
                "max": max(speeds),
                "token_agreement": float((first["tokens"] == dense_tokens).float().mean()),
                **{k: first.get(k, 0) for k in ("slow_steps", "fast_steps", "full_steps")},
                "keys_read_share": first.get("keys_read_share", 1.0),
            }
        )
    return rows


def main() -> None:
    """Run the benchmark and write benchmarks/results/decode_cpu.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--contexts", default="2048,4096,8192", help="prompt + new tokens, separated by commas"
    )
    parser.add_argument("--new", type=int, default=128, help="new tokens per run")
    parser.add_argument("--rounds", type=int, default=3, help="runs per arm; medians are reported")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="decode_cpu", help="name of the result file")
    parser.add_argument("--json", action="store_true", help="print the result on stdout too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded = load("smollm2", dtype="float32", device="cpu")
    text = prose()
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids
    rows: list[dict[str, Any]] = []
    for context in (int(c) for c in args.contexts.split(",")):
        rows += measure(loaded, ids, context, args.new, args.rounds, console.log)
    result = {
        "rows": rows,
        "config": {
            "model": loaded.name,
            "dtype": "float32",
            "new_tokens": args.new,
            "rounds": args.rounds,
            "text": {"kind": "prose", "sha256": digest(text)},
            **{name: config.to_dict() for name, config in VARIANTS.items()},
        },
        **provenance(),
    }
    path = save(args.name, result)
    columns = (
        "context",
        "arm",
        "tokens_per_s",
        "speedup",
        "speedup_over_transformers",
        "slow_steps",
        "keys_read_share",
    )
    show("decode on the CPU, medians", rows, columns)
    console.print(f"written to {path}")
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
