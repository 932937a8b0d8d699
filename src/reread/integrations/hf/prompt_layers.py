"""A long prompt with the decoder layers compiled around attention: norms, rotary positions,
residuals and activations take as long as the attention of a sparse prefill where each is a kernel
of its own.

Caches are written and attention is chosen outside of what is compiled, in an opaque op.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, library, nn
from transformers.cache_utils import Cache

from ...errors import RereadError
from ...layer import LayerState
from ...prefill import PrefillMeter, covers
from ...prefilling import SparsePrefill
from . import guard
from .cache import cache_keyword
from .call import Call
from .capturable import unknown_argument
from .compiled import PassingCache, Weights, attention_of, layers_compiled, op_arguments
from .fuse import stacked
from .indexed import Reader
from .runner import Runner

ATTENTION = "reread_prompt"
# a first compilation takes seconds: no prompt that is read in less waits for it
COMPILED_FROM = 2048

# layer, q [B, H, T, D], k and v [B, Hkv, T, D], scale, index [B, T, 2 d] or None -> [B, T, H, D]
Attend = Callable[[int, Tensor, Tensor, Tensor, float, Tensor | None], Tensor]
# a session's attention over what is cached, None where nothing would be left out
Read = Callable[[Call, LayerState, Tensor, float, Tensor | None], Tensor | None]

_ATTEND: list[Attend] = []  # of the forward that is running
_HANDED: list[tuple[Tensor, Tensor]] = []  # while a layer is traced: what its cache was given


@library.custom_op("reread::prompt_attention", mutates_args=())
def prompt_attention(
    q: Tensor, k: Tensor, v: Tensor, layer: Tensor, scale: float, index: Tensor | None
) -> Tensor:
    """Append and attend for one layer of the prompt that is running.

    Args:
        q: [B, H, T, D]; k, v: [B, Hkv, T, D]; layer: int64 [], on the CPU.
        index: [B, T, 2 d], what an indexer's projections gave; None without one.

    Returns:
        [B, T, H, D].
    """
    return _ATTEND[-1](int(layer), q, k, v, scale, index).contiguous()


@prompt_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, layer: Tensor, scale: float, index: Tensor | None) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in the place of SDPA; refusals are told by the model's own forward,
    which then runs instead."""
    name = type(module).__name__
    guard.check_attention_call(name, {**kwargs, "attention_mask": attention_mask})
    handed = _HANDED.pop()
    if key is not handed[0] or value is not handed[1]:
        raise RuntimeError(f"{name} changes its keys or values after caching them")
    layer, scale, index = op_arguments(module, query, scaling, kwargs)
    return torch.ops.reread.prompt_attention(query, key, value, layer, scale, index), None


class _PromptCache(PassingCache):
    """Notes what it hands through, for `_attention` to compare."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        _HANDED.append((key_states, value_states))
        return key_states, value_states


@torch.inference_mode(False)
@torch.no_grad()
def run_compiled(
    model: Any,
    forward: Callable[..., Any],
    weights: Weights,
    given: Mapping[str, Any],
    length: int,
    attend: Attend,
) -> Any:
    """The model's own forward around compiled layers; the model is as before afterwards.

    Args:
        forward: of `model`, without wrappers; weights: of this model.
        given: its arguments by name, `input_ids` and a cache among them.
        length: columns cached before.

    Returns:
        the model's output, with the cache that was given.
    """
    keyword, passing, ids = cache_keyword(model), _PromptCache(length), given["input_ids"]
    positions = given.get("position_ids")
    if positions is None:
        positions = torch.arange(length, length + ids.shape[1], device=ids.device)
        positions = positions.expand(ids.shape[0], -1)
    own = {name: x for name, x in given.items() if name not in ("cache", "past_key_values")}
    # a copy: layers are not compiled once more for what was made in inference mode
    own |= {"position_ids": positions.clone(), "return_dict": True, keyword: passing}
    with _swapped(model, weights, ids.device, attend):
        output = forward(**own)
    for name, value in list(output.items()):
        if value is passing:
            output[name] = given.get("cache", given.get("past_key_values"))
    return output


@contextmanager
def _swapped(model: Any, weights: Weights, device: torch.device, attend: Attend) -> Iterator[None]:
    _ATTEND.append(attend)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(attention_of(model, ATTENTION, _attention))
            stack.enter_context(stacked(weights.stacks))
            # else a number of tokens that is also a width would be taken for that width
            settings: Any = torch.fx.experimental._config
            stack.enter_context(settings.patch(use_duck_shape=False))
            stack.enter_context(layers_compiled(weights.layers, device, prompt=True))
            yield
    finally:
        _ATTEND.pop()
        _HANDED.clear()


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of a first chunk without padding: [B, H, T, D] -> [B, T, H, D]."""
    grouped = q.shape[1] != k.shape[1]
    out = nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=grouped
    )
    return out.transpose(1, 2)


