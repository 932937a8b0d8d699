"""Vision-language models: the language model is made sparse, the vision tower runs as it is."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reread
from reread import Config, UnsupportedError
from reread.integrations.hf import guard
from reread.integrations.hf.cache import sparse_layers
from reread.integrations.hf.capturable import obstacle
from reread.integrations.hf.session import Session
from reread.layer import LayerState

from . import tiny
from . import tiny_vision as tv
from .tiny import CACHE, cache_of, left_padded, select_everything, sparse, stock
from .tiny_vision import FAMILIES

NEW = 12
# tokens that see later ones: those of an image
BIDIRECTIONAL = ("gemma3",)
POSITIONS_OF_THEIR_OWN = ("qwen2.5-vl", "qwen3-vl", "qwen3.5")


def batch(name: str, images: int = 2, text: int = 40, seed: int = 1) -> dict[str, Tensor]:
    family = FAMILIES[name]
    ids = tv.prompt(family, images, text, seed=seed)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        **tv.inputs(family, ids, images, seed=seed),
    }


def ours(name: str, given: dict[str, Tensor], config: Config) -> tuple[Tensor, reread.Stats]:
    out = reread.generate(
        tv.model(name), **given, config=config, max_new_tokens=NEW, do_sample=False
    )
    return out.sequences[:, given["input_ids"].shape[1] :], out.stats


def own(name: str, given: dict[str, Tensor]) -> Tensor:
    rest = {key: value for key, value in given.items() if key != "input_ids"}
    return stock(tv.model(name), given["input_ids"], NEW, **rest)


@pytest.mark.parametrize("name", FAMILIES)
def test_selecting_everything_gives_the_models_own_tokens(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, attended = batch(name), set[nn.Module]()
    attend = Session.attend

    def watched(self: Session, module: nn.Module, *args: Any) -> Tensor | None:
        attended.add(module)
        return attend(self, module, *args)

    monkeypatch.setattr(Session, "attend", watched)
    tokens, stats = ours(name, given, select_everything())
    assert torch.equal(tokens, own(name, given))
    assert stats.fast_steps[0] > NEW // 2
    assert (stats.sparse_layers, stats.total_layers) == FAMILIES[name].layers
    # no attention of the vision tower came this way
    assert attended
    assert attended <= set(tv.model(name).get_decoder().modules())


@pytest.mark.parametrize("name", FAMILIES)
def test_the_comparison_can_fail(name: str) -> None:
    given = batch(name)
    other = {**given, "pixel_values": -3 * given["pixel_values"].flip(0)}
    assert not torch.equal(own(name, given), own(name, other)), "the images change the text"
    assert len(own(name, given).unique()) > 3


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_a_ragged_batch_are_as_they_are_alone(name: str) -> None:
    model, short, long = tv.model(name), batch(name, 2, 20, seed=2), batch(name, 2, 45)
    ids, mask = left_padded([long["input_ids"], short["input_ids"]])
    together = {"input_ids": ids, "attention_mask": mask}
    for key in long.keys() - together.keys():
        tensors = long[key], short[key]
        together[key] = (ids == tv.IMAGE).long() if "type" in key else torch.cat(tensors)
    alone = [ours(name, given, sparse()) for given in (long, short)]
    tokens, stats = ours(name, together, sparse())
    assert torch.equal(tokens, torch.cat([row for row, _ in alone]))
    assert stats.fast_steps == [s.fast_steps[0] for _, s in alone]
    assert min(stats.fast_steps) > NEW // 2
    assert stats.keys_read_share < 0.7
    assert model.config.get_text_config()._attn_implementation == "sdpa"


def second_turn(name: str, before: Tensor) -> dict[str, Tensor]:
    """What follows the tokens of a first turn: text, and another image where transformers takes
    one behind a filled cache."""
    family = FAMILIES[name]
    if name in POSITIONS_OF_THEIR_OWN:
        ids = torch.cat([before, tiny.prompt(20, seed=7).clamp(max=tv.IMAGE - 1)], dim=1)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    more = tv.prompt(family, 1, 20, seed=7)
    ids = torch.cat([before, more], dim=1)
    new = tv.inputs(family, more, 1, seed=7)
    new |= {key: (ids == tv.IMAGE).long() for key in new if "type" in key}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **new}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_second_turn(name: str) -> None:
    def two_turns(config: Config | None) -> Tensor:
        model = tv.model(name)
        options: dict[str, Any] = {
            "max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True,
        }  # fmt: skip
        with nullcontext() if config is None else reread.attach(model, config) as session:
            one = model.generate(**batch(name), **options)
            given = second_turn(name, one.sequences)
            two = model.generate(**given, **{CACHE: cache_of(one)}, **options)
        if session is not None:
            assert session.stats.fast_steps[0] > NEW // 2
        sequences: Tensor = two.sequences
        return sequences

    assert torch.equal(two_turns(select_everything()), two_turns(None))


@pytest.mark.parametrize("name", FAMILIES)
def test_sparse_prefill_runs_or_is_refused(name: str) -> None:
    chosen = {"chooser": "sampled", "b_sel": 8, "k": 16, "local": 8}
    config = Config.preset("dense").updated({"prefill": chosen})
    given = batch(name, text=120)
    if name in BIDIRECTIONAL:
        with pytest.raises(UnsupportedError, match="see later ones"):
            ours(name, given, config)
        # without an image, no token sees a later one
        given = {key: given[key][:, -100:] for key in ("input_ids", "attention_mask")}
    tokens, stats = ours(name, given, config)
    assert tokens.shape == (1, NEW)
    assert stats.prefill_backend == "reference"
    assert stats.prefill_keys_share < 0.6


def test_cross_attention_is_refused() -> None:
    model = tv.build(tv.MLLAMA)
    with pytest.raises(UnsupportedError, match=r"cross attention in layers \[1\]"):
        reread.attach(model, sparse())


def test_layers_of_different_lengths_are_refused() -> None:
    states = {0: LayerState(), 1: LayerState()}
    for layer, state in states.items():
        state.kv.append(*[torch.zeros(1, 1, 3 + layer, 4)] * 2)
    with pytest.raises(UnsupportedError, match=r"\[3, 4\] positions, not all the same"):
        guard.check_layers("It", states, {0, 1})


@pytest.mark.parametrize("name", FAMILIES)
def test_steps_of_models_that_count_positions_are_not_captured(name: str) -> None:
    model = tv.model(name)
    every = sparse_layers(model.config.get_text_config(decoder=True))
    found = obstacle(model, every)
    if FAMILIES[name].layers == (2, 2):
        assert ("rope_deltas" in found) == (name in POSITIONS_OF_THEIR_OWN)
    else:
        assert "cache of their own kind" in found


def test_the_tiny_models_have_the_tiny_vocabulary() -> None:
    assert tv.model("llava").get_input_embeddings().weight.shape[0] == tiny.VOCABULARY > tv.END
