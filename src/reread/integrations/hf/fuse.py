"""Sibling projections of one input as one matrix product, while a step is traced and captured.

A decode step multiplies few rows with large matrices: it waits for weights, and small matrices
(keys, values) do not fill the card. Stacked with their siblings they do. The parameters become
views of the stacked matrix, so no memory is added, and in-place changes of a weight still count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# called in this order with the same input, in every transformers model that has them
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class First(nn.Module):
    """Stands for the first sibling: computes all, keeps the others' results for them."""

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.sizes = tuple(sizes)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> this sibling's [..., out]."""
        every = nn.functional.linear(x, self.weight, self.bias)
        first, *rest = torch.split(every, list(self.sizes), dim=-1)
        self.kept.extend(rest)
        return first


class Next(nn.Module):
    """Stands for a later sibling: hands out what the first one computed for it."""

    def __init__(self, first: First) -> None:
        super().__init__()
        # in a tuple, so that it does not become a submodule a second time
        self.first = (first,)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> this sibling's [..., out]."""
        return self.first[0].kept.pop(0)


@dataclass(frozen=True, slots=True)
class Stack:
    """One group of siblings: the modules of `parent` called `names`, and what stands for them."""

    parent: nn.Module
    names: tuple[str, ...]
    linears: tuple[nn.Linear, ...]
    stand_ins: tuple[nn.Module, ...]

    def split(self) -> None:
        """Give every parameter memory of its own again."""
        for linear in self.linears:
            for parameter in linear.parameters():
                parameter.data = parameter.data.clone()


def stack_siblings(module: nn.Module) -> list[Stack]:
    """Stack the weights of all siblings within `module`; plain linear layers only."""
    stacks = []
    for parent in module.modules():
        for names in SIBLINGS:
            linears = [getattr(parent, name, None) for name in names]
            if all(_plain(linear) for linear in linears) and _alike(linears):
                stacks.append(_stack(parent, names, linears))
    return stacks


def _plain(linear: Any) -> bool:
    # subclasses and tensor subclasses are quantised or adapted weights: those stay as they are
    return (
        type(linear) is nn.Linear
        and type(linear.weight) is nn.Parameter
        and type(linear.weight.data) is Tensor
        and "forward" not in vars(linear)
        and not linear._forward_hooks
        and not linear._forward_pre_hooks
    )


def _alike(linears: Sequence[Any]) -> bool:
    first = linears[0]
    return all(
        (x.in_features, x.weight.dtype, x.weight.device, x.bias is None)
        == (first.in_features, first.weight.dtype, first.weight.device, first.bias is None)
        for x in linears
    )


@torch.no_grad()
def _stack(parent: nn.Module, names: tuple[str, ...], linears: Sequence[Any]) -> Stack:
    sizes = [linear.out_features for linear in linears]
    weight = torch.cat([linear.weight.data for linear in linears])
    bias = None if linears[0].bias is None else torch.cat([x.bias.data for x in linears])
    for i, linear in enumerate(linears):
        span = slice(sum(sizes[:i]), sum(sizes[: i + 1]))
        linear.weight.data = weight[span]
        if bias is not None:
            linear.bias.data = bias[span]
    first = First(weight, bias, sizes)
    stand_ins = (first, *(Next(first) for _ in linears[1:]))
    return Stack(parent, names, tuple(linears), stand_ins)


@contextmanager
def stacked(stacks: Sequence[Stack]) -> Iterator[None]:
    """Within it, the stand-ins are called in the place of the siblings."""
    for stack in stacks:
        for name, module in zip(stack.names, stack.stand_ins, strict=True):
            stack.parent._modules[name] = module
    try:
        yield
    finally:
        for stack in stacks:
            for name, linear in zip(stack.names, stack.linears, strict=True):
                stack.parent._modules[name] = linear
            for module in stack.stand_ins:
                if isinstance(module, First):
                    module.kept.clear()
