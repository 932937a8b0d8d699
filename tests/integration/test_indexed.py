"""Indexed decoding, sparse prefill with an indexer, and mode oracle: what they may not change, what
they refuse, and that every way of running a step says the same."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

import reread
from reread import Config, ConfigError, InputError, SparsePrefill, UnsupportedError
from reread.cli import app
from reread.indexer.model import WEIGHTS, Indexer
from reread.integrations.hf.indexed import Reader, kernels_lack
from reread.integrations.hf.indexers import new_indexer
from reread.oracle import choose, step_mass
from reread.prefill import PrefillMeter, pieces, prefill_row

from ..unit import tiny_checkpoint
from . import device, tiny
from .device import counted, generate, same, steps, tokens
from .tiny import CACHE, MATRIX, cache_of, left_padded, prompt, sparse

WAYS: dict[str, dict[str, str]] = {
    "reference": {"backend": "reference"},
    "eager": {"backend": "triton", "runner": "eager"},
    "graph": {"backend": "triton", "runner": "graph"},
}
ways = pytest.mark.parametrize("way", WAYS)
# interpreted steps are slow, so that most tests run them one way
both_backends = pytest.mark.parametrize("way", ["reference", "graph"])
PREFILL = {"chooser": "indexer", "k": 12, "b_sel": 8, "sink": 2, "local": 4, "dense_below": 0}
UNREAD = "the cache holds .* tokens, of .* this indexer has read: read the whole text"


def indexed(way: str = "reference", **options: Any) -> Config:
    """Every decode step leaves most of a prompt out; no step is dense unless asked for."""
    small = {"k": 8, "recent": 4, "t_max": None, "first_step": False, **options}
    return sparse(**small).updated({"mode": "indexed", **WAYS[way]})


def everything(way: str = "reference") -> Config:
    return indexed(way, k=100_000, dense_below_budget=False)


def session(net: Any, config: Config, **options: Any) -> Any:
    indexer = new_indexer(net, 16, 1, "svd") if config.uses_indexer else None
    return reread.attach(net, config, indexer=indexer, **options)


@pytest.fixture(scope="module")
def net() -> Any:
    """Two cheap layers that the kernels take; tests leave it as they found it."""
    return device.small()


def padded(*lengths: int) -> tuple[Tensor, Tensor]:
    return left_padded([prompt(n, seed=n) for n in lengths])


@torch.no_grad()
def read(net: Any, ids: Tensor, cache: Any = None, **options: Any) -> Any:
    """A cache that holds `ids` besides what it held."""
    cache = tiny.DynamicCache(config=net.config) if cache is None else cache
    net(ids, use_cache=True, **{CACHE: cache}, **options)
    return cache


# -- decoding


@pytest.mark.parametrize("name", MATRIX)
def test_a_budget_for_everything_gives_denses_tokens(name: str) -> None:
    net, (ids, mask) = tiny.model(name), padded(40, 1, 23)
    with session(net, everything()) as attached:
        got = generate(net, ids, 8, attention_mask=mask)
        assert attached.stats.fast_steps == [7] * 3
        assert attached.stats.keys_read_share == 1
    with session(net, Config.preset("dense")):
        want = generate(net, ids, 8, attention_mask=mask)
    same(got, want)


@pytest.mark.parametrize("name", MATRIX)
def test_a_row_is_the_same_alone_and_in_a_ragged_batch(name: str) -> None:
    """Padding in front of a row takes no place in the indexer's positions."""
    net, lengths = tiny.model(name), (40, 1, 23)
    ids, mask = padded(*lengths)
    with session(net, indexed()):
        together = tokens(net, ids, 8, attention_mask=mask)
        alone = [tokens(net, prompt(n, seed=n), 8)[0] for n in lengths]
    assert together == alone


CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "ragged": ({}, (41, 24)),
    "one token, never dense": ({"dense_below_budget": False}, (1, 30)),
    "interval": ({"t_max": 2}, (25,)),
    "boundary": ({"boundary": True}, (25,)),
    "first step": ({"first_step": True, "k": 1}, (30,)),
    "uncertainty": ({"uncertainty": 2.5}, (25,)),
    "more than available": ({"k": 500, "dense_below_budget": False}, (30, 5)),
    "dense beside fast": ({}, (9, 30)),
    "grows out of the budget": ({}, (13,)),
    "no sink, recent of one": ({"sink": 0, "recent": 1}, (25,)),
    "shorter than the sink": ({"sink": 6, "dense_below_budget": False}, (2, 30)),
}


@pytest.mark.parametrize("case", CASES)
def test_both_runners_say_what_the_reference_says(case: str, net: Any) -> None:
    options, lengths = CASES[case]
    ids, mask = padded(*lengths)
    found = {}
    for way in WAYS if case == "ragged" else ("reference", "graph"):
        with session(net, indexed(way, **options), tokenizer=tiny.tokenizer()) as attached:
            found[way] = generate(net, ids, 3, attention_mask=mask), attached
    want, expected = found.pop("reference")
    for got, attached in found.values():
        same(got, want)
        assert counted(attached.stats) == counted(expected.stats)
        assert attached.stats.backend == "triton"
        for mine, its in zip(cache_of(got).layers, cache_of(want).layers, strict=True):
            assert mine.state.kv.indexed == its.state.kv.indexed
            for b, pad in enumerate((mask == 0).sum(1).tolist()):
                torch.testing.assert_close(
                    mine.state.kv.index[b, :, pad:], its.state.kv.index[b, :, pad:],
                    atol=1e-3, rtol=1e-3,
                )  # fmt: skip


