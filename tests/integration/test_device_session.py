"""What a session on the kernels keeps, reuses, notices and gives back."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.generation.streamers import BaseStreamer

import reread
from reread import InputError
from reread.device import Arena

from . import device, tiny
from .device import dense, generate, reference, small, steps, tokens, triton
from .tiny import CACHE, cache_of, prompt


def address(output: Any) -> list[int]:
    """Where the keys of an output's cache lie."""
    return [layer.state.kv.buffers().k.data_ptr() for layer in cache_of(output).layers]


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Arena]]:
    """Every arena that was made."""
    made, init = [], Arena.__init__

    def noted(self: Arena, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Arena, "__init__", noted)
    return made


def alive(arenas: list[weakref.ref[Arena]]) -> list[bool]:
    gc.collect()
    return [arena() is not None for arena in arenas]


# -- memory


def test_prompts_of_one_session_share_one_arena(arenas: list[weakref.ref[Arena]]) -> None:
    net, config = device.model("qwen3"), triton("graph", t_max=3, first_step=False)
    prompts = [prompt(45, seed=3), prompt(40, seed=4), prompt(45, seed=5)]
    with reread.attach(net, reference(config)):
        want = [tokens(net, p, 4) for p in prompts]
    with reread.attach(net, config):
        first = generate(net, prompts[0], 4)
        place, got = address(first), [first.sequences[:, 45:].tolist()]
        del first
        for p in prompts[1:]:
            out = generate(net, p, 4)
            assert address(out) == place
            got.append(out.sequences[:, p.shape[1] :].tolist())
            del out
    assert got == want
    assert len(arenas) == 1


def test_a_cache_that_lives_on_is_not_reused() -> None:
    net = small()
    with reread.attach(net, dense("eager")):
        first = generate(net, prompt(40))
        keys = cache_of(first).layers[0].keys.clone()
        second = generate(net, prompt(40, seed=2))
        assert not set(address(first)) & set(address(second))
        assert torch.equal(cache_of(first).layers[0].keys, keys)


def test_a_refused_call_leaves_its_cache_alone() -> None:
    net = small()
    with reread.attach(net, dense("eager")):
        out = generate(net, prompt(40, rows=2))
        cache, keys = cache_of(out), cache_of(out).layers[0].keys.clone()
        with pytest.raises(InputError, match="the cache has 2 rows, the input 1"):
            generate(net, prompt(50), **{CACHE: cache})
        gc.collect()
        generate(net, prompt(38, rows=2, seed=9))
        assert torch.equal(cache.layers[0].keys, keys)


def test_a_shallow_copy_of_a_cache_keeps_its_memory() -> None:
    net = small()
    with reread.attach(net, dense("eager")):
        cache = copy.copy(cache_of(generate(net, prompt(40))))
        gc.collect()
        keys = cache.layers[0].keys.clone()
        generate(net, prompt(30, seed=4))
        assert torch.equal(cache.layers[0].keys, keys)


@pytest.mark.parametrize("runner", ["eager", "graph"])
def test_a_longer_prompt_frees_the_smaller_arena(
    runner: str, arenas: list[weakref.ref[Arena]]
) -> None:
    net = small()
    with reread.attach(net, dense(runner)):
        generate(net, prompt(40))
        got = tokens(net, prompt(90))
        assert alive(arenas) == [False, True]
    with reread.attach(net, dense(runner)):
        assert tokens(net, prompt(90)) == got


