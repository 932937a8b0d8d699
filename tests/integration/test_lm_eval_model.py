"""reread as a model of lm-eval: real lm-eval code around tiny models, beside lm-eval's own HFLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from reread import Config, InputError
from reread.evaluation.fidelity import prefill, step_logits
from tests.unit import tiny_checkpoint

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'reread[eval]'")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from reread.evaluation.lm_eval_model import RereadLM

TEXT = "The kettle was on. A cat slept by the door, and the rain went on; nobody came. " * 3
SPARSE = {"sink": 2, "recent": 6, "k": 8}
ROWS = [
    {"context": TEXT[i : i + 120], "question": f"{i}?", "options": ["yes", "no"], "answer": i % 2}
    for i in range(4)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tokenizer knows the end of a text."""
    place = tmp_path_factory.mktemp("tiny")
    tiny_checkpoint.model().save_pretrained(place)
    tokenizer = tiny_checkpoint.tokenizer()
    tokenizer.eos_token = "~"
    tokenizer.save_pretrained(place)
    return place


def model_of(folder: Path, **changes: Any) -> RereadLM:
    return RereadLM(str(folder), device="cpu", **changes)


def asked(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, given, i) for i, given in enumerate(arguments)]


@pytest.fixture(scope="module")
def plain(folder: Path) -> HFLM:
    return HFLM(str(folder), device="cpu", dtype="float32", batch_size=1)


PAIRS = (
    (TEXT[:150], " and so"),
    (TEXT[:150], " ."),
    (TEXT[:150], " and so"),
    ("x", "yz"),
    ("", "abc"),
    (TEXT * 3, " long"),
)


def test_dense_likelihoods_are_those_of_lm_evals_own_model(folder: Path, plain: HFLM) -> None:
    ours = model_of(folder, preset="dense", prefill_chunk=50)
    found = ours.loglikelihood(asked("loglikelihood", *PAIRS), disable_tqdm=True)
    wanted = plain.loglikelihood(asked("loglikelihood", *PAIRS), disable_tqdm=True)
    assert [one for one, _ in found] == pytest.approx([one for one, _ in wanted], abs=2e-3)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert found[0] == found[2]
    assert ours.totals.truncated == 1


def test_dense_rolling_likelihoods_are_those_of_lm_evals_own_model(
    folder: Path, plain: HFLM
) -> None:
    texts = ((TEXT[:60],), (TEXT * 2,))  # the second takes two windows
    found = model_of(folder, preset="dense").loglikelihood_rolling(
        asked("loglikelihood_rolling", *texts), disable_tqdm=True
    )
    wanted = plain.loglikelihood_rolling(asked("loglikelihood_rolling", *texts), disable_tqdm=True)
    assert found == pytest.approx(wanted, abs=2e-2)


def test_dense_answers_are_those_of_lm_evals_own_model(folder: Path, plain: HFLM) -> None:
    options = {"until": [], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0}
    given = [(TEXT[:100], options), (TEXT * 3, options)]
    ours = model_of(folder, preset="dense", prefill_chunk=64)
    found = ours.generate_until(asked("generate_until", *given), disable_tqdm=True)
    assert found == plain.generate_until(asked("generate_until", *given), disable_tqdm=True)
    assert ours.totals.truncated == 1


def test_an_answer_ends_before_the_first_of_until(folder: Path) -> None:
    ours = model_of(folder, preset="dense")
    whole, *_ = ours.generate_until(
        asked("generate_until", (TEXT[:100], {"max_gen_toks": 12})), disable_tqdm=True
    )
    end = whole[5:7]
    steps = ours.totals.full_steps
    cut, *_ = ours.generate_until(
        asked("generate_until", (TEXT[:100], {"max_gen_toks": 12, "until": end})),
        disable_tqdm=True,
    )
    assert cut == whole[: whole.index(end)]
    assert ours.totals.full_steps - steps < steps  # it stopped there


def test_sparse_likelihoods_are_those_of_decode_steps(folder: Path) -> None:
    context, continuation = PAIRS[0]
    ours = model_of(folder, **SPARSE)
    ((found, _),) = ours.loglikelihood(
        asked("loglikelihood", (context, continuation)), disable_tqdm=True
    )
    ids = torch.tensor([ours.tok_encode(context + continuation)])
    cut = len(ours.tok_encode(context))
    config = Config.preset("default").updated(SPARSE)
    told: list[torch.Tensor] = []
    step_logits(
        ours.model, prefill(ours.model, ids[:, : cut - 1], config), ids[:, cut - 1 : -1], config,
        ours.tokenizer, lambda _, logits: told.append(logits.log_softmax(-1)[0]),
    )  # fmt: skip
    wanted = sum(float(row[token]) for row, token in zip(told, ids[0, cut:], strict=True))
    assert found == pytest.approx(wanted, abs=1e-4)
    dense = model_of(folder, preset="dense")
    ((other, _),) = dense.loglikelihood(
        asked("loglikelihood", (context, continuation)), disable_tqdm=True
    )
    assert abs(found - other) > 1e-3
    info = ours.get_model_info()["reread"]
    assert info["fast_steps"] > 0
    assert info["keys_read_share"] < 0.9
    assert info["config"] == config.to_dict()


