"""The task `fidelity` on tiny random models."""

from __future__ import annotations

import copy
import functools
import json
import math
from typing import Any

import pytest
import torch
from tokenizers.pre_tokenizers import CharDelimiterSplit
from torch import Tensor

from reread import Config, attach
from reread.errors import ConfigError, InputError
from reread.evaluation import fidelity, texts
from reread.evaluation.methods import Method, parse_methods
from reread.evaluation.tasks.base import Sample
from reread.evaluation.tasks.fidelity_task import FidelityTask, make_fidelity
from reread.evaluation.tasks.watch import watching
from reread.integrations.hf.load import Loaded
from reread.policy.trigger import LINE_ENDS, SENTENCE_ENDS
from reread.types import StepKind, Watched

from . import tiny

TOKENS, STEPS = 96, 24
DENSE = Method("dense", Config.preset("dense"))
SPARSE = Method("sparse", tiny.sparse(boundary=True))
EVERYTHING = Method("everything", tiny.select_everything())


@functools.cache
def tokenizer() -> Any:
    """The tiny tokenizer, which knows single words only, for words with spaces between them."""
    made = copy.deepcopy(tiny.tokenizer())
    made.backend_tokenizer.pre_tokenizer = CharDelimiterSplit(" ")
    return made


def words(count: int, seed: int = 1) -> str:
    """As many tokens of the tiny tokenizer, without its special ones."""
    return " ".join(tokenizer().convert_ids_to_tokens(tiny.prompt(count, seed=seed)[0]))


def loaded(name: str) -> Loaded:
    return Loaded(tiny.model(name), tokenizer(), name)


def task(count: int = 1, seed: int = 0, steps: int = STEPS) -> FidelityTask:
    sources = {"one": words(300), "two": words(400, seed=2)}
    made = make_fidelity(
        tokenizer(), tokens=TOKENS, count=count, seed=seed, texts=sources, steps=steps
    )
    assert isinstance(made, FidelityTask)
    return made


def samples(name: str, *methods: Method, number: int = 0) -> list[Sample]:
    return list(task(count=2).measure(number, methods, loaded(name)))


@pytest.mark.parametrize("name", ["llama", "llama-gqa4", "qwen3"])
def test_figures_of_dense_ours_and_everything(name: str) -> None:
    dense, sparse, everything = samples(name, DENSE, SPARSE, EVERYTHING)
    assert dense.score == 1.0
    assert dense.figures["kl"] == dense.figures["kl_max"] == 0.0
    assert dense.figures["ppl"] == pytest.approx(dense.figures["ppl_dense"])
    assert "mass_fast" not in dense.figures
    assert everything.score == 1.0
    assert everything.figures["kl"] == pytest.approx(0.0, abs=1e-4)
    assert everything.figures["mass_fast"] == pytest.approx(1.0, abs=1e-5)
    figures = sparse.figures
    assert 0 < figures["mass_fast"] < 1
    assert 0 < figures["kl"] < figures["kl_max"]
    assert 0.25 < figures["keys_read_share"] < 0.75  # 22 to 26 of 73 to 96, or all
    assert 0 < figures["slow_rate"] < 1
    assert 0 <= figures["useless_share"] <= 1
    assert 0 < figures["stability_inside"] < 1
    assert figures["sentences"] > 0
    for sample in (dense, sparse, everything):
        assert sample.kind == "one"
        assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample


def test_perplexity_and_agreement_are_those_of_one_dense_pass() -> None:
    (dense,) = samples("llama", DENSE, number=3)
    piece = torch.tensor([task(count=2).pieces[3].ids])
    with torch.no_grad():
        log_p = tiny.model("llama")(piece).logits.log_softmax(-1)[0, -STEPS:-1]
    nats = -log_p.gather(-1, piece[0, -STEPS + 1 :, None]).mean()
    assert dense.figures["ppl_dense"] == pytest.approx(math.exp(nats), rel=1e-3)


def test_figures_do_not_depend_on_the_other_methods() -> None:
    alone = samples("llama", SPARSE)[0]
    among = samples("llama", EVERYTHING, DENSE, SPARSE)[2]
    assert (alone.figures, alone.extra) == (among.figures, among.extra)


