"""Stacked siblings compute what they computed alone, and stay the model's own parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reread.integrations.hf.fuse import First, Stack, shared_parameters, stack_siblings, stacked


class Attention(nn.Module):
    def __init__(self, *, bias: bool = False, width: int = 12) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, 8, bias=bias)
        self.k_proj = nn.Linear(width, 4, bias=bias)
        self.v_proj = nn.Linear(width, 6, bias=bias)
        self.o_proj = nn.Linear(8, width, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(12, 10, bias=False), nn.Linear(12, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate_proj(x) * self.up_proj(x)


class Subclass(nn.Linear):
    pass


class Quantised(Tensor):
    """Stands for a tensor subclass that holds packed weights."""


def check_outputs(module: nn.Module, stacks: list[Stack], x: Tensor, want: Any) -> None:
    with torch.no_grad():
        with stacked(stacks):
            got = module(x)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(module(x), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(12,), (3, 12), (2, 1, 12)])
def test_results_are_equal(bias: bool, shape: tuple[int, ...]) -> None:
    module, x = Attention(bias=bias), torch.randn(shape)
    with torch.no_grad():
        want = module(x)
    stacks = stack_siblings(module)
    assert [stack.names for stack in stacks] == [("q_proj", "k_proj", "v_proj")]
    check_outputs(module, stacks, x, want)


def test_the_stand_ins_are_there_only_within() -> None:
    module = Attention()
    before, names = dict(module.named_modules()), set(module.state_dict())
    stacks = stack_siblings(module)
    assert dict(module.named_modules()) == before
    with stacked(stacks):
        assert isinstance(module.q_proj, First)
        assert module.o_proj is before["o_proj"]
    with pytest.raises(KeyError), stacked(stacks):
        raise KeyError
    assert dict(module.named_modules()) == before
    assert set(module.state_dict()) == names


def test_what_an_interrupted_call_left_is_forgotten() -> None:
    module, x = Attention(), torch.randn(2, 12)
    stacks = stack_siblings(module)
    with torch.no_grad():
        want = module(x)
        with stacked(stacks):
            module.q_proj(torch.randn(2, 12))
        check_outputs(module, stacks, x, want)


def test_several_calls_within_one_block() -> None:
    module = Mlp()
    stacks = stack_siblings(module)
    xs = [torch.randn(n, 12) for n in (1, 4, 2)]
    with torch.no_grad():
        want = [module(x) for x in xs]
        with stacked(stacks):
            got = [module(x) for x in xs]
    torch.testing.assert_close(got, want)


class OtherOrder(Attention):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v = self.k_proj(x), self.v_proj(x)
        return self.q_proj(x), k, v


class ValuesFirst(Attention):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, v = self.q_proj(x), self.v_proj(x)
        return q, self.k_proj(x), v


class OtherInput(Attention):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_proj(x), self.k_proj(2 * x), self.v_proj(x + 1)


class Unused(Attention):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_proj(x), self.k_proj(x)


@pytest.mark.parametrize("kind", [OtherOrder, ValuesFirst, OtherInput, Unused])
def test_layers_that_use_them_otherwise_are_right_or_an_error(kind: type[Attention]) -> None:
    """An error is enough: the step then runs uncompiled, and nothing is stacked."""
    module, xs = kind(), [torch.randn(2, 12) for _ in range(2)]
    stacks = stack_siblings(module)
    with torch.no_grad():
        want = [module(x) for x in xs]
        try:
            with stacked(stacks):
                got = [module(x) for x in xs]
        except Exception:  # whatever it is called: not a wrong result
            got = want
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_parameters_are_views_and_changes_in_place_count() -> None:
    module, x = Attention(bias=True), torch.randn(3, 12)
    parameters = dict(module.named_parameters())
    stacks = stack_siblings(module)
    assert dict(module.named_parameters()).keys() == parameters.keys()
    assert all(p is parameters[n] and p.requires_grad for n, p in module.named_parameters())
    for kind in ("weight", "bias"):
        q, k, v = (getattr(getattr(module, f"{x}_proj"), kind) for x in "qkv")
        assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
        assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        assert q.untyped_storage().nbytes() == q.nbytes + k.nbytes + v.nbytes
    with torch.no_grad():
        module.k_proj.weight.mul_(3.0)
        module.v_proj.bias.add_(1.0)
        module.load_state_dict({**module.state_dict(), "q_proj.bias": torch.ones(8)})
        check_outputs(module, stacks, x, module(x))


def test_split_undoes_it() -> None:
    module = Attention(bias=True)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    parameters = dict(module.named_parameters())
    for stack in stack_siblings(module):
        stack.split()
    for name, p in module.named_parameters():
        assert p is parameters[name]
        assert torch.equal(p, before[name])
        assert p.untyped_storage().nbytes() == p.nbytes
        assert p.is_contiguous()
        assert p.requires_grad


def test_it_can_be_done_again() -> None:
    module, x = Attention(), torch.randn(2, 12)
    with torch.no_grad():
        want = module(x)
    for stack in stack_siblings(module):
        stack.split()
    check_outputs(module, stack_siblings(module), x, want)


def test_both_groups_and_nested_modules_are_found() -> None:
    block = nn.ModuleDict({"attention": Attention(), "mlp": Mlp(), "other": nn.Linear(3, 3)})
    assert sorted(len(stack.linears) for stack in stack_siblings(block)) == [2, 3]


def subclass(module: Attention) -> None:
    module.k_proj = Subclass(12, 4, bias=False)


def quantised(module: Attention) -> None:
    data = module.v_proj.weight.data.as_subclass(Quantised)
    module.v_proj.weight = nn.Parameter(data)


def packed_buffer(module: Attention) -> None:
    weight = module.v_proj.weight.data
    del module.v_proj.weight
    module.v_proj.register_buffer("weight", weight)


def other_dtype(module: Attention) -> None:
    module.k_proj.double()


def one_bias(module: Attention) -> None:
    module.k_proj = nn.Linear(12, 4, bias=True)


def other_input(module: Attention) -> None:
    module.k_proj = nn.Linear(11, 4, bias=False)


def forward_hook(module: Attention) -> None:
    module.q_proj.register_forward_hook(lambda *_: None)


def forward_pre_hook(module: Attention) -> None:
    module.q_proj.register_forward_pre_hook(lambda *_: None)


def own_forward(module: Attention) -> None:
    forward = module.k_proj.forward
    module.k_proj.forward = lambda x: 2 * forward(x)


def missing(module: Attention) -> None:
    del module.v_proj


def parametrized(module: Attention) -> None:
    nn.utils.parametrizations.weight_norm(module.k_proj)


def tied(module: Attention) -> None:
    module.k_proj = nn.Linear(12, 6, bias=False)
    module.k_proj.weight = module.v_proj.weight


def same_module(module: Attention) -> None:
    module.k_proj = module.v_proj


@pytest.mark.parametrize(
    "change",
    [
        subclass, quantised, packed_buffer, other_dtype, one_bias, other_input, forward_hook,
        forward_pre_hook, own_forward, missing, parametrized, tied, same_module,
    ],
)  # fmt: skip
def test_what_is_no_plain_linear_is_left_alone(change: Any) -> None:
    module = Attention()
    change(module)
    before = {name: p.data_ptr() for name, p in module.named_parameters()}
    assert stack_siblings(module) == []
    assert {name: p.data_ptr() for name, p in module.named_parameters()} == before


def test_layers_that_share_a_weight_stay_tied() -> None:
    """Cross-layer sharing: changing the one must change the other, before and after."""
    block = nn.ModuleList([Attention(), Attention()])
    block[1].k_proj.weight = block[0].k_proj.weight
    x = torch.randn(2, 12)
    stacks = stack_siblings(block, shared_parameters(block))
    with torch.no_grad():
        block[0].k_proj.weight.add_(1.0)
        for module in block:
            want = module(x)
            with stacked(stacks):
                torch.testing.assert_close(module(x), want)
    for stack in stacks:
        stack.split()
    assert block[1].k_proj.weight is block[0].k_proj.weight


def test_frozen_parameters_stay_frozen_and_kept_gradients_stay() -> None:
    module = Attention()
    module.k_proj.requires_grad_(False)
    sum(y.sum() for y in module(torch.randn(2, 12))).backward()
    gradient = module.q_proj.weight.grad.clone()
    for stack in stack_siblings(module):
        stack.split()
    assert not module.k_proj.weight.requires_grad
    assert torch.equal(module.q_proj.weight.grad, gradient)
