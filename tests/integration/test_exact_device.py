"""Mode "exact" on (interpreted) kernels: dense text, and the drafts that the reference makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import reread
from reread import Config, NumericalError

from . import device, tiny
from .device import PAPER_LIKE
from .tiny import left_padded, prompt, sparse

LENGTHS = (41, 30)
NEW = 6


def exact(base: Config | None = None, **changes: Any) -> Config:
    """A budget that leaves most of the prompts out; always two tokens, unless told otherwise."""
    base = sparse(k=16) if base is None else base
    given = {"draft.tokens": 2, "draft.adapt": False, "draft.min_probability": 0.0, **changes}
    return base.updated({"mode": "exact", **given})


def both(net: Any, config: Config, runner: str, **options: Any) -> tuple[Any, Any, torch.Tensor]:
    """Outputs on the reference and on the kernels, and transformers' own new tokens."""
    ids, mask = left_padded([prompt(n, seed=n) for n in options.pop("lengths", LENGTHS)])
    given = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": mask, **options}
    want = net.generate(ids, **given)
    outputs = []
    for backend in ({"backend": "reference"}, {"backend": "triton", "runner": runner}):
        outputs.append(reread.generate(net, ids, config=config.updated(backend), **given))
    return outputs[0], outputs[1], want


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
    ref, got, want = both(device.small(), exact(**CASES[case]), runner)
    assert torch.equal(ref.sequences, want)
    assert torch.equal(got.sequences, want)
    assert got.stats.backend == "triton"
    assert got.stats.runner == ("graph, compiled layers" if runner == "graph" else "eager")
    assert got.stats.drafts == ref.stats.drafts
    assert got.stats.drafts.drafted > 0
    assert got.stats.fast_steps == ref.stats.fast_steps
    assert got.stats.slow_steps == ref.stats.slow_steps
    assert got.stats.keys_read_share == pytest.approx(ref.stats.keys_read_share)
    if case == "everything":
        assert got.stats.drafts.acceptance == 1.0


def test_drafts_that_end_early_cost_one_step_more() -> None:
    """The device does not wait: the step behind an uncertain token has begun when it is seen."""
    case = {"draft.tokens": 4, "draft.min_probability": 0.999}
    ref, got, want = both(device.small(), exact(**case), "graph")
    assert torch.equal(got.sequences, want)
    assert got.stats.drafts == ref.stats.drafts
    assert set(got.stats.drafts.lengths) <= {0, 1}
    drafts = ref.stats.fast_steps
    assert all(
        one < more <= 2 * one for one, more in zip(drafts, got.stats.fast_steps, strict=True)
    )


def test_sampled_tokens_go_from_step_to_step() -> None:
    """With processors and sampling, and the same again for the same seed."""
    net, ids = device.small(), prompt(41)
    config = exact(**{"draft.tokens": 4}).updated({"backend": "triton", "runner": "graph"})
    options = {"do_sample": True, "temperature": 0.7, "top_k": 9, "repetition_penalty": 1.2}
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        output = reread.generate(net, ids, config=config, max_new_tokens=12, **options)
        found.append((output.sequences.tolist(), output.stats.drafts))
    assert found[0] == found[1]
    assert found[0][1].drafted > 0


def test_nan_while_drafting_names_the_row() -> None:
    net = device.small(tie_word_embeddings=False)
    ids = prompt(41)
    config = exact().updated({"backend": "triton", "runner": "graph"})
    want = reread.generate(net, ids, config=config, max_new_tokens=NEW, do_sample=False)
    token = int(want.sequences[0, ids.shape[1]])
    net.get_input_embeddings().weight.data[token].fill_(torch.nan)
    with pytest.raises(NumericalError, match="row 0"):
        reread.generate(
            net, ids[ids != token][None], config=config, max_new_tokens=NEW, do_sample=False
        )


def test_the_papers_selector_with_key_norms() -> None:
    base = sparse(k=16, selector=PAPER_LIKE)
    ref, got, want = both(device.small(), exact(base), "graph", lengths=(33,))
    assert torch.equal(got.sequences, want)
    assert got.stats.drafts == ref.stats.drafts


def test_rows_end_on_their_own() -> None:
    net = device.small()
    plain = both(net, exact(), "graph")[2][:, max(LENGTHS) :]
    # a token that one row writes early and another late, or never
    end = int(plain[0, 2])
    ref, got, want = both(net, exact(), "graph", eos_token_id=end, pad_token_id=0)
    assert torch.equal(got.sequences, want)
    assert got.stats.drafts == ref.stats.drafts


def test_a_hybrid_runs_kernel_by_kernel() -> None:
    net = device.build("qwen3.5", head_dim=64)
    ref, got, want = both(net, exact(), "auto", lengths=(33,))
    assert torch.equal(got.sequences, want)
    assert got.stats.runner == "eager"
    assert got.stats.drafts == ref.stats.drafts


def test_a_second_turn_on_the_same_cache() -> None:
    net = device.small()
    ids, config = prompt(40, seed=3), exact().updated({"backend": "triton"})
    name = tiny.CACHE
    turns = []
    for attach in (None, config):
        cache = tiny.prefilled(net, ids[:, :-1])
        options = {"max_new_tokens": 4, "do_sample": False, name: cache}
        found = ids
        for seed in (4, 5):
            if attach is None:
                found = net.generate(found, **options)
            else:
                found = reread.generate(net, found, config=attach, **options).sequences
            found = torch.cat([found, prompt(4, seed=seed)], dim=1)
        turns.append(found)
    assert torch.equal(*turns)


def test_sampling_with_a_seed_draws_what_the_reference_draws() -> None:
    net, config = device.small(), exact()
    found = []
    for backend in ("reference", "triton"):
        torch.manual_seed(1)
        ids, mask = left_padded([prompt(n, seed=n) for n in (41, 30)])
        options = {"max_new_tokens": 5, "do_sample": True, "temperature": 0.7, "top_k": 20}
        changed = config.updated({"backend": backend})
        out = reread.generate(net, ids, mask, config=changed, **options)
        found.append(out.sequences)
    assert torch.equal(*found)
