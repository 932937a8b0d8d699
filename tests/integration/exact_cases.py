"""What the tests of mode "exact" share: small budgets, one ragged batch, and the same call of
`generate` without and with reread."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import reread
from reread import Config, DraftConfig

from . import tiny
from .tiny import left_padded, model, prompt

NEW = 16
LENGTHS = (30, 37, 44, 52, 61, 70, 79, 90)
EVERYTHING = 100_000


def exact(
    *,
    k: int = 8,
    tokens: int = 4,
    adapt: bool = False,
    min_probability: float = 0.0,
    dense_below_budget: bool = False,
) -> Config:
    """A budget of `k` + 10 keys; drafts of a fixed length unless told otherwise."""
    return Config(
        mode="exact",
        sink=2,
        recent=8,
        k=k,
        draft=DraftConfig(tokens=tokens, adapt=adapt, min_probability=min_probability),
        dense_below_budget=dense_below_budget,
    )


def everything(tokens: int = 8) -> Config:
    """Drafts read every position, so that all of them have to stand."""
    return exact(k=EVERYTHING, tokens=tokens)


@functools.cache
def ragged() -> tuple[Tensor, Tensor]:
    """Eight prompts of different lengths: ids and attention mask."""
    return left_padded([prompt(n, seed=n) for n in LENGTHS])


@functools.cache
def dense(name: str, rows: int, new: int = NEW) -> Tensor:
    """Greedy tokens [rows, new] of transformers alone, for 1 row or for `ragged`."""
    if rows == 1:
        return tiny.stock(model(name), prompt(90), new)
    ids, mask = ragged()
    return tiny.stock(model(name), ids, new, attention_mask=mask)


def both(
    net: Any, ids: Tensor, config: Config, *, seed: int = 7, **options: Any
) -> tuple[Any, Any, reread.Stats]:
    """What the same call returns without and with reread, and the stats. Greedy unless told
    otherwise; drafts must have run."""
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    torch.manual_seed(seed)
    want = net.generate(ids, **options)
    torch.manual_seed(seed)
    with reread.attach(net, config) as session:
        got = net.generate(ids, **options)
    assert session.stats.drafts is not None
    assert session.stats.drafts.drafted > 0
    return want, got, session.stats


def as_if_keys_were_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adaptation of a model whose keys outweigh its weights: in the tiny ones a sparse step saves
    too little to draft at all."""
    monkeypatch.setattr("reread.integrations.hf.exact.passes.weight_bytes", lambda model: 0)


def ends(texts: Tensor, spare: int = 1) -> list[int]:
    """Tokens that end the rows of free-running `texts` [B, T] at several steps, none at once, and
    leave `spare` rows going to the end."""
    rows, found = texts.tolist(), list[int]()
    # a token behind the first few of some row that still goes on, as long as it leaves enough rows
    for row in rows[spare:]:
        if _end(row, found) is None:
            tried = [
                [*found, token]
                for token in dict.fromkeys(row[3:-3])
                if all(_end(other, [token]) not in (0, 1, 2) for other in rows[spare:])
                and all(_end(other, [token]) is None for other in rows[:spare])
            ]
            assert tried, "the prompts of this test must be chosen anew"
            found = tried[len(found) % len(tried)]
    at = [_end(row, found) for row in rows]
    assert len(set(at)) >= min(3, len(at)), "the prompts of this test must be chosen anew"
    return found


def _end(row: list[int], tokens: list[int]) -> int | None:
    return next((n for n, token in enumerate(row) if token in tokens), None)
