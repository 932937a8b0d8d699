"""`reread eval`: answers that are the model's own, tables that an interrupt does not change, and
bad input by name."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from reread.cli import app
from reread.evaluation.methods import parse_methods
from reread.evaluation.tasks import english, needle_task
from reread.evaluation.tasks.answering import Answering
from reread.evaluation.tasks.base import Answer, Case, Query
from reread.integrations.hf.indexers import new_indexer
from reread.integrations.hf.load import Loaded

from ..unit import needle_checkpoint, tiny_checkpoint
from . import tiny

LENGTH = 700
METHODS = "dense,default@6%,paper:k=32:recent=16,oracle@6%"
ASKED = ["--tasks", "needle", "--lengths", str(LENGTH), "--limit", "2", "--device", "cpu"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(needle_checkpoint.save(tmp_path_factory.mktemp("needle")))


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoint.save(tmp_path_factory.mktemp("chat"), positions=3000))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["eval", *arguments], env={"COLUMNS": "200"})


def lines(folder: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The samples of a folder by key, without what differs between two runs."""
    found = {}
    for line in (folder / "samples.jsonl").read_text().splitlines():
        value = json.loads(line)
        del value["seconds"]
        found[tuple(value[k] for k in ("task", "length", "method", "number", "query"))] = value
    return found


# -- answers


