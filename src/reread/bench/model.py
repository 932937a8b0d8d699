"""A model of a given shape with random weights, and caches full of random keys: speed does not
depend on what the numbers are."""

from __future__ import annotations

from typing import Any

import torch

from ..cuda import check_memory, free_memory
from ..errors import InputError
from ..kv import Buffers
from ..layer import LayerState
from ..shapes import Shape, hf_config

SPREAD = 0.02  # standard deviation of the weights, as models of these families start from


def random_model(shape: Shape, device: torch.device, dtype: torch.dtype) -> Any:
    """A transformers model of `shape`, built on `device`, in evaluation mode.

    Raises:
        InputError: it would not fit; says what is free.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(hf_config(shape))
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    if device.type == "cuda" and shape.weight_bytes > (free := free_memory(device)):
        raise InputError(
            f"the weights of {shape.name} take {shape.weight_bytes / 2**30:.1f} GiB, "
            f"{free / 2**30:.1f} GiB are free: a smaller shape would fit"
        )
    torch.manual_seed(0)
    with torch.device(device), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, SPREAD)
    return model.eval()


def random_caches(
    shape: Shape, rows: int, positions: int, device: torch.device, dtype: torch.dtype
) -> dict[int, LayerState]:
    """Caches of `positions` random keys and values in every layer.

    Raises:
        InputError: they would not fit; says what would.
    """
    per_position = rows * shape.kv_bytes_per_token(dtype.itemsize)
    check_memory(device, per_position, rows, positions)
    states = {}
    for layer in range(shape.layers):
        size = (rows, shape.kv_heads, positions, shape.head_dim)
        k, v = (torch.empty(size, device=device, dtype=dtype).normal_() for _ in range(2))
        state = LayerState()
        state.kv.use(Buffers(k, v, None))
        state.kv.length = positions
        state.chosen = [None] * rows
        states[layer] = state
    return states
