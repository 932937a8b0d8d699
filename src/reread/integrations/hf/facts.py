"""What can be known of a model without its weights: layers, KV memory, whether reread serves it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache

from ...errors import RereadError
from .cache import sparse_layers
from .capturable import obstacle
from .guard import check_model
from .load import load_config, quiet_loading, resolve_dtype


def model_facts(
    model: str, *, dtype: str = "auto", trust_remote_code: bool = False
) -> dict[str, Any]:
    """Facts for `reread info`, as plain values.

    Returns:
        name, architecture, parameters, dtype, positions; supported and refusal (why not, or None);
        runner: how decode steps run on a CUDA device: "graph", or "eager" and why;
        layers (how many), sparse_layers (indices of those that reread serves), cache_layers (how
        many of each kind of cache layer); kv_heads, head_dim, and kv_bytes_per_token over the
        sparse layers.

    Raises:
        InputError: the model cannot be found.
    """
    config = load_config(model, trust_remote_code=trust_remote_code)
    wanted = resolve_dtype(dtype)
    chosen = (config.dtype or torch.float32) if isinstance(wanted, str) else wanted
    text = config.get_text_config(decoder=True)
    # on the meta device: shapes without memory
    with quiet_loading(), torch.device("meta"):
        skeleton = _kind(config).from_config(config, trust_remote_code=trust_remote_code)
    sparse = sparse_layers(text)
    heads, width = kv_shape(text)
    kinds = Counter(type(layer).__name__ for layer in DynamicCache(config=text).layers)
    refusal = _refusal(skeleton)
    return {
        "name": model,
        "architecture": type(skeleton).__name__,
        "parameters": sum(p.numel() for p in skeleton.parameters()),
        "dtype": str(chosen).removeprefix("torch."),
        "positions": getattr(text, "max_position_embeddings", None),
        "supported": refusal is None,
        "refusal": refusal,
        "runner": "graph" if not (why := obstacle(skeleton.eval(), sparse)) else f"eager: {why}",
        "layers": text.num_hidden_layers,
        "sparse_layers": list(sparse),
        "cache_layers": dict(kinds),
        "kv_heads": heads,
        "head_dim": width,
        "kv_bytes_per_token": 2 * heads * width * chosen.itemsize * len(sparse),
    }


def _kind(config: Any) -> Any:
    """The class that makes its model: of a language model, or of one that sees images as well."""
    text, vision = AutoModelForCausalLM, AutoModelForImageTextToText
    known = type(config) in text._model_mapping or type(config) not in vision._model_mapping
    return text if known else vision


def kv_shape(text: Any) -> tuple[int, int]:
    """KV heads and head dim of a text config."""
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return getattr(text, "num_key_value_heads", None) or heads, width


def _refusal(skeleton: Any) -> str | None:
    try:
        check_model(skeleton)
    except RereadError as error:
        return str(error)
    return None
