"""What the user asks of the plug-in: `{"reread": {...}}` in vLLM's additional config; and what is
refused before weights load."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ...config import Config
from ...errors import ConfigError, UnsupportedError
from .prefill_checks import check_prefill

KEY = "reread"
PACKAGE = "reread.integrations.vllm"
WORKERS = {
    "cpu": f"{PACKAGE}.cpu_worker.RereadCPUWorker",
    "cuda": f"{PACKAGE}.gpu_worker.RereadGPUWorker",
}
SCHEDULER = f"{PACKAGE}.scheduler.RereadScheduler"
ASYNC_SCHEDULER = f"{PACKAGE}.scheduler.RereadAsyncScheduler"
MAX_SEQS = 64  # requests at once on a GPU


def asked_for(additional: Any) -> bool:
    """Whether vLLM's additional config asks for the plug-in."""
    return isinstance(additional, Mapping) and KEY in additional


def parse(values: Any) -> Config:
    """The value behind "reread": `{"preset": name}` and changes by dotted path or unique last
    part, as in `Config.updated`; or the nested fields of `Config.to_dict`.

    Raises:
        ConfigError: not a mapping, an unknown key, or a value that cannot be right.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{KEY}={values!r} is not possible: a mapping of Config's fields")
    changes = dict(values)
    base = Config.preset(changes.pop("preset", "default"))
    nested = {k: v for k, v in changes.items() if isinstance(v, Mapping) and _is_group(k)}
    flat = {f"{k}.{name}": v for k, inner in nested.items() for name, v in inner.items()}
    flat |= {k: v for k, v in changes.items() if k not in nested}
    return base.updated(flat)


def _is_group(key: str) -> bool:
    return key in ("triggers", "selector", "draft")


def config_of(vllm_config: Any) -> Config:
    """The plug-in's config of an engine that asked for it."""
    return parse(vllm_config.additional_config[KEY])


def check_config(config: Config) -> None:
    """Refuse what the plug-in does not do inside vLLM.

    Raises:
        UnsupportedError: names the value and what would be right.
    """
    if config.mode not in ("slow-fast", "dense"):
        raise UnsupportedError(
            f"mode={config.mode!r} is not supported inside vLLM: 'slow-fast' or 'dense'"
        )
    if config.prefill is None:
        return
    if config.prefill.chooser != "indexer":
        raise UnsupportedError(
            f"prefill.chooser={config.prefill.chooser!r} is not supported inside vLLM: 'indexer'"
        )
    if config.indexer_folder is None:
        raise ConfigError("prefill.chooser='indexer' needs an indexer: set prefill.indexer to one")


def check_platform(config: Config, platform: str) -> None:
    """Refuse what the plug-in does not do on this platform, "cpu" or "cuda".

    Raises:
        UnsupportedError: names the value and what would be right.
    """
    if platform == "cpu":
        if config.backend == "triton":
            raise UnsupportedError("backend='triton' needs a GPU: 'auto' or 'reference' on the CPU")
        if config.runner == "graph":
            raise UnsupportedError("runner='graph' needs a GPU: 'auto' or 'eager' on the CPU")
        return
    if config.backend == "reference":
        raise UnsupportedError("backend='reference' is not supported in vLLM on a GPU: 'auto'")
    if config.runner != "auto":
        raise UnsupportedError(
            f"runner={config.runner!r} is not supported in vLLM on a GPU: 'auto'; vLLM's own "
            "enforce_eager says whether steps are graphs"
        )
    if config.selector.lambda_clip > 0:
        raise UnsupportedError(
            f"selector.lambda_clip={config.selector.lambda_clip} needs the keys' norms, which "
            "vLLM's pages do not hold: 0 on a GPU"
        )
    if not config.triggers.first_step and config.mode == "slow-fast":
        raise UnsupportedError("triggers.first_step=False is not supported in vLLM on a GPU: True")


