"""Sibling projections of one input as one matrix product, while a step is traced and captured.

A decode step multiplies few rows with large matrices: it waits for weights, and small matrices
(keys, values) do not fill the card. Stacked with their siblings they do. The parameters become
views of the stacked matrix, so no memory is added, and in-place changes of a weight still count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# called in this order with the same input, in every transformers model that has them
ATTENTION = ("q_proj", "k_proj", "v_proj")
SIBLINGS = (ATTENTION, ("gate_proj", "up_proj"))
BESIDE = "beside"  # rows of a stack that no sibling has: an indexer's projections


class First(nn.Module):
    """Stands for the first sibling: computes all, keeps the others' results for them."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, sizes: Sequence[int], names: Sequence[str]
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.sizes, self.names = list(sizes), tuple(names)
        self.input: Tensor | None = None
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> this sibling's [..., out].

        Raises:
            RuntimeError: a sibling was not called since the last time.
        """
        if self.kept:
            raise RuntimeError(f"{self.names} are not called in this order, each once")
        every = nn.functional.linear(x, self.weight, self.bias)
        first, *rest = torch.split(every, self.sizes, dim=-1)
        self.input = x
        for name, part in zip(self.names[1:], rest, strict=True):
            self.kept[name] = part
        return first

    def rest(self) -> Tensor:
        """What was computed beside the siblings, which were all called before."""
        if list(self.kept) != [BESIDE]:
            raise RuntimeError(f"{self.names} are not called in this order, each once")
        self.input = None
        return self.kept.pop(BESIDE)

    def take(self, name: str, x: Tensor) -> Tensor:
        """What was computed for a later sibling; x must be what the first one was given."""
        if x is not self.input or name not in self.kept:
            raise RuntimeError(f"{self.names} are not called in this order with one input")
        part = self.kept.pop(name)
        if not self.kept:
            self.input = None
        return part


class Next(nn.Module):
    """Stands for a later sibling: hands out what the first one computed for it."""

    def __init__(self, first: First, name: str) -> None:
        super().__init__()
        # in a tuple, so that it does not become a submodule a second time
        self.first, self.name = (first,), name

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> this sibling's [..., out]."""
        return self.first[0].take(self.name, x)


@dataclass(frozen=True, slots=True)
class Stack:
    """One group of siblings: the modules of `parent` called `names`, and what stands for them."""

    parent: nn.Module
    names: tuple[str, ...]
    linears: tuple[nn.Linear, ...]
    stand_ins: tuple[nn.Module, ...]

    @property
    def in_place(self) -> bool:
        """Whether the siblings still stand where they stood."""
        here = (self.parent._modules.get(name) for name in self.names)
        return all(found is linear for found, linear in zip(here, self.linears, strict=True))

    def split(self) -> None:
        """Give every parameter memory of its own again."""
        for linear in self.linears:
            for parameter in linear.parameters():
                parameter.data = parameter.data.clone()


def shared_parameters(model: nn.Module) -> frozenset[int]:
    """Addresses of the parameters that several modules have."""
    seen = Counter(
        parameter.data_ptr()
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    return frozenset(address for address, times in seen.items() if times > 1)


def stack_siblings(
    module: nn.Module, shared: frozenset[int] = frozenset(), beside: Tensor | None = None
) -> list[Stack]:
    """Stack the weights of all siblings within `module`: plain linear layers only, and none whose
    parameters are `shared` (see `shared_parameters`). beside: [rows, in], further rows for the
    projections of the attention."""
    stacks = []
    for parent in module.modules():
        for names in SIBLINGS:
            linears: list[Any] = [getattr(parent, name, None) for name in names]
            if not all(_plain(linear) for linear in linears) or not _alike(linears):
                continue
            own = [p.data_ptr() for linear in linears for p in linear.parameters()]
            if not shared.intersection(own) and len(set(own)) == len(own):
                more = beside if names == ATTENTION else None
                stacks.append(_stack(parent, names, linears, more))
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
def _stack(
    parent: nn.Module, names: tuple[str, ...], linears: Sequence[Any], beside: Tensor | None
) -> Stack:
    sizes = [linear.out_features for linear in linears]
    weights = [linear.weight.data for linear in linears]
    biases = [] if linears[0].bias is None else [linear.bias.data for linear in linears]
    computed = names
    if beside is not None:
        weights.append(beside.to(weights[0]))
        biases += [biases[0].new_zeros(len(beside))] if biases else []
        sizes, computed = [*sizes, len(beside)], (*names, BESIDE)
    weight = torch.cat(weights)
    bias = torch.cat(biases) if biases else None
    for i, linear in enumerate(linears):
        span = slice(sum(sizes[:i]), sum(sizes[: i + 1]))
        linear.weight.data = weight[span]
        if bias is not None:
            linear.bias.data = bias[span]
    first = First(weight, bias, sizes, computed)
    stand_ins = (first, *(Next(first, name) for name in names[1:]))
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
                    module.input = None
