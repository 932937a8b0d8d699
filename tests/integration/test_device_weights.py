"""Weights that change under a session, and layers that use theirs in a way of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

import reread
from reread import UnsupportedError
from reread.integrations.hf import graph

from . import device, tiny
from .device import dense, generate, reference, small, steps, tokens, triton
from .tiny import CACHE, cache_of, prompt


class Shifted(LlamaMLP):
    """Multiplies what comes from two inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x.flip(-1)))


class Half(nn.Module):
    """Wraps a linear, and has no parameter of its own."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * self.inner(x)


def change_parameter(layer: Any, weight: Tensor) -> None:
    layer.self_attn.q_proj.weight = nn.Parameter(weight)


def change_data(layer: Any, weight: Tensor) -> None:
    layer.self_attn.q_proj.weight.data = weight


def change_in_place(layer: Any, weight: Tensor) -> None:
    with torch.no_grad():
        layer.self_attn.q_proj.weight.copy_(weight)


def change_module(layer: Any, weight: Tensor) -> None:
    layer.self_attn.q_proj = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.self_attn.q_proj.weight = nn.Parameter(weight)


def wrap_module(layer: Any, weight: Tensor) -> None:
    layer.self_attn.q_proj = Half(layer.self_attn.q_proj)


@pytest.mark.parametrize(
    "change", [change_parameter, change_data, change_in_place, change_module, wrap_module]
)
@pytest.mark.parametrize("continued", [False, True], ids=["new prompt", "second turn"])
def test_replaced_weights_are_noticed(change: Any, continued: bool) -> None:
    found = []
    for config in (reference(dense()), dense()):
        net, g = small(), torch.Generator().manual_seed(3)
        with reread.attach(net, config) as session:
            first = generate(net, prompt(40), 4)
            for layer in net.model.layers:
                change(layer, torch.randn(layer.self_attn.q_proj.weight.shape, generator=g))
            modules = list(net.modules())
            ids, cache = prompt(45, seed=5), {}
            if continued:
                ids = torch.cat([first.sequences, prompt(5, seed=8)], 1)
                cache = {CACHE: cache_of(first)}
            found.append(generate(net, ids, 5, **cache))
            assert list(net.modules()) == modules
            assert session.stats.runner != "graph"
    device.same(found[1], found[0])


def test_weights_replaced_within_a_loop_are_noticed() -> None:
    found = []
    for config in (reference(dense()), dense()):
        net, g = small(), torch.Generator().manual_seed(3)
        with reread.attach(net, config) as session:
            cache = tiny.prefilled(net, prompt(40))
            for _ in range(2):
                with session.decoding():
                    found.append(steps(net, cache, [6, 7]))
                for layer in net.model.layers:
                    weight = torch.randn(layer.self_attn.q_proj.weight.shape, generator=g)
                    change_parameter(layer, weight)
    torch.testing.assert_close(found[2:], found[:2], rtol=1e-3, atol=2e-3)


def test_layers_that_share_a_weight() -> None:
    """Changed in place after it was stacked."""
    found = []
    for config in (reference(dense()), dense()):
        net = small()
        keys = net.model.layers[0].self_attn.k_proj
        net.model.layers[1].self_attn.k_proj.weight = keys.weight
        with reread.attach(net, config):
            generate(net, prompt(40), 4)
            with torch.no_grad():
                keys.weight.mul_(-1.5)
            found.append(generate(net, prompt(40), 4))
    device.same(found[1], found[0])


def test_siblings_with_inputs_of_their_own() -> None:
    """They must not be computed as one product."""
    found = []
    for config in (reference(dense()), dense()):
        net = small()
        for layer in net.model.layers:
            layer.mlp.__class__ = Shifted
        with reread.attach(net, config):
            found.append(tokens(net, prompt(40), 4))
    assert found[0] == found[1]


class Uncompilable(LlamaMLP):
    """Works, but not under a compiler."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class Uncapturable(LlamaMLP):
    """Works, but not within a step."""

    def forward(self, x: Tensor) -> Tensor:
        if graph._Active.step is not None:
            raise RuntimeError("not here\nand more")
        return super().forward(x)


