"""Mode "exact" and caches: turns follow each other, with reread or without, as dense's do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import reread
from reread import Config

from . import tiny
from .exact_cases import NEW, dense, ends, everything, exact
from .exact_cases import ragged as eight
from .tiny import CACHE, MATRIX, cache_of, left_padded, model, prompt

archs = pytest.mark.parametrize("name", MATRIX)
some = pytest.mark.parametrize("name", ["llama", "qwen2-windowed", "qwen3.5"])
ROWS = 4
drafting = pytest.mark.parametrize("config", [exact(k=24), everything()], ids=["k=24", "all"])


@dataclass
class Talk:
    """Two turns on one cache, each with reread (a config) or without (None)."""

    net: Any
    first: Config | None
    second: Config | None

    def turn(self, config: Config | None, ids: Tensor, mask: Tensor, **options: Any) -> Any:
        with reread.attach(self.net, config) if config else nullcontext() as session:
            out = self.net.generate(
                ids, attention_mask=mask, do_sample=False, pad_token_id=0,
                return_dict_in_generate=True, **{"max_new_tokens": NEW, **options},
            )  # fmt: skip
        if session is not None:
            assert session.stats.drafts.drafted > 0
        return out

    def both(
        self, ids: Tensor, mask: Tensor, more: tuple[Tensor, Tensor], *,
        holes: bool = False, between: Callable[[Any], object] = lambda cache: None, **options: Any
    ) -> tuple[Tensor, Tensor, Any]:  # fmt: skip
        """Texts of both turns, and the cache. holes: the padding behind ended rows is masked out;
        options: of the first turn."""
        one = self.turn(self.first, ids, mask, **options)
        answer = one.sequences[:, ids.shape[1] :]
        kept = (answer != 0).long() if holes else torch.ones_like(answer)
        between(cache_of(one))
        longer = torch.cat([one.sequences, more[0]], 1)
        mask = torch.cat([mask, kept, more[1]], 1)
        two = self.turn(self.second, longer, mask, max_new_tokens=10, **{CACHE: cache_of(one)})
        return one.sequences, two.sequences, cache_of(two)


def ragged() -> tuple[Tensor, Tensor]:
    ids, mask = eight()
    return ids[::2], mask[::2]


def early(name: str) -> list[int]:
    """Tokens that end all rows of `ragged` but one early."""
    return ends(dense(name, 8)[::2])


def alone() -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    ids, more = prompt(90), prompt(12, seed=2)
    return ids, torch.ones_like(ids), (more, torch.ones_like(more))


def together() -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    ids, mask = ragged()
    return ids, mask, left_padded([prompt(3 + n, seed=50 + n) for n in range(ROWS)])


def same(name: str, talks: tuple[Any, Any], given: Any, **options: Any) -> tuple[Any, Any]:
    """Both turns of the talk equal dense's; returns the caches, dense's first."""
    want = Talk(model(name), None, None).both(*given, **options)
    got = Talk(model(name), *talks).both(*given, **options)
    assert got[0].tolist() == want[0].tolist()
    assert got[1].tolist() == want[1].tolist()
    return want[2], got[2]


def assert_same_cache(want: Any, got: Any, padding: Tensor | None = None) -> None:
    """What reread keeps, in dense's shape and with dense's values; padding: bool [B, columns] that
    nothing reads."""
    assert got.get_seq_length() == want.get_seq_length()
    for ours, theirs in zip(got.layers, want.layers, strict=True):
        if not isinstance(getattr(theirs, "keys", None), Tensor):
            continue
        for name in ("keys", "values"):
            a, b = getattr(ours, name), getattr(theirs, name)
            assert a.shape == b.shape
            if padding is not None and padding.shape[1] == a.shape[2]:
                a, b = (x.masked_fill(padding[:, None, :, None], 0) for x in (a, b))
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


# ---- both turns exact


@archs
def test_a_second_turn_on_the_cache_of_the_first_is_denses(name: str) -> None:
    assert_same_cache(*same(name, (exact(k=24), exact(k=24)), alone()))


@some
@drafting
def test_a_second_turn_of_a_ragged_batch_is_denses(name: str, config: Config) -> None:
    same(name, (config, config), together())


@some
@drafting
@pytest.mark.parametrize("holes", [False, True])
def test_a_second_turn_of_rows_that_ended_early_is_denses(
    name: str, config: Config, holes: bool
) -> None:
    """With and without the padding behind them in the attention mask."""
    end = early(name)
    same(name, (config, config), together(), holes=holes, eos_token_id=end)


def test_a_third_turn_is_denses() -> None:
    def run(config: Config | None) -> list[list[int]]:
        talk, (ids, mask, more) = Talk(model("llama"), config, config), together()
        _, two, cache = talk.both(ids, mask, more)
        wide = torch.cat([mask, torch.ones(ROWS, NEW, dtype=mask.dtype), more[1]], 1)
        longer = torch.cat([two, prompt(5, rows=ROWS, seed=9)], 1)
        wide = torch.nn.functional.pad(wide, (0, longer.shape[1] - wide.shape[1]), value=1)
        return talk.turn(config, longer, wide, **{CACHE: cache}).sequences.tolist()

    assert run(exact(k=24)) == run(None)


# ---- one turn exact, one without reread


@some
@drafting
def test_transformers_alone_goes_on_from_an_exact_cache(name: str, config: Config) -> None:
    same(name, (config, None), together())


@some
@pytest.mark.parametrize("holes", [False, True])
def test_transformers_alone_goes_on_from_rows_that_ended_early(name: str, holes: bool) -> None:
    end = early(name)
    same(name, (exact(k=24), None), together(), holes=holes, eos_token_id=end)


@some
@drafting
def test_an_exact_turn_goes_on_from_denses_cache(name: str, config: Config) -> None:
    assert_same_cache(*same(name, (None, config), alone()))
    same(name, (None, config), together())


@some
@pytest.mark.parametrize("config", [exact(k=24), everything(4)], ids=["k=24", "all"])
def test_the_cache_that_comes_back_is_denses(name: str, config: Config) -> None:
    """All of its rows, whenever they ended: the newest token is not in it, padding is."""
    ids, mask = ragged()
    end = early(name)
    out = [
        Talk(model(name), None, None).turn(c, ids, mask, eos_token_id=end) for c in (None, config)
    ]
    assert out[1].sequences.tolist() == out[0].sequences.tolist()
    padding = torch.nn.functional.pad(mask == 0, (0, NEW - 1))
    assert_same_cache(cache_of(out[0]), cache_of(out[1]), padding)


@pytest.mark.parametrize("split", [1, 50, 89])
@some
def test_a_cached_prefix_and_the_rest_leave_denses_text(name: str, split: int) -> None:
    cached = tiny.prefilled(model(name), prompt(90)[:, :split])
    got, stats = tiny.ours(model(name), prompt(90), exact(k=24), NEW, **{CACHE: cached})
    assert got.tolist() == dense(name, 1).tolist()
    assert stats.drafts is not None
    assert stats.drafts.drafted > 0


def test_an_exact_turn_may_follow_a_slow_fast_one_on_its_cache() -> None:
    """Selections of the other session are not used: the turn equals dense's on the same cache."""
    net, (ids, mask, more) = model("llama"), alone()
    slow_fast = tiny.sparse()
    with reread.attach(net, slow_fast):
        outs = [
            net.generate(
                ids, attention_mask=mask, max_new_tokens=9, do_sample=False,
                return_dict_in_generate=True,
            )
            for _ in range(2)
        ]  # fmt: skip
    longer = torch.cat([outs[0].sequences, more[0]], 1)
    talk = Talk(net, None, None)
    got, want = (
        talk.turn(config, longer, torch.ones_like(longer), **{CACHE: cache_of(out)}).sequences
        for config, out in zip((exact(k=24), None), outs, strict=True)
    )
    assert got.tolist() == want.tolist()


@pytest.mark.parametrize("embedded", [False, True])
def test_a_prompt_of_embeddings_is_served(embedded: bool) -> None:
    net, ids = model("llama"), prompt(90)
    given = {"inputs_embeds": net.get_input_embeddings()(ids)}
    if not embedded:
        given["input_ids"] = ids
    with reread.attach(net, exact(k=24)) as session:
        got = net.generate(**given, max_new_tokens=NEW, do_sample=False)
    assert got[:, -NEW:].tolist() == dense("llama", 1).tolist()
    assert session.stats.drafts is not None
    assert session.stats.drafts.drafted > 0
