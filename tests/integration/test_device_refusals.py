"""What the kernels or a captured step cannot do is refused, or told; what changed is noticed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

import reread
from reread import InputError, NumericalError, UnsupportedError, ops
from reread.cuda import check_memory
from reread.ops.triton import workspace

from . import device, tiny
from .device import dense, generate, small, tokens, triton
from .tiny import CACHE, MATRIX, cache_of, left_padded, prompt

CUDA = torch.device("cuda:0")
WHY = "decode steps were not captured as graphs: "


# -- backends and shapes


def test_a_head_dim_without_kernels_is_refused_at_attach() -> None:
    with pytest.raises(UnsupportedError, match=r"head dim 16.*backend='reference'"):
        reread.attach(tiny.model("llama"), triton())


def test_a_dtype_without_kernels_is_refused_at_attach() -> None:
    net = small().to(torch.float64)
    with pytest.raises(UnsupportedError, match=r"float64.*backend='reference'"):
        reread.attach(net, triton())


def test_what_attach_refused_is_left_as_it_was() -> None:
    net = tiny.build(MATRIX["llama"])
    before = dict(vars(net))
    with pytest.raises(UnsupportedError):
        reread.attach(net, triton())
    assert vars(net).keys() == before.keys()
    assert tokens(net, prompt(20))


@pytest.mark.parametrize("runner", ["eager", "graph"])
@pytest.mark.parametrize(
    ("rows", "new", "named"), [(65, 2, "65 rows"), (1, 262_200, "262209 positions|262210")]
)
def test_too_large_a_conversation_is_refused_before_its_prefill(
    runner: str, rows: int, new: int, named: str
) -> None:
    net = small()
    with reread.attach(net, dense(runner)):
        cache = tiny.DynamicCache(config=net.config)
        with pytest.raises(UnsupportedError, match=rf"({named}).*backend='reference'"):
            generate(net, prompt(10, rows=rows), new, **{CACHE: cache})
        assert cache.get_seq_length() == 0
        assert tokens(net, prompt(20), 2)


def test_64_rows_and_the_last_position_are_covered() -> None:
    assert ops.kernels_lack(64, 4, 2, 128, 262_144, torch.float16) is None


@pytest.mark.parametrize("outside", [False, True], ids=["all within", "prefix from outside"])
def test_room_for_growth_never_makes_a_cache_too_large(
    outside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """70 positions are asked for, and fit; 64 further ones to spare would not."""
    monkeypatch.setattr(workspace, "MAX_LENGTH", 90)
    monkeypatch.setattr("reread.kv.MAX_LENGTH", 90)
    net, ids = small(), prompt(60)
    cache = tiny.prefilled(net, ids[:, :50]) if outside else None
    more = {CACHE: cache} if outside else {}
    with reread.attach(net, dense("eager")):
        out = net.generate(ids, max_length=64, do_sample=False, **more)
    assert out.shape[1] == 64


@pytest.mark.parametrize("runner", ["eager", "graph"])
def test_padding_between_two_turns_is_refused(runner: str) -> None:
    net, config = device.model("qwen3"), triton(runner, t_max=None)
    ids, mask = left_padded([prompt(30), prompt(41, seed=2)])
    more, holes = left_padded([prompt(3, seed=3), prompt(5, seed=4)])
    with reread.attach(net, config):
        first = generate(net, ids, 2, attention_mask=mask)
        told = torch.cat([first.sequences, more], 1)
        old = torch.cat([mask, torch.ones(2, 2, dtype=mask.dtype)], 1)
        whole, cache = torch.cat([old, holes], 1), cache_of(first)
        cached = cache.get_seq_length()
        with pytest.raises(UnsupportedError, match=r"padding behind or between.*'reference'"):
            generate(net, told, 3, attention_mask=whole, **{CACHE: cache})
        assert tokens(net, prompt(30), 2)
        assert cache.get_seq_length() == cached, "refused after the prefill"


# -- runners


def test_graph_is_refused_where_the_model_does_not_allow_it() -> None:
    hybrid = device.build("gemma3", query_pre_attn_scalar=64)
    with pytest.raises(UnsupportedError, match=r"runner='graph'.*2 of 4 layers"):
        reread.attach(hybrid, triton("graph"))
    net = small().train()
    with pytest.raises(UnsupportedError, match=r"runner='graph'.*training mode"):
        reread.attach(net, triton("graph"))
    net = small()
    net.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match=r"runner='graph'.*layers.1.mlp has forward hooks"):
        reread.attach(net, triton("graph"))
    net = small()
    own = net.model.layers[1].forward
    net.model.layers[1].forward = lambda *args, **kwargs: own(*args, **kwargs)
    with pytest.raises(UnsupportedError, match=r"runner='graph'.*layers.1 has a forward"):
        reread.attach(net, triton("graph"))


def test_graph_is_refused_where_a_call_does_not_allow_it() -> None:
    net, refused = small(), r"runner='graph'.*output_hidden_states"
    with reread.attach(net, dense("graph")), pytest.raises(UnsupportedError, match=refused):
        generate(net, prompt(40), output_hidden_states=True)


def test_auto_falls_back_and_says_why() -> None:
    net, why = small(), []
    want = tokens(net, prompt(40))

    def run(**options: Any) -> Any:
        with reread.attach(net, dense()) as session:
            out = generate(net, prompt(40), **options)
        assert out.sequences[:, 40:].tolist() == want
        assert (session.stats.backend, session.stats.runner) == ("triton", "eager")
        why.extend(session.stats.notes)
        return out

    net.train()
    run()
    net.eval()
    calls: list[int] = []
    handle = net.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    run()
    handle.remove()
    assert len(calls) == 3
    assert len(run(output_hidden_states=True).hidden_states) == 3
    assert why == [
        f"{WHY}the model is in training mode: call model.eval()",
        f"{WHY}model.layers.0.mlp has forward hooks, which would run only once",
        f"{WHY}the argument output_hidden_states",
    ]


def test_a_note_belongs_to_the_call_it_is_about() -> None:
    net = small()
    with reread.attach(net, dense()) as session:
        generate(net, prompt(40), output_scores=True)
        assert session.stats.notes == []
        net.train()
        generate(net, prompt(40))
        assert session.stats.notes != []
        net.eval()
        generate(net, prompt(40))
        assert session.stats.notes == []
        assert session.stats.runner == "graph, compiled layers"
        generate(net, prompt(40), 1)
        assert (session.stats.runner, session.stats.notes) == ("", [])


def test_hidden_states_wanted_by_the_config_are_there() -> None:
    net = small()
    net.config.output_hidden_states = True
    with reread.attach(net, dense()) as session:
        cache = tiny.prefilled(net, prompt(40))
        with session.decoding(), torch.no_grad():
            out = net(torch.tensor([[5]]), use_cache=True, **{CACHE: cache})
    assert len(out.hidden_states) == 3


def hook(net: Any) -> None:
    net.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("change", [hook, nn.Module.train], ids=["hook", "training"])
@pytest.mark.parametrize("runner", ["auto", "graph"])
def test_what_changes_after_attach_is_noticed(runner: str, change: Any) -> None:
    net = small()
    with reread.attach(net, dense(runner)) as session:
        generate(net, prompt(40))
        change(net)
        if runner == "graph":
            with pytest.raises(UnsupportedError, match="runner='graph' is not possible"):
                generate(net, prompt(40))
        else:
            generate(net, prompt(40))
            assert session.stats.runner == "eager"
            assert len(session.stats.notes) == 1


def test_a_forward_of_its_own_is_called_and_kept() -> None:
    net, calls = small(), []
    layer = net.model.layers[1]
    for module in (layer, layer.self_attn.k_proj):
        own = module.forward
        mine = module.forward = lambda *a, own=own, **k: (calls.append(1), own(*a, **k))[1]
        with reread.attach(net, dense()):
            generate(net, prompt(40))
        assert vars(module)["forward"] is mine
        assert len(calls) == 3
        calls.clear()
        del module.forward


def test_a_loop_that_is_refused_does_not_begin() -> None:
    """Forwards after it are no decode steps."""
    net = small()
    with reread.attach(net, dense("graph")) as session:
        hook(net)
        with pytest.raises(UnsupportedError), session.decoding():
            pass
        assert not session._recorder.decoding


@pytest.mark.parametrize("runner", ["eager", "graph"])
def test_nan_in_a_decode_step_is_an_error_and_the_session_goes_on(runner: str) -> None:
    net = small(tie_word_embeddings=False)
    with reread.attach(net, dense(runner)):
        want = tokens(net, prompt(40))
        row = net.get_input_embeddings().weight.data[want[0][0]]
        kept = row.clone()
        row.fill_(float("nan"))
        with pytest.raises(NumericalError, match="row 0"):
            generate(net, prompt(40)[prompt(40) != want[0][0]][None])
        row.copy_(kept)
        assert tokens(net, prompt(40)) == want


# -- what the machine must have


def test_no_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "triton" else find(name)
    )
    for name, where in (("auto", CUDA), ("triton", torch.device("cpu"))):
        with pytest.raises(UnsupportedError, match=r"need Triton.*install it.*'reference'"):
            ops.resolve_backend(name, where)
    assert ops.resolve_backend("reference", CUDA) == "reference"
    assert ops.resolve_backend("auto", torch.device("cpu")) == "reference"


def test_an_old_card_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    for name in ("auto", "triton"):
        with pytest.raises(UnsupportedError, match=r"7\.5 is below 8\.0.*backend='reference'"):
            ops.resolve_backend(name, CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    assert ops.resolve_backend("auto", CUDA) == "triton"


def test_a_cpu_without_the_interpreter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnsupportedError, match=r"needs a CUDA device, this is cpu: use 'auto'"):
        ops.resolve_backend("triton", torch.device("cpu"))


@pytest.mark.parametrize(("free", "reserved", "fits"), [(2, 0, True), (1, 1, True), (1, 0, False)])
def test_memory_that_is_not_there_is_refused(
    free: int, reserved: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wanted: 2 GiB. What torch holds without using it is free as well."""
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: (5 + reserved) * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 5 * gib)
    check_memory(torch.device("cpu"), 10**15, 8, 4096)
    check_memory(CUDA, 2**19, 8, 4096, held=4096)
    if fits:
        check_memory(CUDA, 2**19, 8, 4096)
        return
    with pytest.raises(InputError) as error:
        check_memory(CUDA, 2**19, 8, 4096)
    for said in ("8 rows of 4096 positions", "2.0 GiB", "1.0 GiB are free", "2048 positions",
                 "4 rows with 4096 positions"):  # fmt: skip
        assert said in str(error.value)
