"""What both backends refuse of a layer, when the model is built and before weights load."""

from __future__ import annotations

from typing import Any

from ...errors import UnsupportedError


def check_layer(impl: Any, *, quantised: bool) -> None:
    """Refuse a full-attention layer with a term that the ops do not know.

    Args:
        impl: vLLM's implementation of the layer. quantised: whether its cache is.

    Raises:
        UnsupportedError: names the term.
    """
    terms = {
        "ALiBi slopes": impl.alibi_slopes is not None,
        f"a soft cap of its logits ({impl.logits_soft_cap})": bool(impl.logits_soft_cap),
        "learned attention sinks": impl.sinks is not None,
        "keys shared with another layer": impl.kv_sharing_target_layer_name is not None,
        f"a cache in {impl.kv_cache_dtype}": quantised,
    }
    for term, found in terms.items():
        if found:
            raise UnsupportedError(
                f"a full-attention layer has {term}, which reread does not cover: run this "
                "model without it"
            )


def check_kind(name: str, layer: Any) -> None:
    """Refuse a layer that is a kind of vLLM's attention with rules of its own (learned sinks before
    the text, windows that keep the prompt).

    Raises:
        UnsupportedError: names the layer and its kind.
    """
    if type(layer).__name__ != "Attention":
        raise UnsupportedError(
            f"{name} is a {type(layer).__name__}, which reread does not cover: run this model "
            "without it"
        )


def other_backend(name: str, layer: Any) -> UnsupportedError:
    """A full-attention layer that the model gives a backend of its own: it would stay dense."""
    return UnsupportedError(
        f"{name} runs {type(layer.impl).__name__}, which reread does not replace: run this model "
        "without it"
    )


def no_layer(model: str) -> UnsupportedError:
    """A model without a layer that the plug-in makes sparse."""
    return UnsupportedError(
        f"{model} has no full-attention layer, so there is nothing to make sparse: run it without "
        "reread"
    )
