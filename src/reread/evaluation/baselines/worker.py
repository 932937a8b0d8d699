"""Answers by kvpress's methods, in an environment of its own: it needs an older transformers.

    python worker.py JOBS.json ANSWERS.jsonl

Imports nothing of reread. JOBS.json:

    {"model": FOLDER, "dtype": NAME, "device": NAME, "prompts": [[id, ...], ...],
     "jobs": [{"id", "press", "kept", "prompt", "new_tokens", "eos", "choices"}, ...]}

`prompt` counts in `prompts`; `press` is a class of kvpress; `kept` is the share to keep, see
`PRESSES`; `choices` are continuations whose log-probability is wanted, else the answer is greedy.
ANSWERS.jsonl gets a line per job as soon as it is done:

    {"id", "tokens" or "logprobs", "kept_share", "kv_bytes_share", "seconds", "path"}
    {"id", "error": "Type: message"}

The whole prompt, question included, is read densely and evicted afterwards, as the methods'
authors do it. The first token of an answer thus comes from dense attention, the others from what
is left, at the positions they have in the text.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvpress  # type: ignore[import-not-found]  # lives in the other environment only
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

# kvpress's defaults
WINDOW = 64  # of SnapKV and what builds on it
LAG = 128  # of LagKV
SINK = 4  # of StreamingLLM and LagKV
CHUNK = 20  # of ChunkKV
BETA = 20  # of PyramidKV: the top layer keeps a BETA-th of the mean


@dataclass(frozen=True, slots=True)
class Budget:
    """The share `kept` of a prompt of `length` tokens, whose keys have `channels` channels."""

    kept: float
    length: int
    channels: int

    @property
    def keys(self) -> int:
        """Tokens to keep of each KV head, in the mean over layers."""
        return min(self.length, max(1, round(self.kept * self.length)))

    def window(self, part: int) -> int:
        """Queries of an observation window, whose keys are always kept: kvpress's 64, or one in
        `part` of a small budget, which it would fill without leaving anything to choose."""
        return max(1, min(WINDOW, self.keys // part))


def removed(keep: int, of: int) -> float:
    """A compression ratio for which kvpress, which rounds down, keeps exactly `keep`."""
    return 0.0 if keep >= of else 1 - (keep + 0.5) / of


def _streaming_llm(budget: Budget) -> Any:
    """The first 4 tokens and the last ones."""
    return kvpress.StreamingLLMPress(removed(budget.keys, budget.length), n_sink=SINK)


def _tova(budget: Budget) -> Any:
    """What the last token attends to, the same for all heads. kvpress evicts once, after the
    prompt; the paper goes on while it decodes and has fewer keys."""
    return kvpress.TOVAPress(removed(budget.keys, budget.length))


def _think(budget: Budget) -> Any:
    """Key channels, not tokens: `kept` is their share. Values stay whole, so that (1 + kept) / 2
    of the bytes remain (if keys were packed: kvpress writes zeros)."""
    channels = max(1, round(budget.kept * budget.channels))
    # here it is the pruned ones that kvpress rounds down
    pruned = 0.0 if channels >= budget.channels else 1 - (channels - 0.5) / budget.channels
    return kvpress.ThinKPress(pruned, window_size=min(32, budget.length))


def _snapkv(budget: Budget) -> Any:
    """The window's tokens and what they attend to, by KV head."""
    ratio = removed(budget.keys, budget.length)
    return kvpress.SnapKVPress(ratio, window_size=budget.window(2))


def _chunkkv(budget: Budget) -> Any:
    """Whole chunks of 20 tokens, by SnapKV's scores, the same for all heads."""
    rest = budget.length % CHUNK
    # the last, shorter chunk holds the window and is always among the best
    chunks = round((budget.keys - rest) / CHUNK) + (rest > 0)
    ratio = removed(max(1, chunks), math.ceil(budget.length / CHUNK))
    scores = kvpress.SnapKVPress(ratio, window_size=budget.window(4))
    return kvpress.ChunkKVPress(scores, chunk_length=CHUNK)


