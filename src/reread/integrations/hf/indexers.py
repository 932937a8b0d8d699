"""Indexers for a transformers model: which backbone it is, and an indexer to start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InputError, UnsupportedError
from ...indexer.model import Indexer, IndexerCard, identity, initialise_from
from .cache import sparse_layers
from .facts import kv_shape

INITS = ("svd", "random")
DEFAULT_THETA = 10_000.0


SAMPLE = 64  # rows and columns of the embedding that tell one training from another


def backbone_identity(model: Any) -> str:
    """Hash of the model's text config and of a corner of its embedding, which an indexer's card
    must carry to be used with it. The same in bfloat16 and in float32."""
    weight = model.get_input_embeddings().weight
    return identity_of(model.config.get_text_config(decoder=True), weight)


def identity_of(text: Any, embedding: Tensor) -> str:
    """`backbone_identity` by its text config and its embedding [vocabulary, hidden], of which the
    first SAMPLE rows are enough."""
    corner = embedding[:SAMPLE, :SAMPLE].detach()
    values = corner.to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes()
    return identity(text.to_dict(), values)


def new_indexer(
    model: Any, width: int = 64, heads: int = 1, init: str = "svd", *, seed: int = 0
) -> Indexer:
    """An untrained indexer for the model's full-attention layers, float32 on the CPU.

    `card.record` says how the weights were drawn: {"init", "random_layers"}; "svd" needs plain
    query and key projections, layers without them start at random.

    Args:
        width: d of one index head; heads: n, a divisor of the query heads.
        init: "svd", from the layers' own projections, or "random".
        seed: of the random weights.

    Raises:
        InputError: a width or number of heads that is not possible, or an unknown init.
        UnsupportedError: the model has no full-attention layer.
    """
    if init not in INITS:
        raise InputError(f"init={init!r} is not possible: one of {', '.join(INITS)}")
    text = model.config.get_text_config(decoder=True)
    layers = sparse_layers(text)
    if not layers:
        raise UnsupportedError("the model has no full-attention layer: there is nothing to index")
    if heads < 1 or text.num_attention_heads % heads:
        raise InputError(
            f"heads={heads} is not possible: a divisor of the model's {text.num_attention_heads} "
            "query heads"
        )
    found = _projecting(model, layers) if init == "svd" else {}
    card = IndexerCard(
        layers=layers,
        hidden=text.hidden_size,
        width=width,
        theta=rope_theta(text),
        backbone=backbone_identity(model),
        heads=heads,
        record={"init": init, "random_layers": [i for i in layers if i not in found]},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        indexer = Indexer(card)
    for layer, module in found.items():
        # where the model is: the decomposition of a large layer takes long on a CPU
        weights = _weights(module, text)
        assert weights is not None
        part = Indexer(replace(card, layers=(layer,))).to(weights[0].device)
        initialise_from(part, {layer: weights}, kv_shape(text)[1])
        indexer.load_state_dict(part.state_dict(), strict=False)
    return indexer


def rope_theta(text: Any) -> float:
    """Base of the rotary positions of a text config's full-attention layers."""
    rope = getattr(text, "rope_parameters", None) or {}
    rope = rope.get("full_attention") or rope  # some models have a base for each kind of layer
    found = rope.get("rope_theta") or getattr(text, "rope_theta", None)
    return float(found or DEFAULT_THETA)


def _projecting(model: Any, layers: tuple[int, ...]) -> dict[int, nn.Module]:
    """The attention modules of those layers that have plain query and key projections."""
    text = model.config.get_text_config(decoder=True)
    found = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if layer in layers and _weights(module, text) is not None:
            found[int(layer)] = module
    return dict(sorted(found.items()))


def _weights(module: nn.Module, text: Any) -> tuple[Tensor, Tensor] | None:
    """W_q [H D, hidden] and W_k [Hkv D, hidden]; None where they are quantised, wrapped or
    fused."""
    kv_heads, dim = kv_shape(text)
    w_q, w_k = (getattr(getattr(module, n, None), "weight", None) for n in ("q_proj", "k_proj"))
    for weight in (w_q, w_k):
        if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.dim() != 2:
            return None
    assert w_q is not None
    assert w_k is not None
    rows = _query_rows(w_q.detach(), text.num_attention_heads, dim)
    if rows is None or w_k.shape != (kv_heads * dim, text.hidden_size):
        return None
    return rows, w_k.detach()


def _query_rows(weight: Tensor, heads: int, dim: int) -> Tensor | None:
    """[H D, hidden]; each head of Qwen3.5 and Qwen3-Next has D rows of queries, then D of gates."""
    if weight.shape[0] == 2 * heads * dim:
        return weight.view(heads, 2, dim, -1)[:, 0].reshape(heads * dim, -1)
    return weight if weight.shape[0] == heads * dim else None


def init_notes(record: Mapping[str, Any]) -> list[str]:
    """What a user should know of how an indexer's weights were drawn; see `new_indexer`."""
    random = record.get("random_layers", [])
    if record.get("init") != "svd" or not random:
        return []
    return [
        f"layers {', '.join(map(str, random))} have no plain query and key projections, so their "
        "indexers start at random"
    ]
