"""Where tokens must be dense's, and where they must not depend on batch, chunks, turns, history."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import reread
from reread import Config, SelectorConfig, SoftNMS, Span, UnsupportedError

from . import simulate, tiny
from .tiny import (
    MATRIX,
    always_slow,
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
LENGTHS = (60, 75, 97, 130)

archs = pytest.mark.parametrize("name", MATRIX)

PAPER_LIKE = SelectorConfig(lambda_clip=0.02, refine=SoftNMS(), alpha_cross=0.35, tail_queries=4)
SIMULATED = {
    "span": sparse(),
    "paper": sparse(selector=PAPER_LIKE),
    "paper at every boundary": sparse(selector=PAPER_LIKE, t_max=64, boundary=True),
    "prefill's evidence first": sparse(first_step=False, t_max=7),
    "prefill's evidence first, paper": sparse(first_step=False, t_max=7, selector=PAPER_LIKE),
    "uncertain": sparse(t_max=None, uncertainty=2.5),
    "no refinement, no sink": sparse(sink=0, selector=SelectorConfig(refine=None)),
    "only the current token is recent": sparse(recent=1, k=20),
}


# ---- equal to dense


@archs
def test_always_slow_gives_denses_tokens(name: str) -> None:
    ids = prompt(120)
    got, stats = ours(model(name), ids, always_slow())
    assert got.tolist() == tiny.stock(model(name), ids).tolist()
    assert stats.slow_steps == [NEW - 1]


@archs
def test_selecting_everything_gives_denses_tokens(name: str) -> None:
    ids = prompt(120)
    got, stats = ours(model(name), ids, select_everything())
    assert got.tolist() == tiny.stock(model(name), ids).tolist()
    assert stats.fast_steps[0] > stats.slow_steps[0] > 0
    assert stats.keys_read_share == 1.0


@archs
@pytest.mark.parametrize("preset", ["default", "paper", "dense"])
def test_below_the_budget_any_preset_gives_denses_tokens(name: str, preset: str) -> None:
    ids = prompt(120)
    with tiny.quiet_boundary_warning():
        got, stats = ours(model(name), ids, Config.preset(preset))
    assert got.tolist() == tiny.stock(model(name), ids).tolist()
    assert (stats.full_steps, stats.slow_steps, stats.fast_steps) == ([NEW - 1], [0], [0])


@archs
def test_a_ragged_batch_that_selects_everything_gives_denses_tokens(name: str) -> None:
    ids, mask = left_padded([prompt(n, seed=n) for n in LENGTHS])
    got, stats = ours(model(name), ids, select_everything(), mask=mask)
    assert got.tolist() == tiny.stock(model(name), ids, attention_mask=mask).tolist()
    assert min(stats.fast_steps) > 0


@archs
def test_a_tiny_budget_is_not_dense(name: str) -> None:
    """Without this, every equality here could hold because nothing sparse ever ran."""
    ids = prompt(120)
    got = torch.stack(attached(model(name), ids, sparse()).logits, 1)
    want = torch.stack(
        model(name)
        .generate(
            ids,
            max_new_tokens=NEW,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        .logits,
        1,
    )
    assert (
        float((got[:, :2] - want[:, :2]).abs().max()) < 1e-3
    )  # the prefill and the first, slow, step are dense
    assert float((got[:, 2] - want[:, 2]).abs().max()) > 1e-2


def test_a_tiny_budget_changes_the_text_of_most_models() -> None:
    ids = prompt(120)
    changed = [
        n
        for n in MATRIX
        if ours(model(n), ids, sparse())[0].tolist() != tiny.stock(model(n), ids).tolist()
    ]
    assert len(changed) > len(MATRIX) // 2


def test_the_greedy_text_of_the_tiny_models_wanders() -> None:
    for name in MATRIX:
        assert len(set(tiny.stock(model(name), prompt(120))[0].tolist())) >= 10, name


def test_crossing_the_budget_in_the_middle_of_an_answer_starts_slow() -> None:
    config = sparse(recent=8, k=90, t_max=50)  # budget 100
    ids = prompt(90)
    got, stats = ours(model("llama"), ids, config)
    sim = simulate.run(model("llama"), ids, config, NEW, (0, 1))
    assert sim.kinds[:12] == ["full"] * 10 + ["slow", "fast"]
    assert got[0].tolist() == sim.tokens
    assert (stats.full_steps, stats.slow_steps, stats.fast_steps) == ([10], [1], [NEW - 12])


# ---- equal to slow-fast decoding written down naively


@archs
@pytest.mark.parametrize("case", ["span", "paper", "prefill's evidence first"])
def test_every_architecture_decodes_as_the_equations_say(name: str, case: str) -> None:
    _compare_with_simulation(name, SIMULATED[case])


@pytest.mark.parametrize("case", SIMULATED)
def test_every_option_decodes_as_the_equations_say(case: str) -> None:
    _compare_with_simulation("llama-gqa4", SIMULATED[case])


def _compare_with_simulation(name: str, config: Config) -> None:
    ids = prompt(110)
    sim = simulate.run(model(name), ids, config, NEW, MATRIX[name].full)
    with reread.attach(model(name), config, tokenizer=tiny.tokenizer()) as session:
        out = model(name).generate(
            ids,
            max_new_tokens=NEW,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    assert "fast" in sim.kinds
    assert "slow" in sim.kinds
    assert out.sequences[0, ids.shape[1] :].tolist() == sim.tokens
    torch.testing.assert_close(
        torch.stack(out.logits)[:, 0], torch.stack(sim.logits), rtol=1e-3, atol=2e-3
    )
    assert session.stats.slow_steps == [sim.slow_steps]
    assert session.stats.fast_steps == [sim.kinds.count("fast")]
    assert session.stats.keys_read_share == pytest.approx(sim.keys_read / sim.keys_cached, rel=1e-9)


# ---- a row alone = the row in a batch


@archs
@pytest.mark.parametrize("case", ["span", "paper at every boundary", "prefill's evidence first"])
def test_a_row_alone_is_the_row_in_a_ragged_batch(name: str, case: str) -> None:
    config = SIMULATED[case]
    rows = [prompt(n, seed=n) for n in LENGTHS]
    ids, mask = left_padded(rows)
    together, stats = ours(model(name), ids, config, mask=mask, tokenizer=tiny.tokenizer())
    for b, row in enumerate(rows):
        alone, own = ours(model(name), row, config, tokenizer=tiny.tokenizer())
        assert together[b].tolist() == alone[0].tolist()
        assert stats.slow_steps[b] == own.slow_steps[0]
        assert stats.fast_steps[b] == own.fast_steps[0]
    assert min(stats.fast_steps) > 0


def test_rows_of_one_batch_are_slow_at_different_steps() -> None:
    """Without a mixture of slow and fast rows in one step, the test above would show little."""
    ids, mask = left_padded([prompt(n, seed=n) for n in LENGTHS])
    config = sparse(t_max=64, boundary=True)
    _, stats = ours(model("llama"), ids, config, mask=mask, tokenizer=tiny.tokenizer())
    assert len(set(stats.slow_steps)) > 1


def test_rows_below_and_above_the_budget_share_a_batch() -> None:
    config = sparse(k=75)  # budget 85: the first two rows start below it, the others above
    rows = [prompt(n, seed=n) for n in LENGTHS]
    ids, mask = left_padded(rows)
    together, stats = ours(model("qwen3"), ids, config, mask=mask)
    assert stats.full_steps[:2] == [23, 10]
    assert stats.full_steps[2:] == [0, 0]
    for b, row in enumerate(rows):
        assert together[b].tolist() == ours(model("qwen3"), row, config)[0][0].tolist()


def test_the_order_of_rows_does_not_matter() -> None:
    rows = [prompt(n, seed=n) for n in LENGTHS]
    ids, mask = left_padded(rows)
    one, _ = ours(model("llama"), ids, sparse(), mask=mask)
    other, _ = ours(model("llama"), ids.flip(0), sparse(), mask=mask.flip(0))
    assert one.tolist() == other.flip(0).tolist()


def test_identical_rows_give_identical_text() -> None:
    got, _ = ours(model("llama"), prompt(100).repeat(5, 1), sparse())
    assert all(row == got[0].tolist() for row in got.tolist())


# ---- chunks


# one token at a time is slow: one model of each mechanism is enough
CHUNKS = [(name, chunk) for name in MATRIX for chunk in (16, 17, 109)] + [
    (name, chunk) for name in ("llama", "gemma3", "qwen3.5") for chunk in (1, 3, 110, 500)
]


@pytest.mark.parametrize(("name", "chunk"), CHUNKS)
def test_any_chunk_size_gives_what_one_chunk_gives(name: str, chunk: int) -> None:
    config = sparse(
        first_step=False,
        t_max=6,
        selector=SelectorConfig(refine=Span(back=1, ahead=3), tail_queries=16),
    )
    ids = prompt(110)
    whole, _ = ours(model(name), ids, config)
    pieces, stats = ours(model(name), ids, config, prefill_chunk=chunk)
    assert pieces.tolist() == whole.tolist()
    assert stats.fast_steps[0] > 0
    assert stats.decode_steps == NEW - 1  # chunks of one token are no decode steps


@pytest.mark.parametrize("chunk", [7, 16])
def test_chunks_and_padding_together_change_nothing(chunk: int) -> None:
    rows = [prompt(n, seed=n) for n in LENGTHS]
    ids, mask = left_padded(rows)
    config = sparse(first_step=False)
    got, _ = ours(model("llama"), ids, config, mask=mask, prefill_chunk=chunk)
    for b, row in enumerate(rows):
        assert got[b].tolist() == ours(model("llama"), row, config)[0][0].tolist()


# ---- turns


def two_turns(name: str, config: Config | None) -> tuple[list[int], list[int]]:
    """Prompt, answer, further prompt, answer: on one cache. None: transformers alone."""
    net, first, more = model(name), prompt(90), prompt(25, seed=2)

    def answer(ids: torch.Tensor, cache: object, new: int) -> tuple[torch.Tensor, object]:
        options = {} if cache is None else {tiny.CACHE: cache}
        out = net.generate(
            ids, max_new_tokens=new, do_sample=False, return_dict_in_generate=True, **options
        )
        return out.sequences, cache_of(out)

    def both() -> tuple[list[int], list[int]]:
        sequence, cache = answer(first, None, 9)
        second = torch.cat([sequence, more], 1)
        final, _ = answer(second, cache, NEW)
        return sequence[0, first.shape[1] :].tolist(), final[0, second.shape[1] :].tolist()

    if config is None:
        return both()
    with reread.attach(net, config):
        return both()


@archs
@pytest.mark.parametrize("make", [always_slow, select_everything])
def test_two_turns_give_what_denses_two_turns_give(name: str, make: Callable[[], Config]) -> None:
    assert two_turns(name, make()) == two_turns(name, None)


@archs
@pytest.mark.parametrize("split", [1, 50, 94, 109])
def test_a_cached_prefix_and_the_rest_give_what_the_whole_prompt_gives(
    name: str, split: int
) -> None:
    ids, config = prompt(110), sparse(t_max=6)
    whole, _ = ours(model(name), ids, config)
    cached = tiny.prefilled(model(name), ids[:, :split])
    got, stats = ours(model(name), ids, config, **{tiny.CACHE: cached})
    assert got.tolist() == whole.tolist()
    assert stats.fast_steps[0] > 0
    assert stats.decode_steps == NEW - 1


@pytest.mark.parametrize("split", [1, 50, 94])
def test_a_rest_of_w_tokens_is_evidence_enough_whoever_cached_the_prefix(split: int) -> None:
    ids, config = prompt(110), sparse(first_step=False)
    assert config.selector.tail_queries == 16
    whole, _ = ours(model("qwen3"), ids, config)
    got, _ = ours(
        model("qwen3"), ids, config, **{tiny.CACHE: tiny.prefilled(model("qwen3"), ids[:, :split])}
    )
    assert got.tolist() == whole.tolist()


@archs
@pytest.mark.parametrize("split", [60, 109])
def test_a_prefix_cached_under_attach_serves_with_the_evidence_of_its_own_queries(
    name: str, split: int
) -> None:
    ids, config, net = prompt(110), sparse(first_step=False), model(name)
    whole, _ = ours(net, ids, config)
    with reread.attach(net, config):
        cached = tiny.prefilled(net, ids[:, :split])
        out = net.generate(ids, max_new_tokens=NEW, do_sample=False, **{tiny.CACHE: cached})
    assert out[:, 110:].tolist() == whole.tolist()


@pytest.mark.parametrize("case", ["span", "paper", "prefill's evidence first"])
def test_a_second_turn_in_a_ragged_batch_gives_what_the_row_gives_alone(case: str) -> None:
    """The second turn's padding lies inside a row: it is not recent, and nobody's neighbour."""
    net, config = model("llama"), SIMULATED[case]
    first = [prompt(n, seed=n) for n in (60, 90)]
    more = [prompt(n, seed=n + 1) for n in (21, 4)]

    def talk(rows: list[int]) -> list[list[int]]:
        ids, mask = left_padded([first[b] for b in rows])
        with reread.attach(net, config):
            one = net.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=6,
                do_sample=False,
                return_dict_in_generate=True,
            )
            more_ids, more_mask = left_padded([more[b] for b in rows])
            everything = torch.cat([one.sequences, more_ids], 1)
            full_mask = torch.cat([mask, torch.ones(len(rows), 6, dtype=mask.dtype), more_mask], 1)
            two = net.generate(
                everything,
                attention_mask=full_mask,
                max_new_tokens=16,
                do_sample=False,
                **{tiny.CACHE: cache_of(one)},
            )
        return two[:, everything.shape[1] :].tolist()

    assert talk([0, 1]) == [talk([0])[0], talk([1])[0]]


def test_a_second_turn_after_sparse_steps_uses_nothing_stale() -> None:
    """Turn one's window and selection must not survive into turn two: it starts like dense."""
    net, ids, more = model("llama"), prompt(90), prompt(30, seed=5)
    with reread.attach(net, sparse()) as session:
        one = net.generate(ids, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
        longer = torch.cat([one.sequences, more], 1)
        two = attached_logits(net, longer, cache_of(one))
        assert session.stats.slow_steps[0] >= 1
    with reread.attach(net, sparse()):
        again = net.generate(ids, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    dense = attached_logits(net, longer, cache_of(again))
    torch.testing.assert_close(
        two[:2], dense[:2], rtol=1e-3, atol=1e-3
    )  # the prefill, and the first step: slow


def attached_logits(net: Any, ids: torch.Tensor, cache: object) -> torch.Tensor:
    out = net.generate(
        ids,
        max_new_tokens=4,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **{tiny.CACHE: cache},
    )
    return torch.stack(out.logits)


# ---- history


@pytest.mark.parametrize("name", ["llama", "qwen3.5"])
def test_what_ran_before_does_not_matter(name: str) -> None:
    net, config = model(name), sparse(boundary=True, uncertainty=2.5)
    a, b = prompt(100, seed=3), prompt(80, rows=2, seed=4)
    fresh = {}
    for key, ids in (("a", a), ("b", b)):
        fresh[key] = attached(net, ids, config, tokenizer=tiny.tokenizer())
    with reread.attach(net, config, tokenizer=tiny.tokenizer()):
        for key in ("a", "b", "b", "a"):
            out = net.generate(
                {"a": a, "b": b}[key],
                max_new_tokens=NEW,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            assert torch.equal(out.sequences, fresh[key].sequences)
            assert torch.equal(torch.stack(out.logits), torch.stack(fresh[key].logits))


def test_a_generation_that_broke_off_leaves_nothing_behind() -> None:
    net, ids = model("llama"), prompt(100)
    want, _ = ours(net, ids, sparse())

    class Broken(Exception):
        pass

    def stop(*_: object) -> None:
        raise Broken

    with reread.attach(net, sparse()):
        with pytest.raises(Broken):
            net.generate(ids, max_new_tokens=NEW, do_sample=False, logits_processor=[stop])
        got = net.generate(ids, max_new_tokens=NEW, do_sample=False)
    assert got[:, 100:].tolist() == want.tolist()


# ---- other precisions, other implementations


@archs
def test_bfloat16_runs_the_sparse_path(name: str) -> None:
    net = tiny.build(MATRIX[name]).to(torch.bfloat16)
    ids, mask = left_padded([prompt(n, seed=n) for n in (60, 97)])
    got, stats = ours(net, ids, sparse(), mask=mask)
    assert got.shape == (2, NEW)
    assert min(stats.fast_steps) > 0


def test_bfloat16_that_selects_everything_stays_close_to_dense() -> None:
    net, ids = tiny.build(MATRIX["llama"]).to(torch.bfloat16), prompt(120)
    got = torch.stack(attached(net, ids, select_everything(), new=3).logits).float()
    dense = torch.stack(
        net.generate(
            ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_logits=True
        ).logits
    ).float()
    assert (
        cache_of(attached(net, ids, select_everything(), new=2)).layers[0].keys.dtype
        == torch.bfloat16
    )
    for a, b in zip(got, dense, strict=True):
        # bfloat16 keeps 8 bits: two layers' worth of roundings, on logits of about 10
        assert float((a - b).abs().max()) < 0.05 * float(b.abs().max())


def test_eager_attention_is_served_like_sdpa() -> None:
    net, ids = tiny.build(MATRIX["llama"], attn_implementation="eager"), prompt(120)
    assert net.config._attn_implementation == "eager"
    got, stats = ours(net, ids, select_everything())
    assert got.tolist() == tiny.stock(model("llama"), ids).tolist()
    assert stats.fast_steps[0] > 0
    assert net.config._attn_implementation == "eager"


def test_only_full_attention_layers_are_made_sparse() -> None:
    for name, arch in MATRIX.items():
        _, stats = ours(model(name), prompt(60), sparse(), new=3)
        assert stats.sparse_layers == len(arch.full), name
        assert stats.total_layers == model(name).config.num_hidden_layers, name


def test_a_model_with_windows_only_decodes_as_without_reread_and_says_so() -> None:
    net, ids = tiny.build(tiny.MISTRAL_WINDOWED), prompt(120)
    got, stats = ours(net, ids, sparse())
    assert got.tolist() == tiny.stock(net, ids).tolist()
    assert stats.sparse_layers == 0
    assert stats.keys_read_share == 1.0
    assert any("full-attention" in note for note in stats.notes)


@pytest.mark.parametrize(
    ("arch", "reason"),
    [(tiny.GPT_OSS, "sinks"), (tiny.GEMMA2, "softcap")],
    ids=["gpt-oss", "gemma2"],
)
def test_attention_with_terms_of_its_own_is_refused_at_once(arch: tiny.Arch, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason), reread.attach(tiny.build(arch), sparse()):
        raise AssertionError("attached")