def test_a_method_may_read_the_prompt_sparsely() -> None:
    values = {"chooser": "sampled", "sink": 2, "local": 8, "b_sel": 8, "k": 8}
    sparse = Method("sparse prefill", Config.preset("dense").updated({"prefill": values}))
    dense, other = samples("llama", DENSE, sparse)
    assert dense.figures["kl"] == 0.0
    assert other.figures["kl"] > 0.0
    assert other.figures["ppl_dense"] == dense.figures["ppl_dense"]


def test_steps_that_choose_for_themselves_are_watched() -> None:
    oracle = Method("oracle", parse_methods("oracle:k=12:recent=8:sink=2")[0].config)
    (sample,) = samples("llama", oracle)
    assert 0.3 < sample.figures["mass_fast"] < 1
    assert sample.figures["slow_rate"] == 0.0
    assert 0 <= sample.figures["useless_share"] < 1


def test_a_method_with_kernels_is_watched_in_a_pass_of_its_own() -> None:
    """On a GPU; the interpreter runs the same code here."""
    from . import device

    plain_config = tiny.sparse(t_max=3)
    of = [Method("plain", plain_config), Method("kernels", device.triton("eager", plain_config))]
    short = task(steps=4)
    plain, kernels = short.measure(0, of, Loaded(device.small(), tokenizer(), "small"))
    assert kernels.figures.keys() == plain.figures.keys()
    for name in ("mass_fast", "useless_share", "slow_rate", "keys_read_share"):
        assert kernels.figures[name] == pytest.approx(plain.figures[name], abs=1e-3)
    assert kernels.figures["kl"] == pytest.approx(plain.figures["kl"], rel=0.05, abs=1e-4)
    assert kernels.extra["picture"]["kinds"] == plain.extra["picture"]["kinds"]


# ---- the watch


def run(model: Any, config: Config, see: Any = None) -> tuple[Tensor, Any]:
    ids = tiny.prompt(TOKENS)
    cache = fidelity.prefill(model, ids[:, :-STEPS], config)
    out: list[Tensor] = []
    following = ids[:, -STEPS:]
    fidelity.step_logits(
        model, cache, following, config, tokenizer(), lambda _, x: out.append(x), see
    )
    return torch.stack(out), cache


@pytest.mark.parametrize("config", [SPARSE.config, Config.preset("dense")], ids=["ours", "dense"])
def test_watching_changes_no_bit(config: Config) -> None:
    told: list[tuple[int, StepKind]] = []
    plain, _ = run(tiny.model("llama"), config)
    watched, _ = run(tiny.model("llama"), config, lambda layer, w: told.append((layer, w.kind)))
    assert torch.equal(plain, watched)
    assert len(told) == 2 * STEPS


def test_nothing_is_watched_after_the_block() -> None:
    model, told = tiny.model("llama"), []
    _, cache = run(model, SPARSE.config, lambda layer, w: told.append(layer))
    before = len(told)
    with attach(model, SPARSE.config, tokenizer=tokenizer()) as session, session.decoding():
        model(tiny.prompt(1), use_cache=True, **{tiny.CACHE: cache})
    assert len(told) == before
    with pytest.raises(KeyError), watching(model, cache, lambda layer, w: told.append(layer)):
        raise KeyError
    assert all(layer.state.watch is None for layer in cache.layers)


def test_what_is_told_is_what_was_read() -> None:
    kinds: list[StepKind] = []

    def see(layer: int, watched: Watched) -> None:
        kinds.append(watched.kind)
        assert watched.q.shape == (4, 16)
        assert watched.kv.lengths[0] == watched.kv.k.shape[2]
        assert (watched.reading is not None) == (watched.kind is StepKind.FAST)
        if watched.reading is not None:
            chosen = watched.reading.selected
            assert chosen.shape == (2, 12)
            assert int(chosen.min()) >= watched.reading.sink_end == 2
            assert int(chosen.max()) < watched.reading.window_start <= watched.kv.lengths[0] - 8

    run(tiny.model("llama"), tiny.sparse(), see)
    assert kinds.count(StepKind.SLOW) == 2 * len(range(0, STEPS, 5))


@pytest.mark.parametrize("name", ["gemma3", "qwen3.5"])
def test_layers_that_are_not_ours_are_left_out(name: str) -> None:
    layers: set[int] = set()
    run(tiny.model(name), SPARSE.config, lambda layer, w: layers.add(layer))
    assert layers == {1, 3}
    (sample,) = samples(name, SPARSE)
    assert 0 < sample.figures["mass_fast"] < 1
    assert sample.extra["picture"]["layer"] in (1, 3)


