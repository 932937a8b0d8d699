"""Baselines: what passes between the two environments, and what kvpress does in the other one."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from reread.errors import InputError
from reread.evaluation.baselines import run
from reread.evaluation.baselines.export import export_model
from reread.evaluation.baselines.run import (
    BaselineAnswer,
    Job,
    answers,
    check_environment,
    find_python,
)
from reread.integrations.hf.load import Loaded, load

from . import needle_checkpoint

JOBS = [Job(name, "SnapKVPress", 0.5, (5, 6, 7), new_tokens=2) for name in "abc"]
HEAD = """
import json, os, signal, sys, time
from pathlib import Path
work = json.loads(Path(sys.argv[1]).read_text())
out = open(sys.argv[2], "w")
def say(text):
    out.write(text)
    out.flush()
def answer(name):
    return json.dumps({"id": name, "tokens": [1, 2], "kept_share": 0.5, "kv_bytes_share": 0.5,
        "seconds": 0.1, "path": "fake"}) + chr(10)
"""
Ask = Callable[[str], Iterator[BaselineAnswer]]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Answers to JOBS from a worker of the test's own."""

    def asked(body: str) -> Iterator[BaselineAnswer]:
        script = tmp_path / "fake.py"
        script.write_text(HEAD + body)
        monkeypatch.setattr(run, "WORKER", script)
        python = Path(sys.executable)
        return answers(JOBS, tmp_path, "float32", "cpu", python, tmp_path / "work")

    return asked


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_answers_come_while_the_worker_still_works(ask: Ask, tmp_path: Path) -> None:
    given = ask(
        "say(answer('a'))\n"
        f"while not Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.01)\n"
        "say(answer('b') + answer('c'))"
    )
    first = next(given)
    assert (first.id, first.tokens, first.kept_share, first.path) == ("a", (1, 2), 0.5, "fake")
    (tmp_path / "go").touch()
    assert [answer.id for answer in given] == ["b", "c"]


def test_jobs_of_one_prompt_share_it(ask: Ask) -> None:
    given = list(
        ask(
            "assert work['prompts'] == [[5, 6, 7]]\n"
            "assert all(work['prompts'][job['prompt']] == [5, 6, 7] for job in work['jobs'])\n"
            "for job in work['jobs']: say(answer(job['id']))"
        )
    )
    assert [answer.error for answer in given] == [None] * 3


@pytest.mark.parametrize(
    ("death", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by signal 9 (out of memory?)"),
        ("sys.exit(3)", "ended with exit status 3"),
        ("", "ended with exit status 0"),
    ],
)
def test_a_worker_that_dies_keeps_what_it_said(ask: Ask, death: str, said: str) -> None:
    given = list(
        ask(f"say(answer('a'))\nprint('last words', file=sys.stderr, flush=True)\n{death}")
    )
    assert [answer.id for answer in given] == ["a", "b", "c"]
    assert given[0].error is None
    for answer in given[1:]:
        assert answer.error is not None
        assert said in answer.error
        assert "last words" in answer.error
        assert (answer.tokens, answer.logprobs, answer.kept_share) == ((), (), None)


@pytest.mark.parametrize(
    "line",
    [
        '{"id": "b", "tok',
        '{"id": "b"}',
        "[]",
        '{"id": "nobody", "tokens": [1]}',
        '{"id": "b", "tokens": [1], "error": "both"}',
    ],
)
def test_a_broken_line_is_no_answer_and_stops_nothing(ask: Ask, line: str) -> None:
    given = list(ask(f"say(answer('a'))\nsay({line!r} + chr(10))\nsay(answer('c'))"))
    assert [answer.id for answer in given] == ["a", "c", "b"]
    assert given[2].error is not None
    assert line[:20] in given[2].error


def test_a_line_cut_off_by_a_crash_is_no_answer(ask: Ask) -> None:
    given = list(ask("say(answer('a'))\nsay(answer('b')[:20])\nos._exit(1)"))
    assert [answer.error is None for answer in given] == [True, False, False]


def test_a_failed_job_is_an_error_and_the_next_one_is_answered(ask: Ask) -> None:
    given = list(
        ask(
            "say(answer('a'))\n"
            "say(json.dumps({'id': 'b', 'error': 'AssertionError: too short'}) + chr(10))\n"
            "say(answer('c'))"
        )
    )
    assert [answer.error for answer in given] == [None, "AssertionError: too short", None]


SLEEPER = (
    "say(answer('a'))\nPath(sys.argv[2] + '.pid').write_text(str(os.getpid()))\ntime.sleep(600)"
)


def _pid(tmp_path: Path) -> int:
    file = tmp_path / "work" / "answers.jsonl.pid"
    while not (file.exists() and file.read_text()):
        time.sleep(0.01)
    return int(file.read_text())


def test_closing_the_answers_ends_the_worker(ask: Ask, tmp_path: Path) -> None:
    given = ask(SLEEPER)
    assert next(given).id == "a"
    pid = _pid(tmp_path)
    assert not gone(pid)
    given.close()  # type: ignore[attr-defined]  # it is a generator
    assert gone(pid)


def test_an_interrupt_ends_the_worker(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ask(SLEEPER)
    assert next(given).id == "a"
    pid = _pid(tmp_path)

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(given)
    assert gone(pid)


def test_no_jobs_start_nothing(tmp_path: Path) -> None:
    assert not list(answers([], tmp_path, "float32", "cpu", Path("missing"), tmp_path / "work"))
    assert not (tmp_path / "work").exists()


def test_the_environment_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REREAD_BASELINES", sys.executable)
    assert find_python() == Path(sys.executable)
    monkeypatch.setenv("REREAD_BASELINES", str(tmp_path / "none"))
    with pytest.raises(InputError, match=r"none.*make baselines"):
        find_python()
    monkeypatch.delenv("REREAD_BASELINES")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "__file__", str(tmp_path / "src" / "a" / "b" / "c" / "run.py"))
    with pytest.raises(InputError, match=r"make baselines.*REREAD_BASELINES"):
        find_python()
    python = tmp_path / ".venv-baselines" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert find_python() == python  # the link, not what it points to


def test_an_environment_without_kvpress_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"No module named 'kvpress'.*make baselines"):
        check_environment(Path(sys.executable))
    with pytest.raises(InputError, match=r"does not run.*make baselines"):
        check_environment(tmp_path / "missing")


def test_a_local_folder_is_used_as_it_is(tmp_path: Path) -> None:
    folder = needle_checkpoint.save(tmp_path / "model")
    assert export_model(load(str(folder), device="cpu"), tmp_path / "export") == folder
    assert not (tmp_path / "export").exists()


def test_another_model_is_saved_once(tmp_path: Path) -> None:
    loaded = Loaded(needle_checkpoint.model(), needle_checkpoint.tokenizer(), "some/model")
    folder = export_model(loaded, tmp_path / "export")
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert export_model(loaded, folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    again = load(str(folder), device="cpu")
    ids = torch.arange(40)[None]
    torch.testing.assert_close(again.model(ids).logits, loaded.model(ids).logits)
    assert again.tokenizer.get_vocab() == loaded.tokenizer.get_vocab()
    with pytest.raises(InputError, match=r"does not hold .*other"):
        export_model(Loaded(loaded.model, loaded.tokenizer, "some/other"), folder)
