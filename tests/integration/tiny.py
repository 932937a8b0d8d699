"""Tiny random models of every architecture of the matrix, and what tests often do with them.

The weights are drawn wide enough for greedy text to wander, so that equal tokens mean something.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import reread
from reread import Config, SelectorConfig, Span, TriggerConfig

VOCABULARY = 128
# ids that the tiny tokenizer spells as a sentence end, a line end, or a mark with a closing quote
BOUNDARY_IDS = frozenset(range(5, VOCABULARY, 6))
# the keyword of the cache: "cache" since transformers 5.24
CACHE = (
    "cache"
    if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
    else "past_key_values"
)

BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
}
HYBRID = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
WINDOWED = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 24,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Arch:
    """A model type, what it needs beyond BASE, and which of its layers have full attention."""

    model_type: str
    extra: dict[str, Any] = field(default_factory=dict)
    full: tuple[int, ...] = (0, 1)


MATRIX = {
    "llama": Arch("llama"),
    "llama-gqa4": Arch("llama", {"num_key_value_heads": 1}),
    "qwen2": Arch("qwen2"),
    "qwen2-windowed": Arch(
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 2,
            "num_hidden_layers": 3,
        },
    ),
    "qwen3": Arch("qwen3"),
    "qwen3-moe": Arch("qwen3_moe", MOE),
    "mistral": Arch("mistral", {"sliding_window": None}),
    "gemma3": Arch("gemma3_text", {**WINDOWED, "query_pre_attn_scalar": 16}, full=(1, 3)),
    "smollm3": Arch("smollm3", {"no_rope_layers": [1, 0]}),
    "phi3": Arch("phi3"),
    "glm4": Arch("glm4"),
    "olmo2": Arch("olmo2"),
    "granite": Arch("granite"),
    "qwen3-next": Arch(
        "qwen3_next", {**HYBRID, **MOE, "shared_expert_intermediate_size": 32}, full=(1, 3)
    ),
    "qwen3.5": Arch("qwen3_5_text", HYBRID, full=(1, 3)),
}
MISTRAL_WINDOWED = Arch("mistral", {"sliding_window": 24}, full=())
GPT_OSS = Arch(
    "gpt_oss",
    {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2},
)
GEMMA2 = Arch("gemma2", {"query_pre_attn_scalar": 16})


@functools.cache
def _weights(arch_name: str) -> Any:
    return build(MATRIX[arch_name])


def build(arch: Arch, *, seed: int = 0, **changes: Any) -> Any:
    """A fresh model, eval mode, fp32."""
    config = AutoConfig.for_model(arch.model_type, **{**BASE, **arch.extra, **changes})
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def model(name: str) -> Any:
    """The shared model of a matrix row. Tests must leave it as they found it."""
    return _weights(name)


def prompt(length: int, *, rows: int = 1, seed: int = 1) -> Tensor:
    """Random ids above the special ones, int64 [rows, length]."""
    return torch.randint(
        3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed)
    )


def left_padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Prompts [1, n] of different lengths as one batch: ids and attention mask."""
    width = max(row.shape[1] for row in rows)
    ids = torch.cat(
        [torch.nn.functional.pad(row, (width - row.shape[1], 0), value=0) for row in rows]
    )
    mask = torch.tensor([[0] * (width - row.shape[1]) + [1] * row.shape[1] for row in rows])
    return ids, mask


@functools.cache
def tokenizer() -> Any:
    """One word per id; BOUNDARY_IDS are spelt as ends, everything else as harmless words."""
    ends = (".", "?", "!", ";", "\n", "。", '."')
    vocab = {}
    for i in range(VOCABULARY):
        spelling = f"w{i}"
        if i in BOUNDARY_IDS:
            spelling += ends[i % len(ends)]
        vocab[spelling] = i
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocab, unk_token="w3")))
    made.pad_token = "w0"
    return made


def sparse(
    *,
    sink: int = 2,
    recent: int = 8,
    k: int = 12,
    t_max: int | None = 5,
    boundary: bool = False,
    uncertainty: float | None = None,
    t_min: int = 1,
    first_step: bool = True,
    selector: SelectorConfig | None = None,
    dense_below_budget: bool = True,
) -> Config:
    """A budget so small that every layer leaves most of the prompt out."""
    return Config(
        sink=sink,
        recent=recent,
        k=k,
        triggers=TriggerConfig(
            boundary=boundary,
            t_max=t_max,
            t_min=t_min,
            uncertainty=uncertainty,
            first_step=first_step,
        ),
        selector=selector or SelectorConfig(refine=Span(back=1, ahead=3)),
        dense_below_budget=dense_below_budget,
    )


def always_slow() -> Config:
    return sparse(t_max=1)


def select_everything() -> Config:
    """Fast steps that gather every position: the sparse path runs, and must not lose anything."""
    return sparse(k=100_000, dense_below_budget=False)


def stock(model: Any, ids: Tensor, new: int = 24, **options: Any) -> Any:
    """Greedy tokens of transformers alone, [rows, new]."""
    out = model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, **options)
    return out if not isinstance(out, Tensor) else out[:, ids.shape[1] :]


def ours(
    model: Any,
    ids: Tensor,
    config: Config,
    new: int = 24,
    *,
    mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, reread.Stats]:
    """Greedy tokens [rows, new] under reread, and the stats."""
    options.setdefault("do_sample", False)
    out = reread.generate(model, ids, mask, config=config, max_new_tokens=new, **options)
    return out.sequences[:, ids.shape[1] :], out.stats


def attached(
    model: Any, ids: Tensor, config: Config, new: int = 24, tokenizer: Any = None, **options: Any
) -> Any:
    """The output object of a greedy `generate` under `attach`, with the raw logits."""
    with reread.attach(model, config, tokenizer=tokenizer):
        return model.generate(
            ids,
            max_new_tokens=new,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )


def cache_of(output: Any) -> Any:
    """The cache in an output of `generate` or of a model, under either name."""
    return output.cache if getattr(output, "cache", None) is not None else output.past_key_values


@torch.no_grad()
def prefilled(model: Any, ids: Tensor) -> Any:
    """A cache that holds `ids`, filled by one forward pass."""
    cache = DynamicCache(config=model.config)
    model(ids, use_cache=True, **{CACHE: cache})
    return cache


@contextmanager
def quiet_boundary_warning() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the boundary trigger is off")
        yield
