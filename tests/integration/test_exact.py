"""Mode "exact", greedy: every token is the one that transformers alone chooses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import reread
from reread import Config

from . import tiny
from .exact_cases import (
    EVERYTHING,
    LENGTHS,
    NEW,
    as_if_keys_were_all,
    both,
    dense,
    everything,
    exact,
    ragged,
)
from .tiny import MATRIX, left_padded, model, ours, prompt

archs = pytest.mark.parametrize("name", MATRIX)
batches = pytest.mark.parametrize("rows", [1, 8])
# layers with caches of their own kind: rows advance together
TOGETHER = ("qwen2-windowed", "gemma3", "qwen3-next", "qwen3.5")


def greedy(name: str, rows: int, config: Config, new: int = NEW) -> reread.Stats:
    """The text is dense's; returns the stats."""
    ids, mask = (prompt(90), None) if rows == 1 else ragged()
    got, stats = ours(model(name), ids, config, new, mask=mask)
    assert got.tolist() == dense(name, rows, new).tolist()
    assert stats.drafts is not None
    return stats


# ---- every architecture


@archs
@batches
def test_drafts_of_a_tiny_budget_leave_denses_text(name: str, rows: int) -> None:
    drafts = greedy(name, rows, exact(k=8, tokens=4)).drafts
    assert drafts is not None
    assert drafts.accepted < drafts.drafted  # a text that only agreeing drafts leave shows nothing


@archs
def test_single_drafts_of_rows_below_and_above_the_budget_leave_denses_text(name: str) -> None:
    """Budget 34: one of the eight rows begins below it, and crosses it."""
    drafts = greedy(name, 8, exact(k=24, tokens=1, dense_below_budget=True)).drafts
    assert drafts is not None
    # eight rows that wait for each other seldom all take a draft
    assert drafts.accepted < drafts.drafted
    assert drafts.accepted > 0 or name in TOGETHER
    assert set(drafts.lengths) == {0, 1}


@archs
@batches
def test_drafts_that_read_everything_all_stand(name: str, rows: int) -> None:
    stats = greedy(name, rows, everything())
    assert stats.drafts is not None
    assert stats.drafts.acceptance == 1.0
    # 15 tokens behind the first: 8 drafted and one verified, 5 drafted and one verified
    assert stats.drafts.lengths == {5: rows, 8: rows}
    assert stats.slow_steps == [2] * rows
    assert stats.fast_steps == [13] * rows


@archs
def test_drafts_that_adapt_leave_denses_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_keys_were_all(monkeypatch)
    config = exact(k=8, adapt=True, min_probability=0.3, dense_below_budget=True)
    drafts = greedy(name, 8, config).drafts
    assert drafts is not None
    assert drafts.drafted > 0


# ---- every option


@pytest.mark.parametrize(
    ("name", "rows"), [("llama", 8), ("qwen3.5", 1)], ids=["llama-8", "qwen3.5-1"]
)
@pytest.mark.parametrize("tokens", [1, 4, 16])
@pytest.mark.parametrize("k", [8, 40, EVERYTHING])
def test_any_budget_and_any_length_of_drafts_leave_denses_text(
    k: int, tokens: int, name: str, rows: int
) -> None:
    drafts = greedy(name, rows, exact(k=k, tokens=tokens), new=20).drafts
    assert drafts is not None
    assert max(drafts.lengths) == tokens
    assert (drafts.acceptance == 1.0) == (k == EVERYTHING)


@pytest.mark.parametrize("min_probability", [0.2, 0.5, 1.0])
def test_uncertain_drafts_end_early_and_leave_denses_text(min_probability: float) -> None:
    free = greedy("llama", 8, exact(k=40)).drafts
    drafts = greedy("llama", 8, exact(k=40, min_probability=min_probability)).drafts
    assert free is not None
    assert drafts is not None
    assert drafts.lengths.get(4, 0) < free.lengths[4]
    if min_probability == 1.0:  # no distribution is above it
        assert set(drafts.lengths) == {0, 1}