def test_a_single_token_is_scored_by_the_first_step_which_is_slow(folder: Path) -> None:
    ours, dense = model_of(folder, **SPARSE), model_of(folder, preset="dense")
    given = asked("loglikelihood", (TEXT[:150], "a"), (TEXT[:150], "b"))
    found = ours.loglikelihood(given, disable_tqdm=True)
    wanted = dense.loglikelihood(given, disable_tqdm=True)
    assert [one for one, _ in found] == pytest.approx([one for one, _ in wanted], abs=1e-4)
    assert (ours.totals.slow_steps, ours.totals.fast_steps) == (2, 0)


def test_a_sparse_prompt_is_counted(folder: Path) -> None:
    small = {"prefill.k": 8, "prefill.local": 8, "prefill.b_sel": 8}
    ours = model_of(folder, preset="dense", prefill="oracle", **small, prefill_chunk=64)
    ours.loglikelihood(asked("loglikelihood", *PAIRS[:2]), disable_tqdm=True)
    info = ours.get_model_info()["reread"]
    assert info["sparse_prefills"] == 1  # both continuations share the context
    assert info["prefill_keys_share"] < 1


def write_tasks(place: Path) -> None:
    """Two tasks in lm-eval's form over one local file."""
    place.mkdir(exist_ok=True)
    rows = place / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(rows)},
            "cache_dir": str(place / "cache"),
        },
        "test_split": "test",
        "doc_to_text": "{{context}}\n{{question}}",
    }
    choose = {
        **shared, "task": "tiny_choose", "output_type": "multiple_choice",
        "doc_to_choice": "options", "doc_to_target": "answer", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    write = {
        **shared, "task": "tiny_write", "output_type": "generate_until",
        "doc_to_target": "{{options[answer]}}", "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6},
    }  # fmt: skip
    for task in (choose, write):
        (place / f"{task['task']}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")


def test_lm_eval_finds_it_by_name_and_keeps_what_ran(folder: Path, tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks")
    manager = TaskManager(include_defaults=False, include_path=str(tmp_path / "tasks"))
    results = simple_evaluate(
        model="reread", model_args=f"pretrained={folder},preset=default,sink=2,recent=6,k=8",
        tasks=["tiny_choose", "tiny_write"], task_manager=manager, device="cpu", bootstrap_iters=0,
    )  # fmt: skip
    assert 0 <= results["results"]["tiny_choose"]["acc,none"] <= 1
    assert set(results["results"]) == {"tiny_choose", "tiny_write"}
    ran = results["config"]["reread"]
    assert ran["requests"] == 3 * len(ROWS)  # two choices and one answer to each
    assert ran["fast_steps"] > 0
    assert ran["config"]["k"] == 8
    json.dumps(ran)


@pytest.mark.slow
def test_the_command_hands_over_to_lm_evals_own(folder: Path, tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks")
    command = [
        sys.executable, "-m", "reread.evaluation.lm_eval_model", "--model", "reread",
        "--model_args", f"pretrained={folder},k=8,recent=6", "--tasks", "tiny_write",
        "--include_path", str(tmp_path / "tasks"), "--output_path", str(tmp_path / "out"),
        "--limit", "2", "--device", "cpu",
    ]  # fmt: skip
    quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    ran = subprocess.run(
        command, env={**os.environ, **quiet}, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    assert "tiny_write" in ran.stdout
    (results,) = (tmp_path / "out").rglob("results_*.json")
    config = json.loads(results.read_text(encoding="utf-8"))["config"]
    assert config["reread"]["config"]["k"] == 8
    assert config["reread"]["requests"] == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kk": 8}, "kk"),
        ({"k": 0}, "k=0"),
        ({"preset": "fast"}, "fast"),
        ({"batch_size": 8}, "batch_size=8"),
        ({"max_length": 4000}, "max_length=4000"),
        ({"prefill_chunk": 1}, "prefill_chunk=1"),
        ({"dtype": "int3"}, "int3"),
        ({"indexer": "nowhere"}, "nowhere"),
    ],
)
def test_bad_arguments_are_refused_by_name(
    folder: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        model_of(folder, **changes)


def test_a_model_is_needed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="pretrained is missing"):
        RereadLM()
    with pytest.raises(InputError, match="nothing-here"):
        RereadLM(str(tmp_path / "nothing-here"))


def test_requests_that_do_not_fit_are_refused(folder: Path) -> None:
    ours = model_of(folder, max_length=32)
    with pytest.raises(InputError, match="exceeds 32 positions"):
        ours.loglikelihood(asked("loglikelihood", ("a", "b" * 40)), disable_tqdm=True)
    given = asked("generate_until", ("a", {"max_gen_toks": 40}))
    with pytest.raises(InputError, match="leaves no room"):
        ours.generate_until(given, disable_tqdm=True)


def test_the_command_tells_a_missing_lm_eval_in_one_line() -> None:
    code = (
        "import sys; sys.modules['lm_eval'] = None; "
        "from reread.cli.lm_eval import main; sys.argv = ['reread-lm-eval']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: lm-eval is needed")
    assert "Traceback" not in done.stderr
