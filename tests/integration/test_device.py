"""Decode steps on the (interpreted) kernels say what the reference says: tokens, logits, counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import reread
from reread import Config
from reread.integrations.hf.graph import decoder_layers

from . import device, tiny
from .device import PAPER_LIKE, counted, run, same, triton
from .tiny import CACHE, MATRIX, cache_of, left_padded, prompt, sparse

RAGGED = (41, 60)
# budget of all these: sink 2, recent 8, k 16
CASES: dict[str, tuple[Config, tuple[int, ...]]] = {
    "ragged": (sparse(k=16, t_max=4), RAGGED),
    "first step fast": (sparse(k=16, t_max=None, first_step=False), RAGGED),
    "first step fast, paper": (
        sparse(k=16, t_max=4, first_step=False, selector=PAPER_LIKE),
        RAGGED,
    ),
    "paper": (sparse(k=16, t_max=3, selector=PAPER_LIKE), RAGGED),
    "all slow": (sparse(k=16, t_max=1), (33,)),
    "below the budget": (sparse(k=16), (9, 15)),
    "full beside fast": (sparse(k=16, t_max=5), (12, 50)),
    "full beside fast from the prefill": (sparse(k=16, t_max=None, first_step=False), (12, 50)),
    "grows out of the budget": (sparse(k=16), (24, 17)),
    "shorter than the sink": (
        sparse(k=16, sink=4, recent=4, dense_below_budget=False, first_step=False, t_max=4),
        (2, 40),
    ),
    "selects everything": (sparse(k=500, dense_below_budget=False, t_max=4), (30, 44)),
    "recent of one, no sink": (sparse(k=16, sink=0, recent=1, t_max=4), (40,)),
    "dense": (sparse(k=16).updated({"mode": "dense"}), RAGGED),
    "uncertainty": (sparse(k=16, t_max=None, first_step=False, uncertainty=2.5), (40,)),
    "boundary": (sparse(k=16, t_max=None, first_step=False, boundary=True), (40,)),
}
NEW = 5
BY_KERNEL = ("ragged", "first step fast, paper")


def batch(lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    return left_padded([prompt(n, seed=n) for n in lengths])


@pytest.mark.parametrize("name", CASES)
def test_both_runners_say_what_the_reference_says(name: str) -> None:
    config, lengths = CASES[name]
    ids, mask = batch(lengths)
    net, tokenizer = device.model("qwen3"), tiny.tokenizer()
    want, expected = run(net, ids, config, NEW, attention_mask=mask, tokenizer=tokenizer)
    assert (expected.backend, expected.runner) == ("reference", "eager")
    runners = {
        "graph": "graph, compiled layers",
        **({"eager": "eager"} if name in BY_KERNEL else {}),
    }
    for runner, told in runners.items():
        got, stats = run(
            net, ids, triton(runner, config), NEW, attention_mask=mask, tokenizer=tokenizer
        )
        same(got, want)
        assert counted(stats) == counted(expected)
        assert (stats.backend, stats.runner) == ("triton", told)
        assert stats.decode_steps == NEW - 1


def test_the_cases_take_the_paths_that_they_are_named_after() -> None:
    net, found = device.model("qwen3"), {}
    for name, (config, lengths) in CASES.items():
        ids, mask = batch(lengths)
        _, found[name] = run(net, ids, config, NEW, attention_mask=mask, tokenizer=tiny.tokenizer())
    assert found["first step fast"].slow_steps == [0, 0]
    assert found["all slow"].slow_steps == [NEW - 1]
    assert found["below the budget"].full_steps == [NEW - 1] * 2
    assert found["full beside fast"].full_steps == [NEW - 1, 0]
    assert found["full beside fast"].fast_steps[1] > 0
    assert found["grows out of the budget"].slow_reasons == {"no selection": 1}
    assert found["uncertainty"].slow_reasons.keys() == {"uncertainty"}
    assert min(found["uncertainty"].fast_steps) > 0
    assert found["boundary"].slow_reasons.keys() == {"boundary"}


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "mistral": {},
    "qwen3-moe": {},
    "phi3": {},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.11, "residual_multiplier": 0.5},
    "glm4": {},
    "smollm3": {},
}


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model(name: str) -> None:
    net, (ids, mask) = device.build(name, **MODELS[name]), batch((40, 52))
    config = triton("graph", t_max=None)
    want, expected = run(net, ids, device.reference(config), 4, attention_mask=mask)
    got, stats = run(net, ids, config, 4, attention_mask=mask)
    same(got, want)
    assert counted(stats) == counted(expected)
    assert stats.runner == "graph, compiled layers", stats.notes
    assert stats.notes == []


def test_the_layers_of_a_model_with_as_many_experts_as_layers_are_found() -> None:
    net = tiny.build(MATRIX["qwen3-moe"], **device.SHAPE, num_experts=2)
    assert decoder_layers(net, 2) == list(net.model.layers)


def test_layers_are_compiled_once_for_all_of_them() -> None:
    from torch._dynamo.utils import counters

    net = device.small(num_hidden_layers=4)
    torch._dynamo.reset()
    counters.clear()
    with reread.attach(net, device.dense()) as session:
        device.generate(net, prompt(40))
        device.generate(net, prompt(60))
        assert session.stats.runner == "graph, compiled layers"
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("runner", ["eager", "auto"])
def test_a_hybrid_runs_kernel_by_kernel_and_says_why(runner: str) -> None:
    net, ids = device.build("gemma3", query_pre_attn_scalar=64), prompt(45)
    config = triton(runner, t_max=None)
    want, expected = run(net, ids, device.reference(config), 4)
    got, stats = run(net, ids, config, 4)
    same(got, want)
    assert counted(stats) == counted(expected)
    assert (stats.sparse_layers, stats.total_layers, stats.runner) == (2, 4, "eager")
    why = "2 of 4 layers keep a cache of their own kind" if runner == "auto" else "runner='eager'"
    assert stats.notes == [f"decode steps were not captured as graphs: {why}"]


def test_sampling_with_a_seed() -> None:
    net, (ids, mask), found = device.model("qwen3"), batch(RAGGED), []
    config = triton(t_max=None)
    for chosen in (device.reference(config), config):
        torch.manual_seed(3)
        out, stats = run(
            net, ids, chosen, 6, attention_mask=mask, do_sample=True, temperature=1.3, top_k=0
        )
        found.append((out.sequences.tolist(), counted(stats)))
    assert found[0] == found[1]


def test_steps_after_a_rows_end_are_not_counted() -> None:
    net, (ids, mask) = device.model("qwen3"), batch(RAGGED)
    config = triton(t_max=None)
    free, _ = run(net, ids, device.reference(config), 6, attention_mask=mask)
    end = int(free.sequences[0, ids.shape[1] + 2])
    results = [
        run(net, ids, c, 6, attention_mask=mask, eos_token_id=end, pad_token_id=0)
        for c in (device.reference(config), config)
    ]
    same(results[1][0], results[0][0])
    assert counted(results[1][1]) == counted(results[0][1])
    assert sum(results[1][1].fast_steps) < 2 * 5 - 2


@pytest.mark.parametrize(("chunk", "lengths"), [(39, (40,)), (16, (20, 45))])
def test_a_chunked_prefill_gives_the_same_evidence(chunk: int, lengths: tuple[int, ...]) -> None:
    """The last case begins with a chunk that is padding alone in one row."""
    net, (ids, mask) = device.model("qwen3"), batch(lengths)
    config = triton(t_max=None, first_step=False)
    want, _ = run(net, ids, device.reference(config), 4, attention_mask=mask)
    got, _ = run(net, ids, config, 4, attention_mask=mask, prefill_chunk_size=chunk)
    same(got, want)


def test_embeddings_instead_of_ids() -> None:
    net, (ids, mask) = device.model("qwen3"), batch(RAGGED)
    embeds = net.get_input_embeddings()(ids).detach()
    found = []
    for config in (device.reference(triton()), triton()):
        with reread.attach(net, config) as session:
            out = net.generate(
                inputs_embeds=embeds, attention_mask=mask, max_new_tokens=4, do_sample=False
            )
            found.append((out.tolist(), counted(session.stats)))
    assert found[0] == found[1]


def test_a_second_turn_and_a_cropped_cache() -> None:
    net, ids, outputs = device.model("qwen3"), prompt(40), []
    config = triton("graph", t_max=3, selector=PAPER_LIKE)
    for chosen in (device.reference(config), config):
        with reread.attach(net, chosen) as session:
            first = device.generate(net, ids, 4)
            cache = cache_of(first)
            told = torch.cat([first.sequences, prompt(6, seed=8)], 1)
            second = device.generate(net, told, 4, **{CACHE: cache})
            cache.crop(-5)
            kept = second.sequences[:, : cache.get_seq_length()]
            again = torch.cat([kept, prompt(3, seed=9)], 1)
            third = device.generate(net, again, 4, **{CACHE: cache})
            outputs.append((first, second, third, counted(session.stats)))
    for want, got in zip(outputs[0][:3], outputs[1][:3], strict=True):
        same(got, want)
    assert outputs[0][3] == outputs[1][3]


def test_a_loop_whose_cache_grows_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reread.kv.GROWTH_STEP", 2)
    net, ids, found = device.model("qwen3"), prompt(40), []
    config = triton("graph", t_max=5, selector=PAPER_LIKE)
    for chosen in (device.reference(config), config):
        with reread.attach(net, chosen) as session:
            cache = tiny.prefilled(net, ids)
            arenas = set()  # by how often the memory became another: addresses come again
            with session.decoding():
                for token in range(20, 27):
                    logits = device.steps(net, cache, [token])
                    found.append(logits)
                    arenas.add(cache.layers[0].state.kv.moves)
                cache.crop(-3)
                found.append(device.steps(net, cache, [50, 51, 52]))
            assert len(arenas) >= 3
            found.append(counted(session.stats))
    half = len(found) // 2
    for got, want in zip(found[half:-1], found[: half - 1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=2e-3)
    assert found[-1] == found[half - 1]


def test_two_caches_take_turns() -> None:
    net, config, found = device.model("qwen3"), triton(t_max=3), []
    for chosen in (device.reference(config), config):
        with reread.attach(net, chosen) as session:
            caches = [tiny.prefilled(net, prompt(n, seed=n)) for n in (40, 55)]
            with session.decoding():
                turns = [device.steps(net, c, [t]) for t in range(10, 14) for c in caches]
        found.append(torch.cat(turns))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=2e-3)