def test_triggers_make_steps_dense(net: Any) -> None:
    with session(net, indexed(t_max=3, first_step=True)) as attached:
        generate(net, prompt(40), 8)
        stats = attached.stats
    # of 7 steps: the first one, and every third behind it
    assert (stats.full_steps, stats.slow_steps) == ([3], [0])
    assert stats.slow_reasons == {"first": 1, "interval": 2}


def test_the_share_of_keys_by_hand(net: Any) -> None:
    lengths, new = (40, 3, 19), 6
    ids, mask = padded(*lengths)
    with session(net, indexed(t_max=4)) as attached:
        generate(net, ids, new, attention_mask=mask)
        stats = attached.stats
    has = [n + step for n in lengths for step in range(1, new)]
    # sink 2, recent 4, k 8; the fourth step is dense; what the budget covers is, too
    reads = [
        n if step == 4 or n <= 14 else 14
        for n, step in ((n + s, s) for n in lengths for s in range(1, new))
    ]
    assert stats.keys_read_share == pytest.approx(sum(reads) / sum(has))


@both_backends
def test_sampling_is_the_same_everywhere(way: str, net: Any) -> None:
    def sampled(way: str) -> list[list[int]]:
        with session(net, indexed(way)):
            torch.manual_seed(11)
            return tokens(net, prompt(30, rows=2), 3, do_sample=True, temperature=1.5)

    assert sampled(way) == sampled("reference")


@both_backends
def test_rows_that_end_early(way: str, net: Any) -> None:
    ids, mask = padded(40, 22)
    with session(net, indexed()):
        free = tokens(net, ids, 4, attention_mask=mask)
    end = free[1][1]
    with session(net, indexed(way)) as attached:
        got = tokens(net, ids, 4, attention_mask=mask, eos_token_id=end)
        stats = attached.stats
    for row, whole in zip(got, free, strict=True):
        kept = whole[: whole.index(end) + 1] if end in whole else whole
        assert row[: len(kept)] == kept[: len(row)]
        assert not any(row[len(kept) :])
    ran = [len(row[: row.index(end) + 1] if end in row else row) - 1 for row in got]
    assert stats.fast_steps == ran


# -- several turns


@both_backends
def test_a_second_turn_reads_as_the_whole_text_does(way: str, net: Any) -> None:
    """The first turn has no decode step, whose sparse attention would leave other values."""
    whole = prompt(47)
    with session(net, indexed(way)):
        first = generate(net, whole[:, :30], 1)
        told = torch.cat([first.sequences[:, :31], whole[:, 31:]], dim=1)
        got = generate(net, told, 3, **{CACHE: cache_of(first)})
        want = generate(net, told, 3)
        same(got, want)
        for mine, its in zip(cache_of(got).layers, cache_of(want).layers, strict=True):
            torch.testing.assert_close(
                mine.state.kv.index, its.state.kv.index, atol=1e-3, rtol=1e-3
            )


def test_a_second_turn_after_decode_steps_that_read_everything(net: Any) -> None:
    with session(net, everything()):
        first = generate(net, prompt(20), 3)
    told = torch.cat([first.sequences, prompt(9, seed=8)], dim=1)
    with session(net, indexed()):
        got = generate(net, told, 2, **{CACHE: cache_of(first)})
        same(got, generate(net, told, 2))


def test_loops_of_ones_own_are_generate(net: Any) -> None:
    with session(net, indexed()) as attached:
        want = generate(net, prompt(30), 3)
        fed = want.sequences[0, 30:-1].tolist()
        cache = read(net, prompt(30)[:, :17])
        read(net, prompt(30)[:, 17:], cache)
        with attached.decoding():
            got = steps(net, cache, fed)
        assert attached.stats.fast_steps == [2]
    torch.testing.assert_close(got, torch.stack(want.logits)[1:, 0], atol=2e-3, rtol=1e-3)


@both_backends
def test_cropping_and_going_on(way: str, net: Any) -> None:
    ids = prompt(30)
    with session(net, indexed(way)) as attached:
        cache = read(net, ids)
        with attached.decoding():
            want = steps(net, cache, [5, 6])
            steps(net, cache, [9])
            cache.crop(30)
            torch.testing.assert_close(steps(net, cache, [5, 6]), want, atol=2e-3, rtol=1e-3)
        # within the prompt, then a turn, then steps
        cache.crop(25)
        read(net, ids[:, 25:], cache)
        with attached.decoding():
            torch.testing.assert_close(steps(net, cache, [5, 6]), want, atol=2e-3, rtol=1e-3)


MOVES: dict[str, tuple[list[int], Callable[[Any], object]]] = {
    "reordered": ([1, 0], lambda cache: cache.reorder_cache(torch.tensor([1, 0]))),
    "left out": ([1], lambda cache: cache.batch_select_indices(torch.tensor([1]))),
    "doubled": ([0, 0, 1, 1], lambda cache: cache.batch_repeat_interleave(2)),
}


@torch.no_grad()
def moved(net: Any, way: str, before: int, name: str) -> tuple[Tensor, Tensor]:
    """Logits of a step behind `before` others, with the rows as they are and moved."""
    ids, mask = padded(26, 33)
    order, move = MOVES[name]
    found = []
    with session(net, indexed(way)) as attached:
        for rows in ([0, 1], order):
            cache, seen = read(net, ids, attention_mask=mask), mask
            with attached.decoding():
                for step in range(before + 1):
                    fed = torch.tensor([[5 + step], [40 + step]])
                    if step == before and rows is order:
                        move(cache)
                        fed, seen = fed[rows], seen[rows]
                    seen = torch.nn.functional.pad(seen, (0, 1), value=1)
                    out = net(fed, attention_mask=seen, use_cache=True, **{CACHE: cache})
            found.append(out.logits[:, -1].clone())
    return found[0][order], found[1]


