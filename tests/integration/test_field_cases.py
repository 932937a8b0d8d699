"""What users of neighbouring projects reported, one test per kind, named after the report.

Reports about prefill, training, serving engines and published tables belong to other parts. A floor
per task (duo-attention #8) is in test_quality.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import reread
from reread import Config, SelectorConfig, SoftNMS, Span

from . import simulate, tiny
from .tiny import (
    CACHE,
    MATRIX,
    attached,
    cache_of,
    left_padded,
    model,
    ours,
    prompt,
    select_everything,
    sparse,
)

NEW = 24
PAPER_LIKE = SelectorConfig(lambda_clip=0.02, refine=SoftNMS(), alpha_cross=0.35)


def logits(output: Any) -> Tensor:
    return torch.stack(output.logits)[:, 0]


def with_random_norms(name: str) -> Any:
    """QK-norm scales far from one, so that scores before and after the norm disagree."""
    net = tiny.build(MATRIX[name])
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for path, parameter in net.named_parameters():
            if "q_norm" in path or "k_norm" in path:
                parameter.copy_(0.2 + 2 * torch.rand(parameter.shape, generator=g))
    return net


@pytest.mark.parametrize("name", ["llama", "glm4", "smollm3"])
def test_kvpress_16_selected_keys_keep_their_original_rotary_positions(name: str) -> None:
    """Against masks over the whole cache; RoPE on all, half of each head, half of the layers."""
    ids, config = prompt(140), sparse(k=20, t_max=9)
    sim = simulate.run(model(name), ids, config, NEW, MATRIX[name].full)
    out = attached(model(name), ids, config)
    assert out.sequences[0, 140:].tolist() == sim.tokens
    torch.testing.assert_close(logits(out), torch.stack(sim.logits), rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["qwen3", "olmo2", "gemma3"])
def test_kvpress_76_evidence_and_prior_use_queries_and_keys_after_norm_and_rope(name: str) -> None:
    net, ids = with_random_norms(name), prompt(120)
    for config in (sparse(selector=PAPER_LIKE), sparse(first_step=False, selector=PAPER_LIKE)):
        sim = simulate.run(net, ids, config, NEW, MATRIX[name].full)
        out = attached(net, ids, config)
        assert out.sequences[0, 120:].tolist() == sim.tokens
        torch.testing.assert_close(logits(out), torch.stack(sim.logits), rtol=1e-3, atol=2e-3)


def test_kvpress_76_the_norm_matters_to_what_is_selected() -> None:
    """The test above could not fail if norms changed nothing."""
    ids, config = prompt(120), sparse(selector=PAPER_LIKE)
    plain = simulate.run(tiny.build(MATRIX["qwen3"]), ids, config, 3, (0, 1))
    scaled = simulate.run(with_random_norms("qwen3"), ids, config, 3, (0, 1))
    assert plain.chosen[0][0] != scaled.chosen[0][0]


@pytest.mark.parametrize("name", ["llama", "qwen3.5"])
def test_kvpress_25_and_kivi_46_padding_in_a_batch_changes_no_row(name: str) -> None:
    rows = [prompt(n, seed=n) for n in (50, 64, 80, 111)]
    ids, mask = left_padded(rows)
    config = sparse(boundary=True, t_max=6, selector=PAPER_LIKE)
    together, _ = ours(model(name), ids, config, mask=mask, tokenizer=tiny.tokenizer())
    alone = [
        ours(model(name), row, config, tokenizer=tiny.tokenizer())[0][0].tolist() for row in rows
    ]
    assert together.tolist() == alone


def test_kvpress_25_what_the_padding_is_does_not_matter() -> None:
    rows = [prompt(n, seed=n) for n in (50, 90)]
    ids, mask = left_padded(rows)
    other = torch.where(mask == 0, torch.randint(0, 128, ids.shape), ids)
    assert ours(model("llama"), ids, sparse(), mask=mask)[0].tolist() == (
        ours(model("llama"), other, sparse(), mask=mask)[0].tolist()
    )


def test_kvpress_25_padding_on_the_right_is_what_stock_makes_of_it() -> None:
    """transformers warns and answers from the padding; the sparse path must do the same."""
    rows = [prompt(n, seed=n) for n in (50, 90)]
    ids = torch.cat([torch.nn.functional.pad(row, (0, 90 - row.shape[1])) for row in rows])
    mask = torch.tensor([[1] * row.shape[1] + [0] * (90 - row.shape[1]) for row in rows])
    got, stats = ours(model("llama"), ids, select_everything(), mask=mask)
    assert got.tolist() == tiny.stock(model("llama"), ids, attention_mask=mask).tolist()
    assert min(stats.fast_steps) > 0


def test_kvpress_192_no_state_of_one_prompt_reaches_the_next() -> None:
    net, config = model("qwen3"), sparse(first_step=False, uncertainty=2.0, boundary=True)
    target = prompt(100, seed=11)
    want = attached(net, target, config, tokenizer=tiny.tokenizer())
    with reread.attach(net, config, tokenizer=tiny.tokenizer()):
        for seed, length, rows in ((1, 100, 1), (2, 30, 3), (3, 150, 1)):
            net.generate(prompt(length, rows=rows, seed=seed), max_new_tokens=7, do_sample=False)
            again = net.generate(
                target,
                max_new_tokens=NEW,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            assert torch.equal(logits(again), logits(want))


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3.5", "gemma3"])
def test_kvpress_243_a_prompt_of_one_token_is_a_prefill(name: str) -> None:
    got, stats = ours(model(name), prompt(1), sparse(dense_below_budget=False, recent=4, k=4))
    assert stats.decode_steps == NEW - 1
    assert stats.slow_steps[0] + stats.fast_steps[0] == NEW - 1
    same, _ = ours(model(name), prompt(1), select_everything())
    assert same.tolist() == tiny.stock(model(name), prompt(1)).tolist()
    assert got[0, 0] == same[0, 0]


@torch.no_grad()
def test_kvpress_243_one_further_token_of_a_prompt_is_a_prefill_too() -> None:
    """A second turn of a single token, on a full cache: no decode step, although T == 1."""
    net, ids = model("llama"), prompt(100)
    dense = net(ids).logits[0, -1]
    with reread.attach(net, sparse(k=4)) as session:
        cache = tiny.prefilled(net, ids[:, :99])
        out = net.generate(
            ids,
            max_new_tokens=1,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **{CACHE: cache},
        )
        assert session.stats.decode_steps == 0
    torch.testing.assert_close(out.logits[0][0], dense, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3.5"])
def test_kvpress_257_nothing_is_evicted_or_rewritten(name: str) -> None:
    net, ids, full = model(name), prompt(100), MATRIX[name].full
    dense = tiny.prefilled(net, ids)
    short, long = (cache_of(attached(net, ids, sparse(t_max=4), new=new)) for new in (8, NEW))
    for i in full:
        for part in ("keys", "values"):
            kept, older, prefill = (getattr(c.layers[i], part) for c in (long, short, dense))
            assert kept.shape[2] == 100 + NEW - 1
            assert torch.equal(kept[:, :, :100], prefill)
            assert torch.equal(kept[:, :, : older.shape[2]], older)


def test_kvpress_257_a_position_left_out_can_return() -> None:
    sim = simulate.run(model("llama"), prompt(120), sparse(t_max=4), NEW, (0, 1))
    seen = [
        set(step[0][0]) for step, kind in zip(sim.chosen, sim.kinds, strict=True) if kind == "slow"
    ]
    returned = [j for a, b, c in zip(seen, seen[1:], seen[2:], strict=False) for j in (a & c) - b]
    assert returned  # the simulation's text is reread's, token by token (test_equal_to_dense.py)
    assert ours(model("llama"), prompt(120), sparse(t_max=4))[0][0].tolist() == sim.tokens


@pytest.mark.parametrize("length", [1, 2, 3, 9, 10, 11, 22, 30])
@pytest.mark.parametrize("preset", ["default", "paper"])
def test_kvpress_134_short_contexts_equal_dense(length: int, preset: str) -> None:
    with tiny.quiet_boundary_warning():
        got, stats = ours(model("qwen3"), prompt(length), Config.preset(preset))
    assert got.tolist() == tiny.stock(model("qwen3"), prompt(length)).tolist()
    assert stats.full_steps == [NEW - 1]


@pytest.mark.parametrize("length", [1, 2, 3, 9, 10, 11, 22, 30])
def test_kvpress_134_short_contexts_survive_the_sparse_path_as_well(length: int) -> None:
    """Shorter than sink, than recent, than both: forced through the gather, nothing may be lost."""
    got, stats = ours(model("qwen3"), prompt(length), select_everything())
    assert got.tolist() == tiny.stock(model("qwen3"), prompt(length)).tolist()
    assert stats.fast_steps[0] > 0


@pytest.mark.parametrize("length", [1, 3, 9, 30])
def test_kvpress_134_a_short_row_beside_a_long_one(length: int) -> None:
    ids, mask = left_padded([prompt(length, seed=3), prompt(120, seed=4)])
    got, _ = ours(model("qwen3"), ids, select_everything(), mask=mask)
    assert got.tolist() == tiny.stock(model("qwen3"), ids, attention_mask=mask).tolist()
    budgeted, stats = ours(model("qwen3"), ids, sparse(k=60), mask=mask)
    assert budgeted[0].tolist() == tiny.stock(model("qwen3"), prompt(length, seed=3))[0].tolist()
    assert stats.full_steps == [NEW - 1, 0]
    assert stats.fast_steps[1] > 0


@pytest.mark.parametrize("chunk", [1, 5, 16, 33, 139])
def test_minference_186_chunks_give_the_selection_of_the_whole(chunk: int) -> None:
    """The first step is fast: it reads what the prefill's own last queries chose, no more."""
    ids, config = prompt(140), sparse(first_step=False, t_max=None, k=20)
    whole = attached(model("llama"), ids, config)
    chunked = attached(model("llama"), ids, config, prefill_chunk_size=chunk)
    assert torch.equal(chunked.sequences, whole.sequences)
    torch.testing.assert_close(logits(chunked), logits(whole), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "llama-gqa4", "qwen3.5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_snapkv_16_and_think_4_the_cache_holds_kv_heads_not_query_heads(
    name: str, dtype: torch.dtype
) -> None:
    net, rows, length = tiny.build(MATRIX[name], max_position_embeddings=2048).to(dtype), 2, 700
    cache = cache_of(attached(net, prompt(length, rows=rows), sparse(), new=20))
    cached, c = length + 20 - 1, net.config
    exact = (
        2
        * cached
        * c.num_key_value_heads
        * c.head_dim
        * dtype.itemsize
        * rows
        * len(MATRIX[name].full)
    )
    buffers = {}
    for i in MATRIX[name].full:
        for tensor in (cache.layers[i].keys, cache.layers[i].values):
            assert tensor.shape == (rows, c.num_key_value_heads, cached, c.head_dim)
            buffers[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    assert exact <= sum(buffers.values()) <= 1.125 * exact


def test_snapkv_16_the_cache_of_a_prefill_alone_has_little_slack() -> None:
    net = tiny.build(MATRIX["llama"], max_position_embeddings=2048)
    with reread.attach(net, sparse()):
        cache = tiny.prefilled(net, prompt(1500))
    exact = 1500 * 2 * 16 * 4
    for layer in cache.layers:
        assert exact <= layer.keys.untyped_storage().nbytes() <= 1.125 * exact


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"sink": 0}, "logits"),
        ({"recent": 20}, "logits"),
        ({"k": 13}, "logits"),
        ({"t_max": 4}, "stats"),
        ({"t_max": None}, "stats"),
        ({"boundary": True}, "stats"),
        ({"uncertainty": 2.0}, "stats"),
        ({"first_step": False}, "stats"),
        ({"tail_queries": 2}, "prefill's choice"),
        ({"selector.alpha": 3.0}, "prefill's choice"),
        ({"lambda_clip": 0.5}, "logits"),
        ({"lambda_clip": 0.5, "gamma": 3.0}, "prior"),
        ({"lambda_clip": 0.5, "beta": 9.0}, "prior"),
        ({"lambda_clip": 0.5, "p": 7.0}, "prior"),
        ({"lambda_clip": 0.5, "eta": 9.0}, "prior"),
        ({"refine": "none"}, "logits"),
        ({"refine": "soft_nms"}, "logits"),
        ({"back": 5}, "logits"),
        ({"ahead": 0}, "logits"),
        ({"alpha_cross": 3.0}, "logits"),
        ({"alpha_cross": 3.0, "temperature": 9.0}, "cross"),
        ({"mode": "dense"}, "stats"),
        ({"k": 200, "dense_below_budget": False}, "forced"),
    ],
    ids=str,
)
def test_sglang_6867_every_option_has_an_effect(change: dict[str, Any], where: str) -> None:
    base = sparse()
    base = {
        "prefill's choice": base.updated({"first_step": False, "t_max": None}),
        "prior": base.updated({"lambda_clip": 0.5}),
        "cross": base.updated({"alpha_cross": 3.0}),
        "forced": base.updated({"k": 200}),
    }.get(where, base)
    runs = []
    for config in (base, base.updated(change)):
        with reread.attach(model("llama"), config, tokenizer=tiny.tokenizer()) as session:
            out = model("llama").generate(
                prompt(120),
                max_new_tokens=NEW,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        runs.append((logits(out), session.stats))
    (a, before), (b, after) = runs
    if where in ("stats", "forced"):
        assert (before.slow_steps, before.fast_steps) != (after.slow_steps, after.fast_steps)
    else:
        assert float((a - b).abs().max()) > 1e-3


def test_sglang_6867_stats_prove_the_path_that_ran() -> None:
    net = model("llama")
    _, fast = ours(net, prompt(120), sparse())
    assert fast.fast_steps[0] > fast.slow_steps[0] > 0
    assert fast.keys_read_share < 0.5
    _, dense = ours(net, prompt(120), Config.preset("dense"))
    assert dense.fast_steps == [0]
    assert dense.keys_read_share == 1.0


def test_sglang_6867_a_backend_that_is_not_there_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(reread.UnsupportedError, match="triton"):
        ours(model("llama"), prompt(50), sparse().updated({"backend": "triton"}))


def all_scores_equal(name: str = "llama") -> Any:
    """Queries of zero: every allowed position has the same probability, every choice is a tie."""
    net = tiny.build(MATRIX[name])
    with torch.no_grad():
        for layer in net.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    return net


def test_vllm_57815_and_atom_1832_ties_go_to_the_lower_index_at_any_batch_size() -> None:
    net, config = (
        all_scores_equal(),
        sparse(sink=2, k=12, selector=SelectorConfig(refine=Span(back=0, ahead=0))),
    )
    rows = [prompt(n, seed=n) for n in (60, 75, 97, 130)]
    sims = [simulate.run(net, row, config, NEW, (0, 1)) for row in rows]
    assert sims[0].chosen[0][0] == [list(range(2, 14))] * 2
    ids, mask = left_padded(rows)
    together, _ = ours(net, ids, config, mask=mask)
    assert together.tolist() == [sim.tokens for sim in sims]
    for row, sim in zip(rows, sims, strict=True):
        out = attached(net, row, config)
        torch.testing.assert_close(logits(out), torch.stack(sim.logits), rtol=1e-3, atol=2e-3)


def test_vllm_39629_and_47327_short_requests_run_dense_and_gather_nothing() -> None:
    with tiny.quiet_boundary_warning():
        _, stats = ours(model("llama"), prompt(120), Config.preset("default"))
    assert (stats.full_steps, stats.slow_steps, stats.fast_steps) == ([NEW - 1], [0], [0])
    assert stats.slow_reasons == {}


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5"])
def test_vllm_43559_a_cached_prefix_on_a_hybrid_model_changes_nothing(name: str) -> None:
    ids, config = prompt(120), sparse(t_max=6)
    whole = attached(model(name), ids, config)
    for split in (40, 100, 119):
        cached = tiny.prefilled(model(name), ids[:, :split])
        got = attached(model(name), ids, config, **{CACHE: cached})
        assert torch.equal(got.sequences, whole.sequences)
        torch.testing.assert_close(logits(got), logits(whole), rtol=1e-3, atol=5e-3)


def test_x_attention_16_the_dense_arm_does_denses_work_and_no_more() -> None:
    """The baseline: stock's logits, each cached key read once, no cache copied at each step."""
    net, ids = model("llama"), prompt(120)
    want = net.generate(
        ids, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    got = attached(net, ids, Config.preset("dense"))
    torch.testing.assert_close(logits(got), logits(want), rtol=1e-4, atol=1e-3)
    cache = tiny.prefilled(net, ids)
    addresses = set()
    with reread.attach(net, Config.preset("dense")) as session, torch.no_grad(), session.decoding():
        for _ in range(40):
            net(torch.tensor([[5]]), use_cache=True, **{CACHE: cache})
            addresses.add(cache.layers[0].keys.data_ptr())
    assert session.stats.keys_read_share == 1.0
    assert session.stats.full_steps == [40]
    assert len(addresses) <= 3