def test_a_layer_that_cannot_be_compiled_is_told() -> None:
    net, config = device.build("llama"), triton("graph", t_max=None)
    net.model.layers[1].mlp.__class__ = Uncompilable
    want, expected = device.run(net, prompt(40), reference(config), 4)
    with reread.attach(net, config) as session:
        for _ in range(2):
            device.same(generate(net, prompt(40), 4), want)
            assert device.counted(session.stats) == device.counted(expected)
            assert session.stats.runner == "graph"
            assert len(session.stats.notes) == 1
            assert session.stats.notes[0].startswith("layers are not compiled (")


def test_a_step_that_cannot_be_captured_is_told_or_refused() -> None:
    """Layer 0 has run twice by then; nothing may be appended or counted twice."""
    net, config = device.build("llama"), triton(t_max=None)
    net.model.layers[1].mlp.__class__ = Uncapturable
    want, expected = device.run(net, prompt(40), reference(config), 4)
    with reread.attach(net, config) as session:
        for _ in range(2):
            device.same(generate(net, prompt(40), 4), want)
            assert device.counted(session.stats) == device.counted(expected)
            assert session.stats.runner == "eager"
            assert "the step could not be captured (RuntimeError: not here)" in str(
                session.stats.notes
            )
    refused = r"runner='graph' is not possible.*not here"
    with reread.attach(net, triton("graph")), pytest.raises(UnsupportedError, match=refused):
        generate(net, prompt(40))
    assert tokens(net, prompt(40))


def test_two_models_of_one_config_at_once() -> None:
    nets = [small()]
    nets.append(type(nets[0])(nets[0].config).eval())
    assert nets[1].model.layers[0].self_attn.config is nets[0].config
    want = [tokens(net, prompt(40)) for net in nets]
    with reread.attach(nets[0], dense()), reread.attach(nets[1], dense()):
        assert [tokens(net, prompt(40)) for net in nets] == want
    assert nets[0].config._attn_implementation == "sdpa"


def test_a_copied_cache_goes_its_own_way() -> None:
    net, config, found = device.model("qwen3"), triton(t_max=3), []
    for chosen in (reference(config), config):
        with reread.attach(net, chosen) as session:
            cache = tiny.prefilled(net, prompt(40))
            with session.decoding():
                steps(net, cache, [5])
                other = copy.deepcopy(cache)
                turns = [steps(net, c, [t]) for t in (6, 7) for c in (cache, other)]
        found.append(torch.cat(turns))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=2e-3)


def test_half_precision() -> None:
    """float16: the interpreter multiplies bfloat16's bits."""
    net = device.build("qwen3").to(torch.float16)
    config = triton("graph", k=500, dense_below_budget=False, first_step=False)
    want, _ = device.run(net, prompt(40), reference(config), 3)
    got, stats = device.run(net, prompt(40), config, 3)
    assert stats.runner == "graph, compiled layers"
    torch.testing.assert_close(got.logits[1], want.logits[1], rtol=0.01, atol=0.05)


def test_quantised_weights_are_left_as_they_are() -> None:
    """torchao's fp8 weights: compiled like any others, never stacked."""
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    net = small()
    quantization.quantize_(net.model, quantization.Float8WeightOnlyConfig())
    before = [type(p.data) for p in net.parameters()]
    ids, config = prompt(40), triton("graph")
    want, _ = device.run(net, ids, reference(config), 4)
    got, stats = device.run(net, ids, config, 4)
    assert stats.runner == "graph, compiled layers"
    assert got.sequences.tolist() == want.sequences.tolist()
    assert [type(p.data) for p in net.parameters()] == before
