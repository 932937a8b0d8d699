"""Settings of indexed decoding and sparse prefills, and the index cache, without a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from reread import Config, ConfigError, InputError, SparsePrefill
from reread.cli import app
from reread.config import AFRESH
from reread.indexer.apply import best_keys, step_scores
from reread.kv import GrowingKV
from reread.oracle import attention_mass, step_mass
from reread.policy.controller import Controller
from reread.types import StepKind


def test_the_preset_has_no_slow_steps_and_says_what_it_needs() -> None:
    config = Config.preset("indexed")
    assert config.mode == "indexed"
    assert config.uses_indexer
    assert config.indexer_folder is None
    controller = Controller(config, None, 1)
    kinds = {controller.plan([5], [10_000], [False])[0] for _ in range(50)}
    assert kinds == {StepKind.FAST}


@pytest.mark.parametrize("mode", AFRESH)
def test_slow_steps_read_everything_and_choose_nothing(mode: str) -> None:
    config = Config.preset("indexed").updated({"mode": mode, "t_max": 4})
    controller = Controller(config, None, 1)
    kinds = [controller.plan([5], [10_000], [False])[0] for _ in range(8)]
    assert kinds.count(StepKind.FULL) == 2
    assert controller.reasons == {"interval": 2}


def test_the_folder_may_stand_in_either_place() -> None:
    here = Path("an") / "indexer"
    prefill = SparsePrefill(indexer=here)  # type: ignore[arg-type]  # a path is taken too
    assert prefill.indexer == str(here)
    assert prefill.chooser == "indexer"
    config = Config(mode="indexed", prefill=prefill)
    assert config.indexer_folder == str(here)
    assert Config.from_dict(config.to_dict()) == config
    given = Config().updated({"prefill": {"indexer": "there", "b_sel": 16}})
    assert given.indexer_folder == "there"
    assert Config.preset("indexed").updated({"indexer": "there"}).indexer_folder == "there"


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Config(indexer="x"), "indexer='x'"),
        (lambda: Config(mode="indexed", indexer=""), "indexer=''"),
        (
            lambda: Config(mode="indexed", indexer="a", prefill=SparsePrefill(indexer="b")),
            "indexer='a' is not possible: the prefill's, 'b'",
        ),
        (lambda: SparsePrefill(indexer="x", chooser="oracle"), "prefill.chooser='oracle'"),
        (lambda: SparsePrefill(dense_below=-1), "prefill.dense_below=-1"),
    ],
)
def test_what_cannot_be_meant_is_refused(make: object, named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace("(", r"\(")):
        make()  # type: ignore[operator]  # a function


def test_index_keys_follow_the_cache() -> None:
    kv = GrowingKV()
    for new in (5, 1, 70):
        k = torch.randn(2, 3, new, 8)
        kv.append(k, k)
        kv.append_index(torch.full((2, 1, new, 4), float(kv.length)))
    assert kv.index.shape == (2, 1, 76, 4)
    assert kv.index[0, 0, :, 0].unique().tolist() == [5.0, 6.0, 76.0]
    kv.crop(6)
    assert kv.indexed == 6
    kv.reindex(torch.tensor([1, 1, 0]))
    assert kv.index.shape == (3, 1, 6, 4)
    buffers = kv.buffers()
    other = GrowingKV()
    other.use(buffers)
    assert other.indexed == 0


def test_a_text_that_the_indexer_has_not_read_is_refused() -> None:
    kv = GrowingKV()
    kv.claim_index("a")
    k = torch.randn(1, 2, 9, 8)
    kv.append(k, k)
    with pytest.raises(InputError, match="the cache holds 9 tokens, of 0 this indexer has read"):
        kv.claim_index("a")
    kv.append_index(torch.zeros(1, 1, 9, 4))
    kv.claim_index("a")
    with pytest.raises(InputError, match="of 0 this indexer has read"):
        kv.claim_index("b")
    kv.crop(0)
    kv.claim_index("b")


def test_one_steps_mass_is_that_of_a_prompts_last_query() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(4, 8), torch.randn(2, 30, 8)
    want = attention_mass(q[:, None], k, torch.tensor([29]), 3, 0.3)[0]
    torch.testing.assert_close(step_mass(q, k, 3, 0.3, None), want)
    valid = torch.ones(30, dtype=torch.bool)
    valid[10:12] = False
    holed = step_mass(q, k, 3, 0.3, valid)
    assert bool((holed[10:12] == 0).all())
    torch.testing.assert_close(holed.sum(), torch.tensor(1.0))


def test_ties_of_a_step_go_to_the_lower_position() -> None:
    scores = step_scores(torch.ones(1, 1, 4), torch.ones(1, 20, 4), 2, 15, 0)
    assert best_keys(scores, 2, 4).tolist() == [2, 3, 4, 5]
    assert best_keys(scores, 2, 100).tolist() == list(range(2, 15))
    valid = torch.ones(13, dtype=torch.bool)
    valid[1] = False
    assert best_keys(scores, 2, 3, valid).tolist() == [2, 4, 5]


def test_the_planner_does_not_guess() -> None:
    done = CliRunner().invoke(app, ["plan", "--preset", "indexed"])
    assert done.exit_code == 2
    assert "not in the planner's model" in done.output
