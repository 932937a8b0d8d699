"""What of a sparse prefill is refused before weights load."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ...errors import ConfigError, UnsupportedError
from ...indexer.model import Indexer, IndexerCard
from ...prefilling import SparsePrefill
from ..hf.cache import sparse_layers


def whole_blocks(prefill: SparsePrefill) -> int:
    """Tokens that chunks of a prompt, and hits of the prefix cache, are multiples of: blocks, and
    an even number.

    So no chunk but the prompt's last is a single token, which on a GPU passes for a decode step;
    and that token never completes a page, of even size, that other requests might be given.
    """
    return math.lcm(2, prefill.b_sel)


def check_prefill(vllm_config: Any, prefill: SparsePrefill, folder: str, platform: str) -> None:
    """Refuse a sparse prefill that cannot run in this engine.

    Args:
        vllm_config: vLLM's own, complete; folder: of the indexer; platform: "cpu" or "cuda".

    Raises:
        InputError: no indexer there, a broken one, or one of another shape than the model.
        ConfigError: passes of too few tokens.
        UnsupportedError: a shape that the GPU's kernels do not cover.
    """
    text = vllm_config.model_config.hf_text_config
    # no weights: tensors that this process computes with could stop the one that it forks
    card = Indexer.read_card(Path(folder))
    card.check_fits(int(text.hidden_size), sparse_layers(text))
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    if dtype == "float16":
        raise UnsupportedError(
            "dtype=float16 is not supported with an indexer, which knows its model by weights in "
            "bfloat16: bfloat16 or float32"
        )
    _check_passes(vllm_config.scheduler_config, prefill)
    if platform == "cuda":
        _check_kernels(vllm_config, prefill, card)


def _check_passes(scheduler: Any, prefill: SparsePrefill) -> None:
    """Chunks end with a block, so a block has to fit beside everybody's decode step."""
    most, block = scheduler.max_num_seqs, whole_blocks(prefill)
    for name in ("max_num_batched_tokens", "max_num_scheduled_tokens"):
        tokens = getattr(scheduler, name, None)
        if tokens is not None and tokens < block + most:
            raise ConfigError(
                f"{name}={tokens} is not possible with a sparse prefill in chunks of {block} "
                f"beside {most} requests: at least {block + most}, or a smaller prefill.b_sel"
            )
    threshold = getattr(scheduler, "long_prefill_token_threshold", 0)
    if 0 < threshold < block:
        raise ConfigError(
            f"long_prefill_token_threshold={threshold} is not possible with a sparse prefill in "
            f"chunks of {block}: 0, or at least {block}"
        )


def _check_kernels(vllm_config: Any, prefill: SparsePrefill, card: IndexerCard) -> None:
    from ...ops.triton import index_refusal, prefill_refusal

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    heads, kv_heads = model.get_num_attention_heads(parallel), model.get_num_kv_heads(parallel)
    longest = model.max_model_len
    # without a k of its own a block's budget is at most that of the longest text
    chosen = min(prefill.budget(longest), longest)
    reason = index_refusal(card.heads, card.width, prefill.b_sel, model.dtype)
    reason = reason or prefill_refusal(heads // kv_heads, prefill.b_sel, chosen)
    if reason is not None:
        raise UnsupportedError(f"reread's GPU kernels do not cover {reason}")
