"""How an indexer gets the input of each attention layer, of which vLLM's backends see only what
the projections made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, library, nn

from ...errors import UnsupportedError
from . import compat

INPUT = "hidden_states"


@library.custom_op(compat.READ_ALONG, mutates_args=("x",))
def read_along(x: Tensor, layer: str) -> None:
    """Hand the input x [N, hidden] of an attention layer to its implementation, before the layer
    attends. Nothing is changed; x is told to be so that compilers keep the call, and its place."""
    attention, metadata, slots = compat.layer_context(layer)
    if metadata is not None and slots is not None:
        attention.impl.read_along(layer, x, metadata, slots)


def listen(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Have `read_along` called for these attention layers of vLLM's, by name, from now on.

    Raises:
        UnsupportedError: a layer whose surroundings take no hidden states.
    """
    homes = {id(child): home for home in model.modules() for child in home.children()}
    for name, layer in layers.items():
        home = homes.get(id(layer))
        given = [] if home is None else list(inspect.signature(home.forward).parameters)
        if home is None or INPUT not in given:
            raise UnsupportedError(
                f"{name} is not within a module that takes {INPUT}, so an indexer cannot read "
                "along: leave prefill None"
            )
        home.register_forward_pre_hook(_teller(name, given.index(INPUT)), with_kwargs=True)


def _teller(name: str, place: int) -> Callable[[nn.Module, Any, Any], None]:
    def tell(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = kwargs[INPUT] if INPUT in kwargs else args[place]
        torch.ops.reread.read_along(x, name)

    return tell
