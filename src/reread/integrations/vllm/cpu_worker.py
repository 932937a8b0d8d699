"""vLLM's CPU worker with the plug-in's backend, what it remembers of requests, and its counts."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from . import compat, memory
from .checks import check_kind, no_layer
from .cpu_backend import RereadImpl
from .metrics import Counts, Page
from .options import config_of
from .requests import Registry
from .worker import boundary_of, reader_of, stats

BACKEND = "reread.integrations.vllm.cpu_backend.RereadBackend"


class RereadCPUWorker(CPUWorker):  # type: ignore[misc]  # vLLM is absent where types are checked
    """One process of an engine that asked for reread.

    Attributes:
        reread: what is remembered of its requests.
    """

    reread: Registry

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        compat.check_installed()
        super().__init__(vllm_config, *args, **kwargs)
        config = config_of(vllm_config)
        self.reread = Registry(config, boundary_of(vllm_config, config))
        self._page = Page.of(self.parallel_config.data_parallel_rank, self.rank)
        self._sparse: dict[str, RereadImpl] = {}

    def load_model(self, **kwargs: Any) -> None:
        with compat.backend_override("CPU_ATTN", BACKEND):
            super().load_model(**kwargs)
        for name, layer in compat.attention_layers(self.vllm_config).items():
            if isinstance(layer.impl, RereadImpl) and layer.impl.sparse:
                check_kind(name, layer)
                layer.impl.registry = self.reread
                self._sparse[name] = layer.impl
        if not self._sparse:
            raise no_layer(self.model_config.model)
        layers = compat.attention_layers(self.vllm_config)
        sparse = {name: layers[name] for name in self._sparse}
        self.reread.reader = reader_of(self, self.reread.config, sparse, "reference")

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        reader = self.reread.reader
        if reader is not None:
            layers = compat.attention_layers(self.vllm_config)
            caches = {name: layers[name].kv_cache.shape for name in self._sparse}
            reader.index.allocate({name: (at[0], at[2]) for name, at in caches.items()})

    def determine_available_memory(self) -> int:
        """What vLLM may give to pages, the state of the most requests at once set aside.

        Raises:
            ConfigError: so many requests' state leaves no room; names the number that would fit.
        """
        available = int(super().determine_available_memory())
        layers, reader = list(self._sparse.values()), self.reread.reader
        state = memory.state_bytes(self.reread.config, layers, self.vllm_config)
        specs = self.get_kv_cache_spec()
        page = max(specs[name].block_size for name in self._sparse)
        index = (0, 0) if reader is None else (reader.index.slot_bytes * page, 0)
        return memory.room_for_pages(available, *state, self.vllm_config, specs, index)

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
            registry.pending, registry.plans = None, ()
            if registry.reader is not None:
                registry.reader.index.forget()
        self._page.write(self._counts())
        return output

    def _counts(self) -> Counts:
        return Counts.of(self.reread, len(self._sparse))

    def reread_stats(self) -> dict[str, Any]:
        """What the plug-in did in this process so far, for `collective_rpc("reread_stats")`."""
        return stats(self.reread, self._counts(), len(self._sparse))