class PromptLayers:
    """The prompts of one session that run with compiled layers."""

    def __init__(
        self,
        model: Any,
        runner: Runner,
        config: SparsePrefill,
        reader: Reader | None,
        read: Read,
    ) -> None:
        """config: with `dense_below` known; reader: of an indexer that reads along."""
        self._model, self._runner, self._config, self._read = model, runner, config, read
        self._forward: Callable[..., Any] = model.forward
        self._reader, self._fails = reader, False

    def run(self, call: Call, given: Mapping[str, Any], meter: PrefillMeter) -> Any | None:
        """The forward of a prompt; None where the model's own has to run, with everything as it was
        before.

        Args:
            given: arguments of the forward, by name; meter: what `read` counts in.
        """
        if self._fails or not self._takes(call, given):
            return None
        weights = self._runner.stacked()
        if not weights.layers:
            return None
        length, undo = call.conversation.length, _undo(call, meter)
        cache = given.get("cache", given.get("past_key_values"))
        try:
            return run_compiled(
                self._model, self._forward, weights, given, length, self._attend_in(call, cache)
            )
        except (RereadError, torch.OutOfMemoryError):
            undo()
            raise
        except Exception as error:
            # whatever the compiler says: the prompt can still be read as it is
            undo()
            first_line = (str(error).strip() or "no message").splitlines()[0][:200]
            told = f"{type(error).__name__}: {first_line}"
            self._runner.notes.append(f"prefill layers are not compiled ({told})")
            self._fails = True
            return None
        except BaseException:
            undo()
            raise

    def _takes(self, call: Call, given: Mapping[str, Any]) -> bool:
        """Whether the prompt is worth it, and it is certain which attention runs."""
        known = {name: value for name, value in given.items() if name != "logits_to_keep"}
        if self._runner.obstacle or unknown_argument(self._model, known):
            return False
        if torch.is_grad_enabled() or given.get("use_cache") is False:
            return False
        new = int(given["input_ids"].shape[1])
        first = call.conversation.length
        if new < COMPILED_FROM:
            return False
        if not all(covers(start, first + new, self._config) for start in call.starts):
            return True
        return first == 0 and not any(call.starts)  # dense, and causal without a mask

    def _attend_in(self, call: Call, cache: Cache) -> Attend:
        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, raw: Tensor | None
        ) -> Tensor:
            cache.update(k, v, layer)
            state = call.conversation.states[layer]
            if (raw is None) != (self._reader is None):
                raise RuntimeError(f"the index projections of layer {layer} are not beside others")
            iq = None
            if raw is not None and self._reader is not None:
                iq = self._reader.turn(raw, state.kv, call.starts)
            out = self._read(call, state, q, scale, iq)
            return dense(q, state.kv.keys, state.kv.values, scale) if out is None else out

        return attend


def _undo(call: Call, meter: PrefillMeter) -> Callable[[], None]:
    """Puts caches, and what was counted, back to what they are now."""
    length, counted = call.conversation.length, replace(meter)
    kept = [(state, replace(state)) for state in call.conversation.states.values()]

    def undo() -> None:
        meter.read, meter.cached = counted.read, counted.cached
        meter.backend = counted.backend
        for state, before in kept:
            state.kv.crop(length)
            state.tail, state.tail_positions = before.tail, before.tail_positions
            state.tail_end, state.scale = before.tail_end, before.scale

    return undo
