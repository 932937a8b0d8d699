"""Log-likelihood of a continuation, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reread import Config, InputError
from reread.evaluation.fidelity import prefill
from reread.evaluation.likelihood import continuation_likelihood, continuation_logprob
from reread.integrations.hf.attach import attach
from tests.integration import tiny

CONTEXT = 60


def scored(model: Any, ids: torch.Tensor, config: Config, context: int = CONTEXT) -> Any:
    cache = prefill(model, ids[:, : context - 1], config)
    with attach(model, config, tokenizer=tiny.tokenizer()) as session, session.decoding():
        row = ids[0].tolist()
        found = continuation_likelihood(model, cache, row[context - 1], row[context:])
    return found, session.stats, cache


def plain(model: Any, ids: torch.Tensor, context: int = CONTEXT) -> tuple[float, bool]:
    """From one dense forward over everything."""
    with torch.no_grad():
        logits = model(ids).logits[0, context - 1 : -1]
    targets = ids[0, context:]
    picked = logits.log_softmax(-1).gather(-1, targets[:, None])
    return float(picked.sum()), bool((logits.argmax(-1) == targets).all())


@pytest.mark.parametrize("context", [2, CONTEXT])
def test_dense_equals_one_forward(context: int) -> None:
    model, ids = tiny.model("llama"), tiny.prompt(CONTEXT + 9)
    found, stats, cache = scored(model, ids, Config.preset("dense"), context)
    expected, greedy = plain(model, ids, context)
    assert found.logprob == pytest.approx(expected, abs=1e-3)
    assert found.greedy is greedy is False
    assert stats.decode_steps == ids.shape[1] - context
    assert cache.get_seq_length() == ids.shape[1] - 1


def test_a_sparse_config_reads_less_and_says_something_else() -> None:
    model, ids = tiny.model("llama"), tiny.prompt(CONTEXT + 9)
    found, stats, _ = scored(model, ids, tiny.sparse(k=4, recent=4))
    assert stats.fast_steps[0] > 0
    assert stats.keys_read_share < 0.9
    assert abs(found.logprob - plain(model, ids)[0]) > 1e-2


def test_the_models_own_text_is_greedy() -> None:
    model, ids = tiny.model("llama"), tiny.prompt(CONTEXT)
    whole = model.generate(ids, max_new_tokens=6, do_sample=False)
    found, _, _ = scored(model, whole, Config.preset("dense"))
    assert found.greedy
    changed = whole.clone()
    changed[0, -1] = (changed[0, -1] + 1) % tiny.VOCABULARY
    assert not scored(model, changed, Config.preset("dense"))[0].greedy


def test_a_cropped_cache_scores_each_choice_alike() -> None:
    model, ids = tiny.model("llama"), tiny.prompt(CONTEXT)
    dense = Config.preset("dense")
    cache = prefill(model, ids[:, :-1], dense)
    last, choices = int(ids[0, -1]), ([5, 9], [7], [5, 9])
    values = []
    with attach(model, dense, tokenizer=tiny.tokenizer()) as session:
        for choice in choices:
            with session.decoding():
                values.append(continuation_logprob(model, cache, last, choice))
            cache.crop(CONTEXT - 1 - cache.get_seq_length())
    assert values[0] == values[2] != values[1]


def test_nothing_to_score() -> None:
    model, ids = tiny.model("llama"), tiny.prompt(4)
    cache = prefill(model, ids, Config.preset("dense"))
    with pytest.raises(InputError, match="without tokens"):
        continuation_logprob(model, cache, 3, [])
