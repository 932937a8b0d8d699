"""Runs of `reread eval` that end early or are asked for something else, as a user makes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reread.cli import app
from reread.evaluation.suite import run as suite_run

from ..unit import needle_checkpoint

LENGTH = 600


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(needle_checkpoint.save(tmp_path_factory.mktemp("needle")))


def asked(model: str, out: Path, *more: str) -> list[str]:
    return [
        "eval", "--model", model, "--tasks", "needle", "--lengths", str(LENGTH), "--limit", "1",
        "--methods", "dense", "--device", "cpu", "--out", str(out), *more,
    ]  # fmt: skip


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_run_that_ends_while_its_model_is_loading_can_be_repeated(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(suite_run.registry, "load_for", fail)
        assert run(*asked(model, tmp_path / "out")).exit_code != 0
    result = run(*asked(model, tmp_path / "out"))
    assert result.exit_code == 0, result.output


def test_json_stands_alone_on_stdout(model: str, tmp_path: Path) -> None:
    result = run(*asked(model, tmp_path / "out", "--json"))
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert [line["method"] for line in found["lines"]] == ["dense"] * len(found["lines"])


def test_failed_samples_of_other_methods_stay_failed(model: str, tmp_path: Path) -> None:
    """Or the others' mean would pass for the whole method's."""
    out = tmp_path / "out"
    assert run(*asked(model, out)).exit_code == 0
    line = json.loads((out / "samples.jsonl").read_text().splitlines()[0])
    failed = line | {"method": "snapkv", "score": None, "error": "out of memory", "figures": {}}
    measured = line | {"method": "snapkv", "query": 1, "score": 1.0}
    with (out / "samples.jsonl").open("a") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in (failed, measured))
    result = run(*asked(model, out, "--retry-failed"))
    assert result.exit_code == 0, result.output
    (row,) = (row for row in result.stdout.splitlines() if row.startswith("  snapkv"))
    assert "failed" in row
    assert "failed: snapkv: out of memory" in result.stdout


@pytest.mark.parametrize("error", ["no file [/usr/lib/x]", "shape [bold] differs"])
def test_brackets_in_names_and_errors_are_printed_as_they_are(
    model: str, tmp_path: Path, error: str
) -> None:
    out = tmp_path / "[bold]" / "[" / "x]"
    assert run(*asked(model, out)).exit_code == 0
    line = json.loads((out / "samples.jsonl").read_text().splitlines()[0])
    with (out / "samples.jsonl").open("a") as file:
        failed = line | {"number": 7, "kind": error, "score": None, "error": error}
        file.write(json.dumps(failed) + "\n")
    result = run(*asked(model, out))
    assert result.exit_code == 0, result.output
    assert f"failed: dense: {error}" in result.stdout
    assert "/[bold]/[/x]" in result.stderr.replace("\n", "")


def test_other_samples_of_the_same_number_are_refused(model: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(*asked(model, out)).exit_code == 0
    described = json.loads((out / "run.json").read_text())
    described["places"][0]["digest"] = "0" * 16
    (out / "run.json").write_text(json.dumps(described))
    result = run(*asked(model, out))
    assert result.exit_code == 2
    assert f"other samples of needle at {LENGTH} tokens" in result.stderr


def test_time_is_measured_at_the_end_of_the_positions(model: str, tmp_path: Path) -> None:
    longest = str(needle_checkpoint.POSITIONS)
    out = tmp_path / "out"
    result = run(*asked(model, out, "--speed", "on", "--lengths", longest))
    assert result.exit_code == 0, result.output
    for line in (out / "speed.jsonl").read_text().splitlines():
        times = json.loads(line)
        assert times["prefill_tokens"] + times["new_tokens"] <= needle_checkpoint.POSITIONS