@torch.no_grad()
def by_hand(model: Any, ids: list[int], new: int) -> tuple[int, ...]:
    """Greedy answer without a cache."""
    row = torch.tensor([ids])
    for _ in range(new):
        row = torch.cat([row, model(row, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return tuple(row[0, len(ids) :].tolist())


def test_dense_answers_are_the_models_own() -> None:
    loaded = Loaded(needle_checkpoint.model(), needle_checkpoint.tokenizer(), "tiny")
    task = needle_task.make(loaded.tokenizer, tokens=660, count=1, seed=3)
    case = task.cases[0]
    samples = list(Answering(task).measure(0, parse_methods("dense"), loaded))
    assert [sample.kind for sample in samples] == ["code"] * 2 + ["note"] * 2 + ["chain"] * 2
    for sample, query in zip(samples, case.queries, strict=True):
        tokens = by_hand(loaded.model, [*case.context, *query.ids], query.new_tokens)
        assert sample.answer.split() == loaded.tokenizer.convert_ids_to_tokens(list(tokens))
        assert sample.score == task.score(query, Answer(tokens))
        assert sample.figures["keys_read_share"] == 1


def test_an_answer_does_not_depend_on_what_was_asked_before() -> None:
    loaded = Loaded(needle_checkpoint.model(), needle_checkpoint.tokenizer(), "tiny")
    task = needle_task.make(loaded.tokenizer, tokens=660, count=1, seed=3)
    methods = parse_methods("default:k=16:recent=16,paper:k=16:recent=16")
    together = list(Answering(task).measure(0, methods, loaded))
    (case,) = task.cases
    for index in reversed(range(len(case.queries))):
        alone = needle_task.NeedleTask(
            loaded.tokenizer, 660, [Case(case.context, (case.queries[index],))]
        )
        for at, method in enumerate(reversed(methods)):
            (sample,) = Answering(alone).measure(0, [method], loaded)
            other = together[(1 - at) * len(case.queries) + index]
            assert other.method == method.name
            assert (sample.answer, sample.figures) == (other.answer, other.figures)
            assert sample.figures["fast_steps"] > 0


class Choosing:
    """A task of one multiple choice."""

    name, length = "choosing", 64

    def __init__(self, cases: list[Case]) -> None:
        self.cases = cases

    def score(self, query: Query, answer: Answer) -> float:
        return float(max(range(3), key=answer.logprobs.__getitem__) == query.data)


@pytest.mark.parametrize("architecture", ["llama", "qwen3.5", "gemma3"])
@pytest.mark.parametrize("asked", [1, 7])
def test_choices_are_scored_as_without_a_cache(architecture: str, asked: int) -> None:
    model = tiny.model(architecture)
    rng = random.Random(0)
    context, ids = ([rng.randrange(2, 128) for _ in range(n)] for n in (40, asked))
    choices = tuple(tuple(rng.randrange(2, 128) for _ in range(n)) for n in (1, 3, 2))
    with torch.no_grad():
        expected = []
        for choice in choices:
            row = torch.tensor([[*context, *ids, *choice]])
            log_p = model(row, use_cache=False).logits[0].float().log_softmax(-1)
            first = len(context) + len(ids) - 1
            expected.append(sum(float(log_p[first + i, t]) for i, t in enumerate(choice)))
    best = max(range(3), key=expected.__getitem__)
    query = Query(tuple(ids), 0, "k", choices=choices, data=best)
    task = Choosing([Case(tuple(context), (query, query))])
    samples = list(Answering(task).measure(0, parse_methods("dense"), Loaded(model, None, "t")))
    assert len(samples) == 2
    for sample in samples:
        assert sample.score == 1
        assert [float(x) for x in sample.answer.split()] == pytest.approx(expected, abs=2e-4)


# -- the English needle


def test_english_prompts_fit_and_say_what_is_asked(chat_model: str) -> None:
    from reread.integrations.hf.load import load_tokenizer

    tokenizer = load_tokenizer("smollm2")
    task = english.make(tokenizer, tokens=1500, count=2, seed=0)
    assert task == english.make(tokenizer, tokens=1500, count=2, seed=0)
    assert task.cases[0] == english.make(tokenizer, tokens=1500, count=1, seed=0).cases[0]
    for case in task.cases:
        text = tokenizer.decode(list(case.context))
        assert [query.kind for query in case.queries] == ["code"] * 3 + ["note"] * 3 + ["chain"] * 3
        for query in case.queries:
            total = len(case.context) + len(query.ids) + query.new_tokens
            assert 1350 < total <= 1500
            asked = tokenizer.decode(list(query.ids))
            assert query.depth is not None
            assert 0 <= query.depth < 1
            if query.kind != "chain":
                assert " ".join(query.expected) in text
                start = asked.rsplit("\n", 1)[-1]
                assert f"{start} {' '.join(query.expected)}." in text
                right = Answer(text=f" {' '.join(query.expected)}. And more.")
                assert task.score(query, right) == 1
                assert task.score(query, Answer(text=" nothing of it")) == 0
            else:
                name = asked.rsplit("\n", 1)[-1].removeprefix("The key of the ").split(" is")[0]
                for place in query.expected:
                    assert f"The key of the {name} is in the {place}." in text
                    name = place


def test_too_few_tokens_for_english(chat_model: str) -> None:
    result = run("--model", chat_model, "--tasks", "needle_en", "--lengths", "60", "--out", "none")
    assert result.exit_code == 2
    assert "tokens=60 is too short" in result.stderr


# -- runs


@pytest.fixture(scope="module")
def undisturbed(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "whole"
    result = run("--model", model, *ASKED, "--methods", METHODS, "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "oracle@6%" in result.stdout
    return out


def test_a_run_has_every_sample_once(undisturbed: Path) -> None:
    found = lines(undisturbed)
    assert len(found) == 4 * 2 * 6
    text = (undisturbed / "samples.jsonl").read_text()
    assert text.count("\n") == len(found)
    described = json.loads((undisturbed / "run.json").read_text())
    assert set(described["methods"]) == set(METHODS.split(","))
    (place,) = described["places"]
    assert len(place.pop("digest")) == 16
    assert place == {"task": "needle", "length": LENGTH, "samples": 12}
    assert {"commit", "device", "versions", "notes", "skipped"} <= set(described)
    fast = [v for k, v in found.items() if k[2] == "default@6%"]
    assert all(v["figures"]["fast_steps"] > 0 for v in fast)
    assert all(v["figures"]["fast_keys_share"] <= 0.06 for v in fast)


def test_the_same_command_measures_nothing_again(model: str, undisturbed: Path) -> None:
    before = (undisturbed / "samples.jsonl").read_bytes()
    result = run("--model", model, *ASKED, "--methods", METHODS, "--out", str(undisturbed))
    assert result.exit_code == 0
    assert (undisturbed / "samples.jsonl").read_bytes() == before


def test_methods_can_come_one_after_the_other(
    model: str, undisturbed: Path, tmp_path: Path
) -> None:
    for method in reversed(METHODS.split(",")):
        result = run("--model", model, *ASKED, "--methods", method, "--out", str(tmp_path / "a"))
        assert result.exit_code == 0, result.output
    assert lines(tmp_path / "a") == lines(undisturbed)


@pytest.mark.slow
def test_interrupted_at_any_moment_and_run_again(
    model: str, undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = [
        sys.executable, "-m", "reread", "eval", "--model", model, *ASKED,
        "--methods", METHODS, "--out", str(out),
    ]  # fmt: skip
    rng = random.Random(0)
    interrupted = 0
    for turn in range(12):
        before = len(lines(out)) if (out / "samples.jsonl").exists() else 0
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        # some time after the first new line, so that it is work that is interrupted, and well
        # before the last, so that the process does not end before the signal arrives
        left = len(lines(undisturbed)) - before
        wanted, deadline = before + rng.randrange(1, max(2, left // 3)), time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            file = out / "samples.jsonl"
            if file.exists() and file.read_bytes().count(b"\n") >= wanted:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGINT if turn % 3 else signal.SIGKILL)
        _, told = process.communicate(timeout=60)
        if process.returncode == 0:
            break
        interrupted += 1
        assert process.returncode in (130, -signal.SIGKILL, -signal.SIGINT), told
        if process.returncode == 130:
            assert "the same command continues" in told
        if interrupted >= 4:
            break
    assert interrupted >= 2
    result = run("--model", model, *ASKED, "--methods", METHODS, "--out", str(out))
    assert result.exit_code == 0, result.output
    assert lines(out) == lines(undisturbed)


def test_an_indexer_is_used(model: str, tmp_path: Path) -> None:
    new_indexer(needle_checkpoint.model(), 8, 1, "svd").save(tmp_path / "indexer")
    result = run(
        "--model", model, *ASKED, "--methods", "indexer@6%,prefill:k=16:local=16:dense_below=0",
        "--indexer", str(tmp_path / "indexer"), "--out", str(tmp_path / "out"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = lines(tmp_path / "out").values()
    assert {v["method"] for v in found} == {"indexer@6%", "prefill:k=16:local=16:dense_below=0"}
    for value in found:
        name = "fast_keys_share" if value["method"] == "indexer@6%" else "prefill_keys_share"
        assert value["figures"][name] < 0.95


def test_speed_is_measured_where_it_is_asked_for(model: str, tmp_path: Path) -> None:
    asked = ["--model", model, *ASKED, "--methods", "default:k=16:recent=16", "--speed", "on"]
    assert run(*asked, "--out", str(tmp_path)).exit_code == 0
    speeds = [json.loads(line) for line in (tmp_path / "speed.jsonl").read_text().splitlines()]
    assert [line["method"] for line in speeds] == ["transformers", "default:k=16:recent=16"]
    for line in speeds:
        assert line["ms_per_token"] > 0
        assert line["ttft_s"] > 0
    assert speeds[1]["keys_read_share"] < 1
    before = (tmp_path / "speed.jsonl").read_bytes()
    assert run(*asked, "--out", str(tmp_path)).exit_code == 0
    assert (tmp_path / "speed.jsonl").read_bytes() == before


# -- what cannot be right


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"--tasks": "nedle"}, "task 'nedle' is unknown: one of needle, needle_en"),
        ({"--tasks": ","}, "no task"),
        ({"--methods": "dnese"}, "method 'dnese' is unknown"),
        ({"--methods": "indexer"}, "needs an indexer"),
        ({"--methods": "default@1%", "--lengths": "200"}, "2 keys"),
        ({"--lengths": "0"}, "--lengths '0'"),
        ({"--limit": "0"}, "limit=0"),
        ({"--seed": "-1"}, "seed=-1"),
        ({"--speed": "fast"}, "speed='fast'"),
        ({"--speed": "on", "--tasks": "fidelity"}, "speed='on' needs a prompt"),
        ({"--data": "nowhere"}, "data folder nowhere is not there"),
        ({"--indexer": "nowhere"}, "nowhere"),
        ({"--text": "nowhere.txt"}, "for task 'fidelity' alone"),
        ({"--tasks": "fidelity", "--text": "nowhere.txt"}, "nowhere.txt cannot be read"),
        ({"--device": "tpu"}, "tpu"),
        ({"--lengths": "99999"}, "nothing to measure: the model has 1200 positions"),
        ({"--model": "nowhere/at-all"}, "nowhere/at-all"),
    ],
)
def test_bad_input_is_named(
    model: str, tmp_path: Path, changes: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    options = {
        "--model": model, "--tasks": "needle", "--lengths": str(LENGTH), "--limit": "1",
        "--methods": "dense", "--out": str(tmp_path / "out"), **changes,
    }  # fmt: skip
    result = run(*(part for pair in options.items() for part in pair))
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.split())
    assert not (tmp_path / "out" / "samples.jsonl").exists()


def test_another_run_in_the_folder(model: str, undisturbed: Path) -> None:
    before = (undisturbed / "samples.jsonl").read_bytes()
    result = run(
        "--model", model, "--tasks", "needle", "--lengths", str(LENGTH), "--limit", "1",
        "--device", "cpu", "--out", str(undisturbed),
    )  # fmt: skip
    assert result.exit_code == 2
    assert "limit=2 there, 1 now" in result.stderr
    assert (undisturbed / "samples.jsonl").read_bytes() == before


def test_a_task_that_is_too_long_is_skipped_and_said(model: str, tmp_path: Path) -> None:
    result = run(
        "--model", model, "--tasks", "needle", "--lengths", "600,5000", "--limit", "1",
        "--methods", "dense", "--device", "cpu", "--out", str(tmp_path),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "skipped: needle at 5000, 1 samples: the model has 1200 positions" in result.stderr


def test_a_missing_baseline_environment(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REREAD_BASELINES", str(tmp_path / "python"))
    result = run(
        "--model", model, *ASKED, "--methods", "dense,snapkv", "--out", str(tmp_path / "out")
    )
    assert result.exit_code == 2
    assert "make baselines" in result.stderr
    assert not (tmp_path / "out").exists()


def test_an_answer_ends_with_what_it_was_told_to_end_with() -> None:
    loaded = Loaded(needle_checkpoint.model(), needle_checkpoint.tokenizer(), "tiny")
    task = needle_task.make(loaded.tokenizer, tokens=660, count=1, seed=3)
    case = task.cases[0]
    whole = by_hand(loaded.model, [*case.context, *case.queries[0].ids], 8)
    words = loaded.tokenizer.convert_ids_to_tokens(list(whole))
    at = next(i for i in range(2, 8) if words[i] not in words[:i])
    for until in ((words[at],), (" ".join(words[at - 1 : at + 1]), "never said")):
        query = Query(case.queries[0].ids, 8, "code", tuple(words[:at]), until=until)
        stopping = needle_task.NeedleTask(loaded.tokenizer, 660, [Case(case.context, (query,))])
        (sample,) = Answering(stopping).measure(0, parse_methods("dense"), loaded)
        said = " ".join(words[: at + 1])
        assert sample.answer == said[: said.index(until[0])]
