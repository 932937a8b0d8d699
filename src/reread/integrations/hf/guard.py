"""What is refused, before the first token: models, decoding modes and inputs that would give a
wrong answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError, UnsupportedError
from ...layer import LayerState

MASK_ROWS = 1024  # of a mask that are looked at together


def check_model(model: Any) -> None:
    """Refuse models whose attention has terms that the ops do not know, and models without a
    causal decoder cache.

    Raises:
        UnsupportedError: names the model and the reason.
    """
    name = type(model).__name__
    if not hasattr(model, "generate") or not hasattr(model, "config"):
        raise UnsupportedError(f"{name} is not a transformers model with `generate`")
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"{name} is an encoder-decoder: reread works with decoder-only models"
        )
    if not model._supports_default_dynamic_cache():
        raise UnsupportedError(
            f"{name} keeps a cache of its own kind: reread needs transformers' DynamicCache"
        )
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise UnsupportedError(
            f"{name} caps its attention logits (attn_logit_softcapping): not supported"
        )
    if layers := getattr(config, "cross_attention_layers", None):
        raise UnsupportedError(
            f"{name} has cross attention in layers {sorted(layers)}, whose keys are not positions "
            "of the text: not supported"
        )
    for path, module in model.named_modules():
        if isinstance(getattr(module, "sinks", None), torch.nn.Parameter):
            raise UnsupportedError(
                f"{name} has learned attention sinks ({path}.sinks): not supported"
            )


def check_attention_call(name: str, kwargs: dict[str, Any]) -> None:
    """Refuse extra attention terms that arrive only with the call.

    Raises:
        UnsupportedError: names the term.
    """
    for term in ("s_aux", "softcap", "position_bias", "head_mask"):
        if kwargs.get(term) is not None:
            raise UnsupportedError(f"{name} passes `{term}` to its attention: not supported")
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] > 1:
        raise UnsupportedError(f"{name} has an attention mask for each head: not supported")


def check_causal(name: str, mask: Any) -> None:
    """Refuse a sparse prefill of tokens that see what comes after them, as those of an image do in
    some models: its blocks are causal.

    Args:
        mask: of the call, [B, 1, T, L] over cached and new positions; of another form: causal.

    Raises:
        UnsupportedError: some query may read a later position.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[2] == 1:
        return
    new, length = mask.shape[2:]
    at = torch.arange(length, device=mask.device)
    for first in range(0, new, MASK_ROWS):
        piece = mask[:, :, first : first + MASK_ROWS]
        own = at[length - new + first :][: piece.shape[2], None]
        # as numbers that are added to logits, or as what may be read
        read = piece if piece.dtype == torch.bool else piece > torch.finfo(piece.dtype).min / 2
        if bool((read & (at > own)).any()):
            raise UnsupportedError(
                f"{name} lets tokens of the prompt see later ones (an image's, for example), which "
                "a sparse prefill does not cover: leave prefill unset"
            )


def check_layers(name: str, states: Mapping[int, LayerState], intercepted: set[int]) -> None:
    """Refuse, after a forward pass, a model whose sparse layers did not all do what they should.

    Args:
        intercepted: layers whose attention came through the interface.

    Raises:
        UnsupportedError: names the layers.
    """
    if missed := states.keys() - intercepted:
        raise UnsupportedError(
            f"{name}: the attention of layers {sorted(missed)} does not go through transformers' "
            "attention interface, so reread cannot serve this model"
        )
    lengths = {state.kv.length for state in states.values()}
    if len(lengths) > 1:
        raise UnsupportedError(
            f"{name}: its layers cache {sorted(lengths)} positions, not all the same (cross "
            "attention?): not supported"
        )


def check_cached(name: str, what: str, given: Tensor, cached: Tensor) -> None:
    """Refuse an attention that is not given the keys or values as the cache holds them.

    Raises:
        UnsupportedError: names which.
    """
    if given.data_ptr() != cached.data_ptr() or given.shape != cached.shape:
        raise UnsupportedError(f"{name} changes its {what} after caching them: unsupported")