@pytest.mark.parametrize(
    ("name", "before"),
    [("reordered", 0), ("left out", 0), ("doubled", 0), ("reordered", 1), ("left out", 1)],
)
def test_rows_that_move(name: str, before: int, net: Any) -> None:
    torch.testing.assert_close(*moved(net, "reference", before, name), atol=2e-3, rtol=1e-3)


def test_rows_that_become_more_within_a_loop(net: Any) -> None:
    torch.testing.assert_close(*moved(net, "reference", 1, "doubled"), atol=2e-3, rtol=1e-3)


def test_rows_that_move_on_the_kernels(net: Any) -> None:
    torch.testing.assert_close(*moved(net, "graph", 1, "left out"), atol=2e-3, rtol=1e-3)


@both_backends
def test_two_conversations_in_turns(way: str, net: Any) -> None:
    with session(net, indexed(way)) as attached:
        prompts = prompt(20, seed=3), prompt(24, seed=4)
        want = []
        for ids in prompts:
            cache = read(net, ids)
            with attached.decoding():
                want.append(steps(net, cache, [5] if way == "graph" else [5, 6]))
        caches = [read(net, ids) for ids in prompts]
        with attached.decoding():
            for i, fed in enumerate([5] if way == "graph" else [5, 6]):
                for cache, expected in zip(caches, want, strict=True):
                    got = steps(net, cache, [fed])[0]
                    torch.testing.assert_close(got, expected[i], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("way", ["eager", "graph"])
def test_a_conversation_goes_on_in_another_session(way: str, net: Any) -> None:
    """On the reference and on the kernels by turns."""
    with session(net, indexed()) as attached:
        cache = read(net, prompt(30))
        with attached.decoding():
            want = steps(net, cache, [5, 6, 7])
        cache = read(net, prompt(30))
    got = []
    for current, fed in ((way, 5), ("reference", 6), (way, 7)):
        with session(net, indexed(current)) as attached, attached.decoding():
            got.append(steps(net, cache, [fed])[0])
    torch.testing.assert_close(torch.stack(got), want, atol=2e-3, rtol=1e-3)


@both_backends
def test_a_cache_that_grows(way: str, net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with session(net, indexed(way)) as attached:
        cache = read(net, prompt(30))
        with attached.decoding():
            want = steps(net, cache, [5, 6])
        monkeypatch.setattr("reread.kv.GROWTH_STEP", 1)
        monkeypatch.setattr("reread.kv.GROWTH_SHARE", 1000)
        cache = read(net, prompt(30))
        moves = cache.layers[0].state.kv.moves
        with attached.decoding():
            got = steps(net, cache, [5, 6])
        assert cache.layers[0].state.kv.moves > moves
    torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-3)


@both_backends
def test_a_copied_cache_goes_its_own_way(way: str, net: Any) -> None:
    with session(net, indexed(way)) as attached:
        cache = read(net, prompt(30))
        with attached.decoding():
            steps(net, cache, [5])
            copied = copy.deepcopy(cache)
            want = steps(net, cache, [6])
            torch.testing.assert_close(steps(net, copied, [6]), want, atol=2e-3, rtol=1e-3)


@torch.no_grad()
def test_embeddings_in_the_place_of_tokens(net: Any) -> None:
    embed, found = net.get_input_embeddings(), {}
    for way in ("reference", "graph"):
        # a step of embeddings is no captured one
        with session(net, indexed(way).updated({"runner": "auto"})) as attached:
            cache = tiny.DynamicCache(config=net.config)
            net(inputs_embeds=embed(prompt(30)), use_cache=True, **{CACHE: cache})
            with attached.decoding():
                given = {"inputs_embeds": embed(torch.tensor([[5]])), CACHE: cache}
                first = net(use_cache=True, **given).logits[:, -1].clone()
                found[way] = torch.cat([first, steps(net, cache, [6])])
    torch.testing.assert_close(found["graph"], found["reference"], atol=2e-3, rtol=1e-3)


def test_weights_that_change_between_two_calls() -> None:
    """In place, while they are stacked with the indexer's."""
    net = device.small()
    indexer = new_indexer(net, 16, 1, "svd")
    with reread.attach(net, indexed("graph"), indexer=indexer):
        before = generate(net, prompt(30), 2)
        with torch.no_grad():
            net.model.layers[1].self_attn.q_proj.weight.mul_(-2)
        got = generate(net, prompt(30), 2)
    with reread.attach(net, indexed(), indexer=indexer):
        same(got, generate(net, prompt(30), 2))
    assert not torch.allclose(got.logits[1], before.logits[1], atol=1e-2)


# -- what the indexer has not read


def unread(net: Any, way: str, then: Callable[[Any, Any], object]) -> Any:
    """A cache that was filled without the indexer, and what `then` does with it."""
    cache = tiny.prefilled(net, prompt(30))
    with session(net, indexed(way)) as attached, pytest.raises(InputError, match=UNREAD):
        then(attached, cache)
    return cache


def one_step(net: Any, attached: Any, cache: Any) -> None:
    with attached.decoding():
        steps(net, cache, [5])


@pytest.mark.parametrize(
    "way",
    [
        "reference",
        *(
            way
            for way in ("eager", "graph")
        ),
    ],
)  # fmt: skip
def test_a_step_on_a_cache_that_was_read_without_the_indexer(way: str, net: Any) -> None:
    unread(net, way, lambda attached, cache: one_step(net, attached, cache))


@ways
def test_a_turn_on_a_cache_that_was_read_without_the_indexer(way: str, net: Any) -> None:
    told = prompt(36)
    unread(net, way, lambda _, cache: generate(net, told, 2, **{CACHE: cache}))


@ways
def test_a_refused_turn_leaves_the_cache_alone(way: str, net: Any) -> None:
    told = prompt(36)
    cache = unread(net, way, lambda _, cache: generate(net, told, 2, **{CACHE: cache}))
    assert [layer.get_seq_length() for layer in cache.layers] == [30, 30]


@pytest.mark.parametrize(
    "way",
    [
        "reference",
        "eager",
        "graph",
    ],
)
@pytest.mark.parametrize("between", ["slow-fast", "dense"])
def test_steps_without_the_indexer_in_between_are_noticed(way: str, between: str, net: Any) -> None:
    with session(net, indexed(way)):
        cache = read(net, prompt(30))
    other = sparse().updated({"mode": between, **WAYS[way]})
    with session(net, other) as attached, attached.decoding():
        steps(net, cache, [5, 6])
    assert cache.layers[0].state.kv.indexed == 30
    with session(net, indexed(way)) as attached, pytest.raises(InputError, match=UNREAD):
        one_step(net, attached, cache)


def test_what_was_read_without_the_indexer_can_be_cropped_away(net: Any) -> None:
    with session(net, indexed()) as attached:
        cache = read(net, prompt(30))
        with attached.decoding():
            want = steps(net, cache, [5, 6])
        cache.crop(30)
    with session(net, sparse()) as attached, attached.decoding():
        steps(net, cache, [7, 7, 7])
    cache.crop(30)
    with session(net, indexed()) as attached, attached.decoding():
        torch.testing.assert_close(steps(net, cache, [5, 6]), want, atol=2e-3, rtol=1e-3)


@both_backends
@pytest.mark.parametrize("width", [16, 32])
def test_index_keys_of_another_indexer_are_not_used(way: str, width: int, net: Any) -> None:
    """Refused, or read anew: not scored against queries that they do not belong to."""
    other = new_indexer(net, width, 1, "random", seed=3)
    with session(net, indexed(way)):
        cache = read(net, prompt(30))
    with reread.attach(net, indexed(way), indexer=other) as attached:
        fresh = read(net, prompt(30))
        with attached.decoding():
            want = steps(net, fresh, [5])
        try:
            with attached.decoding():
                got = steps(net, cache, [5])
        except InputError:
            return
    torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-3)


