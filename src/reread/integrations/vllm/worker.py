"""vLLM's CPU worker with the plug-in's backend, what it remembers of requests, and its counts."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.worker.cpu_worker import CPUWorker

from ...errors import UnsupportedError
from ..hf.vocabulary import boundary_tokens
from . import compat, memory
from .backend import RereadImpl
from .metrics import Counts, Page
from .options import config_of
from .requests import Registry

BACKEND = "reread.integrations.vllm.backend.RereadBackend"
logger = init_logger("vllm.reread.worker")


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
        self.reread = Registry(config, self._boundary() if config.triggers.boundary else None)
        self._page = Page.of(self.parallel_config.data_parallel_rank, self.rank)
        self._sparse: dict[str, RereadImpl] = {}

    def _boundary(self) -> Any:
        tokenizer = compat.tokenizer_of(self.vllm_config)
        if tokenizer is None:
            logger.warning("reread: no tokenizer, so ends of sentences cannot make a step slow")
            return None
        return boundary_tokens(tokenizer, self.model_config.get_vocab_size())

    def load_model(self, **kwargs: Any) -> None:
        with compat.cpu_backend(BACKEND):
            super().load_model(**kwargs)
        for name, layer in compat.attention_layers(self.vllm_config).items():
            if isinstance(layer.impl, RereadImpl) and layer.impl.sparse:
                layer.impl.registry = self.reread
                self._sparse[name] = layer.impl
        if not self._sparse:
            raise UnsupportedError(
                f"{self.model_config.model} has no full-attention layer, so there is nothing to "
                "make sparse: run it without reread"
            )

    def determine_available_memory(self) -> int:
        """What vLLM may give to pages, the state of the most requests at once set aside.

        Raises:
            ConfigError: so many requests' state leaves no room; names the number that would fit.
        """
        available = int(super().determine_available_memory())
        return available - memory.set_aside(
            self.reread.config,
            list(self._sparse.values()),
            self.vllm_config,
            self.get_kv_cache_spec(),
            available,
        )

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
        self._page.write(self._counts())
        return output

    def _counts(self) -> Counts:
        return Counts.of(self.reread, len(self._sparse))

    def reread_stats(self) -> dict[str, Any]:
        """What the plug-in did in this process so far, for `collective_rpc("reread_stats")`."""
        registry = self.reread
        return {
            **self._counts().to_dict(),
            "slow_reasons": dict(registry.reasons),
            "sparse_layers": len(self._sparse),
            "requests": len(registry.requests),
            "config": registry.config.to_dict(),
        }