@pytest.mark.parametrize("preset", [{}, {"k": 16, "recent": 16}])
def test_the_preset_leaves_denses_text(
    preset: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_keys_were_all(monkeypatch)
    drafts = greedy("qwen3", 8, Config.preset("exact").updated(preset)).drafts
    assert drafts is not None
    assert (drafts.drafted > 0) == bool(preset)  # the preset's own budget covers these prompts


def test_a_model_whose_weights_outweigh_its_keys_does_not_draft() -> None:
    """Drafting would cost time there; the text is dense's all the same."""
    stats = greedy("llama", 1, exact(adapt=True))
    assert stats.drafts is not None
    assert stats.drafts.drafted == 0
    assert (stats.slow_steps, stats.fast_steps) == ([NEW - 1], [0])
    assert stats.keys_read_share == 1.0


def test_drafts_that_would_save_nothing_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_keys_were_all(monkeypatch)
    stats = greedy("llama", 8, exact(k=EVERYTHING, adapt=True))
    assert stats.fast_steps == [0] * 8


@pytest.mark.parametrize("name", ["llama", *TOGETHER])
def test_a_row_alone_is_the_row_in_a_ragged_batch(name: str) -> None:
    """Also in what it drafts, where rows advance on their own."""
    rows = [prompt(n, seed=n) for n in LENGTHS[::3]]
    ids, mask = left_padded(rows)
    config = exact(k=24)
    got, stats = ours(model(name), ids, config, NEW, mask=mask)
    for b, row in enumerate(rows):
        alone, own = ours(model(name), row, config, NEW)
        assert got[b].tolist() == alone[0].tolist()
        if name not in TOGETHER:
            assert (stats.slow_steps[b], stats.fast_steps[b]) == (
                own.slow_steps[0],
                own.fast_steps[0],
            )


def test_what_ran_before_does_not_matter() -> None:
    net, config = model("llama"), exact(k=24)
    a, b = prompt(90, seed=3), prompt(70, rows=2, seed=4)
    fresh = [ours(net, ids, config, NEW) for ids in (a, b)]
    with reread.attach(net, config) as session:
        for i in (0, 1, 1, 0):
            ids = (a, b)[i]
            got = net.generate(ids, max_new_tokens=NEW, do_sample=False)[:, ids.shape[1] :]
            assert torch.equal(got, fresh[i][0])
            assert session.stats.drafts == fresh[i][1].drafts


@pytest.mark.parametrize("chunk", [1, 16, 89])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3.5"])
def test_a_prompt_in_chunks_leaves_denses_text(name: str, chunk: int) -> None:
    got, stats = ours(model(name), prompt(90), exact(k=24), NEW, prefill_chunk=chunk)
    assert got.tolist() == dense(name, 1).tolist()
    assert stats.drafts is not None
    assert stats.drafts.drafted > 0


def test_eager_attention_is_served_like_sdpa() -> None:
    net = tiny.build(MATRIX["llama"], attn_implementation="eager")
    got, _ = ours(net, prompt(90), exact(k=24), NEW)
    assert got.tolist() == dense("llama", 1).tolist()


def test_a_model_with_windows_only_decodes_as_without_reread_and_says_so() -> None:
    net, ids = tiny.build(tiny.MISTRAL_WINDOWED), prompt(90)
    got, stats = ours(net, ids, exact(), NEW)
    assert got.tolist() == tiny.stock(net, ids, NEW).tolist()
    assert stats.drafts is None
    assert any("full-attention" in note for note in stats.notes)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "factor": 4.0,
            "original_max_position_embeddings": 100,
            "rope_theta": 1e4,
        },
    ],
    ids=["dynamic", "longrope"],
)
@batches
def test_frequencies_that_change_within_the_answer_leave_denses_text(
    rope: dict[str, Any], rows: int
) -> None:
    """A pass turns all its positions by the frequencies of its last one."""
    longest = 100 if rope["rope_type"] == "dynamic" else 400
    net = tiny.build(MATRIX["llama"], max_position_embeddings=longest, rope_parameters=rope)
    ids, mask = (prompt(90), None) if rows == 1 else ragged()
    config = exact(k=24)
    want, got, _ = both(net, ids, config, attention_mask=mask)
    assert got.tolist() == want.tolist()


# ---- long answers


LONG = {"max_position_embeddings": 1024}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), [("llama", 8), ("qwen3.5", 1)])
def test_an_answer_of_512_tokens_is_denses(name: str, rows: int) -> None:
    net = tiny.build(MATRIX[name], **LONG)
    ids, mask = (prompt(90), None) if rows == 1 else ragged()
    want, got, stats = both(
        net, ids, exact(k=440, tokens=16), max_new_tokens=512, attention_mask=mask
    )
    assert got.tolist() == want.tolist()
    assert stats.drafts is not None
    assert 0 < stats.drafts.accepted < stats.drafts.drafted
    assert stats.drafts.tokens == 512 * rows


def test_a_long_answer_that_adapts_is_denses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long enough for a row to give up drafting, and to try again."""
    as_if_keys_were_all(monkeypatch)
    net = tiny.build(MATRIX["qwen3"], **LONG)
    config = exact(k=24, tokens=8, adapt=True, dense_below_budget=True)
    want, got, stats = both(net, prompt(90), config, max_new_tokens=200)
    assert got.tolist() == want.tolist()
    assert stats.drafts is not None
    lengths = stats.drafts.lengths
    assert lengths[0] > 150  # nearly nothing stands of what a random model drafts from 34 keys
    assert sum(times for n, times in lengths.items() if n) >= 3  # trials

    fixed = dataclasses.replace(config, draft=dataclasses.replace(config.draft, adapt=False))
    _, _, blind = both(net, prompt(90), fixed, max_new_tokens=64)
    assert stats.keys_read_share < blind.keys_read_share


def test_an_answer_may_end_at_the_last_position_of_the_model() -> None:
    ids, mask = left_padded([prompt(n, seed=n) for n in (460, 490)])
    want, got, _ = both(model("llama"), ids, everything(16), max_new_tokens=22, attention_mask=mask)
    assert got.tolist() == want.tolist()


def test_rows_that_share_the_weights_draft_where_one_alone_would_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A draft needs evidence, which a verification leaves if drafting may pay: for the batch."""
    monkeypatch.setattr("reread.integrations.hf.exact.passes.weight_bytes", lambda _: 200_000)
    config = exact(k=24, tokens=8, adapt=True, dense_below_budget=True)
    drafts = []
    for rows in (1, 8):
        ids = prompt(90, rows=rows)
        got, stats = tiny.ours(model("llama"), ids, config, 40)
        assert torch.equal(got, tiny.stock(model("llama"), ids, 40))
        assert stats.drafts is not None
        drafts.append(sum(times for n, times in stats.drafts.lengths.items() if n) / rows)
    assert drafts[0] == 0
    assert drafts[1] >= 2  # the first trial fails, and another comes
