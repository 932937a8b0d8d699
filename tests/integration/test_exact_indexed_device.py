"""Mode "exact" with an indexer on (interpreted) kernels: dense text, the reference's drafts, and
the reference's index keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import reread
from reread import Config, InputError, UnsupportedError
from reread.device import Arena
from reread.integrations.hf.graph import StepGraphs
from reread.integrations.hf.indexers import new_indexer
from reread.steps import StepShape

from . import device, tiny
from .test_exact_device import LENGTHS, NEW, exact
from .tiny import CACHE, cache_of, left_padded, prompt

WAYS = {"graph": "graph, compiled layers", "eager": "eager"}


def run(net: Any, config: Config, ids: Tensor, **options: Any) -> tuple[Any, reread.Stats]:
    given = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    with reread.attach(net, config, indexer=new_indexer(net, 16, 1, "svd")) as session:
        out = net.generate(ids, return_dict_in_generate=True, **given)
    return out, session.stats


def both(net: Any, config: Config, runner: str, **options: Any) -> tuple[Any, Any, Tensor]:
    """Outputs and stats on the reference and on the kernels, and transformers' own tokens."""
    ids, mask = left_padded([prompt(n, seed=n) for n in options.pop("lengths", LENGTHS)])
    given = {"attention_mask": mask, **options}
    plain = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **given}
    want = net.generate(ids, **plain)
    ref = run(net, config.updated({"backend": "reference"}), ids, **given)
    got = run(net, config.updated({"backend": "triton", "runner": runner}), ids, **given)
    assert_same_index(got[0], ref[0], mask)
    return ref, got, want


def assert_same_index(got: Any, want: Any, mask: Tensor) -> None:
    for mine, its in zip(cache_of(got).layers, cache_of(want).layers, strict=True):
        if not hasattr(mine, "state"):
            continue
        kv, other = mine.state.kv, its.state.kv
        assert kv.indexed == kv.length == other.indexed == other.length
        for b, pad in enumerate((mask == 0).sum(1).tolist()):
            torch.testing.assert_close(
                kv.index[b, :, pad:], other.index[b, :, pad:], atol=1e-3, rtol=1e-3
            )


CASES: dict[str, dict[str, Any]] = {
    "two": {},
    "one": {"draft.tokens": 1},
    "everything": {"k": 400, "dense_below_budget": False},
    "four, some end early": {"draft.tokens": 4, "draft.min_probability": 0.05},
}


@pytest.mark.parametrize(
    ("runner", "case"), [*(("graph", case) for case in CASES), ("eager", "two")]
)
def test_text_is_denses_and_drafts_are_the_references(runner: str, case: str) -> None:
    (ref, expected), (got, stats), want = both(device.small(), exact(**CASES[case]), runner)
    assert torch.equal(ref.sequences, want)
    assert torch.equal(got.sequences, want)
    assert (stats.backend, stats.runner) == ("triton", WAYS[runner])
    assert stats.drafts == expected.drafts
    assert stats.drafts is not None
    assert stats.drafts.drafted > 0
    assert stats.slow_steps == expected.slow_steps
    # the device does not wait, so that drafts which end early cost it a step more
    if case != "four, some end early":
        assert stats.fast_steps == expected.fast_steps
        assert stats.keys_read_share == pytest.approx(expected.keys_read_share)
    assert (stats.drafts.acceptance == 1.0) == (case == "everything")


def test_rows_end_on_their_own() -> None:
    net = device.small()
    ids, mask = left_padded([prompt(n, seed=n) for n in LENGTHS])
    plain = net.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    # a token that one row writes early and another late, or never
    end = int(plain[0, max(LENGTHS) + 2])
    (_, expected), (got, stats), want = both(net, exact(), "graph", eos_token_id=end)
    assert torch.equal(got.sequences, want)
    assert stats.drafts == expected.drafts