def test_a_model_without_layers_of_ours_has_outputs_to_compare_and_nothing_to_watch() -> None:
    model = tiny.build(tiny.MISTRAL_WINDOWED)
    (sample,) = task().measure(0, [SPARSE], Loaded(model, tokenizer(), "windowed"))
    assert sample.score == 1.0
    assert not {"mass_fast", "stability_inside"} & sample.figures.keys()
    assert "picture" not in sample.extra


# ---- pictures


def test_the_first_piece_of_each_text_has_a_picture() -> None:
    pictured = [piece.pictured for piece in task(count=2).pieces]
    assert pictured == [True, False, True, False]
    (first,) = samples("llama", SPARSE)
    (second,) = samples("llama", SPARSE, number=1)
    assert "picture" not in second.extra
    picture = first.extra["picture"]
    assert picture["read"] == TOKENS - STEPS
    assert picture["positions"] == list(range(TOKENS))
    for name in ("tokens", "ends", "kinds", "mass", "kept", "missed"):
        assert len(picture[name]) == STEPS, name
    assert sum(picture["ends"]) == first.figures["sentences"]
    for kind, mass, kept, missed in zip(
        *(picture[name] for name in ("kinds", "mass", "kept", "missed")), strict=True
    ):
        assert sum(mass) == pytest.approx(1.0, abs=0.01)
        assert (missed is None) == (kind == "slow")
        if missed is not None:
            # every bin holds one position here
            left = sum(m for m, share in zip(mass, kept, strict=True) if not share)
            assert missed == pytest.approx(left, abs=0.01)
    kinds = picture["kinds"]
    for ends, kind in zip(picture["ends"][1:], kinds[1:], strict=True):
        assert kind == "slow" or not ends


def test_a_picture_stays_small() -> None:
    long = make_fidelity(
        tokenizer(), tokens=500, count=1, seed=0, texts={"one": words(500)}, steps=160
    )
    (sample,) = long.measure(0, [SPARSE], loaded("llama"))
    assert len(sample.extra["picture"]["kinds"]) == 128
    assert len(json.dumps(sample.extra["picture"])) < 150_000


# ---- pieces and texts


def test_pieces_depend_on_the_seed_alone_and_do_not_overlap() -> None:
    ids = tokenizer()(words(400, seed=2)).input_ids
    text = ",".join(map(str, ids))
    assert task(2, seed=5).pieces == task(2, seed=5).pieces
    assert task(2, seed=5).pieces != task(2, seed=6).pieces
    for seed in range(4):
        one, two = (",".join(map(str, p.ids)) for p in task(2, seed=seed).pieces[2:])
        assert one in text[: text.index(two)]


def test_errors_name_what_is_wrong() -> None:
    how: dict[str, Any] = {"count": 2, "seed": 0, "texts": {"book.txt": words(100)}}
    with pytest.raises(InputError, match=r"'book.txt' has 100 tokens: 2 pieces of 64"):
        make_fidelity(tokenizer(), tokens=64, steps=8, **how)
    with pytest.raises(InputError, match=r"'book.txt' has 0 tokens"):
        make_fidelity(tokenizer(), tokens=64, steps=8, **{**how, "texts": {"book.txt": ""}})
    with pytest.raises(InputError, match="128 steps of 100 tokens"):
        make_fidelity(tokenizer(), tokens=100, **how)
    with pytest.raises(InputError, match="1 steps of"):
        make_fidelity(tokenizer(), tokens=40, steps=1, **how)
    with pytest.raises(InputError, match="count=0"):
        make_fidelity(tokenizer(), tokens=40, steps=2, **{**how, "count": 0})
    with pytest.raises(ConfigError, match="baseline"):
        list(task().measure(0, parse_methods("snapkv"), loaded("llama")))


def test_text_without_sentence_marks_has_none() -> None:
    for name, make in texts.UNMARKED.items():
        text = make()
        assert len(text) > 100_000
        assert not set(SENTENCE_ENDS) & set(text), name
        assert bool(set(LINE_ENDS) & set(text)) == (name == "csv")
        assert text == make()
    assert set(texts.dna()) == set("ACGT")