# -- the model comes back


def state_of(net: Any) -> dict[str, Any]:
    return {
        "own": sorted(vars(net)),
        "forwards": [path for path, m in net.named_modules() if "forward" in vars(m)],
        "hooks": [
            path for path, m in net.named_modules() if m._forward_hooks or m._forward_pre_hooks
        ],
        "attention": net.config._attn_implementation,
        "memory": [p.untyped_storage().nbytes() == p.nbytes for p in net.parameters()],
        "types": [type(m) for m in net.modules()],
    }


class Failing:
    """A hook of the user's on one module, which raises in its n-th call."""

    def __init__(self, error: BaseException, nth: int) -> None:
        self.error, self.left = error, nth

    def __call__(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


@both_backends
@pytest.mark.parametrize(
    ("error", "nth"), [(ValueError("mine"), 3), (KeyboardInterrupt(), 1)], ids=["step", "prompt"]
)
def test_leaving_after_a_hook_raised(way: str, error: BaseException, nth: int) -> None:
    net = device.small()
    before = state_of(net), {n: p.detach().clone() for n, p in net.named_parameters()}
    hook = Failing(error, nth)
    with session(net, indexed(way)) as attached:
        want = tokens(net, prompt(30), 2)
    with session(net, indexed(way)) as attached:
        # outside the layers, so that it runs with captured steps, too
        handle = net.register_forward_hook(hook)
        with pytest.raises(type(error)):
            generate(net, prompt(30, seed=5), 6)
        handle.remove()
        # the session goes on
        assert tokens(net, prompt(30), 2) == want
    assert attached._reader._hooks == []
    assert state_of(net) == before[0]
    assert all(torch.equal(p, before[1][n]) for n, p in net.named_parameters())


@pytest.mark.parametrize("way", ["reference", "eager"])
@pytest.mark.parametrize(
    ("error", "nth"), [(ValueError("mine"), 3), (KeyboardInterrupt(), 1)], ids=["step", "prompt"]
)
def test_leaving_after_a_layer_raised(way: str, error: BaseException, nth: int) -> None:
    """Between the hooks that keep a layer's input and the attention that takes it."""
    net = device.small()
    before = state_of(net)
    with session(net, indexed(way)):
        handle = net.model.layers[1].self_attn.q_proj.register_forward_hook(Failing(error, nth))
        with pytest.raises(type(error)):
            generate(net, prompt(30), 6)
    handle.remove()
    assert state_of(net) == before
    with session(net, indexed(way)):
        got = tokens(net, prompt(30), 2)
    with session(net, indexed()):
        assert tokens(net, prompt(30), 2) == got


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("a capture fails"),
        KeyboardInterrupt(),
    ],
    ids=["capture", "stop"],
)
def test_a_step_that_fails_between_two_kernels_spoils_no_later_choice(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reread.ops.triton import index_decode

    net, top_k = device.small(), index_decode.top_k
    with session(net, indexed()):
        want = generate(net, prompt(40), 3)

    def failing(*args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(index_decode, "top_k", top_k)
        raise error

    with session(net, indexed("graph").updated({"runner": "auto"})) as attached:
        monkeypatch.setattr(index_decode, "top_k", failing)
        if isinstance(error, RuntimeError):
            same(generate(net, prompt(40), 3), want)
            assert "a capture fails" in str(attached.stats.notes)
        else:
            with pytest.raises(KeyboardInterrupt):
                tokens(net, prompt(40), 3)
            same(generate(net, prompt(40), 3), want)


def test_a_session_that_is_never_entered_changes_nothing() -> None:
    net = device.small()
    before = state_of(net)
    session(net, indexed("graph"))
    assert state_of(net) == before


@pytest.mark.parametrize(
    "runner",
    [
        "eager",
        "graph",
    ],
)  # fmt: skip
def test_attaching_twice_is_refused_and_changes_nothing(runner: str) -> None:
    net = device.small()
    before = state_of(net)
    with session(net, indexed("graph")):
        want = tokens(net, prompt(30), 2)
        with pytest.raises(InputError, match="attached already"), session(net, indexed(runner)):
            pass
        assert tokens(net, prompt(30), 2) == want
    assert state_of(net) == before


# -- sparse prefill


@pytest.mark.parametrize(
    ("mode", "way"),
    [("slow-fast", "graph"), ("indexed", "graph"), ("dense", "reference")],
)
def test_sparse_prefill_and_decoding_in_one_call(mode: str, way: str, net: Any) -> None:
    base = indexed() if mode == "indexed" else sparse(k=8, recent=4, first_step=False)
    config = base.updated({"mode": mode, "prefill": PREFILL, **WAYS[way]})
    ids, mask = padded(30, 21)
    with session(net, config) as attached:
        got, stats = generate(net, ids, 2, attention_mask=mask), attached
    with session(net, config.updated({**WAYS["reference"], "runner": "auto"})) as attached:
        want, expected = generate(net, ids, 2, attention_mask=mask), attached
    same(got, want)
    assert counted(stats.stats) == counted(expected.stats)
    assert stats.stats.prefill_keys_share == expected.stats.prefill_keys_share < 1
    assert stats.stats.prefill_backend == config.backend
    assert (stats.stats.keys_read_share < 1) == (mode != "dense")
    told = "the sparse prefill ran on the reference path"
    assert any(told in note for note in stats.stats.notes) == (way == "reference")


def run_in_chunks(net: Any, config: Config, ids: Tensor, chunk: int | None) -> Any:
    options = {"prefill_chunk_size": chunk} if chunk else {}
    with session(net, config) as attached:
        out = generate(net, ids, 3, **options)
        out.stats = attached.stats
    return out


@pytest.mark.parametrize(
    ("way", "mode"), [("reference", "slow-fast"), ("reference", "indexed"), ("graph", "indexed")]
)
def test_chunks_of_whole_blocks_change_nothing(way: str, mode: str, net: Any) -> None:
    base = sparse(k=8, recent=4, first_step=False) if mode == "slow-fast" else indexed()
    config, ids = (
        base.updated({"prefill": PREFILL, **WAYS[way]}),
        prompt(45 if way == "reference" else 29),
    )
    want = run_in_chunks(net, config, ids, None)
    for chunk in (8, 40) if way == "reference" else (16,):
        got = run_in_chunks(net, config, ids, chunk)
        same(got, want)
        assert got.stats.prefill_keys_share == pytest.approx(want.stats.prefill_keys_share)
        for mine, its in zip(cache_of(got).layers, cache_of(want).layers, strict=True):
            torch.testing.assert_close(
                mine.state.kv.index, its.state.kv.index, atol=1e-3, rtol=1e-3
            )


def test_queries_of_their_own_make_any_chunk_the_same(net: Any) -> None:
    config = indexed().updated({"prefill": {**PREFILL, "b_sel": 1}})
    want = run_in_chunks(net, config, prompt(24), None)
    for chunk in (7, 9, 23):
        same(run_in_chunks(net, config, prompt(24), chunk), want)


@pytest.mark.parametrize("chunk", [1, 3, 11, 45, 46])
def test_chunks_of_any_size_run(chunk: int, net: Any) -> None:
    config = indexed().updated({"prefill": PREFILL})
    out = run_in_chunks(net, config, prompt(45), chunk)
    assert out.sequences.shape == (1, 48)
    assert cache_of(out).layers[1].state.kv.indexed == 47


def test_ragged_rows_in_chunks_are_those_alone(net: Any) -> None:
    """A short row has whole chunks of padding alone."""
    lengths = (45, 3, 20)
    ids, mask = padded(*lengths)
    config = indexed().updated({"prefill": {**PREFILL, "b_sel": 1}})
    with session(net, config):
        together = tokens(net, ids, 5, attention_mask=mask, prefill_chunk_size=9)
        alone = [tokens(net, prompt(n, seed=n), 5)[0] for n in lengths]
    assert together == alone


def test_a_turn_behind_an_indexed_prefill_that_slow_fast_decoded(net: Any) -> None:
    """Decode steps of another mode append index keys as well, for the turn that comes."""
    config = sparse(k=100_000, dense_below_budget=False, t_max=2).updated({"prefill": PREFILL})
    for way in ("reference", "graph"):
        with session(net, config.updated(WAYS[way])):
            first = generate(net, prompt(30), 3)
            told = torch.cat([first.sequences, prompt(7, seed=8)], dim=1)
            generate(net, told, 1, **{CACHE: cache_of(first)})
            got = cache_of(first).layers[1].state.kv
            assert (got.indexed, got.length) == (40, 40)
            if way == "reference":
                want = got.index.clone()
            torch.testing.assert_close(got.index, want, atol=1e-3, rtol=1e-3)


# -- indexers that do not fit


def test_the_indexer_of_another_training_is_refused(net: Any, tmp_path: Path) -> None:
    other = new_indexer(device.build("llama", **device.SMALL, seed=4), 16, 1, "random")
    with pytest.raises(InputError, match="made for another backbone"):
        reread.attach(net, indexed(), indexer=other)
    other.save(tmp_path)
    with pytest.raises(InputError, match="made for another backbone"):
        reread.attach(net, indexed().updated({"indexer": tmp_path}))


def changed(net: Any, **card: Any) -> Indexer:
    from dataclasses import replace

    return Indexer(replace(new_indexer(net, 16, 1, "random").card, **card))


@pytest.mark.parametrize(
    ("card", "error", "message"),
    [
        ({"layers": (1,)}, InputError, r"no part for layers \[0\] of the model"),
        ({"layers": ()}, InputError, r"no part for layers \[0, 1\] of the model"),
        ({"hidden": 48}, InputError, "reads inputs of 48, the model has 32"),
        ({"heads": 2}, UnsupportedError, "an indexer of 2 heads: one head"),
        ({"width": 24}, UnsupportedError, "an indexer of width 24: one of 16, 32, 64, 128"),
    ],
)
def test_indexers_that_do_not_fit(
    card: dict[str, Any], error: type[Exception], message: str, net: Any
) -> None:
    with pytest.raises(error, match=message):
        reread.attach(net, indexed("graph"), indexer=changed(net, **card))
    if error is UnsupportedError:
        with reread.attach(net, indexed(), indexer=changed(net, **card)):
            assert len(tokens(net, prompt(30), 4)[0]) == 4


def test_more_layers_than_needed_do_no_harm(net: Any) -> None:
    with reread.attach(net, indexed(), indexer=changed(net, layers=(0, 1, 2))):
        tokens(net, prompt(20), 2)


def test_settings_that_do_not_fit(net: Any) -> None:
    indexer = new_indexer(net, 16, 1, "random")
    with pytest.raises(ConfigError, match="nothing in the config uses one"):
        reread.attach(net, sparse(), indexer=indexer)
    with pytest.raises(ConfigError, match="mode='indexed' needs an indexer"):
        reread.attach(net, Config.preset("indexed"))
    with pytest.raises(ConfigError, match=r"prefill\.chooser='indexer' needs an indexer"):
        reread.attach(net, sparse().updated({"prefill": "indexer"}))
    with pytest.raises(ConfigError, match="backend='triton' has no mode 'oracle'"):
        reread.attach(net, sparse().updated({"mode": "oracle", "backend": "triton"}))
    with pytest.raises(ConfigError, match="one model has one"):
        Config(mode="indexed", indexer="a").updated({"prefill": {"indexer": "b"}})
    with pytest.raises(ConfigError, match="neither mode nor prefill uses one"):
        Config(mode="indexed", indexer="a").updated({"mode": "dense"})
    config = indexed("eager").updated({"prefill": {**PREFILL, "b_sel": 256}})
    with pytest.raises(UnsupportedError, match="256 queries that share a choice"):
        reread.attach(net, config, indexer=indexer)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder_in_the_place_of_an_indexer_is_named(kind: type, net: Any) -> None:
    with pytest.raises(reread.RereadError, match="indexer="):
        reread.attach(net, indexed(), indexer=kind("folder"))


def test_folders_that_hold_none(net: Any, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InputError, match="holds no indexer"):
            reread.attach(net, indexed().updated({"indexer": folder}))
    (tmp_path / WEIGHTS).write_bytes(b"nothing")
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        reread.attach(net, indexed().updated({"prefill": {"indexer": tmp_path}}))
    with pytest.raises(InputError, match="holds no indexer"):
        reread.attach(net, indexed().updated({"indexer": tmp_path / WEIGHTS}))


@pytest.mark.parametrize(
    "card",
    ["{", "[]", "{}", '{"layers": 3}', '{"layers": [0, 1], "new": 1}',
     '{"layers": [0, 1], "hidden": 32, "width": "16", "theta": 1e4, "backbone": ""}'],
)  # fmt: skip
def test_cards_that_are_none(card: str, net: Any, tmp_path: Path) -> None:
    state = new_indexer(net, 16, 1, "random").state_dict()
    save_file(state, tmp_path / WEIGHTS, {"format": "1", "card": card})
    with pytest.raises(InputError, match=WEIGHTS):
        Indexer.load(tmp_path)


def test_a_folder_serves_mode_and_prefill(net: Any, tmp_path: Path) -> None:
    new_indexer(net, 16, 1, "svd").save(tmp_path)
    with session(net, indexed().updated({"prefill": PREFILL})):
        want = tokens(net, prompt(50), 4)
    named: list[dict[str, Any]] = [
        {"indexer": tmp_path, "prefill": PREFILL},
        {"prefill": {**PREFILL, "indexer": tmp_path}},
        {"indexer": str(tmp_path), "prefill": {**PREFILL, "indexer": tmp_path}},
    ]
    for changes in named:
        config = indexed().updated(changes)
        config = Config.from_dict(json.loads(json.dumps(config.to_dict())))
        assert config.indexer_folder == str(tmp_path)
        with reread.attach(net, config):
            assert tokens(net, prompt(50), 4) == want


def test_the_preset_is_a_config_like_others() -> None:
    config = Config.preset("indexed")
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    changed = config.updated({"prefill": {"indexer": Path("a/b")}, "b_sel": 16, "k": 9})
    assert changed.prefill == SparsePrefill(indexer="a/b", b_sel=16)
    assert (changed.k, changed.indexer, changed.indexer_folder) == (9, None, "a/b")
    assert Config.from_dict(json.loads(json.dumps(changed.to_dict()))) == changed
    assert changed.updated({"prefill": "oracle"}).indexer_folder is None


@pytest.mark.parametrize("chooser", ["oracle", "sampled"])
def test_blocks_that_are_too_large_for_the_kernels_are_refused_before_a_prompt(
    chooser: str, net: Any
) -> None:
    """Before anything is written, whoever chooses."""
    config = Config(
        mode="dense", backend="triton", prefill=SparsePrefill(b_sel=256, chooser=chooser)
    )
    with pytest.raises(UnsupportedError, match="256 queries that share a choice: at most 128"):
        reread.attach(net, config)


def test_more_positions_than_the_top_k_lists_are_refused_by_the_length_of_the_text(
    net: Any,
) -> None:
    reader = Reader(net, new_indexer(net, 16, 1, "svd"), (0, 1))
    config = Config(prefill=SparsePrefill(chooser="indexer", k=100_000))
    assert kernels_lack(config, reader, 2, 16_384) is None
    assert "k=16385 of a sparse prefill" in str(kernels_lack(config, reader, 2, 16_385))
    other = config.updated({"prefill.chooser": "sampled"})
    assert kernels_lack(other, None, 2, 50_000) is None


def test_an_oracle_is_no_graph(net: Any) -> None:
    with pytest.raises(ConfigError, match="runner='graph' has no mode 'oracle'"):
        reread.attach(net, Config.preset("indexed").updated({"mode": "oracle", "runner": "graph"}))


def test_one_folder_may_be_spelt_in_two_ways() -> None:
    config = Config(mode="indexed", indexer="a/b/", prefill=SparsePrefill(indexer="a/./b"))
    assert config.indexer_folder == "a/b/"


def test_holes_are_refused_by_their_name_where_kernels_run(net: Any) -> None:
    mask = torch.ones(1, 30, dtype=torch.long)
    mask[0, 12] = 0
    for way in ("eager", "graph"):
        with (
            session(net, indexed(way)),
            pytest.raises(UnsupportedError, match="padding behind or between"),
        ):
            generate(net, prompt(30), 2, attention_mask=mask)


def test_the_reference_reads_around_holes(net: Any) -> None:
    mask = torch.ones(1, 30, dtype=torch.long)
    mask[0, 12] = 0
    with session(net, indexed(k=100, dense_below_budget=False)) as attached:
        got = generate(net, prompt(30), 6, attention_mask=mask)
        assert attached.stats.fast_steps == [5]
    with session(net, Config.preset("dense")):
        same(got, generate(net, prompt(30), 6, attention_mask=mask))


# -- the oracle


def oracle(**options: Any) -> Config:
    return indexed(**options).updated({"mode": "oracle"})


@pytest.mark.parametrize("name", ["llama-gqa4", "gemma3", "qwen3.5"])
def test_an_oracle_that_reads_everything_is_dense(name: str) -> None:
    net, (ids, mask) = tiny.model(name), padded(40, 1, 23)
    with session(net, oracle(k=100_000, dense_below_budget=False)) as attached:
        got = generate(net, ids, 6, attention_mask=mask)
        assert attached.stats.fast_steps == [5] * 3
    with session(net, Config.preset("dense")):
        same(got, generate(net, ids, 6, attention_mask=mask))


def test_an_oracles_row_is_the_same_alone(net: Any) -> None:
    ids, mask = padded(40, 2, 23)
    with session(net, oracle(t_max=3)):
        together = tokens(net, ids, 6, attention_mask=mask)
        assert together == [tokens(net, prompt(n, seed=n), 6)[0] for n in (40, 2, 23)]


small = {"deadline": None, "max_examples": 30}


@settings(**small)
@given(st.integers(0, 10_000), st.integers(2, 40), st.data())
def test_no_other_choice_of_a_step_has_more_mass(seed: int, length: int, data: Any) -> None:
    from reread.indexer.apply import best_keys

    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(4, 8, generator=g), torch.randn(2, length, 8, generator=g)
    start = data.draw(st.integers(0, length - 1))
    mass = step_mass(q, k, start, 0.5, None)
    assert not mass[:start].any()
    assert float(mass.sum()) == pytest.approx(1, abs=1e-5)
    low = data.draw(st.integers(start, length))
    size = data.draw(st.integers(0, length - low))
    found = best_keys(mass[low:], low, size) if size else torch.empty(0, dtype=torch.int32)
    assert found.tolist() == sorted(set(found.tolist()))
    others = data.draw(st.permutations(range(low, length)))[:size]
    assert float(mass[found.long()].sum()) >= float(mass[others].sum()) - 1e-6


@settings(**small)
@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.data())
def test_no_other_choice_of_a_block_has_more_mass(
    seed: int, length: int, b_sel: int, size: int, data: Any
) -> None:
    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(4, length, 8, generator=g), torch.randn(2, length, 8, generator=g)
    start = data.draw(st.integers(0, length - 1))
    config = SparsePrefill(k=size, b_sel=b_sel, sink=1, local=2)
    (piece,) = pieces(start, length, start, config, 1)
    selection = choose(q[:, start:], k, start, piece, config, 0.5)
    for n, (edge, after) in enumerate(zip(piece.edges, piece.edges[1:], strict=False)):
        # of dense attention by hand, averaged over heads and queries
        mass = torch.zeros(length, dtype=torch.float64)
        for t in range(edge, after):
            for h in range(4):
                logits = (k[h // 2, start : t + 1].double() @ q[h, t].double()) * 0.5
                mass[start : t + 1] += torch.softmax(logits, 0)
        got = selection.indices[n, : selection.sizes[n]].long()
        span = range(start + 1, max(start + 1, piece.windows[n]))
        assert set(got.tolist()) <= set(span)
        assert len(set(got.tolist())) == selection.sizes[n] == min(size, len(span))
        others = data.draw(st.permutations(span))[: len(got)]
        assert float(mass[got].sum()) >= float(mass[others].sum()) - 1e-4


@pytest.mark.parametrize("start", [0, 7])
def test_each_query_alone_is_a_block_of_one(start: int) -> None:
    """The same choice for a chunk as for its queries one by one."""
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(h, 40, 16, generator=g) for h in (4, 2, 2))
    config = SparsePrefill(k=5, b_sel=1, sink=2, local=3)
    whole = prefill_row(q, k, v, start, config, 0.25, PrefillMeter())
    for t in range(start, 40):
        seen = slice(0, t + 1)
        own = prefill_row(q[:, t : t + 1], k[:, seen], v[:, seen], start, config, 0.25,
                          PrefillMeter())  # fmt: skip
        torch.testing.assert_close(own[:, 0], whole[:, t])
    sampled = SparsePrefill(k=5, b_sel=1, sink=2, local=3, chooser="sampled", samples=1)
    assert torch.equal(prefill_row(q, k, v, start, sampled, 0.25, PrefillMeter()), whole)


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("below", [1, 15, 16, 17, 33])
def test_blocks_up_to_dense_below_are_dense(start: int, below: int) -> None:
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(h, 60, 16, generator=g) for h in (4, 2, 2))
    config = SparsePrefill(k=2, b_sel=8, sink=1, local=1, dense_below=below)
    meter = PrefillMeter()
    got = prefill_row(q, k, v, start, config, 0.25, meter)
    keep = torch.ones(60, 60).tril().bool()
    keep[:, :start] = False
    want = torch.nn.functional.scaled_dot_product_attention(
        q, *(x.repeat_interleave(2, 0) for x in (k, v)), attn_mask=keep, scale=0.25
    )
    whole = start + below // 8 * 8
    torch.testing.assert_close(got[:, start:whole], want[:, start:whole])
    # sink, k and local hold everything of the first four
    after = max(whole, start + 4)
    far = [t for t in range(after + 4, 60) if (t - start) % 8 == 7]
    assert all((got[:, t] - want[:, t]).abs().max() > 1e-3 for t in far)
    dense = PrefillMeter()
    dense.dense(start, 60, start)
    assert meter.cached == dense.cached


# -- the command line


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoint.save(tmp_path_factory.mktemp("model")))


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


