"""The attention backend that takes the place of vLLM's CPU_ATTN. Layers that are not full
attention over a decoder's own text keep vLLM's own implementation and layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from .checks import check_layer
from .compat import attention_layers
from .pages import write
from .requests import Registry
from .rows import LayerPass, attend_rows


class RereadBackend(CPUAttentionBackend):  # type: ignore[misc]  # vLLM is absent where types are checked
    """vLLM's CPU backend with another implementation."""

    @staticmethod
    def get_impl_cls() -> type[RereadImpl]:
        return RereadImpl

    @staticmethod
    def get_builder_cls() -> type[RereadBuilder]:
        return RereadBuilder


class RereadBuilder(CPUAttentionMetadataBuilder):  # type: ignore[misc]  # vLLM is absent where types are checked
    """Called once a pass for each group of layers, when the batch is arranged: the place to plan
    the pass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        impls = [layer.impl for layer in attention_layers(self.vllm_config).values()]
        ours = [impl.registry for impl in impls if isinstance(impl, RereadImpl)]
        self._registries = {registry for registry in ours if registry is not None}

    def build(self, *args: Any, **kwargs: Any) -> CPUAttentionMetadata:
        for registry in self._registries:
            registry.plan()
        return super().build(*args, **kwargs)


class RereadImpl(CPUAttentionBackendImpl):  # type: ignore[misc]  # vLLM is absent where types are checked
    """One layer's attention; made when the model is built, before weights load.

    Attributes:
        sparse: whether the layer is ours.
        registry: the worker's, set once the model is there; None: nothing runs yet.

    Raises:
        UnsupportedError: a full-attention layer with a term that the ops do not know.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sparse = self.attn_type == AttentionType.DECODER and self.sliding_window == -1
        self.registry: Registry | None = None
        if self.sparse:
            check_layer(self, quantised=self.is_fp8_kv_cache)

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        if self.sparse:
            write(kv_cache, key, value, slot_mapping)
        else:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def read_along(self, name: str, x: Tensor, metadata: Any, slots: Tensor) -> None:
        """The layer's input x [N, hidden], before it attends; see `listening`."""
        registry = self.registry
        if registry is not None and registry.reader is not None and registry.plans:
            positions = registry.positions()
            count = len(positions)
            registry.reader.index.read(name, x[:count], positions, slots[:count])

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if not self.sparse or attn_metadata is None:
            given = layer, query, key, value, kv_cache, attn_metadata, output
            result: Tensor = super().forward(*given, *args, **kwargs)
            return result
        assert self.registry is not None, "the worker hands its registry over after loading"
        of = query, key, value, kv_cache, attn_metadata.block_table
        attend_rows(self.registry, LayerPass(layer.layer_name, *of, self.scale), output)
        return output
