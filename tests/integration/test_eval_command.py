"""`reread eval`: rows that ran as they say, results that are continued, bad input by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from reread.cli import app
from reread.evaluation.gaps import run as gaps
from reread.evaluation.gaps.tasks import DENSE, FUSED, REFERENCE
from reread.integrations.hf.indexers import new_indexer

from ..unit import needle_checkpoint, tiny_checkpoint

LENGTH = 700
SMALL = ["--k", "8", "--local", "4", "--limit", "1", "--device", "cpu"]
NEEDLE = ["--tasks", "needle", "--lengths", str(LENGTH), "--b-sel", "16,64", *SMALL]
WITH_INDEXER = [
    "dense",
    "oracle per query", "oracle shared by 16", "oracle shared by 64",
    "indexer per query", "indexer shared by 16", "indexer shared by 64",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(needle_checkpoint.save(tmp_path_factory.mktemp("needle")))


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoint.save(tmp_path_factory.mktemp("chat"), positions=1000))


@pytest.fixture(scope="module")
def indexer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("indexer")
    new_indexer(needle_checkpoint.model(), 8, 1, "svd").save(folder)
    return str(folder)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["eval", *arguments], env={"COLUMNS": "200"})


def run_json(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    value: dict[str, Any] = json.loads(result.stdout)
    return value


# -- gaps ----------------------------------------------------------------------------------------


def test_every_row_ran_as_it_says(model: str, indexer: str, tmp_path: Path) -> None:
    out = tmp_path / "gaps.json"
    value = run_json("gaps", "--model", model, "--indexer", indexer, "--out", str(out), *NEEDLE)
    assert value == json.loads(out.read_text())
    rows = {row["variant"]: row for row in value["rows"]}
    assert list(rows) == WITH_INDEXER
    for name, row in rows.items():
        assert row["path"] == (DENSE if name == "dense" else REFERENCE)
        assert row["ttft_s"] is None
        assert (row["share_read"] < 0.2) == (name != "dense")
        assert set(row["accuracy"]) == {"code", "note", "chain", "all"}
        assert row["cases"] == {kind: len(shares) for kind, shares in row["shares"].items()}
        assert row["config"]["mode"] == "dense"
        if name != "dense":
            assert row["config"]["prefill"]["dense_below"] == 0
    assert {gap["gap"] for gap in value["gaps"]} == {
        "oracle gap", "indexer gap", "sharing of the oracle", "realisation gap",
    }  # fmt: skip
    for gap in value["gaps"]:
        upper, lower = (rows[name]["accuracy"][gap["kind"]] for name in gap["of"])
        assert gap["value"] == pytest.approx(upper - lower)
        assert gap["low"] <= gap["value"] + 1e-9
        assert gap["high"] >= gap["value"] - 1e-9
        assert gap["dense_can"] is False  # random weights know nothing
    assert value["indexer"]["record"]["init"] == "svd"
    assert {"versions", "device", "commit", "config", "notes", "default_b_sel"} <= value.keys()


def test_a_run_is_continued_row_by_row(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "gaps.json"
    arguments = ["gaps", "--model", model, "--out", str(out), *NEEDLE]
    measure, measured = gaps._measure, []

    def interrupted(task: Any, loaded: Any, way: Any, tick: Any) -> Any:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(way.config)
        return measure(task, loaded, way, tick)

    monkeypatch.setattr(gaps, "_measure", interrupted)
    result = run(*arguments)
    assert result.exit_code == 130
    assert "keeps its rows" in result.stderr
    kept = json.loads(out.read_text())["rows"]
    assert [row["variant"] for row in kept] == ["dense", "oracle per query"]

    monkeypatch.setattr(gaps, "_measure", measure)
    value = run_json(*arguments)
    assert value["rows"][:2] == kept  # seconds included: they did not run again
    assert [row["variant"] for row in value["rows"][2:]] == [
        "oracle shared by 16", "oracle shared by 64",
        "sampled shared by 16", "sampled shared by 64",
    ]  # fmt: skip
    assert any("sampled" in note for note in value["notes"])
    assert run_json(*arguments)["rows"] == value["rows"]

    before = out.read_text()
    other = run(*arguments, "--seed", "1")
    assert other.exit_code == 2
    assert "seed is 0 there and 1 now" in other.stderr
    assert out.read_text() == before


def test_the_tables_show_rows_gaps_and_the_default_block(
    model: str, indexer: str, tmp_path: Path
) -> None:
    out = str(tmp_path / "gaps.json")
    lengths = ["--tasks", "needle", "--lengths", f"{LENGTH},4096", "--b-sel", "64", *SMALL]
    result = run("gaps", "--model", model, "--indexer", indexer, "--out", out, *lengths)
    assert result.exit_code == 0, result.output
    for text in (
        "indexer shared by 64", REFERENCE, "realisation gap", "dense - oracle per query",
        "dense cannot do it", "dense_below=0",
    ):  # fmt: skip
        assert text in result.stdout
    positions = needle_checkpoint.POSITIONS
    assert f"skipped: needle at 4096, the model has {positions} positions" in result.stderr


def test_greedy_and_english_tasks_run_too(model: str, chat_model: str, tmp_path: Path) -> None:
    small = ["--lengths", "900", "--b-sel", "64", *SMALL]
    for folder, task, kinds in (
        (model, "needle-greedy", {"code", "note", "chain"}),
        (chat_model, "niah", {"niah_single", "niah_multikey"}),
    ):
        out = str(tmp_path / f"{task}.json")
        value = run_json("gaps", "--model", folder, "--tasks", task, "--out", out, *small)
        assert {kind for row in value["rows"] for kind in row["shares"]} == kinds
        for row in value["rows"]:
            assert row["path"] == (DENSE if row["variant"] == "dense" else REFERENCE)


def test_a_greedy_task_uses_the_indexer(model: str, indexer: str, tmp_path: Path) -> None:
    out = str(tmp_path / "gaps.json")
    arguments = ["--tasks", "needle-greedy", "--lengths", "900", "--b-sel", "64", *SMALL]
    value = run_json("gaps", "--model", model, "--indexer", indexer, "--out", out, *arguments)
    assert value["rows"][-1]["variant"] == "indexer shared by 64"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "niah2"], "task 'niah2' is unknown"),
        (["--k", "0"], "--k '0' is not possible"),
        (["--k", "8,16"], "--k '8,16' is not possible: one number"),
        (["--b-sel", "0"], "--b-sel '0' is not possible"),
        (["--limit", "0"], "limit=0 is not possible"),
        (["--lengths", "4K"], "--lengths '4K' is not possible"),
        (["--lengths", "300"], "tokens=300 is too short"),
        (["--lengths", "4096"], "nothing to measure: the model has 1200 positions"),
        (["--indexer", "nowhere"], "nowhere holds no indexer"),
        (["--model", "./nowhere"], "'./nowhere' does not exist"),
        (["--local", "0"], "prefill.local=0 is not possible"),
    ],
)
def test_bad_input_is_an_error_before_the_work(
    model: str, tmp_path: Path, arguments: list[str], message: str
) -> None:
    out = tmp_path / "gaps.json"
    result = run("gaps", "--model", model, "--out", str(out), *NEEDLE, *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not out.exists()


def test_an_indexer_of_another_model_is_refused_before_the_work(
    indexer: str, tmp_path: Path
) -> None:
    other, out = needle_checkpoint.save(tmp_path / "other", seed=1), tmp_path / "gaps.json"
    result = run(
        "gaps", "--model", str(other), "--indexer", indexer, "--out", str(out), *NEEDLE
    )  # fmt: skip
    assert result.exit_code == 2
    assert "was made for another backbone" in result.stderr
    assert not out.exists()


# -- mass ----------------------------------------------------------------------------------------


def test_mass_shows_every_layer_and_draws_it(model: str, tmp_path: Path) -> None:
    plot = tmp_path / "mass.svg"
    arguments = ["--model", model, "--length", str(LENGTH), "--k", "4,64", "--device", "cpu"]
    result = run("mass", *arguments, "--tasks", "needle", "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert "mass of the top k" in result.stdout
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line[0] for line in lines if "64" in line[:2]] == ["64", "64"]
    assert [line[:2] for line in lines if "1" in line[1:2]] == [["0", "1"], ["1", "1"]]
    assert plot.read_text().startswith("<?xml")


def test_mass_of_a_file_as_json(chat_model: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    value = run_json(
        "mass", "--model", chat_model, "--prompt-file", str(text), "--length", "500", "--k", "1,500"
    )
    assert value["tokens"] == 500
    assert list(value["per_query"]) == list(value["shared"]) == ["0", "1"]
    assert value["per_query"]["0"]["mass"]["500"] == pytest.approx(1.0)
    assert value["shared"]["0"]["needed"]["0.9"]["mean"] >= 1
    assert {"versions", "device", "commit", "dtype"} <= value.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --prompt-file or --tasks"),
        (["--tasks", "needle", "--k", "0"], "--k '0' is not possible"),
        (["--tasks", "needle,vt"], "one task at a time"),
        (["--tasks", "prose"], "task 'prose' is unknown"),
        (["--tasks", "needle", "--length", "64"], "length=64 is not possible"),
        (["--tasks", "needle", "--length", "8192"], "the model has 1200 positions"),
        (["--tasks", "needle", "--plot", "mass.txt"], "ends in .svg"),
        (["--tasks", "needle", "--queries", "0"], "queries=0 is not possible"),
        (["--prompt-file", "nowhere.txt"], "prompt file nowhere.txt cannot be read"),
    ],
)
def test_bad_input_of_mass_is_an_error(model: str, arguments: list[str], message: str) -> None:
    result = run("mass", "--model", model, *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


# -- the retrieval checkpoint --------------------------------------------------------------------


@pytest.mark.slow
def test_dense_answers_every_question_inside_the_prefill(needle_dir: Path, tmp_path: Path) -> None:
    """What makes the other rows mean something: what they lose is their loss."""
    out = str(tmp_path / "gaps.json")
    value = run_json(
        "gaps", "--model", str(needle_dir), "--out", out, "--dtype", "float32", "--device", "cpu",
        "--lengths", "1024", "--k", "8", "--b-sel", "64", "--limit", "1",
    )  # fmt: skip
    rows = {row["variant"]: row["accuracy"] for row in value["rows"]}
    assert rows["dense"]["all"] >= 0.99
    assert rows["oracle per query"]["all"] >= rows["dense"]["all"] - 0.02
    assert rows["oracle shared by 64"]["all"] < rows["oracle per query"]["all"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_the_indexers_rows_run_fused_kernels_and_are_timed(
    needle_dir: Path, tmp_path: Path
) -> None:
    from reread.integrations.hf.load import load

    new_indexer(load(str(needle_dir), device="cpu").model, 64, 1, "svd").save(tmp_path)
    value = run_json(
        "gaps", "--model", str(needle_dir), "--indexer", str(tmp_path), "--device", "cuda",
        "--out", str(tmp_path / "gaps.json"), "--lengths", "8192", "--k", "64", "--b-sel", "64",
        "--limit", "1",
    )  # fmt: skip
    for row in value["rows"]:
        wanted = {"dense": DENSE, "oracle": REFERENCE, "indexer": FUSED}[row["chooser"]]
        assert row["path"] == wanted, row["variant"]
        assert (row["ttft_s"] is not None) == (row["chooser"] != "oracle")


@pytest.mark.parametrize(
    ("seconds", "done", "total", "said"),
    [(10, 1, 4, "30 s"), (60, 1, 2, "60 s"), (60, 1, 3, "2 min"), (100, 10, 100, "15 min")],
)
def test_the_time_left(seconds: float, done: int, total: int, said: str) -> None:
    from reread.cli.evaluate import time_left

    assert time_left(seconds, done, total) == said