@pytest.mark.parametrize("runner", ["eager", "graph"])
def test_an_outgrown_arena_is_freed(
    runner: str, arenas: list[weakref.ref[Arena]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reread.kv.GROWTH_STEP", 1)
    net = small()
    with reread.attach(net, dense(runner)) as session:
        cache = tiny.prefilled(net, prompt(40))
        with session.decoding():
            steps(net, cache, [5] * 5)
        assert len(arenas) > 1
        assert alive(arenas) == [False] * (len(arenas) - 1) + [True]


def test_a_session_that_is_over_keeps_no_cache(arenas: list[weakref.ref[Arena]]) -> None:
    net = small()
    with reread.attach(net, dense("eager")) as session:
        out = generate(net, prompt(40))
    del out
    assert session.stats.decode_steps == 2
    assert alive(arenas) == [False]


@pytest.mark.parametrize("runner", ["eager", "graph"])
def test_inference_mode_in_one_call_and_not_in_the_next(runner: str) -> None:
    net = small()
    with reread.attach(net, dense(runner)):
        with torch.inference_mode():
            inside = tokens(net, prompt(40))
        assert tokens(net, prompt(40)) == inside
        with torch.inference_mode():
            assert tokens(net, prompt(40)) == inside


def test_inference_mode_and_key_norms_of_an_adopted_prefix() -> None:
    net, config = small(), triton("eager", t_max=None, selector=device.PAPER_LIKE)
    for chosen in (config, reference(config)):
        cache = tiny.prefilled(net, prompt(40))
        with reread.attach(net, chosen):
            with torch.inference_mode():
                first = generate(net, prompt(45), 2, **{CACHE: cache}).sequences
            told = torch.cat([first.clone(), prompt(3)], 1)
            assert tokens(net, told, 2, **{CACHE: cache})


def test_rows_left_out_midway_free_the_larger_arena(arenas: list[weakref.ref[Arena]]) -> None:
    net = small()
    with reread.attach(net, dense("eager")) as session:
        cache = tiny.prefilled(net, prompt(40, rows=2))
        with session.decoding(), torch.no_grad():
            net(torch.tensor([[5], [6]]), use_cache=True, **{CACHE: cache})
            cache.batch_select_indices(torch.tensor([1]))
            steps(net, cache, [7])
        assert alive(arenas) == [False, True]


def test_memory_that_is_reused_remembers_no_autograd_graph() -> None:
    net = small()
    with reread.attach(net, dense("eager")) as session:
        cache = tiny.DynamicCache(config=net.config)
        net(prompt(40), use_cache=True, **{CACHE: cache})
        with session.decoding():
            steps(net, cache, [5])
        del cache
        out = generate(net, prompt(30))
        assert not cache_of(out).layers[0].keys.requires_grad


@pytest.mark.parametrize("runner", ["eager", "graph"])
def test_a_loop_with_autograd_on(runner: str) -> None:
    net, cache = small(), None
    with reread.attach(net, dense(runner)) as session:
        cache = tiny.prefilled(net, prompt(40))
        with session.decoding():
            logits = [
                net(torch.tensor([[5]]), use_cache=True, **{CACHE: cache}).logits for _ in range(2)
            ]
    assert all(torch.isfinite(x).all() for x in logits)


# -- undone


@pytest.mark.parametrize("name", ["qwen2", "phi3"])
def test_leaving_gives_the_model_back(name: str) -> None:
    net = device.build(name)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    modules, mapping = dict(net.named_modules()), dict(AttentionInterface._global_mapping)
    implementation, own = net.config._attn_implementation, set(vars(net))
    with reread.attach(net, dense("graph")) as session:
        generate(net, prompt(40))
        assert session.stats.runner == "graph, compiled layers"
        stacked = {p.untyped_storage().data_ptr() for p in net.parameters()}
        # beside the embeddings and norms: 4 linears or 7 in 4 matrices
        assert len(stacked) < len(before) or name == "phi3"
        assert dict(net.named_modules()) == modules
    assert {"forward", "generate"} & set(vars(net)) == set()
    assert set(vars(net)) == own
    assert all("forward" not in vars(m) for m in net.modules())
    assert not net._forward_hooks
    assert not net._forward_pre_hooks
    assert net.config._attn_implementation == implementation
    assert dict(AttentionInterface._global_mapping) == mapping
    assert dict(net.named_modules()) == modules
    parameters = dict(net.named_parameters())
    assert parameters.keys() == before.keys()
    for path, parameter in parameters.items():
        assert torch.equal(parameter, before[path]), path
        assert parameter.untyped_storage().nbytes() == parameter.nbytes, path
        assert parameter.requires_grad, path
    assert len({p.data_ptr() for p in parameters.values()}) == len(parameters)


def test_checkpoints_can_be_saved_within_a_session(tmp_path: Any) -> None:
    net = small()
    with reread.attach(net, dense()):
        generate(net, prompt(40))
        names = set(net.state_dict())
        net.save_pretrained(tmp_path)
    again = type(net).from_pretrained(tmp_path)
    assert names == set(net.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), net.parameters(), strict=True))


def test_a_session_can_be_entered_again() -> None:
    net, session = small(), None
    session = reread.attach(net, dense())
    with session:
        first = tokens(net, prompt(40))
    with session:
        assert tokens(net, prompt(40)) == first
        assert session.stats.runner == "graph, compiled layers"


# -- interrupted


class Interrupting(BaseStreamer):
    def __init__(self) -> None:
        self.calls = 0

    def put(self, value: Any) -> None:
        self.calls += 1
        if self.calls == 4:
            raise KeyboardInterrupt

    def end(self) -> None: ...


def test_an_interrupted_generate_leaves_the_session_usable() -> None:
    net, config = device.model("qwen3"), triton("graph", t_max=None)
    with reread.attach(net, reference(config)):
        want = tokens(net, prompt(40), 4)
    with reread.attach(net, config) as session:
        with pytest.raises(KeyboardInterrupt):
            generate(net, prompt(40), 8, streamer=Interrupting())
        assert session.stats.decode_steps == 2
        assert tokens(net, prompt(40), 4) == want


def test_an_interrupt_between_two_kernels_spoils_no_later_selection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Histograms are left at zero for the next call, unless the last kernel never ran."""
    from reread.ops.triton import selection

    net, config, top_k = device.model("qwen3"), triton("eager", t_max=None), selection.top_k
    with reread.attach(net, reference(config)):
        want = tokens(net, prompt(60), 4)

    def interrupted(*args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(selection, "top_k", top_k)
        raise KeyboardInterrupt

    with reread.attach(net, config):
        tokens(net, prompt(60), 2)
        monkeypatch.setattr(selection, "top_k", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tokens(net, prompt(60, seed=5), 4)
        assert tokens(net, prompt(60), 4) == want
