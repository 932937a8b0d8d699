"""How vLLM cuts, batches, caches and preempts requests changes no token, and leaves nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from .engines import SMALL, greedy, ragged, stats, text_ids

Start = Callable[..., Any]
TAIL = {**SMALL, "triggers": {"first_step": False}}
UNSURE = {**SMALL, "triggers": {"uncertainty": 1.0, "t_max": None}}
ASKS = pytest.mark.parametrize(
    "ask",
    [
        pytest.param(SMALL, id="small"),
        pytest.param(TAIL, id="tail", marks=pytest.mark.slow),
        pytest.param(UNSURE, id="unsure", marks=pytest.mark.slow),
    ],
)


@pytest.mark.parametrize("chunk", [16, 37, 256])
@ASKS
def test_chunks_of_the_prefill_change_nothing(
    ask: Any, chunk: int, tiny: str, engine: Start
) -> None:
    whole = engine(tiny, ask)
    prompts = ragged(whole.get_tokenizer(), 8, 20, 500)
    expected = greedy(whole, prompts, 40)
    cut = engine(tiny, ask, max_num_batched_tokens=chunk, max_num_seqs=8)
    assert greedy(cut, prompts, 40) == expected
    assert stats(cut)["fast_steps"] > 100


@ASKS
def test_one_by_one_is_all_at_once(ask: Any, tiny: str, engine: Start) -> None:
    llm = engine(tiny, ask)
    prompts = ragged(llm.get_tokenizer(), 6, 20, 400)
    assert [greedy(llm, [p], 40)[0] for p in prompts] == greedy(llm, prompts, 40)


@ASKS
def test_prefix_caching_changes_nothing(ask: Any, tiny: str, engine: Start) -> None:
    texts = []
    for caching in (False, True):
        llm = engine(tiny, ask, enable_prefix_caching=caching)
        tokenizer = llm.get_tokenizer()
        prefix = text_ids(tokenizer, 320, 7)
        prompts = [prefix + text_ids(tokenizer, n, n) for n in (3, 30, 100)] + [prefix, prefix]
        first = [greedy(llm, [p], 70)[0] for p in prompts]
        # a further turn, whose prompt holds text that sparse steps wrote
        turns = [p + out + text_ids(tokenizer, 9, 1) for p, out in zip(prompts, first, strict=True)]
        cached = _cached(llm, prompts), _cached(llm, turns)
        texts.append((first, greedy(llm, turns, 40), *cached))
    off, on = texts
    assert on[:2] == off[:2]
    assert set(off[2] + off[3]) == {0}
    assert min(on[2]) >= 288
    # pages that hold generated text were computed again; the last turn is the one before it again
    assert all(0 < n <= len(p) for n, p in zip(on[3][:-1], prompts[:-1], strict=True))


def _cached(llm: Any, prompts: list[list[int]]) -> list[int]:
    """How many tokens of each prompt come from the prefix cache."""
    from vllm import SamplingParams

    outputs = llm.generate(
        [{"prompt_token_ids": p} for p in prompts], SamplingParams(max_tokens=1), use_tqdm=False
    )
    return [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize("caching", [False, True], ids=["plain", "prefix-cache"])
@ASKS
def test_preemption_changes_nothing(ask: Any, caching: bool, tiny: str, engine: Start) -> None:
    texts = []
    for pages in (400, 30):
        llm = engine(
            tiny,
            ask,
            num_gpu_blocks_override=pages,
            max_model_len=640,
            max_num_batched_tokens=64,
            max_num_seqs=8,
            enable_prefix_caching=caching,
            disable_log_stats=False,
        )
        prompts = ragged(llm.get_tokenizer(), 8, 60, 160)
        texts.append((greedy(llm, prompts, 160), _preemptions(llm), stats(llm)))
    (roomy, none, calm), (tight, some, pressed) = texts
    assert none == 0
    assert some > 2
    assert tight == roomy
    # what is computed again does not count again
    for name in ("fast_steps", "slow_steps", "full_steps", "keys_read"):
        assert pressed[name] == calm[name]


def _preemptions(llm: Any) -> int:
    return next(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


def test_200_requests_with_random_aborts_leave_nothing(tiny: str, engine: Start) -> None:
    from vllm import SamplingParams

    llm = engine(tiny, SMALL, num_gpu_blocks_override=120, max_model_len=640)
    rng, tokenizer, inner = random.Random(3), llm.get_tokenizer(), llm.llm_engine
    waiting = [str(i) for i in range(200)]
    running: list[str] = []
    aborted = ended = largest = 0
    while waiting or inner.has_unfinished_requests():
        while waiting and len(running) < 24:
            name = waiting.pop()
            ids = text_ids(tokenizer, rng.randrange(10, 300), int(name))
            params = SamplingParams(
                temperature=0.0, max_tokens=rng.randrange(1, 60), ignore_eos=True
            )
            inner.add_request(name, {"prompt_token_ids": ids}, params)
            running.append(name)
        for output in inner.step():
            if output.finished and output.request_id in running:
                running.remove(output.request_id)
                ended += 1
        largest = max(largest, stats(llm)["requests"])
        if running and rng.random() < 0.4:
            victim = running.pop(rng.randrange(len(running)))
            inner.abort_request([victim])
            aborted += 1
    greedy(llm, [[1, 2, 3]], 1)  # vLLM tells its workers who ended in the next pass
    left = stats(llm)
    assert ended + aborted == 200
    assert aborted > 40
    assert largest > 8
    assert left["requests"] == 1  # the one just asked
    assert left["state_bytes"] == 0
