"""Gaps: which rows they are the difference of, what runs in a row, and what a result file keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from reread import Config, SparsePrefill
from reread.errors import ConfigError, InputError
from reread.evaluation.corpus import needle_corpus
from reread.evaluation.gaps import results as gap_results
from reread.evaluation.gaps.forced import ForcedText, make_forced, passes, read_forced
from reread.evaluation.gaps.results import Results
from reread.evaluation.gaps.run import Request
from reread.evaluation.gaps.sums import (
    ALL,
    accuracies,
    bootstrap,
    default_blocks,
    gaps_of,
    variant,
)
from reread.evaluation.gaps.tasks import (
    DENSE,
    FUSED,
    REFERENCE,
    TASKS,
    Way,
    make_task,
    path_of,
    prefill_seconds,
    ttft,
)
from reread.integrations.hf import session
from reread.integrations.hf.indexers import new_indexer
from reread.integrations.hf.load import Loaded
from reread.prefill import prefill_step

from . import needle_checkpoint

TOKENS = 700
SETTINGS = {"model": "m", "k": 8}


def row(chooser: str, b_sel: int, shares: dict[str, list[float]], **changes: Any) -> dict[str, Any]:
    found = {
        "task": "needle", "length": 4096, "variant": variant(chooser, b_sel), "chooser": chooser,
        "b_sel": b_sel, "shares": shares, "accuracy": accuracies(shares),
        "config": Config(mode="dense").to_dict(),
    }  # fmt: skip
    return {**found, **changes}


def five(**changes: Any) -> list[dict[str, Any]]:
    """Dense 1.0, oracle .9, oracle shared .7, indexer .6, indexer shared .3; two kinds."""
    values = (
        ("dense", 1, 1.0), ("oracle", 1, 0.9), ("oracle", 64, 0.7),
        ("indexer", 1, 0.6), ("indexer", 64, 0.3),
    )  # fmt: skip
    return [
        row(chooser, b_sel, {"code": [share] * 4, "note": [share] * 2}, **changes)
        for chooser, b_sel, share in values
    ]


# -- sums ----------------------------------------------------------------------------------------


def test_every_gap_names_its_two_rows_and_is_their_difference() -> None:
    found = {(g["gap"], *g["of"]): g["value"] for g in gaps_of(five()) if g["kind"] == ALL}
    assert found == {
        ("oracle gap", "dense", "oracle per query"): pytest.approx(0.1),
        ("indexer gap", "oracle per query", "indexer per query"): pytest.approx(0.3),
        ("sharing of the oracle", "dense", "oracle shared by 64"): pytest.approx(0.3),
        ("realisation gap", "indexer per query", "indexer shared by 64"): pytest.approx(0.3),
    }


def test_a_gap_without_one_of_its_rows_is_not_reported() -> None:
    rows = [r for r in five() if r["variant"] != "oracle per query"]
    assert {g["gap"] for g in gaps_of(rows)} == {"sharing of the oracle", "realisation gap"}


def test_the_sampled_chooser_has_gaps_of_its_own() -> None:
    rows = [r for r in five() if r["chooser"] != "indexer"]
    rows.append(row("sampled", 64, {"code": [0.5] * 4, "note": [0.5] * 2}))
    found = {g["gap"]: (g["of"], g["value"]) for g in gaps_of(rows) if g["kind"] == ALL}
    assert found["sampling gap"] == (
        ["oracle shared by 64", "sampled shared by 64"],
        pytest.approx(0.2),
    )
    assert found["sampled realisation gap"][1] == pytest.approx(0.4)
    assert "indexer gap" not in found


def test_gaps_of_what_dense_cannot_do_are_marked() -> None:
    rows = five()
    rows[0] = row("dense", 1, {"code": [1.0] * 4, "note": [0.4] * 2})
    marks = {g["kind"]: g["dense_can"] for g in gaps_of(rows) if g["gap"] == "oracle gap"}
    assert marks == {"code": True, "note": False, ALL: True}


def test_lengths_and_tasks_are_never_mixed() -> None:
    rows = [*five(), *five(length=8192), *five(task="vt")]
    found = [(g["task"], g["length"]) for g in gaps_of(rows) if g["gap"] == "oracle gap"]
    assert sorted(set(found)) == [("needle", 4096), ("needle", 8192), ("vt", 4096)]


def test_intervals_hold_the_mean_and_are_repeatable() -> None:
    values = [0.0, 0.0, 1.0, 0.0, 0.5, 0.0]
    low, high = bootstrap(values)
    assert 0 <= low < sum(values) / 6 < high < 1
    assert bootstrap(values) == (low, high)
    assert bootstrap([0.25] * 5) == (0.25, 0.25)


def test_accuracy_is_by_kind_and_over_all_cases() -> None:
    assert accuracies({"a": [1.0, 0.0], "b": [1.0]}) == {"a": 0.5, "b": 1.0, ALL: 2 / 3}


def test_the_default_block_is_the_largest_within_a_point_on_every_kind() -> None:
    def shared(b_sel: int, code: float, note: float) -> dict[str, Any]:
        return row("indexer", b_sel, {"code": [code], "note": [note]})

    rows = [row("dense", 1, {"code": [1.0], "note": [1.0]}), shared(1, 0.95, 0.95)]
    rows += [shared(16, 0.95, 0.95), shared(32, 0.95, 0.94), shared(64, 0.97, 0.93)]
    (found,) = default_blocks(rows)
    assert found["b_sel"] == 32
    assert found["lost"] == {"16": 0, "32": pytest.approx(0.01), "64": pytest.approx(0.02)}
    (none,) = default_blocks([*rows[:2], shared(64, 0.97, 0.9)])
    assert none["b_sel"] == 1
    assert default_blocks(rows[:2])[0]["b_sel"] is None


# -- rows ----------------------------------------------------------------------------------------


def request(tmp_path: Path, **changes: Any) -> Request:
    given: dict[str, Any] = {
        "model": "m", "tasks": ("needle",), "lengths": (4096,), "out": tmp_path / "gaps.json",
    }  # fmt: skip
    return Request(**{**given, **changes})


def test_rows_differ_in_the_prefill_alone_and_are_sparse_at_any_length(tmp_path: Path) -> None:
    rows = request(tmp_path, indexer=tmp_path, k=32, b_sel=(16, 64)).variants()
    assert list(rows) == [
        "dense",
        "oracle per query", "oracle shared by 16", "oracle shared by 64",
        "indexer per query", "indexer shared by 16", "indexer shared by 64",
    ]  # fmt: skip
    for name, (chooser, b_sel, config) in rows.items():
        assert config.mode == "dense"
        if name == "dense":
            assert config.prefill is None
            continue
        wanted = SparsePrefill(chooser=chooser, k=32, b_sel=b_sel, local=16, dense_below=0)  # type: ignore[arg-type]  # a name of one
        assert config.prefill == wanted
        assert config.backend == ("reference" if chooser == "oracle" else "auto")


def test_without_an_indexer_the_sampled_chooser_stands_in_its_place(tmp_path: Path) -> None:
    assert list(request(tmp_path, b_sel=(1, 64)).variants()) == [
        "dense", "oracle per query", "oracle shared by 64", "sampled shared by 64",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ("niah",)}, "task 'niah' is unknown: one of needle, needle-greedy"),
        ({"tasks": ()}, "no task"),
        ({"lengths": ()}, "lengths="),
        ({"b_sel": (16, 0)}, "b_sel="),
        ({"limit": 0}, "limit=0 is not possible"),
        ({"seed": -1}, "seed=-1 is not possible"),
        ({"dtype": "int8"}, "dtype 'int8' is unknown"),
        ({"indexer": Path("none")}, "none holds no indexer"),
        ({"out": Path(".")}, "is a folder"),
    ],
)
def test_what_cannot_be_right_is_refused_before_anything_is_loaded(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        request(tmp_path, **changes).check()


@pytest.mark.parametrize("changes", [{"k": 0}, {"local": 0}])
def test_an_impossible_budget_is_refused_by_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"prefill\.{next(iter(changes))}=0"):
        request(tmp_path, **changes).check()


def test_a_path_is_named_by_what_the_stats_say() -> None:
    assert path_of("triton", 0.1) == FUSED
    assert path_of("reference", 0.1) == REFERENCE
    assert path_of("triton", 1.0) == DENSE


@pytest.mark.parametrize("config", [Config(mode="dense"), None])
def test_what_is_timed_reads_as_the_row_does(
    texts: list[ForcedText], config: Config | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(*args: Any) -> Any:
        calls.append(prefill_step(*args))
        return calls[-1]

    monkeypatch.setattr(session, "prefill_step", counted)
    way, model = Way(config or sparse()), needle_checkpoint.model()
    seconds = prefill_seconds(model, texts[0].ids, way, 2)
    assert len(seconds) == 2
    assert min(seconds) > 0
    # two passes of two layers, each of which left something out
    assert len([out for out in calls if out is not None]) == (0 if config else 4)
    assert ttft(Loaded(model, None, ""), texts[0].ids, way) is None  # no GPU here


@pytest.mark.parametrize("b_sel", [1, 48, 64, 4096])
def test_passes_are_whole_blocks(b_sel: int) -> None:
    way = Way(Config(mode="dense", prefill=SparsePrefill(b_sel=b_sel)))
    assert way.chunk % b_sel == 0


# -- the result file -----------------------------------------------------------------------------


def test_a_result_file_is_continued(tmp_path: Path) -> None:
    path, config = tmp_path / "gaps.json", Config(mode="dense")
    first = Results(path, SETTINGS)
    for entry in five()[:2]:
        first.add(entry)
    again = Results(path, SETTINGS)
    assert again.has("needle", 4096, "dense", config)
    assert not again.has("needle", 4096, "indexer per query", config)
    assert not again.has("needle", 8192, "dense", config)
    assert not again.has("needle", 4096, "dense", Config(mode="dense", sink=2))
    again.add(five()[3])
    held = json.loads(path.read_text())
    assert [r["variant"] for r in held["rows"]] == [
        "dense", "oracle per query", "indexer per query",
    ]  # fmt: skip
    assert {g["gap"] for g in held["gaps"]} == {"oracle gap", "indexer gap"}


def test_another_runs_file_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "gaps.json"
    Results(path, SETTINGS).add(five()[0])
    before = path.read_text()
    with pytest.raises(InputError, match="k is 8 there and 16 now"):
        Results(path, {**SETTINGS, "k": 16})
    later = Results(path, SETTINGS)
    later.note({"backbone": "a"})
    later.write()
    with pytest.raises(InputError, match="backbone is 'a' there and 'b' now"):
        Results(path, SETTINGS).note({"backbone": "b"})
    path.write_text("{}")
    with pytest.raises(InputError, match="is no result of `reread eval gaps`"):
        Results(path, SETTINGS)
    assert before


def test_a_write_that_fails_leaves_the_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gaps.json"
    results = Results(path, SETTINGS)
    results.add(five()[0])
    before = path.read_text()

    def full(*_: Any) -> None:
        raise InputError("no space")

    monkeypatch.setattr(gap_results, "write_json", full)
    with pytest.raises(InputError, match="no space"):
        results.add(five()[1])
    assert path.read_text() == before


# -- questions inside the prefill ----------------------------------------------------------------


@pytest.fixture(scope="module")
def texts() -> list[ForcedText]:
    return make_forced(needle_checkpoint.tokenizer(), tokens=TOKENS, count=2, seed=0)


def test_answers_stand_behind_their_questions_and_in_the_text(texts: list[ForcedText]) -> None:
    tokenizer = needle_checkpoint.tokenizer()
    for text in texts:
        assert TOKENS - 60 <= len(text.ids) <= TOKENS
        words = tokenizer.convert_ids_to_tokens(list(text.ids))
        body = " ".join(words[: text.focus])
        assert words[text.focus] == "?"
        assert {answer.kind for answer in text.answers} == {"code", "note", "chain"}
        assert text.answers[-1].last == len(words)
        for answer in text.answers:
            given = words[answer.first : answer.last]
            assert words[answer.first - 1] == ":"
            said = " ".join(given[:-1] if answer.kind == "code" else given[:2])
            assert said in body


def test_no_text_is_one_that_distillation_learns_from(texts: list[ForcedText]) -> None:
    tokenizer = needle_checkpoint.tokenizer()
    for seed in (0, 1):
        corpus = needle_corpus(tokenizer, context=TOKENS, seed=seed)
        learnt = [tuple(corpus.training(n).ids[:300].tolist()) for n in range(4)]
        assert not {text.ids[:300] for text in texts} & {*learnt}


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(InputError, match="too short for a needle text"):
        make_forced(needle_checkpoint.tokenizer(), tokens=300, count=1, seed=0)


@pytest.mark.parametrize(("length", "chunk"), [(10, 4), (9, 4), (8, 4), (3, 4), (1, 4), (5, 1)])
def test_passes_cover_everything_and_none_is_a_decode_step(length: int, chunk: int) -> None:
    found = list(passes(length, chunk))
    assert [first for first, _ in found] == [0, *(last for _, last in found[:-1])]
    assert found[-1][1] == length
    if chunk > 1 and length > 1:
        assert all(last - first > 1 for first, last in found)


def shares(text: ForcedText, config: Config, chunk: int = 1024, **options: Any) -> list[float]:
    found, _ = read_forced(needle_checkpoint.model(), text, config, chunk=chunk, **options)
    return found


def sparse(**changes: Any) -> Config:
    prefill = SparsePrefill(**{"k": 8, "local": 4, "b_sel": 16, "dense_below": 0, **changes})
    return Config(mode="dense", prefill=prefill)


def test_dense_answers_are_the_models_own_predictions(texts: list[ForcedText]) -> None:
    text = texts[0]
    with torch.no_grad():
        logits = needle_checkpoint.model()(torch.tensor([text.ids])).logits[0]
    given = logits.argmax(-1).tolist()
    wanted = [
        sum(given[i - 1] == text.ids[i] for i in range(a.first, a.last)) / (a.last - a.first)
        for a in text.answers
    ]
    assert shares(text, Config(mode="dense")) == pytest.approx(wanted)
    assert shares(text, Config(mode="dense"), chunk=96) == pytest.approx(wanted)


def test_an_oracle_that_may_choose_everything_answers_as_dense(texts: list[ForcedText]) -> None:
    assert shares(texts[0], sparse(k=TOKENS)) == shares(texts[0], Config(mode="dense"))


@pytest.mark.parametrize("chooser", ["oracle", "indexer"])
def test_passes_change_nothing_and_the_stats_say_what_was_read(
    texts: list[ForcedText], chooser: str
) -> None:
    model, text = needle_checkpoint.model(), texts[0]
    indexer = new_indexer(model, 8, 1, "svd") if chooser == "indexer" else None
    config = sparse(chooser=chooser)
    whole, stats = read_forced(model, text, config, indexer=indexer, chunk=4096)
    parts, in_parts = read_forced(model, text, config, indexer=indexer, chunk=64)
    assert whole == parts
    assert 0 < stats.prefill_keys_share == in_parts.prefill_keys_share < 0.2
    assert stats.decode_steps == in_parts.decode_steps == 0


@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_texts_that_fit(name: str) -> None:
    task = make_task(_tokenizer(name), name, tokens=1000, count=2, seed=0)
    assert task.units == 2
    assert 900 < len(task.sample()) <= 1000


def _tokenizer(name: str) -> Any:
    from . import tiny_checkpoint

    return needle_checkpoint.tokenizer() if "needle" in name else tiny_checkpoint.tokenizer()


def test_needle_tasks_want_the_needle_vocabulary() -> None:
    with pytest.raises(InputError, match="needle-27m's vocabulary"):
        make_task(_tokenizer("vt"), "needle", tokens=TOKENS, count=1, seed=0)
