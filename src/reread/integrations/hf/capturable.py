"""Whether a model's decode steps can be captured as CUDA graphs, as far as its looks tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

# keywords of a forward that a captured step understands
KNOWN = frozenset(
    ("input_ids", "attention_mask", "position_ids", "cache", "past_key_values", "use_cache")
)
# and those that change nothing for one new token, at these values
HARMLESS: dict[str, tuple[Any, ...]] = {
    "return_dict": (True, None),
    "logits_to_keep": (0, 1),
    "output_attentions": (False, None),
    "output_hidden_states": (False, None),
    "labels": (None,),
    "inputs_embeds": (None,),
    "token_type_ids": (None,),
}


def unknown_argument(model: Any, given: Mapping[str, Any]) -> str:
    """The first argument of a forward that a captured step does not know; "" if it knows all."""
    for name in ("output_hidden_states", "output_attentions"):
        if given.get(name) is None and getattr(model.config, name, False):
            return f"config.{name}"
    for name, value in given.items():
        if name not in KNOWN and not any(value is x for x in HARMLESS.get(name, ())):
            return name
    return "" if isinstance(given.get("input_ids"), Tensor) else "input_ids"


def obstacle(model: Any, layers: tuple[int, ...]) -> str:
    """Why the steps of this model cannot be captured, as far as its looks tell; "" if they can."""
    text = model.config.get_text_config(decoder=True)
    if len(layers) != text.num_hidden_layers:
        other = text.num_hidden_layers - len(layers)
        return f"{other} of {text.num_hidden_layers} layers keep a cache of their own kind"
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        return f"the model lies on {len(devices)} devices"
    if model.training:
        return "the model is in training mode: call model.eval()"
    for name, module in model.named_modules():
        if name and (module._forward_hooks or module._forward_pre_hooks):
            return f"{name} has forward hooks, which would run only once"
        if name and "forward" in vars(module):
            return f"{name} has a forward of its own, which would be passed over"
        if hasattr(module, "rope_deltas"):
            # of images and videos; a step's one position per row does not say them
            return f"{name or 'the model'} counts positions itself (rope_deltas)"
    return ""
