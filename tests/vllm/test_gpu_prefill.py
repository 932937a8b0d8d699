"""Sparse prefill inside vLLM on a GPU: needle-27m in bfloat16 with an indexer that starts from its
projections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .engines import stats
from .test_gpu import NEW, Answers, Asked, answers, asked, run, start

__all__ = ["asked", "start"]  # fixtures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

# a quarter of the text, by an indexer that was not trained: some answers are wrong, here as there
QUARTER = {"k": 2048, "dense_below": 0}


@pytest.fixture(scope="module")
def indexer(needle_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import AutoModelForCausalLM

    from reread.integrations.hf.indexers import new_indexer

    folder = tmp_path_factory.mktemp("indexer")
    model = AutoModelForCausalLM.from_pretrained(needle_dir, dtype=torch.float32)
    new_indexer(model, width=64).save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def theirs(indexer: str, needle_dir: Path, asked: Asked) -> Answers:
    """What the Hugging Face path answers."""
    from transformers import AutoModelForCausalLM

    import reread
    from reread.integrations.vllm.options import parse

    kwargs = {"dtype": torch.bfloat16, "device_map": "cuda"}
    model = AutoModelForCausalLM.from_pretrained(needle_dir, **kwargs).eval()
    found = []
    for ids in asked.prompts:
        result = reread.generate(
            model, torch.tensor([ids], device="cuda"), tokenizer=asked.tokenizer,
            config=parse({"prefill": {"indexer": indexer, **QUARTER}}),
            max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
        )  # fmt: skip
        found.append(result.sequences[0, len(ids) :].tolist())
    assert 0.5 < asked.right(found) < 1  # or the case would prove little
    return found


CHANGES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager, chunks of 512": {"enforce_eager": True, "max_num_batched_tokens": 512},
    "compiled": {"compilation_config": {}},
    "pages of 16, tokens known": {"block_size": 16, "async_scheduling": False},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_answers_are_those_of_the_hugging_face_path(
    change: dict[str, Any], indexer: str, start: Any, asked: Asked, theirs: Answers
) -> None:
    llm = start({"prefill": {"indexer": indexer, **QUARTER}}, **change)
    found = run(llm, asked.prompts)
    counted = stats(llm)
    here, there = answers(found, asked), answers(theirs, asked)
    words = [a == b for x, y in zip(here, there, strict=True) for a, b in zip(x, y, strict=True)]
    share = sum(words) / len(words)
    print(change, asked.right(found), asked.right(theirs), share, counted["prompt_keys_read_share"])
    assert share > 0.9
    assert counted["prompt_keys_read_share"] < 0.55
    assert counted["fast_steps"] > 10 * len(asked.prompts)


def test_short_prompts_stay_dense(indexer: str, start: Any, asked: Asked) -> None:
    """Below the length from which sparse blocks pay; and what lies behind it is sparse."""
    ask = {"prefill": {"indexer": indexer}}
    llm = start(ask)
    short = [prompt[-3000:] for prompt in asked.prompts[:4]]
    started_with = run(llm, short)
    assert stats(llm)["prompt_keys_read_share"] == 1
    run(llm, asked.prompts[:2])
    assert stats(llm)["prompt_keys_read_share"] < 0.95
    stock = start(None)
    # sparse decoding behind it, but a prompt that was read as stock vLLM reads it
    assert [a[:1] for a in started_with] == [a[:1] for a in run(stock, short)]


def test_what_the_kernels_lack_is_refused(needle_dir: Path, start: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from reread.errors import UnsupportedError
    from reread.integrations.hf.indexers import new_indexer

    model = AutoModelForCausalLM.from_pretrained(needle_dir, dtype=torch.float32)
    new_indexer(model, width=32, heads=2, init="random").save(tmp_path)
    with pytest.raises(UnsupportedError, match="2 heads"):
        start({"prefill": {"indexer": str(tmp_path)}})