TEXT = "The quick brown fox jumps over the lazy dog. " * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "indexed"], "mode='indexed' needs an indexer"),
        (["--set", "prefill=indexer"], "prefill.chooser='indexer' needs an indexer"),
        (["--preset", "indexed", "--set", "indexer=nowhere"], "nowhere holds no indexer"),
        (["--set", "prefill=magic"], "prefill.chooser='magic'"),
        (["--set", "indexer=nowhere"], "neither mode nor prefill uses one"),
    ],
)
def test_commands_that_cannot_run_say_why_in_one_line(
    arguments: list[str], message: str, checkpoint: str
) -> None:
    result = command(
        "generate", "--model", checkpoint, "--prompt", TEXT, "--max-new-tokens", "4", *arguments
    )
    assert result.exit_code == 2, result.output
    said = [line for line in result.stderr.splitlines() if not line.startswith("loading ")]
    assert len(said) == 1
    assert message in said[0]
    assert result.stdout == ""


def test_commands_with_a_sparse_prefill_and_an_indexer(checkpoint: str, tmp_path: Path) -> None:
    new_indexer(tiny_checkpoint.model(), 8, 1, "svd").save(tmp_path)
    common = ["--model", checkpoint, "--prompt", TEXT, "--max-new-tokens", "6", "--json"]
    small = ["--set", "k=8", "--set", "recent=8", "--set", "sink=2"]
    prefill = ["--set", "prefill.k=8", "--set", "prefill.local=8", "--set", "b_sel=8"]
    result = command("compare", *common, *small, "--set", "prefill=sampled", *prefill)
    assert result.exit_code == 0, result.output
    assert "the sparse prefill ran on the reference path" in str(json.loads(result.stdout)["notes"])
    result = command(
        "generate", *common, "--preset", "indexed", *small, "--set", f"indexer={tmp_path}",
        "--set", "prefill=indexer", *prefill,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    assert value["config"]["indexer"] == str(tmp_path)
    assert 0 < value["stats"]["keys_read_share"] < 1
    assert 0 < value["stats"]["prefill_keys_share"] < 1