def _lagkv(budget: Budget) -> Any:
    """Tokens unlike the next partition of the text. The last partitions are kept whole, so their
    size shrinks with the budget and leaves something to choose."""
    lag = max(2, min(LAG, (budget.keys // 2 - SINK) // 2))
    return kvpress.LagKVPress(removed(budget.keys, budget.length), n_sink=SINK, lag_size=lag)


def _knorm(budget: Budget) -> Any:
    """The keys of the smallest norm, by KV head."""
    return kvpress.KnormPress(removed(budget.keys, budget.length))


def _pyramidkv(budget: Budget) -> Any:
    """SnapKV with many tokens in low layers and few in high ones; `kept` is the mean of layers."""
    # the top layer has to hold the window; with a larger one kvpress silently runs SnapKV instead
    window = budget.window(BETA)
    # a quarter of a key more than is due keeps that comparison on the right side of float error
    ratio = 0.0 if budget.keys == budget.length else 1 - (budget.keys + 0.25) / budget.length
    return kvpress.PyramidKVPress(ratio, window_size=window, beta=BETA)


PRESSES: dict[str, Callable[[Budget], Any]] = {
    "StreamingLLMPress": _streaming_llm,
    "TOVAPress": _tova,
    "ThinKPress": _think,
    "SnapKVPress": _snapkv,
    "ChunkKVPress": _chunkkv,
    "LagKVPress": _lagkv,
    "KnormPress": _knorm,
    "PyramidKVPress": _pyramidkv,
}


@dataclass(frozen=True, slots=True)
class Kept:
    """What is left in a cache of a prompt of `length` tokens.

    Attributes:
        tokens: by layer.
        key_share: of the numbers in the prompt's keys; byte_share: of keys and values.
    """

    tokens: tuple[int, ...]
    key_share: float
    byte_share: float
    length: int

    @classmethod
    def of(cls, cache: Any, length: int, channels_pruned: bool) -> Kept:
        """Measured from the cache's tensors, [1, Hkv, kept, D] each."""
        tokens, keys, values = [], 0.0, 0.0
        for layer in cache.layers:
            share = layer.keys.shape[2] / length
            alive = (layer.keys != 0).any(2).double().mean().item() if channels_pruned else 1.0
            tokens.append(layer.keys.shape[2])
            keys += share * alive
            values += layer.values.shape[2] / length
        layers = len(tokens)
        return cls(tuple(tokens), keys / layers, (keys + values) / 2 / layers, length)

    def check(self, name: str, budget: Budget) -> None:
        """Raises RuntimeError: this is not what was asked for."""
        slack = {"ChunkKVPress": CHUNK / 2, "PyramidKVPress": 0.75}.get(name, 0.0)
        share = budget.keys / budget.length
        if name == "ThinKPress":
            share = max(1, round(budget.kept * budget.channels)) / budget.channels
        if abs(self.key_share - share) > slack / self.length + 1e-9:
            raise RuntimeError(f"{name} kept {self.key_share:.4f} of the keys, not {share:.4f}")
        flat = len(self.tokens) > 1 and len(set(self.tokens)) == 1
        if name == "PyramidKVPress" and flat and budget.keys < self.length - budget.window(BETA):
            raise RuntimeError(f"{budget.keys} keys a layer are no pyramid: SnapKV ran instead")

    def describe(self, press: Any) -> str:
        """For people: which settings, and what was kept."""
        low, high = min(self.tokens), max(self.tokens)
        tokens = f"{low}" if low == high else f"{self.tokens[0]} to {self.tokens[-1]} by layer"
        return f"{press}: {tokens} of {self.length} tokens, {self.key_share:.4f} of key numbers"


class Worker:
    """A model and what it is asked."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def answer(self, job: dict[str, Any], ids: Sequence[int]) -> dict[str, Any]:
        """The line of one job, without its id."""
        self._refuse()
        start, name = time.perf_counter(), job["press"]
        if name not in PRESSES:
            raise ValueError(f"press {name!r} is unknown: one of {', '.join(PRESSES)}")
        if not ids:
            raise ValueError("the prompt is empty")
        channels = self.model.model.layers[0].self_attn.head_dim
        budget = Budget(job["kept"], len(ids), channels)
        press, cache = PRESSES[name](budget), DynamicCache()
        with press(self.model):
            logits = self._forward(ids, 0, cache)
        kept = Kept.of(cache, len(ids), name == "ThinKPress")
        kept.check(name, budget)
        said: tuple[str, list[Any]]
        if job["choices"]:
            said = "logprobs", [self._logprob(c, logits, cache, kept) for c in job["choices"]]
        else:
            said = "tokens", self._greedy(job, logits, cache, kept)
        return {
            said[0]: said[1],
            "kept_share": kept.key_share,
            "kv_bytes_share": kept.byte_share,
            "seconds": time.perf_counter() - start,
            "path": kept.describe(press),
        }

    def _refuse(self) -> None:
        """Raises NotImplementedError: a model that kvpress would treat wrongly."""
        known = kvpress.presses.base_press.SUPPORTED_MODELS
        layers = set(getattr(self.model.config, "layer_types", None) or ["full_attention"])
        if not isinstance(self.model, known) or layers != {"full_attention"}:
            found = f"{type(self.model).__name__} with {', '.join(sorted(layers))}"
            names = ", ".join(c.__name__ for c in known)
            raise NotImplementedError(f"{found}: kvpress knows {names}, with full attention")

    def _forward(self, ids: Sequence[int], position: int, cache: Any) -> Tensor:
        """float32 logits [V] after `ids`, which stand at `position` of the text."""
        device = self.model.device
        out = self.model(
            torch.tensor([list(ids)], device=device),
            position_ids=torch.arange(position, position + len(ids), device=device)[None],
            past_key_values=cache,
            logits_to_keep=1,
        )
        logits: Tensor = out.logits[0, -1].float()
        if logits.isnan().any():
            raise ArithmeticError("NaN in the logits")
        return logits

    def _greedy(self, job: dict[str, Any], logits: Tensor, cache: Any, kept: Kept) -> list[int]:
        """Up to `new_tokens` tokens; one of `eos` is the last."""
        tokens: list[int] = []
        while len(tokens) < job["new_tokens"]:
            if tokens:
                logits = self._forward(tokens[-1:], kept.length + len(tokens) - 1, cache)
            tokens.append(int(logits.argmax()))
            if tokens[-1] in job["eos"]:
                break
        _grown(cache, kept, len(tokens) - 1)
        return tokens

    def _logprob(self, choice: Sequence[int], logits: Tensor, cache: Any, kept: Kept) -> float:
        """Sum over a continuation, in nats; the cache is afterwards as before."""
        before = [(layer.keys, layer.values) for layer in cache.layers]
        total = 0.0
        for i, token in enumerate(choice):
            if i:
                # token by token: one mask for many would have to fit layers of different lengths
                logits = self._forward(choice[i - 1 : i], kept.length + i - 1, cache)
            total += float(logits.log_softmax(-1)[token])
        _grown(cache, kept, len(choice) - 1)
        for layer, (keys, values) in zip(cache.layers, before, strict=True):
            layer.keys, layer.values = keys, values
        return total


def _grown(cache: Any, kept: Kept, steps: int) -> None:
    """Raises RuntimeError: decoding did not go on from what was kept."""
    now = tuple(layer.keys.shape[2] for layer in cache.layers)
    if now != tuple(n + max(steps, 0) for n in kept.tokens):
        raise RuntimeError(f"after {steps} steps from {kept.tokens} keys, the cache holds {now}")


@torch.no_grad()
def main(jobs_file: str, answers_file: str) -> None:
    """Answer every job. A model that does not load raises; a job that fails is a line."""
    logging.disable_progress_bar()  # what stderr says last explains a crash
    work, parent = json.loads(Path(jobs_file).read_text()), os.getppid()
    model: Any = AutoModelForCausalLM.from_pretrained(work["model"], dtype=work["dtype"])
    worker = Worker(model.to(work["device"]).eval())
    with open(answers_file, "w", encoding="utf-8") as out:
        for job in work["jobs"]:
            if os.getppid() != parent:
                return  # nobody waits for the answers
            try:
                line = worker.answer(job, work["prompts"][job["prompt"]])
            except Exception as error:  # whatever a press raises is its line, and the others go on
                line = {"error": f"{type(error).__name__}: {error}"}
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
            out.write(json.dumps({"id": job["id"], **line}) + "\n")
            out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
