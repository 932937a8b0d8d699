"""What the workers of both platforms have in common."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.logger import init_logger

from ...config import Config
from ..hf.vocabulary import boundary_tokens
from . import compat
from .metrics import Counts

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


def stats(registry: Any, counts: Counts, layers: int) -> dict[str, Any]:
    """For `collective_rpc("reread_stats")`; layers: how many are sparse."""
    return {
        **counts.to_dict(),
        "slow_reasons": dict(registry.reasons),
        "sparse_layers": layers,
        "requests": len(registry.requests),
        "config": registry.config.to_dict(),
    }
