"""What the workers of both platforms have in common."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from vllm.logger import init_logger

from ...config import Config
from ...errors import UnsupportedError
from ...indexer.model import Indexer
from ...prefill import resolved
from ..hf.indexers import identity_of
from ..hf.vocabulary import boundary_tokens
from . import compat
from .index_pages import IndexPages
from .listening import listen
from .metrics import Counts
from .prompts import PromptReader

logger = init_logger("vllm.reread.worker")


def boundary_of(vllm_config: Any, config: Config) -> Tensor | None:
    """bool [vocabulary], the tokens that end a sentence or line; None where nobody asks, or no
    tokenizer is known."""
    if not config.triggers.boundary:
        return None
    tokenizer = compat.tokenizer_of(vllm_config)
    if tokenizer is None:
        logger.warning("reread: no tokenizer, so ends of sentences cannot make a step slow")
        return None
    return boundary_tokens(tokenizer, vllm_config.model_config.get_vocab_size())


def reader_of(
    worker: Any, config: Config, sparse: Mapping[str, Any], backend: str
) -> PromptReader | None:
    """What reads a worker's prompts sparsely, None if nothing does.

    Args:
        worker: its model is there; sparse: its sparse layers by name; backend: of the ops.

    Raises:
        InputError: the indexer is another model's.
        UnsupportedError: a model whose layers an indexer cannot read along with.
    """
    if config.prefill is None:
        return None
    model: nn.Module = worker.model_runner.get_model()
    embedding, backbone = compat.embedding_of(model), None
    if embedding is None:
        raise UnsupportedError(
            f"{worker.model_config.model} has no embedding by which an indexer could know it: "
            "leave prefill None"
        )
    # another rank has other rows of the embedding
    if worker.rank % worker.parallel_config.tensor_parallel_size == 0:
        backbone = identity_of(worker.model_config.hf_text_config, embedding)
    folder, device = Path(str(config.indexer_folder)), worker.device
    index = IndexPages(
        # straight to the device: a forked process may not be able to compute on the CPU
        Indexer.load(folder, backbone=backbone, device=device),
        {name: compat.layer_number(name) for name in sparse},
        worker.model_config.dtype,
        device,
        kernels=backend == "triton",
    )
    listen(model, sparse)
    return PromptReader(index, resolved(config.prefill, backend))


def stats(registry: Any, counts: Counts, layers: int) -> dict[str, Any]:
    """For `collective_rpc("reread_stats")`; layers: how many are sparse."""
    return {
        **counts.to_dict(),
        "slow_reasons": dict(registry.reasons),
        "sparse_layers": layers,
        "requests": len(registry.requests),
        "config": registry.config.to_dict(),
    }