def test_every_pass_is_a_fast_step_or_a_dense_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, replay = set[tuple[StepShape, int]](), StepGraphs.replay

    def noted(graphs: StepGraphs, shape: StepShape, new: int = 1) -> Any:
        seen.add((shape, new))
        return replay(graphs, shape, new)

    monkeypatch.setattr(StepGraphs, "replay", noted)
    config = exact().updated({"backend": "triton", "runner": "graph"})
    _, stats = run(device.small(), config, prompt(41))
    assert stats.drafts is not None
    # of one token where there is room for no draft
    assert seen == {(StepShape.FAST, 1), (StepShape.DENSE, 3), (StepShape.DENSE, 1)}


def test_the_arena_keeps_no_room_for_a_selector() -> None:
    net, ids, sizes = device.small(), prompt(41), []
    config = exact().updated({"backend": "triton", "runner": "eager"})
    for indexer in (None, new_indexer(net, 16, 1, "svd")):
        cache = tiny.DynamicCache(config=net.config)
        with reread.attach(net, config, indexer=indexer) as session:
            net.generate(ids, max_new_tokens=NEW, do_sample=False, **{CACHE: cache})
            (arena,) = session._runner._arenas if session._runner is not None else ()
            assert isinstance(arena, Arena)
            sizes.append(arena.lanes.works[0].logits.numel())
    assert sizes[0] > sizes[1] == 0


def test_a_hybrid_runs_kernel_by_kernel_and_goes_back() -> None:
    net = device.build("qwen3.5", head_dim=64)
    (_, expected), (got, stats), want = both(net, exact(), "auto", lengths=(33,))
    assert torch.equal(got.sequences, want)
    assert stats.runner == "eager"
    assert stats.drafts == expected.drafts


def test_a_second_turn_on_the_same_cache() -> None:
    net, ids = device.small(), prompt(40, seed=3)
    turns = []
    for config in (None, exact().updated({"backend": "triton", "runner": "graph"})):
        cache, found = tiny.DynamicCache(config=net.config), ids
        for seed in (4, 5):
            given = {"max_new_tokens": 4, "do_sample": False, CACHE: cache}
            if config is None:
                found = net.generate(found, **given)
            else:
                found = run(net, config, found, **given)[0].sequences
            found = torch.cat([found, prompt(4, seed=seed)], dim=1)
        turns.append(found)
    assert torch.equal(*turns)


def test_a_cache_that_grows_between_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reread.kv.GROWTH_STEP", 1)
    monkeypatch.setattr("reread.kv.GROWTH_SHARE", 1000)
    monkeypatch.setattr("reread.kv.GrowingKV.reserve", lambda kv, positions: None)
    (_, expected), (got, stats), want = both(device.small(), exact(), "graph", lengths=(33,))
    assert torch.equal(got.sequences, want)
    assert stats.drafts == expected.drafts


def test_sampling_with_a_seed_draws_what_the_reference_draws() -> None:
    net, found = device.small(), []
    ids, mask = left_padded([prompt(n, seed=n) for n in LENGTHS])
    options = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.2}
    for backend in ("reference", "triton"):
        torch.manual_seed(1)
        config = exact().updated({"backend": backend})
        found.append(run(net, config, ids, attention_mask=mask, **options)[0].sequences)
    assert torch.equal(*found)


def test_what_the_kernels_do_not_cover_is_refused() -> None:
    net, config = device.small(), exact().updated({"backend": "triton"})
    with pytest.raises(UnsupportedError, match="an indexer of 2 heads: one head"):
        reread.attach(net, config, indexer=new_indexer(net, 16, 2, "svd"))
    with pytest.raises(UnsupportedError, match="an indexer of width 24"):
        reread.attach(net, config, indexer=new_indexer(net, 24, 1, "svd"))
    cache = tiny.prefilled(net, prompt(30))
    with pytest.raises(InputError, match="of 0 this indexer has read"):
        run(net, config, prompt(41), **{CACHE: cache})
    assert cache.get_seq_length() == 30
