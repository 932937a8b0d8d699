"""Token for token, fp32, greedy: select-everything is stock vLLM, a preset is the Hugging Face
path, and nothing about scheduling, caching or batching changes a text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .engines import EVERYTHING, SMALL, greedy, hugging_face, ragged, save_gemma3, stats

Start = Callable[..., Any]


def test_select_everything_is_stock_on_16_ragged_requests(smollm2: str, engine: Start) -> None:
    stock = engine(smollm2)
    prompts = ragged(stock.get_tokenizer(), 16, 5, 200)
    expected = greedy(stock, prompts, 24)
    for ask in (EVERYTHING, {**EVERYTHING, "dense_below_budget": False}):
        llm = engine(smollm2, ask)
        assert greedy(llm, prompts, 24) == expected
    assert stats(llm)["fast_steps"] > 200


@pytest.mark.parametrize(
    "ask", [pytest.param({}, id="default", marks=pytest.mark.slow), pytest.param(SMALL, id="small")]
)
def test_tokens_of_the_hugging_face_path(ask: Any, smollm2: str, engine: Start) -> None:
    llm = engine(smollm2, ask)
    prompts = ragged(llm.get_tokenizer(), 3, 100, 1100)
    found = greedy(llm, prompts, 40)
    counted = stats(llm)
    assert counted["fast_steps"] > 20
    assert counted["keys_read_share"] < 0.95
    assert found == hugging_face(smollm2, ask, prompts, 40)
    # the case would prove little if sparse steps wrote what dense ones write
    dense = greedy(engine(smollm2, {"mode": "dense"}), prompts, 40)
    assert (dense != found) or not ask


TRIGGERS = {
    "tail": {**SMALL, "triggers": {"first_step": False}},
    "paper": {"preset": "paper", **SMALL},
    "uncertainty": {**SMALL, "uncertainty": 1.0, "t_max": None},
    "prior": {**SMALL, "lambda_clip": 0.3, "refine": "none", "sink": 0},
    "forced": {**SMALL, "dense_below_budget": False},
}


@pytest.mark.parametrize("ask", TRIGGERS.values(), ids=TRIGGERS)
def test_every_trigger_and_selector_is_the_same(ask: Any, tiny: str, engine: Start) -> None:
    llm = engine(tiny, ask)
    prompts = ragged(llm.get_tokenizer(), 4, 30, 500)
    found = greedy(llm, prompts, 48)
    assert stats(llm)["fast_steps"] > 50
    assert found == hugging_face(tiny, ask, prompts, 48)


@pytest.mark.slow
def test_sliding_window_layers_keep_their_own(smollm2: str, engine: Start, tmp_path: Path) -> None:
    folder = save_gemma3(tmp_path, smollm2)
    stock = engine(folder, max_num_batched_tokens=64)
    prompts = ragged(stock.get_tokenizer(), 6, 20, 300)
    dense = greedy(stock, prompts, 40)
    everything = engine(folder, {**EVERYTHING, "dense_below_budget": False})
    assert greedy(everything, prompts, 40) == dense
    assert stats(everything)["sparse_layers"] == 1
    llm = engine(folder, SMALL)
    found = greedy(llm, prompts, 40)
    assert stats(llm)["fast_steps"] > 50
    assert found == hugging_face(folder, SMALL, prompts, 40)


@pytest.mark.slow
def test_compiled_layers_give_the_same_tokens(tiny: str, engine: Start) -> None:
    eager = engine(tiny, SMALL)
    prompts = ragged(eager.get_tokenizer(), 4, 60, 200)
    expected = greedy(eager, prompts, 24)
    compiled = engine(tiny, SMALL, enforce_eager=False)
    assert greedy(compiled, prompts, 24) == expected
