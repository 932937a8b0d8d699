"""The cache layer that replaces transformers' `DynamicLayer` in full-attention layers; other
layers keep theirs."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ...errors import InputError, UnsupportedError
from ...layer import LayerState


class RereadLayer(DynamicLayer):
    """Keys and values in one preallocated buffer, plus what slow-fast decoding remembers of the
    layer.

    Outside `attach` it behaves as the `DynamicLayer` it replaces: a cache stays usable with plain
    dense decoding.
    """

    def __init__(self) -> None:
        self.state = LayerState()
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped

    @classmethod
    def of(cls, layer: DynamicLayer) -> RereadLayer:
        """A new layer with the keys and values that `layer` holds already."""
        new = cls()
        keys, values = layer.keys, layer.values
        if keys is not None and values is not None and keys.numel():
            new.update(keys, values)
        return new

    # `keys` and `values` are views of the buffer; transformers' base class sets them to None when
    # made or reset.
    @property
    def keys(self) -> Tensor | None:
        return self.state.kv.keys if self.state.kv.length else None

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        self._refuse_assignment(value)

    @property
    def values(self) -> Tensor | None:
        return self.state.kv.values if self.state.kv.length else None

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self._refuse_assignment(value)

    def _refuse_assignment(self, value: Tensor | None) -> None:
        if value is not None:
            raise UnsupportedError(
                "keys and values of a reread cache layer cannot be replaced: use update or crop"
            )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device = key_states.device
        self.dtype = key_states.dtype
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [B, Hkv, T, D] and return everything, as views of the buffer."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        state = self.state
        if state.kv.length and state.kv.placement is None:
            _check_same(state.kv.keys, key_states)
            _check_same(state.kv.values, value_states)
        state.kv.append(key_states, value_states)
        if not state.chosen:
            state.chosen = [None] * key_states.shape[0]
        return state.kv.keys, state.kv.values

    def get_seq_length(self) -> int:
        return self.state.kv.length

    def reset(self) -> None:
        self.state = LayerState()
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens: -n removes n; a positive number (older transformers) is the
        length to keep."""
        length = self.state.kv.length
        keep = length + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, length)
        if keep < length:
            self.state.kv.crop(max(keep, 0))
            self.state.invalidate()

    def _reindex(self, rows: Tensor) -> None:
        if self.state.kv.length:
            self.state.kv.reindex(rows)
            self.state.chosen = [None] * rows.numel()
            self.state.invalidate()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._reindex(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state.kv.length:
            self._reindex(torch.arange(self.state.kv.keys.shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._reindex(rows)

    def offload(self) -> None:
        raise UnsupportedError(
            "an offloaded cache cannot be used with reread: leave cache_implementation unset"
        )

    def prefetch(self) -> None:
        raise UnsupportedError(
            "an offloaded cache cannot be used with reread: leave cache_implementation unset"
        )


def _check_same(cached: Tensor, new: Tensor) -> None:
    """Refuse to append what cannot belong to the same model: [B, Hkv, T, D] must agree but in T."""
    if cached.shape[:2] != new.shape[:2] or cached.shape[3] != new.shape[3]:
        raise InputError(
            f"the cache holds {tuple(cached.shape)} (batch, KV heads, tokens, head dim), the model "
            f"brings {tuple(new.shape)}: it belongs to another model or batch"
        )
    if cached.dtype != new.dtype:
        raise InputError(f"the cache holds {cached.dtype}, the model brings {new.dtype}")


def sparse_layers(config: Any) -> tuple[int, ...]:
    """Indices of the layers that reread makes sparse: those whose cache is exactly a
    `DynamicLayer`.

    Sliding-window, chunked, linear and KV-sharing layers have cache classes of their own and keep
    them.
    """
    layers = DynamicCache(config=config).layers
    return tuple(i for i, layer in enumerate(layers) if type(layer) is DynamicLayer)


def adopt(cache: Cache, config: Any, wanted: tuple[int, ...]) -> dict[int, LayerState]:
    """Replace the `wanted` layers of `cache` in place; keys that are there already are kept.

    Returns:
        the state of each wanted layer, by layer index.

    Raises:
        UnsupportedError: a kind of cache whose layers cannot be replaced.
    """
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        kind = "offloaded DynamicCache" if type(cache) is DynamicCache else type(cache).__name__
        raise UnsupportedError(
            f"reread works with a DynamicCache, this is a {kind}: leave cache_implementation unset"
        )
    if cache.layer_class_to_replicate is not None:
        # made without the model's config: give it the layers that transformers itself would make
        made = DynamicCache(config=config).layers
        cache.layers.extend(made[len(cache.layers) :])
        cache.layer_class_to_replicate = None
    if cache.layers and len(cache.layers) != config.num_hidden_layers:
        raise InputError(
            f"the cache has {len(cache.layers)} layers, the model {config.num_hidden_layers}: "
            "it belongs to another model"
        )
    states = {}
    for i in wanted:
        layer = cache.layers[i]
        if type(layer) is DynamicLayer:
            layer = cache.layers[i] = RereadLayer.of(layer)
        if isinstance(layer, RereadLayer):
            states[i] = layer.state
    return states


def cache_keyword(model: Any) -> str:
    """The keyword under which the model takes a cache: "cache" since transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
