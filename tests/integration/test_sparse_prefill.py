"""A prompt read sparsely inside transformers: what it may not change, and what it must."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import reread
from reread import Config, SparsePrefill, UnsupportedError

from . import tiny
from .tiny import MATRIX, left_padded, model, prompt, sparse

NEW = 16
archs = pytest.mark.parametrize("name", MATRIX)


def prefilled(**options: Any) -> Config:
    """Dense decoding after a sparse prefill."""
    options = {"k": 24, "b_sel": 8, "sink": 2, "local": 8, **options}
    return Config(mode="dense", prefill=SparsePrefill(**options))


def run(net: Any, ids: torch.Tensor, config: Config, **options: Any) -> Any:
    return reread.generate(
        net, ids, config=config, max_new_tokens=NEW, do_sample=False, tokenizer=tiny.tokenizer(),
        **options,
    )  # fmt: skip


@archs
def test_a_budget_for_everything_gives_denses_tokens(name: str) -> None:
    ids = prompt(120)
    # k = 119 leaves the dense path out of it only where the window and sink count too
    config = prefilled(k=90, sink=0, local=1)
    got = run(model(name), ids, config.updated({"prefill.k": 119}))
    want = run(model(name), ids, Config.preset("dense"))
    assert got.sequences.tolist() == want.sequences.tolist()
    assert got.stats.prefill_keys_share == 1.0


@archs
def test_less_is_read_and_said(name: str) -> None:
    out = run(model(name), prompt(120), prefilled())
    assert 0.2 < out.stats.prefill_keys_share < 0.8
    assert out.stats.sparse_layers == len(MATRIX[name].full)


def test_sparse_attention_really_ran() -> None:
    """With a budget too small for anything the text is another one."""
    net = model("llama")
    got = run(net, prompt(120), prefilled(k=1, sink=0, local=1, b_sel=1))
    assert (
        got.sequences.tolist() != run(net, prompt(120), Config.preset("dense")).sequences.tolist()
    )


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "qwen3.5"])
@pytest.mark.parametrize("chooser", ["oracle", "sampled"])
def test_a_row_is_the_same_alone_and_in_a_ragged_batch(name: str, chooser: str) -> None:
    rows = [prompt(n, seed=n) for n in (60, 75, 97)]
    config = prefilled(chooser=chooser)
    ids, mask = left_padded(rows)
    together = run(model(name), ids, config, attention_mask=mask).sequences[:, ids.shape[1] :]
    for row, alone in zip(together.tolist(), rows, strict=True):
        want = run(model(name), alone, config).sequences[0, alone.shape[1] :]
        assert row == want.tolist()


@pytest.mark.parametrize("chunk", [8, 16, 56])
def test_chunks_of_whole_blocks_change_nothing(chunk: int) -> None:
    net, ids = model("qwen3"), prompt(117)
    whole = run(net, ids, prefilled())
    parts = run(net, ids, prefilled(), prefill_chunk=chunk)
    assert parts.sequences.tolist() == whole.sequences.tolist()
    assert parts.stats.prefill_keys_share == pytest.approx(whole.stats.prefill_keys_share)


def test_queries_of_their_own_make_any_chunk_the_same() -> None:
    net, ids, config = model("qwen3"), prompt(117), prefilled(b_sel=1)
    whole = run(net, ids, config)
    for chunk in (5, 13, 64):
        assert run(net, ids, config, prefill_chunk=chunk).sequences.tolist() == (
            whole.sequences.tolist()
        )


def test_it_goes_together_with_slow_fast_decoding() -> None:
    both = sparse().updated({"prefill": {"k": 24, "b_sel": 8, "sink": 2, "local": 8}})
    out = run(model("qwen3"), prompt(120), both)
    assert out.stats.fast_steps[0] > 0
    assert out.stats.keys_read_share < 1
    assert out.stats.prefill_keys_share < 1


def test_padding_between_turns_is_refused() -> None:
    net, ids = model("llama"), prompt(60)
    mask = torch.ones_like(ids)
    mask[0, 30] = 0
    with (
        reread.attach(net, prefilled(), tokenizer=tiny.tokenizer()),
        pytest.raises(UnsupportedError, match="padding behind or between"),
    ):
        net(ids, attention_mask=mask, use_cache=True, **{tiny.CACHE: tiny.DynamicCache()})


def test_settings_by_name() -> None:
    config = Config().updated({"prefill": "sampled"})
    assert config.prefill == SparsePrefill(chooser="sampled")
    assert config.updated({"b_sel": 16, "prefill.k": 9}).prefill == SparsePrefill(
        chooser="sampled", b_sel=16, k=9
    )
    assert config.updated({"prefill": "none"}).prefill is None
    assert Config.from_dict(config.to_dict()) == config
    with pytest.raises(reread.ConfigError, match=r"prefill\.chooser='magic'"):
        Config().updated({"prefill": "magic"})
