"""Mode "exact", sampling: what comes out is distributed as dense decoding's samples are.

Expected counts come from exact enumeration with dense logits, never from a second sample.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

import reread
from reread import Config, DraftConfig
from reread.errors import NumericalError
from reread.policy import acceptance

from . import tiny
from .tiny import MATRIX

LETTERS = 8
LEVEL = 0.01
BATCH = 500


def p_value(counts: Tensor, chances: Tensor) -> float:
    """Chi-square test of counts [N] against probabilities [N]; cells that expect fewer than 5 are
    one. What cannot happen must not have happened."""
    if bool((counts[chances == 0] > 0).any()):
        return 0.0
    expected = chances.double() * counts.sum()
    small = expected < 5
    seen = torch.cat([counts[~small].double(), counts[small].sum().double()[None]])
    wanted = torch.cat([expected[~small], expected[small].sum()[None]])
    kept = wanted > 0
    statistic = ((seen - wanted)[kept] ** 2 / wanted[kept]).sum()
    return float(chi2.sf(float(statistic), int(kept.sum()) - 1))


# ---- the rule alone


DRAWS = 20_000
DENSE = torch.tensor([0.40, 0.25, 0.15, 0.10, 0.10, 0.0])
DRAFTS = {
    "the same": DENSE,
    "close": torch.tensor([0.35, 0.30, 0.15, 0.10, 0.05, 0.05]),
    "far": torch.tensor([0.02, 0.03, 0.05, 0.20, 0.30, 0.40]),
    "nothing in common": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0]),
    "a part": torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0]),
}


def drawn(rule: Any, draft: Tensor, draws: int = DRAWS) -> tuple[Tensor, float]:
    """Counts of the tokens that come out, and how many drafted ones stood."""
    torch.manual_seed(0)
    scores, counts, stood = DENSE.log(), torch.zeros(len(DENSE)), 0
    for token in torch.multinomial(draft, draws, replacement=True).tolist():
        stands, result = rule(scores, token, draft)
        assert not stands or result == token
        counts[result] += 1
        stood += stands
    return counts, stood / draws


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_rule_leaves_denses_distribution(draft: str) -> None:
    counts, stood = drawn(acceptance.speculative, DRAFTS[draft])
    assert p_value(counts, DENSE) > LEVEL
    # as many stand as can: the distributions' common part (Leviathan et al., 2023, theorem 3.5)
    common = float(torch.minimum(DENSE, DRAFTS[draft]).sum())
    assert stood == pytest.approx(common, abs=4 * math.sqrt(0.25 / DRAWS))


def test_behind_the_last_draft_the_rule_draws_from_dense() -> None:
    torch.manual_seed(0)
    counts = torch.zeros(len(DENSE))
    for _ in range(DRAWS):
        stands, token = acceptance.speculative(DENSE.log(), None, None)
        assert not stands
        counts[token] += 1
    assert p_value(counts, DENSE) > LEVEL


def always(scores: Tensor, drafted: int | None, draft: Tensor | None) -> tuple[bool, int]:
    """Biased: every draft stands."""
    if drafted is not None:
        return True, drafted
    return acceptance.speculative(scores, drafted, draft)


def redrawn(scores: Tensor, drafted: int | None, draft: Tensor | None) -> tuple[bool, int]:
    """Biased: what takes the place of a refused token is drawn from p, not from p - q."""
    stands, token = acceptance.speculative(scores, drafted, draft)
    if drafted is None or stands:
        return stands, token
    return False, int(torch.multinomial(torch.softmax(scores.float(), dim=-1), 1))


@pytest.mark.parametrize("rule", [always, redrawn])
@pytest.mark.parametrize("draft", ["close", "far"])
def test_the_test_catches_a_biased_rule(rule: Any, draft: str) -> None:
    counts, _ = drawn(rule, DRAFTS[draft])
    assert p_value(counts, DENSE) < 1e-6


# ---- through a model


@functools.cache
def letters() -> Any:
    """A model of eight letters: three of its tokens are 512 possible texts."""
    return tiny.build(
        MATRIX["llama"], vocab_size=LETTERS, num_hidden_layers=1, initializer_range=0.35,
        pad_token_id=None, bos_token_id=None,
    )  # fmt: skip


def start() -> Tensor:
    return torch.randint(0, LETTERS, (1, 40), generator=torch.Generator().manual_seed(1))


def small(tokens: int, min_probability: float = 0.0) -> Config:
    """Drafts read 9 of 40 keys and more, so that they are often wrong."""
    draft = DraftConfig(tokens=tokens, adapt=False, min_probability=min_probability)
    return Config(mode="exact", sink=1, recent=4, k=4, draft=draft)


class NoDoubles(LogitsProcessor):
    """Depends on the text: a letter does not follow itself."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter(1, input_ids[:, -1:], -math.inf)


@torch.no_grad()
def exactly(new: int, options: dict[str, Any]) -> Tensor:
    """Probability of each text of `new` tokens, fp64 [LETTERS ** new], as dense decoding draws it:
    transformers' own processors on dense logits."""
    given = {**options, "do_sample": True, "max_new_tokens": 1, "return_dict_in_generate": True}
    chances = torch.ones(1, dtype=torch.float64)
    texts = start()
    for _ in range(new):
        mask = torch.ones_like(texts)
        out = letters().generate(texts, attention_mask=mask, output_scores=True, **given)
        p = torch.softmax(out.scores[0].double(), dim=-1)
        chances = (chances[:, None] * p).flatten()
        rows = texts.shape[0]
        texts = torch.cat(
            [texts.repeat_interleave(LETTERS, 0), torch.arange(LETTERS).repeat(rows)[:, None]], 1
        )
    return chances


