"""Baselines in their own environment: all of kvpress's methods on a tiny random model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from reread.errors import InputError
from reread.evaluation.baselines.export import export_model
from reread.evaluation.baselines.run import (
    BaselineAnswer,
    Job,
    answers,
    check_environment,
    find_python,
)
from reread.evaluation.methods import PRESSES
from reread.evaluation.needle import make_texts, needle_vocabulary
from reread.integrations.hf.cache import cache_keyword
from reread.integrations.hf.load import Loaded, load_tokenizer

from . import needle_checkpoint

LENGTH, NEW = 400, 8
PROMPT = tuple(
    torch.randint(1, 200, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
)
CHOICES = ((7, 8, 9), (20,), (21, 22, 23, 24))
Answers = dict[str, BaselineAnswer]


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return find_python()
    except InputError as error:
        pytest.skip(f"make baselines ({error})")


def _jobs() -> list[Job]:
    jobs = []
    for press in PRESSES.values():
        for kept in (0.5, 0.1, 0.9999):
            jobs.append(Job(f"{press} {kept}", press, kept, PROMPT, new_tokens=NEW))
        for kept in (0.5, 1.0):
            jobs.append(Job(f"{press} {kept} choices", press, kept, PROMPT, choices=CHOICES))
    jobs.append(Job("unknown", "NoPress", 0.5, PROMPT, new_tokens=NEW))
    jobs.append(Job("flat", "PyramidKVPress", 0.03, PROMPT, new_tokens=NEW))
    jobs.append(Job("after", "SnapKVPress", 0.5, PROMPT, new_tokens=NEW))
    return jobs


@pytest.fixture(scope="module")
def model() -> Any:
    return needle_checkpoint.model()


@pytest.fixture(scope="module")
def given(model: Any, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """One worker's answers to every job, from a model saved by this transformers."""
    folder = tmp_path_factory.mktemp("baselines")
    loaded = Loaded(model, needle_checkpoint.tokenizer(), "some/model")
    exported = export_model(loaded, folder / "model")
    found = answers(_jobs(), exported, "float32", "cpu", python, folder / "work")
    return {answer.id: answer for answer in found}


def test_the_environment_has_what_is_pinned(python: Path) -> None:
    lines = (Path(__file__).parents[2] / "constraints-baselines.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    found = {name: version.split("+")[0] for name, version in check_environment(python).items()}
    assert found == {name: pinned[name] for name in ("kvpress", "transformers", "torch")}


@torch.no_grad()
def _continue(model: Any, cache: Any, logits: Tensor, at: int, choice: tuple[int, ...]) -> float:
    """Log-probability of `choice`, its tokens at positions from `at` on."""
    total = 0.0
    for i, token in enumerate(choice):
        total += float(logits.log_softmax(-1)[token])
        out = model(
            torch.tensor([[token]]),
            position_ids=torch.tensor([[at + i]]),
            **{cache_keyword(model): cache},
        )
        logits = out.logits[0, -1]
    return total


@torch.no_grad()
def _read(model: Any) -> tuple[Any, Tensor]:
    cache = DynamicCache()
    out = model(torch.tensor([PROMPT]), **{cache_keyword(model): cache})
    return cache, out.logits[0, -1]


def _streaming(model: Any, choice: tuple[int, ...], *, at: int = LENGTH) -> float:
    """The same of a cache that keeps the first 4 and the last 196 tokens."""
    cache, logits = _read(model)
    rows = torch.cat([torch.arange(4), torch.arange(LENGTH - 196, LENGTH)])
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, rows], layer.values[:, :, rows]
    return _continue(model, cache, logits, at, choice)


@pytest.mark.parametrize("press", PRESSES.values())
def test_what_is_kept_is_what_was_asked_for(given: Answers, press: str) -> None:
    for kept in (0.5, 0.1):
        answer = given[f"{press} {kept}"]
        assert answer.error is None
        assert answer.kept_share is not None
        assert len(answer.tokens) == NEW
        # whole chunks of 20, halves of a token, one of 8 channels
        slack = {"ChunkKVPress": 10 / LENGTH, "ThinKPress": 1 / 16}.get(press, 0.5 / LENGTH)
        assert abs(answer.kept_share - kept) <= slack + 1e-9
        whole = (1 + answer.kept_share) / 2 if press == "ThinKPress" else answer.kept_share
        assert answer.kv_bytes_share == pytest.approx(whole)
        assert f"{press}(" in answer.path


def test_a_pyramid_has_layers_of_different_sizes(given: Answers) -> None:
    assert "by layer" in given["PyramidKVPress 0.5"].path
    assert "by layer" in given["PyramidKVPress 0.1"].path


@pytest.mark.parametrize("press", PRESSES.values())
def test_with_everything_kept_the_answer_is_the_dense_one(
    model: Any, given: Answers, press: str
) -> None:
    dense = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False
    )
    assert given[f"{press} 0.9999"].tokens == tuple(dense[0, LENGTH:].tolist())
    assert given[f"{press} 0.9999"].kept_share == 1.0
    expected = [_continue(model, *_read(model), LENGTH, choice) for choice in CHOICES]
    assert given[f"{press} 1.0 choices"].logprobs == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("press", PRESSES.values())
def test_decoding_reads_what_is_left(given: Answers, press: str) -> None:
    some, everything = given[f"{press} 0.5 choices"], given[f"{press} 1.0 choices"]
    # the first token comes from the prompt itself, the later ones from the cache
    assert some.logprobs[1] == pytest.approx(everything.logprobs[1], abs=1e-4)
    assert abs(some.logprobs[2] - everything.logprobs[2]) > 1e-3


def test_answers_go_on_at_the_positions_of_the_text(model: Any, given: Answers) -> None:
    found = given["StreamingLLMPress 0.5 choices"].logprobs
    right = [_streaming(model, choice) for choice in CHOICES]
    assert found == pytest.approx(right, abs=1e-3)
    moved = [_streaming(model, choice, at=LENGTH // 2) for choice in CHOICES]
    assert abs(moved[2] - right[2]) > 1e-2


def test_failed_jobs_are_errors_and_stop_nothing(given: Answers) -> None:
    assert "ValueError: press 'NoPress' is unknown" in str(given["unknown"].error)
    assert "are no pyramid" in str(given["flat"].error)
    assert given["after"].tokens == given["SnapKVPress 0.5"].tokens


def test_snapkv_answers_from_half_of_a_text_and_streaming_from_what_is_near(
    python: Path, needle_dir: Path, tmp_path: Path
) -> None:
    """On a trained model with QK-norm and grouped heads, as strong as its authors say."""
    tokenizer = load_tokenizer(str(needle_dir))
    vocabulary = needle_vocabulary(tokenizer)
    (text,) = make_texts(vocabulary, tokens=512, count=1, questions=2, seed=1)
    jobs, expected = [], {}
    for i, question in enumerate(text.questions["code"]):
        ids = tuple(tokenizer.convert_tokens_to_ids([*text.words, *question.words]))
        answer = tuple(tokenizer.convert_tokens_to_ids(question.answer))
        for press, kept in (("SnapKVPress", 0.5), ("StreamingLLMPress", 0.05)):
            jobs.append(Job(f"{press} {i}", press, kept, ids, new_tokens=len(answer)))
            expected[f"{press} {i}"] = answer
    found = list(answers(jobs, needle_dir, "float32", "cpu", python, tmp_path))
    right = {answer.id for answer in found if answer.tokens == expected[answer.id]}
    assert {f"SnapKVPress {i}" for i in range(2)} <= right
    assert len(right) < len(jobs)