def check_generation(model: Any, given: dict[str, Any]) -> None:
    """Refuse decoding modes that the fast path cannot serve.

    Args:
        given: keyword arguments of `model.generate`.

    Raises:
        UnsupportedError: names the option and what to use instead.
    """
    configs = [given.get("generation_config"), model.generation_config]

    def option(name: str) -> Any:
        value = given.get(name)
        for config in configs:
            value = getattr(config, name, None) if value is None else value
        return value

    if (option("num_beams") or 1) > 1:
        raise UnsupportedError(
            f"num_beams={option('num_beams')}: beam search is not supported, use num_beams=1"
        )
    for name in ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"):
        if option(name):
            raise UnsupportedError(
                f"{name} asks for assisted decoding, which is not supported: leave it unset"
            )
    for name in ("penalty_alpha", "dola_layers", "force_words_ids", "constraints"):
        if option(name):
            raise UnsupportedError(
                f"{name}: this decoding mode is not supported, use greedy decoding or sampling"
            )
    if (option("guidance_scale") or 1.0) != 1.0:
        raise UnsupportedError(
            f"guidance_scale={option('guidance_scale')}: classifier-free guidance is not supported"
        )
    implementation = option("cache_implementation")
    if implementation not in (None, "dynamic"):
        raise UnsupportedError(
            f"cache_implementation={implementation!r} is not supported: leave it unset"
        )
    if option("use_cache") is False:
        raise UnsupportedError(
            "use_cache=False: reread works on the KV cache, leave use_cache at its default"
        )
    if option("output_attentions"):
        raise UnsupportedError(
            "output_attentions=True: fast steps have no full attention matrix, leave it unset"
        )


def check_inputs(model: Any, ids: Any, mask: Any, cached: int) -> None:
    """Refuse prompts that cannot be right.

    Args:
        ids: input ids [B, T] or None; mask: attention mask [B, cached + T] or [B, T] or None;
            cached: tokens in the cache.

    Raises:
        InputError: names the offending value.
    """
    if ids is None:
        return
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype.is_floating_point:
        raise InputError(
            f"input_ids must be an integer tensor [batch, tokens], got {_describe(ids)}"
        )
    if ids.numel() == 0:
        raise InputError(
            f"the prompt is empty (input_ids has shape {tuple(ids.shape)}): give at least one token"
        )
    vocabulary = model.get_input_embeddings().weight.shape[0]
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        bad = low if low < 0 else high
        raise InputError(
            f"token id {bad} is not in the model's vocabulary of {vocabulary}: wrong tokenizer?"
        )
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and ids.shape[1] > limit:
        raise InputError(
            f"the prompt has {ids.shape[1]} tokens, the model {limit} positions: shorten the prompt"
        )
    if mask is not None:
        _check_mask(mask, ids, cached)
    whole = mask is None or mask.shape[1] == ids.shape[1]
    if cached and whole and ids.shape[1] <= cached:
        raise InputError(
            f"the cache holds {cached} tokens and input_ids only {ids.shape[1]}: pass the whole "
            "conversation, or the new tokens with an attention_mask over old and new"
        )


def _check_mask(mask: Any, ids: Tensor, cached: int) -> None:
    widths = {ids.shape[1], cached + ids.shape[1]}
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise InputError(f"attention_mask must be a tensor [batch, tokens], got {_describe(mask)}")
    if mask.shape[0] != ids.shape[0] or mask.shape[1] not in widths:
        raise InputError(
            f"attention_mask is {tuple(mask.shape)}, input_ids {tuple(ids.shape)}: they must match"
        )
    empty = (mask != 0).sum(dim=1) == 0
    if bool(empty.any()):
        raise InputError(
            f"row {int(empty.nonzero()[0])} of attention_mask is all zero: the prompt is empty"
        )


def check_logits(logits: Tensor) -> None:
    """Refuse NaN where the next token is chosen from. logits: [B, V] or [B, T, V].

    Raises:
        NumericalError: names the row.
    """
    from ...errors import NumericalError

    # the maximum is NaN where any entry is, and needs no second [B, V] tensor
    bad = torch.isnan(logits.flatten(1).amax(dim=-1))
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise NumericalError(
            f"the logits of row {row} contain NaN: check weights and dtype (float16 overflows)"
        )


def _describe(value: Any) -> str:
    return (
        f"shape {tuple(value.shape)} {value.dtype}"
        if isinstance(value, Tensor)
        else type(value).__name__
    )
