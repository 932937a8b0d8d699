"""Tiny models that the kernels take (head dim 64), and runs to compare with the reference."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import reread
from reread import Config, SelectorConfig, SoftNMS, Stats

from . import tiny
from .tiny import CACHE, MATRIX, sparse

pytest.importorskip("triton", reason="triton is not installed: its kernels cannot run here")

SHAPE = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
# for tests of lifetimes, where the selection does not matter: one KV head, and few slow steps
SMALL = {
    "head_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
}
PAPER_LIKE = SelectorConfig(lambda_clip=0.2, refine=SoftNMS(), alpha_cross=0.35)
COUNTED = (
    "slow_steps", "fast_steps", "full_steps", "keys_read_share", "slow_reasons", "decode_steps",
    "new_tokens",
)  # fmt: skip


def build(name: str, **changes: Any) -> Any:
    """A fresh model whose biases and norms are not all zeros and ones."""
    net = tiny.build(MATRIX[name], **{**SHAPE, **changes})
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for path, parameter in net.named_parameters():
            if path.endswith("bias") or "norm" in path:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=g))
    return net


@functools.cache
def model(name: str) -> Any:
    """A shared one. Tests must leave it as they found it."""
    return build(name)


def small(**changes: Any) -> Any:
    """A fresh model on which a step is cheap."""
    return build("llama", **{**SMALL, **changes})


def triton(runner: str = "auto", base: Config | None = None, **options: Any) -> Config:
    """The same configuration on the interpreted kernels."""
    base = sparse(**{"k": 16, **options}) if base is None else base
    return base.updated({"backend": "triton", "runner": runner})


def dense(runner: str = "auto") -> Config:
    """The cheapest steps."""
    return triton(runner).updated({"mode": "dense"})


def reference(config: Config) -> Config:
    return config.updated({"backend": "reference", "runner": "auto"})


def generate(net: Any, ids: Tensor, new: int = 3, **options: Any) -> Any:
    """transformers' output with raw logits, greedy unless told otherwise."""
    options.setdefault("do_sample", False)
    options.setdefault("max_new_tokens", new)
    return net.generate(ids, return_dict_in_generate=True, output_logits=True, **options)


def tokens(net: Any, ids: Tensor, new: int = 3, **options: Any) -> list[list[int]]:
    return [row[ids.shape[1] :] for row in generate(net, ids, new, **options).sequences.tolist()]


def run(
    net: Any, ids: Tensor, config: Config, new: int, *, tokenizer: Any = None, **options: Any
) -> tuple[Any, Stats]:
    with reread.attach(net, config, tokenizer=tokenizer) as session:
        return generate(net, ids, new, **options), _after(session)


def _after(session: reread.Session) -> Stats:
    return session.stats


def counted(stats: Stats) -> dict[str, Any]:
    """What must not depend on the backend."""
    return {name: getattr(stats, name) for name in COUNTED}


def same(got: Any, want: Any) -> None:
    """Two outputs of `generate`: equal tokens, close logits."""
    assert got.sequences.tolist() == want.sequences.tolist()
    torch.testing.assert_close(
        torch.stack(got.logits), torch.stack(want.logits), rtol=1e-3, atol=2e-3
    )


@torch.no_grad()
def steps(net: Any, cache: Any, ids: list[int]) -> Tensor:
    """A loop of one's own over one row, [steps, V]."""
    found = [
        net(torch.tensor([[i]]), use_cache=True, **{CACHE: cache}).logits[0, -1].clone()
        for i in ids
    ]
    return torch.stack(found)
