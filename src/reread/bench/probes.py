"""What a transformers model runs in a prefill: how it calls PyTorch's attention, whether its linear
layers have their fast kernels, and the same model without attention."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .timing import Record

NO_ATTENTION = "reread_bench_none"
PACKAGES = ("fla", "causal_conv1d")
# what transformers calls in a prefill, and falls back to its own PyTorch for
FUNCTIONS = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")
FLAG = "is_new_implementation"  # of transformers' wrapper around each


def linear_layers(model: Any) -> Record:
    """Which packages can be imported, and for each function whether transformers uses theirs; None
    where it cannot be seen. {} for a model without linear layers."""
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or []
    if "linear_attention" not in kinds:
        return {}
    source = sys.modules[type(model).__module__]
    return {
        "importable": {name: importlib.util.find_spec(name) is not None for name in PACKAGES},
        "fast_kernels": {name: flag_of(getattr(source, name, None)) for name in FUNCTIONS},
    }


def flag_of(function: Any, depth: int = 4) -> bool | None:
    """The wrapper's flag, from what a function closes over; None where there is none."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or not cells or not depth:
        return None
    closed = dict(zip(code.co_freevars, cells, strict=True))
    if FLAG in closed:
        return bool(closed[FLAG].cell_contents)
    for cell in closed.values():
        found = flag_of(cell.cell_contents, depth - 1)
        if found is not None:
            return found
    return None


@contextmanager
def without_attention(model: Any) -> Iterator[None]:
    """Inside it, the model's attention gives its queries."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    def attention(module: Any, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return query.transpose(1, 2).contiguous(), None

    config = model.config.get_text_config(decoder=True)
    original = config._attn_implementation
    AttentionInterface.register(NO_ATTENTION, attention)
    AttentionMaskInterface.register(NO_ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    config._attn_implementation_internal = NO_ATTENTION
    try:
        yield
    finally:
        config._attn_implementation_internal = original
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(NO_ATTENTION, None)


@contextmanager
def sdpa_calls() -> Iterator[set[tuple[tuple[str, bool], ...]]]:
    """The different ways in which PyTorch's attention is called inside it: whether it gets a mask,
    is told to be causal, and reads each KV head for its group."""
    functional, found = torch.nn.functional, set[tuple[tuple[str, bool], ...]]()
    original = functional.scaled_dot_product_attention

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        flags = {name: bool(kwargs.get(name)) for name in ("is_causal", "enable_gqa")}
        found.add((("attn_mask", mask is not None), *flags.items()))
        return original(*args, **kwargs)

    functional.scaled_dot_product_attention = noted
    try:
        yield found
    finally:
        functional.scaled_dot_product_attention = original