def check_engine(vllm_config: Any, config: Config, platform: str) -> None:
    """Refuse an engine whose model, cache or parallelism the plug-in does not cover.

    Args:
        vllm_config: vLLM's own, complete; nothing is loaded yet.
        platform: "cpu" or "cuda".

    Raises:
        UnsupportedError: names the value and what would be right.
    """
    _check_model(vllm_config)
    _check_cache(vllm_config)
    _check_parallel(vllm_config, config)
    if config.prefill is not None:
        check_prefill(vllm_config, config.prefill, str(config.indexer_folder), platform)
    if vllm_config.speculative_config is not None:
        raise UnsupportedError(
            f"speculative decoding ({vllm_config.speculative_config.method}) is not supported with "
            "reread: leave speculative_config unset"
        )
    if platform == "cuda":
        _check_gpu(vllm_config)
    elif vllm_config.scheduler_config.async_scheduling:
        raise UnsupportedError("async_scheduling=True is not supported with reread on a CPU: False")


def _check_gpu(vllm_config: Any) -> None:
    most = int(vllm_config.scheduler_config.max_num_seqs)
    if most > MAX_SEQS:
        raise UnsupportedError(
            f"max_num_seqs={most} is not supported with reread on a GPU: at most {MAX_SEQS}"
        )
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    if dtype not in ("bfloat16", "float16"):
        raise UnsupportedError(f"dtype={dtype} is not supported on a GPU: bfloat16 or float16")
    backend = vllm_config.attention_config.backend
    if backend is not None and backend.name != "FLASH_ATTN":
        raise UnsupportedError(
            f"attention backend {backend.name} is not supported with reread: FLASH_ATTN, or unset"
        )
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") != "0":
        raise UnsupportedError(
            "VLLM_BATCH_INVARIANT is not supported with reread, whose kernels share their work by "
            "the batch: leave it unset"
        )


def _check_model(vllm_config: Any) -> None:
    model = vllm_config.model_config
    text, name = model.hf_text_config, model.model
    if model.runner_type != "generate":
        raise UnsupportedError(f"{name} runs as {model.runner_type!r}: reread needs 'generate'")
    if model.is_encoder_decoder:
        raise UnsupportedError(f"{name} is an encoder-decoder: reread needs a decoder-only model")
    if model.use_mla:
        raise UnsupportedError(
            f"{name} uses multi-head latent attention, whose cache reread does not read: a model "
            "with full or grouped-query attention"
        )
    if model.is_mm_prefix_lm:
        raise UnsupportedError(f"{name} lets prompt tokens see later ones: not supported")
    for term in ("attn_logit_softcapping", "attention_chunk_size"):
        if getattr(text, term, None):
            raise UnsupportedError(f"{name} has {term}={getattr(text, term)}: not supported")
    kinds = getattr(text, "layer_types", None)
    without = kinds is not None and not any("full" in str(kind) for kind in kinds)
    if without or model.is_attention_free or vllm_config.cache_config.sliding_window is not None:
        raise UnsupportedError(
            f"{name} has no full-attention layer, so there is nothing to make sparse: run it "
            "without reread"
        )


def _check_cache(vllm_config: Any) -> None:
    kind = str(vllm_config.cache_config.cache_dtype)
    own = str(vllm_config.model_config.dtype).removeprefix("torch.")
    if kind not in ("auto", own):
        raise UnsupportedError(
            f"kv_cache_dtype={kind!r} is not supported with reread: 'auto', which is {own} here"
        )
    if vllm_config.kv_transfer_config is not None:
        raise UnsupportedError("a KV connector is not supported with reread: leave it unset")


def _check_parallel(vllm_config: Any, config: Config) -> None:
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if getattr(parallel, name, 1) > 1:
            raise UnsupportedError(
                f"{name}={getattr(parallel, name)} is not supported with reread: 1"
            )
    if getattr(parallel, "use_ubatching", False):
        raise UnsupportedError(
            "enable_dbo and ubatch_size above 1 are not supported with reread: leave them unset"
        )
    if parallel.tensor_parallel_size == 1:
        return
    # each process has its own KV heads, and the logits may be on one process only
    if config.selector.alpha_cross > 0:
        raise UnsupportedError(
            f"selector.alpha_cross={config.selector.alpha_cross} compares all KV heads, which "
            f"tensor_parallel_size={parallel.tensor_parallel_size} keeps apart: 0"
        )
    if config.triggers.uncertainty is not None:
        raise UnsupportedError(
            f"triggers.uncertainty={config.triggers.uncertainty} is not supported with "
            f"tensor_parallel_size={parallel.tensor_parallel_size}: None"
        )
