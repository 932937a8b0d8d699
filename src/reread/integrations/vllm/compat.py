"""What differs between vLLM releases, in one place; and which releases are tested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...errors import UnsupportedError

# by platform
TESTED: dict[str, tuple[str, ...]] = {"cpu": ("0.32.0",), "cuda": ("0.25.1",)}
READ_ALONG = "reread::read_along"  # the custom op of `listening`
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One request's part of a forward pass, as the runner's input batch has it.

    Attributes:
        tokens: the request's token ids, prompt and output, by position.
        prompt: tokens of its prompt; cached: computed before this pass; new: computed in it.
    """

    name: str
    tokens: Any
    prompt: int
    cached: int
    new: int


def check_release(version: str, platform: str) -> None:
    """Refuse a vLLM release or a platform that the plug-in was not tested with.

    Args:
        version: `vllm.__version__`; platform: its `current_platform.device_type`.

    Raises:
        UnsupportedError: names both, and what is tested.
    """
    tested = "; ".join(f"{' or '.join(names)} on {kind}" for kind, names in TESTED.items())
    if version.split("+")[0] not in TESTED.get(platform, ()):
        raise UnsupportedError(
            f"vLLM {version} on platform {platform!r}: reread's plug-in is tested with vLLM "
            f"{tested} only; install that, or leave `reread` out of the additional config"
        )


def check_installed() -> str:
    """`check_release` for the vLLM that is imported; its platform, "cpu" or "cuda"."""
    import vllm
    from vllm.platforms import current_platform

    kind = str(current_platform.device_type)
    check_release(vllm.__version__, kind)
    return kind


def batch_rows(runner: Any, scheduled: Mapping[str, int]) -> Iterator[BatchRow]:
    """The rows of the pass that `runner` (V1) has prepared, in the order of its tokens.

    Args:
        scheduled: how many tokens each request computes in this pass.
    """
    batch = runner.input_batch
    for i, name in enumerate(batch.req_ids):
        yield BatchRow(
            name,
            batch.token_ids_cpu[i],
            int(batch.num_prompt_tokens[i]),
            int(batch.num_computed_tokens_cpu[i]),
            scheduled[name],
        )


def dropped(scheduler_output: Any) -> tuple[set[str], set[str]]:
    """Requests that ended (finished or aborted) before this pass, and those that lost their pages
    (preempted, or resumed from a preemption)."""
    lost = set(scheduler_output.preempted_req_ids or ())
    lost |= set(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
    return set(scheduler_output.finished_req_ids), lost


def logits_of(runner: Any) -> Any:
    """The logits [rows, vocabulary] of the pass that has just run and is not sampled yet; None
    where there are none."""
    state = runner.execute_model_state
    return None if state is None else state.logits


@contextmanager
def backend_override(name: str, path: str) -> Iterator[None]:
    """While a model is built, the attention backend at `path` takes the place of vLLM's backend
    `name`; another engine of the same process does not see it."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    backend = AttentionBackendEnum[name]
    # vLLM remembers the class that it chose
    selector._cached_get_attn_backend.cache_clear()
    register_backend(backend, path)
    try:
        yield
    finally:
        backend.clear_override()
        selector._cached_get_attn_backend.cache_clear()


def attention_layers(vllm_config: Any) -> dict[str, Any]:
    """vLLM's attention layers of the model that was built for this config, by name."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    return dict(get_layers_from_vllm_config(vllm_config, Attention))


def split_at(vllm_config: Any, op: str) -> None:
    """Have vLLM call a custom op between the pieces that it compiles and captures, as it does
    attention. Within a piece its Python would not run again, and the layer's name in it would make
    every layer compile by itself."""
    ops = vllm_config.compilation_config.splitting_ops
    if ops and op not in ops:
        ops.append(op)


def layer_context(name: str) -> tuple[Any, Any, Any]:
    """Of a layer in the pass that runs: the layer, its metadata, and the slots of the pass's
    tokens in its pages; None for what is not there, as in passes that serve nobody."""
    from vllm.model_executor.layers.attention.attention import get_attention_context

    metadata, layer, _, slots = get_attention_context(name)
    return layer, metadata, slots


def layer_number(name: str) -> int:
    """Which layer of the model an attention layer's name means."""
    from vllm.model_executor.models.utils import extract_layer_index

    return int(extract_layer_index(name))


def embedding_of(model: Any) -> Any:
    """The model's embedding [vocabulary of this process, hidden]; None where it has none."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
            return module.weight
    return None


def tokenizer_of(vllm_config: Any) -> Any | None:
    """The model's tokenizer, None where vLLM was told to do without."""
    from vllm.tokenizers.registry import cached_tokenizer_from_config

    return cached_tokenizer_from_config(vllm_config.model_config)
