"""Starting and stopping vLLM engines, and what the Hugging Face path makes of the prompts."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

REPO = Path(__file__).resolve().parents[2]
SMALL = {"k": 32, "recent": 32}  # fast steps run from 69 tokens on
EVERYTHING = {"k": 100_000}
ENTRY = "[vllm.general_plugins]\nreread = reread.integrations.vllm.plugin:register\n"


@contextlib.contextmanager
def surroundings(folder: Path) -> Iterator[None]:
    """The environment of quick, quiet engines in this process; the plug-in's entry point is made
    known from `folder`, for the case that the package is not installed."""
    from importlib.metadata import entry_points

    import pytest

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }.items():
            patch.setenv(name, value)
        if not any(e.name == "reread" for e in entry_points(group="vllm.general_plugins")):
            info = folder / "reread_entry-0.0.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(
                "Metadata-Version: 2.1\nName: reread-entry\nVersion: 0\n"
            )
            (info / "entry_points.txt").write_text(ENTRY)
            patch.syspath_prepend(str(folder))
            paths = [str(folder), str(REPO / "src"), os.environ.get("PYTHONPATH", "")]
            patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        yield


def start(folder: str, ask: dict[str, Any] | None, **arguments: Any) -> Any:
    """An engine in this process; `ask` is the value behind "reread", None: not asked."""
    from vllm import LLM

    given = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": 2**31,
        "block_size": 32,
        "seed": 0,
    }
    additional = {} if ask is None else {"reread": ask}
    return LLM(folder, additional_config=additional, **(given | arguments))


def stop(started: list[Any]) -> None:
    """End the engines in `started`, and forget them."""
    from vllm.distributed import cleanup_dist_env_and_memory

    while started:
        started.pop().llm_engine.engine_core.shutdown()
        gc.collect()
        cleanup_dist_env_and_memory()


def save_tiny(folder: Path, tokenizer: str) -> str:
    """Save a random two-layer Llama with SmolLM2's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(tokenizer) / name, folder / name)
    return str(folder)


def save_gemma3(folder: Path, tokenizer: str) -> str:
    """Save a random Gemma 3 of one full-attention layer between two of a sliding window."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=49152,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=48,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        max_position_embeddings=8192,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    Gemma3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(tokenizer) / name, folder / name)
    return str(folder)


def save_indexer(folder: str, to: Path, **settings: Any) -> str:
    """An indexer of the model in `folder`, started from its projections."""
    from transformers import AutoModelForCausalLM

    from reread.integrations.hf.indexers import new_indexer

    to.mkdir(exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    new_indexer(model, **settings).save(to)
    return str(to)


@functools.cache
def _words() -> list[str]:
    return (REPO / "docs" / "architecture.md").read_text().split()


def text_ids(tokenizer: Any, length: int, seed: int) -> list[int]:
    """Token ids of English prose from this repository, another passage for every seed."""
    words = _words()
    rng = random.Random(seed)
    out: list[int] = []
    while len(out) < length:
        begin = rng.randrange(len(words) - 20)
        out += tokenizer.encode(" ".join(words[begin : begin + 20]) + ". ")
    return out[:length]


def ragged(tokenizer: Any, count: int, shortest: int, longest: int) -> list[list[int]]:
    """So many prompts of different lengths."""
    span = range(count)
    lengths = [shortest + (longest - shortest) * i // max(1, count - 1) for i in span]
    random.Random(1).shuffle(lengths)
    return [text_ids(tokenizer, n, i) for i, n in enumerate(lengths)]


def greedy(llm: Any, prompts: Sequence[list[int]], new: int, **options: Any) -> list[list[int]]:
    """The new token ids of each prompt."""
    from vllm import SamplingParams

    asked = {"temperature": 0.0, "max_tokens": new, "ignore_eos": True}
    params = SamplingParams(**(asked | options))
    given = [{"prompt_token_ids": ids} for ids in prompts]
    return [list(o.outputs[0].token_ids) for o in llm.generate(given, params, use_tqdm=False)]


def stats(llm: Any) -> dict[str, Any]:
    """What the worker counted."""
    found: dict[str, Any] = llm.collective_rpc("reread_stats")[0]
    return found


def hugging_face(folder: str, ask: dict[str, Any], prompts: Any, new: int) -> list[list[int]]:
    """`reread.generate`'s new token ids of the same prompts, one by one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import reread
    from reread.integrations.vllm.options import parse

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    out = []
    for ids in prompts:
        result = reread.generate(
            model,
            torch.tensor([ids]),
            config=parse(ask),
            tokenizer=tokenizer,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
        )
        out.append(result.sequences[0, len(ids) :].tolist())
    return out
