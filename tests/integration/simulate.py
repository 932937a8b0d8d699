"""Slow-fast decoding of one prompt, naively: dense attention, and a mask over what is not read.

It drives transformers through an attention function of its own, takes queries and keys as the layer
hands them to attention (after norm and RoPE), chooses with `tests.brute`, and never moves or drops
a key. Independent of reread's code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from reread import Config

from .. import brute
from . import tiny

NAME = "naive_slow_fast"


@dataclass
class Layer:
    tail: Tensor | None = None  # queries of the prefill [H, W, D]
    chosen: list[list[int]] | None = None
    window_start: int = 0


@dataclass
class Simulation:
    """The outcome: tokens and raw logits, and per decode step its kind and what was chosen."""

    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    keys_read: int = 0
    keys_cached: int = 0
    chosen: list[dict[int, list[list[int]]]] = field(default_factory=list)

    @property
    def slow_steps(self) -> int:
        return self.kinds.count("slow")


class _Naive:
    def __init__(self, model: Any, config: Config, full: tuple[int, ...]) -> None:
        self.model, self.config, self.full = model, config, full
        self.layers = {i: Layer() for i in full}
        self.kind = "prefill"
        self.result = Simulation()

    def attention(
        self,
        module: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        *,
        scaling: float,
        **_: Any,
    ) -> tuple[Tensor, None]:
        group = q.shape[1] // k.shape[1]
        logits = q.double() @ k.double().repeat_interleave(group, 1).transpose(2, 3) * scaling
        if mask is not None:
            logits = logits + mask[..., : k.shape[2]]
        if module.layer_idx in self.layers:
            logits = self.sparse(
                self.layers[module.layer_idx], module.layer_idx, q, k, logits, scaling
            )
        p = torch.softmax(logits, -1)
        out = p @ v.double().repeat_interleave(group, 1)
        return out.transpose(1, 2).to(q.dtype), None

    def sparse(
        self, layer: Layer, index: int, q: Tensor, k: Tensor, logits: Tensor, scaling: float
    ) -> Tensor:
        """Take evidence, or hide what a fast step may not read. logits [1, H, T, L]"""
        length, hkv = k.shape[2], k.shape[1]
        group = q.shape[1] // hkv
        if self.kind == "prefill":
            tail = q[0] if layer.tail is None else torch.cat([layer.tail, q[0]], 1)
            layer.tail = tail[:, -self.config.selector.tail_queries :]
            return logits
        if self.kind == "fast" and layer.chosen is None:
            assert layer.tail is not None
            w = layer.tail.shape[1]
            self.choose(
                layer,
                layer.tail,
                k[0, :, : length - 1],
                list(range(length - 1 - w, length - 1)),
                scaling,
            )
        read = length
        if self.kind == "fast":
            assert layer.chosen is not None
            hidden = torch.ones(q.shape[1], length, dtype=torch.bool)
            hidden[:, : self.config.sink] = False
            hidden[:, layer.window_start :] = False
            for h in range(hkv):
                hidden[h * group : (h + 1) * group, layer.chosen[h]] = False
            logits = logits.masked_fill(hidden[None, :, None], float("-inf"))
            read = int((~hidden[0]).sum())
        elif self.kind == "slow":
            self.choose(layer, q[0], k[0], [length - 1], scaling)
        elif self.kind == "full":
            layer.chosen = None
        layer.tail = None
        self.result.keys_read += read
        self.result.keys_cached += length
        if layer.chosen is not None:
            self.result.chosen[-1][index] = layer.chosen
        return logits

    def choose(
        self, layer: Layer, q: Tensor, k: Tensor, positions: list[int], scaling: float
    ) -> None:
        """q [H, W, D] at `positions`, k [Hkv, L, D]"""
        c, length, hkv = self.config, k.shape[1], k.shape[0]
        group = q.shape[0] // hkv
        layer.window_start = max(0, length - c.recent)
        j = list(range(c.sink, length - c.recent))
        if not j:
            layer.chosen = [[] for _ in range(hkv)]
            return
        keys = k[:, j].double()
        f = []
        for h in range(hkv):
            p = np.zeros((len(positions), len(j)))
            for w, at in enumerate(positions):
                seen = [i for i, position in enumerate(j) if position <= at]
                for g in range(group):
                    x = q[h * group + g, w].double()
                    if seen:
                        p[w, seen] += brute.softmax((keys[h, seen] @ x * scaling).numpy()) / group
            f.append(brute.evidence(p, c.selector.alpha) if len(positions) > 1 else p[0])
        norms = keys.norm(dim=-1).numpy()
        layer.chosen = [
            [j[i] for i in row] for row in brute.select(np.stack(f), norms, c.selector, c.k)
        ]


def _next_kind(config: Config, sim: Simulation, length: int, has_tail: bool) -> str:
    """Equation 5, the budget rule and the uncertainty trigger, after sim.tokens[-1]."""
    t = config.triggers
    if config.mode == "dense" or (config.dense_below_budget and length <= config.budget):
        return "full"
    slow_at = [i for i, kind in enumerate(sim.kinds) if kind == "slow"]
    step = len(sim.kinds)
    nothing_chosen = not slow_at and not (has_tail and "full" not in sim.kinds)
    if nothing_chosen or (step == 0 and t.first_step):
        return "slow"
    since = step - (slow_at[-1] if slow_at else -1)
    if t.t_max is not None and since >= t.t_max:
        return "slow"
    if slow_at and slow_at[-1] > 0 and since < t.t_min:
        return "fast"
    if t.boundary and sim.tokens[-1] in tiny.BOUNDARY_IDS:
        return "slow"
    if t.uncertainty is not None:
        p = brute.softmax(sim.logits[-1].double().numpy())
        if float(-(p * np.log(np.maximum(p, 1e-300))).sum()) > t.uncertainty:
            return "slow"
    return "fast"


@torch.no_grad()
def run(model: Any, ids: Tensor, config: Config, new: int, full: tuple[int, ...]) -> Simulation:
    """Greedy, one row, no padding."""
    naive = _Naive(model, config, full)
    sim, text = naive.result, model.config.get_text_config()
    before = text._attn_implementation
    AttentionInterface.register(NAME, naive.attention)
    AttentionMaskInterface.register(NAME, eager_mask)
    text._attn_implementation_internal = NAME
    try:
        cache = tiny.DynamicCache(config=model.config)
        out = model(ids, use_cache=True, **{tiny.CACHE: cache})
        for step in range(new):
            sim.logits.append(out.logits[0, -1])
            sim.tokens.append(int(out.logits[0, -1].argmax()))
            if step == new - 1:
                break
            length = ids.shape[1] + step + 1
            naive.kind = _next_kind(config, sim, length, has_tail=True)
            sim.kinds.append(naive.kind)
            sim.chosen.append({})
            out = model(torch.tensor([[sim.tokens[-1]]]), use_cache=True, **{tiny.CACHE: cache})
    finally:
        text._attn_implementation_internal = before
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(NAME, None)
    return sim
