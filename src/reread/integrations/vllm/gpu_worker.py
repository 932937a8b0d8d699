"""vLLM's GPU worker with the plug-in's backend, what it remembers of requests, and its counts."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.worker.gpu_worker import Worker

from ...errors import ConfigError
from . import compat, memory
from .arena import LayerShape, PagedArena
from .checks import check_kind, no_layer, other_backend
from .gpu_backend import RereadFlashImpl
from .lanes import LaneRegistry
from .metrics import Counts, Page
from .options import config_of
from .worker import boundary_of, reader_of, stats

BACKEND = "reread.integrations.vllm.gpu_backend.RereadFlashBackend"


class RereadGPUWorker(Worker):  # type: ignore[misc]  # vLLM is absent where types are checked
    """One process of an engine that asked for reread.

    Attributes:
        reread: what is remembered of its requests; there once the model is.
    """

    reread: LaneRegistry

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        compat.check_installed()
        super().__init__(vllm_config, *args, **kwargs)
        self._page = Page.of(self.parallel_config.data_parallel_rank, self.rank)

    def load_model(self, **kwargs: Any) -> None:
        with compat.backend_override("FLASH_ATTN", BACKEND):
            super().load_model(**kwargs)
        sparse: dict[str, RereadFlashImpl] = {}
        for name, layer in compat.attention_layers(self.vllm_config).items():
            if isinstance(layer.impl, RereadFlashImpl) and layer.impl.sparse:
                check_kind(name, layer)
                sparse[name] = layer.impl
            elif layer.attn_type == AttentionType.DECODER and layer.sliding_window is None:
                raise other_backend(name, layer)
        if not sparse:
            raise no_layer(self.model_config.model)
        self.reread = LaneRegistry(config_of(self.vllm_config), self._arena(sparse))
        self.reread.tokens = lambda: self.model_runner.input_ids.gpu
        for impl in sparse.values():
            impl.registry = self.reread
        layers = compat.attention_layers(self.vllm_config)
        ours = {name: layers[name] for name in sparse}
        self.reread.reader = reader_of(self, self.reread.config, ours, "triton")

    def _arena(self, sparse: dict[str, RereadFlashImpl]) -> PagedArena:
        config = config_of(self.vllm_config)
        rows = self.scheduler_config.max_num_seqs
        try:
            return PagedArena(
                {
                    n: LayerShape(i.num_heads, i.num_kv_heads, i.head_size)
                    for n, i in sparse.items()
                },
                config,
                rows,
                self.model_config.max_model_len,
                self.model_config.dtype,
                self.device,
                boundary_of(self.vllm_config, config),
            )
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"max_num_seqs={rows} is not possible: reread's state and scratch of so many "
                f"requests of {self.model_config.max_model_len} tokens do not fit beside the "
                "weights; choose fewer"
            ) from error

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        """What vLLM may give to pages, the state of the most requests at once set aside.

        Raises:
            ConfigError: so many requests' state leaves no room; names the number that would fit.
        """
        available = int(super().determine_available_memory())
        arena = self.reread.arena
        if self.cache_config.kv_cache_memory_bytes:
            return available  # given by the user for pages alone; the state is there already
        index, specs = (0, 0), self.get_kv_cache_spec()
        if (reader := self.reread.reader) is not None:
            tokens = self.scheduler_config.max_num_batched_tokens
            longest = self.model_config.max_model_len
            page = max(specs[name].block_size for name in arena.layers)
            index = reader.index.slot_bytes * page, reader.scratch_bytes(longest, tokens)
        state = arena.nbytes, arena.nbytes // arena.rows
        return memory.room_for_pages(available, *state, self.vllm_config, specs, index)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        if self.reread.reader is not None:
            layers = compat.attention_layers(self.vllm_config)
            caches = {name: layers[name].kv_cache.shape for name in self.reread.arena.layers}
            # [pages, 2, size, Hkv, D]
            self.reread.reader.index.allocate({n: (at[0], at[2]) for n, at in caches.items()})

    def compile_or_warm_up_model(self) -> Any:
        self.reread.arena.warm_up(self.cache_config.block_size, self.model_config.dtype)
        self.reread.warm_up_prompts(compat.attention_layers(self.vllm_config))
        return super().compile_or_warm_up_model()

    def execute_model(self, scheduler_output: Any) -> Any:
        registry = self.reread
        registry.drop(*compat.dropped(scheduler_output))
        scheduled = scheduler_output.num_scheduled_tokens
        # vLLM arranges its batch within the call, then asks the backend's builder
        registry.pending = lambda: compat.batch_rows(self.model_runner, scheduled)
        try:
            output = super().execute_model(scheduler_output)
            registry.observe(compat.logits_of(self.model_runner))
        finally:
            registry.done()
        self._page.write(self._counts())
        return output

    def _counts(self) -> Counts:
        return Counts.of(self.reread, len(self.reread.arena.layers))

    def reread_stats(self) -> dict[str, Any]:
        """What the plug-in did in this process so far, for `collective_rpc("reread_stats")`."""
        self.reread.learn(wait=True)
        return stats(self.reread, self._counts(), len(self.reread.arena.layers))