def sampled(draws: int, new: int, config: Config, options: dict[str, Any]) -> tuple[Tensor, Any]:
    """How often each text came out, and what was drafted in all."""
    net, ids = letters(), start()
    torch.manual_seed(11)
    counts, total = torch.zeros(LETTERS**new), Counter[str]()
    place = LETTERS ** torch.arange(new - 1, -1, -1)
    for _ in range(draws // BATCH):
        out = reread.generate(
            net, ids, torch.ones_like(ids), config=config, max_new_tokens=new, do_sample=True,
            num_return_sequences=BATCH, **options,
        )  # fmt: skip
        assert out.stats.drafts is not None
        total.update(drafted=out.stats.drafts.drafted, accepted=out.stats.drafts.accepted)
        texts = (out.sequences[:, 40:] * place).sum(1)
        counts += torch.bincount(texts, minlength=LETTERS**new)
    return counts, total


CASES: dict[str, tuple[int, int, Config, dict[str, Any]]] = {
    "temperature": (7000, 4, small(3), {"temperature": 1.7, "top_k": 0}),
    "top-k": (6500, 3, small(2), {"top_k": 3}),
    "top-p": (6500, 3, small(2), {"top_p": 0.8, "temperature": 2.0, "top_k": 0}),
    "drafts that end early": (1500, 4, small(3, min_probability=0.5), {"top_k": 0}),
    "a processor that reads the text": (
        1500, 3, small(2),
        {"logits_processor": LogitsProcessorList([NoDoubles()]), "top_k": 0},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_samples_are_distributed_as_denses(case: str) -> None:
    draws, new, config, options = CASES[case]
    counts, drafts = sampled(draws, new, config, options)
    chances = exactly(new, options)
    assert int(counts.sum()) == draws
    assert 0.1 < drafts["accepted"] / drafts["drafted"] < 0.9  # both ways of the rule were taken
    assert int((chances * draws >= 5).sum()) > 15  # a test of few cells sees little
    assert p_value(counts, chances) > LEVEL
    shape = [LETTERS] * new
    for n in range(new):
        others = [d for d in range(new) if d != n]
        at = counts.reshape(shape).sum(others), chances.reshape(shape).sum(others)
        # more tests, so each of them at a lower level
        assert p_value(*at) > LEVEL / new, f"token {n}"


@pytest.mark.slow
@pytest.mark.parametrize("rule", [always, redrawn])
def test_the_test_through_a_model_catches_a_biased_rule(
    rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reread.integrations.hf.exact.rows.speculative", rule)
    _, new, config, options = CASES["temperature"]
    counts, _ = sampled(1000, new, config, options)
    assert p_value(counts, exactly(new, options)) < 1e-3


def test_enumeration_finds_what_dense_decoding_samples() -> None:
    """The reference itself: its probabilities sum to 1 and pass for a sample of dense decoding."""
    options = {"top_p": 0.8, "temperature": 2.0, "top_k": 0}
    chances, ids = exactly(3, options), start()
    assert float(chances.sum()) == pytest.approx(1.0)
    torch.manual_seed(2)
    out = letters().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=True,
        num_return_sequences=4000, **options,
    )  # fmt: skip
    place = LETTERS ** torch.arange(2, -1, -1)
    counts = torch.bincount((out[:, 40:] * place).sum(1), minlength=LETTERS**3)
    assert p_value(counts, chances) > LEVEL


def test_sampling_with_a_seed_is_repeatable() -> None:
    net, ids, config = tiny.model("llama"), tiny.prompt(90, rows=3), small(4)

    def run(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        out = reread.generate(net, ids, config=config, max_new_tokens=16, do_sample=True)
        assert out.stats.drafts is not None
        assert out.stats.drafts.drafted > 0
        texts: list[list[int]] = out.sequences.tolist()
        return texts

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_rows_of_a_batch_draw_on_their_own() -> None:
    """Equal prompts do not share their random numbers."""
    ids = tiny.prompt(90).repeat(4, 1)
    torch.manual_seed(0)
    out = reread.generate(
        tiny.model("llama"), ids, config=small(4), max_new_tokens=16, do_sample=True
    )
    assert all(a != b for a, b in itertools.combinations(out.sequences.tolist(), 2))


class _Broken(LogitsProcessor):
    """Gives NaN for the second token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores * torch.nan if input_ids.shape[1] == 41 else scores


def test_nan_of_a_processor_is_no_draw() -> None:
    """Where nothing is drafted, rows are drawn together: a NaN there must not become any token."""
    net = tiny.model("qwen3")
    ids = torch.arange(2, 42).repeat(2, 1)
    with pytest.raises(NumericalError, match="row 0"):
        reread.generate(
            net, ids, config=Config.preset("exact"), max_new_tokens=4, do_sample=True,
            logits_processor=LogitsProcessorList([_Broken()]),
        )  # fmt: skip
