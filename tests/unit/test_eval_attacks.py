"""What broke `reread eval` and `reread report` once: folders that end early or hold something else,
answers that are no plain text, and questions whose answers must not depend on each other."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from reread.errors import InputError
from reread.evaluation.baselines.export import MARK, export_model
from reread.evaluation.methods import parse_methods
from reread.evaluation.report import write_report
from reread.evaluation.suite.request import Request
from reread.evaluation.suite.store import RUN, SAMPLES, SPEED, Folder
from reread.evaluation.tasks import english, needle_task
from reread.evaluation.tasks.answering import Answering
from reread.evaluation.tasks.base import Answer, Case, Query, Sample
from reread.evaluation.tasks.registry import load_for
from reread.integrations.hf.load import Loaded

from . import needle_checkpoint, tiny_checkpoint
from .report_folder import write_folder

SETTINGS = {"model": "m", "seed": 0}
VERSIONS = {"reread": "1", "torch": "2", "transformers": "3"}
NAN, INFINITE, HUGE = float("nan"), float("inf"), 10**400


def sample(**changes: Any) -> Sample:
    known: dict[str, Any] = {
        "task": "t", "length": 8, "method": "dense", "number": 0, "kind": "k", "score": 1.0,
    }  # fmt: skip
    return Sample(**{**known, **changes})


def opened(path: Path) -> Folder:
    return Folder(path, SETTINGS, VERSIONS)


def started(path: Path) -> Path:
    with opened(path) as folder:
        folder.note(versions=VERSIONS)
    return path


# -- folders


def test_a_run_that_ended_while_its_model_was_loading_can_start_again(tmp_path: Path) -> None:
    with opened(tmp_path):
        assert (tmp_path / SAMPLES).exists()
    with opened(tmp_path) as folder:
        folder.add(sample())


@pytest.mark.parametrize("text", ["a\u2028b\u2029c\x85d", "\ud83d", "naïve ☃"])
def test_answers_are_read_again_whatever_they_hold(tmp_path: Path, text: str) -> None:
    with opened(started(tmp_path)) as folder:
        folder.add(sample(answer=text))
        folder.add_speed({"method": text, "length": 8})
    with opened(tmp_path) as folder:
        assert [s.answer for s in folder.samples.values()] == [text]
        assert [line["method"] for line in folder.speeds()] == [text]
    write_report(tmp_path)


@pytest.mark.parametrize("score", [NAN, INFINITE])
def test_a_score_that_is_no_number_failed(tmp_path: Path, score: float) -> None:
    with opened(started(tmp_path)) as folder:
        folder.add(sample(score=score, figures={"kl": score, "ppl": 2.0}))
    with opened(tmp_path) as folder:
        (found,) = folder.samples.values()
    assert found.score is None
    assert found.error == f"the score is {score}"
    assert found.figures == {"ppl": 2.0}


def test_a_run_that_was_changed_before_the_lock_is_not_overwritten(tmp_path: Path) -> None:
    started(tmp_path)
    late = opened(tmp_path)
    with opened(tmp_path) as folder:
        folder.note(methods={"paper": {"k": 1}})
    with pytest.raises(InputError, match="another run has just changed"), late:
        pass
    assert "paper" in json.loads((tmp_path / RUN).read_text())["methods"]


@pytest.mark.parametrize(
    "changes",
    [
        {"places": [3]}, {"places": 3}, {"places": [{"task": "t"}]}, {"skipped": {}}, {"notes": 7},
        {"methods": {"dense": []}}, {"versions": []},
    ],
)  # fmt: skip
def test_a_run_of_wrong_types_is_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    started(tmp_path)
    run = json.loads((tmp_path / RUN).read_text())
    (tmp_path / RUN).write_text(json.dumps(run | changes))
    with pytest.raises(InputError, match=next(iter(changes)).rstrip("s")):
        opened(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{"task": {}}, {"method": None}, {"kind": INFINITE}, {"score": "x"}, {"score": HUGE},
     {"figures": "x"}, {"length": HUGE}, {"score": NAN}],
)  # fmt: skip
def test_a_sample_of_wrong_types_is_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    started(tmp_path)
    line = json.dumps(sample().to_dict() | changes)
    (tmp_path / SAMPLES).write_text(line + "\n")
    with pytest.raises(InputError, match="line 1 is no sample"), opened(tmp_path):
        pass


def test_samples_that_are_no_text_are_named(tmp_path: Path) -> None:
    started(tmp_path)
    (tmp_path / SAMPLES).write_bytes(b"\xff\xfe\n")
    with pytest.raises(InputError, match="line 1 is no sample"), opened(tmp_path):
        pass


@pytest.mark.parametrize("line", [b"{}", b"[]", b'{"method": "a", "length": []}', b"\xff"])
def test_times_of_wrong_types_are_named(tmp_path: Path, line: bytes) -> None:
    (started(tmp_path) / SPEED).write_bytes(line + b"\n")
    with pytest.raises(InputError, match=SPEED), opened(tmp_path) as folder:
        folder.speeds()


# -- what is asked for


def request(tmp_path: Path, **changes: Any) -> Request:
    known: dict[str, Any] = {
        "model": "m", "tasks": ("fidelity",), "lengths": (100,), "methods": "dense",
        "out": tmp_path / "out",
    }  # fmt: skip
    return Request(**{**known, **changes})


def test_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="too long"):
        request(tmp_path, out=tmp_path / ("x" * 300)).check()
    with pytest.raises(InputError, match=r"no run\.json"):
        write_report(tmp_path / ("x" * 300))


def test_two_texts_of_one_name(tmp_path: Path) -> None:
    files = (tmp_path / "a" / "x.txt", tmp_path / "b" / "x.txt")
    for file in files:
        file.parent.mkdir()
        file.write_text(str(file))
    with pytest.raises(InputError, match=r"another one is named 'x\.txt'"):
        request(tmp_path, texts=files).source()


def test_baselines_alone_on_text_alone(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="baselines answer questions"):
        request(tmp_path, methods="snapkv@3%,think").check()


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("text", encoding="utf-8-sig")
    assert request(tmp_path, texts=(tmp_path / "x.txt",)).source().texts == {"x.txt": "text"}


# -- the report


@pytest.mark.parametrize(
    "changes",
    [{"of": -1}, {"cases": []}, {"length": "\u2028"}, {"low": HUGE}, {"length": HUGE}],
)
def test_gaps_of_wrong_types_are_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    file = write_folder(tmp_path, cases=1) / "gaps.json"
    held = json.loads(file.read_text())
    held["gaps"][0] |= changes
    file.write_text(json.dumps(held))
    with pytest.raises(InputError, match="a gap"):
        write_report(tmp_path)


def test_half_a_character_and_numbers_that_are_none_are_drawn(tmp_path: Path) -> None:
    write_folder(tmp_path, cases=1)
    file = tmp_path / RUN
    held = json.loads(file.read_text())
    held["config"]["\ud83d"] = "\ud83d"
    file.write_text(json.dumps(held))
    (tmp_path / SPEED).write_text(
        json.dumps({"method": "dense", "length": 4096, "ttft_s": HUGE, "ms_per_token": NAN}) + "\n"
    )
    assert "not measured" in write_report(tmp_path).read_text(encoding="utf-8")


def test_json_that_is_too_deep(tmp_path: Path) -> None:
    (tmp_path / RUN).write_text("[" * 100_000)
    with pytest.raises(InputError, match="is no JSON"):
        write_report(tmp_path)


# -- answers


def tiny() -> Loaded:
    return Loaded(needle_checkpoint.model(), needle_checkpoint.tokenizer(), "tiny")


def test_a_first_fast_step_does_not_depend_on_what_was_asked_before() -> None:
    loaded = tiny()
    method = "default:k=16:recent=16:first_step=false"
    task = needle_task.make(loaded.tokenizer, tokens=660, count=1, seed=3)
    (case,) = task.cases
    before = parse_methods(f"dense,default:k=32:recent=16:tail_queries=8,{method}")
    together = list(Answering(task).measure(0, before, loaded))[-len(case.queries) :]
    for index, query in enumerate(case.queries):
        alone = needle_task.NeedleTask(loaded.tokenizer, 660, [Case(case.context, (query,))])
        (found,) = Answering(alone).measure(0, parse_methods(method), loaded)
        other = together[index]
        assert other.method == method
        assert (found.answer, found.figures) == (other.answer, other.figures)


class Choosing:
    """A task of one multiple choice, which every answer gets right."""

    name, length = "choosing", 4096

    def __init__(self, case: Case) -> None:
        self.cases = [case]

    def score(self, query: Query, answer: Answer) -> float:
        return 1.0


def test_a_case_that_is_too_short_for_a_share_fails_alone() -> None:
    rng = random.Random(0)
    case = Case(
        tuple(rng.randrange(2, 99) for _ in range(40)), (Query((5,), 0, "k", choices=((7,),)),)
    )
    methods = parse_methods("default@3%,dense")
    short, dense = Answering(Choosing(case)).measure(0, methods, tiny())
    assert short.score is None
    assert "'default@3%' is not possible at 41 tokens" in (short.error or "")
    assert dense.score == 1


# -- the model as others read it


def test_a_model_that_cannot_be_written_for_baselines(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        export_model(tiny(), tmp_path / "file" / "model")


def test_a_mark_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / MARK).write_text("{")
    with pytest.raises(InputError, match=MARK):
        export_model(tiny(), tmp_path)


def test_settings_of_the_checkpoint_do_not_change_greedy_answers(tmp_path: Path) -> None:
    """Baselines take the most likely token, so ours may not have penalties or beams either."""
    folder = str(needle_checkpoint.save(tmp_path))
    plain = load_for(["needle"], folder, dtype="auto", device="cpu")
    config = {"repetition_penalty": 5.0, "num_beams": 3, "eos_token_id": 7, "pad_token_id": 0}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    other = load_for(["needle"], folder, dtype="auto", device="cpu")
    assert other.model.generation_config.eos_token_id == 7
    task = Answering(needle_task.make(plain.tokenizer, tokens=660, count=1, seed=3))
    found = (task.measure(0, parse_methods("dense"), loaded) for loaded in (plain, other))
    expected, answers = ([sample.answer for sample in samples] for samples in found)
    assert answers == expected


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{{ messages }}{{ messages }}"]
)
def test_a_chat_template_that_does_not_fit(template: str) -> None:
    tokenizer = tiny_checkpoint.tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(InputError, match="chat template"):
        english.make(tokenizer, tokens=3000, count=1, seed=0)
