"""Documents and videos as tasks, on a tiny vision-language checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from reread import InputError
from reread.evaluation.methods import Method, parse_methods
from reread.evaluation.tasks import vision
from reread.evaluation.tasks.base import Sample
from reread.integrations.hf.facts import model_facts
from reread.integrations.hf.load import Loaded

from ..unit import tiny_checkpoint
from . import tiny_vision as tv
from .tiny import select_everything, sparse


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and data of both tasks in the form of the published files."""
    made = tv.save(tmp_path_factory.mktemp("vision"))
    documents = made / "data" / vision.DOCUMENTS
    rows = []
    for number, pages in enumerate((2, 3, 20)):
        pictures(documents / "documents" / f"doc{number}", pages)
        rows.append({
            "doc_id": f"doc{number}.pdf", "doc_type": "Report", "question": f"What {number}?",
            "answer": "Not answerable" if number else "7",
            "evidence_pages": "[]" if number else "[1]",
            "answer_format": "None" if number else "Int",
        })  # fmt: skip
    (documents / "samples.json").write_text(json.dumps(rows))
    videos = made / "data" / vision.VIDEOS
    pictures(videos / "frames" / "clip", 4)
    row = {
        "videoID": "clip", "question": "Which?", "answer": "B", "duration": "short",
        "options": ["A. red", "B. blue", "C. grey", "D. none"],
    }  # fmt: skip
    (videos / "test.jsonl").write_text(json.dumps(row))
    return made


def pictures(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    for number in range(1, count + 1):
        Image.new("RGB", (24, 32), (number * 40 % 256, 90, 160)).save(folder / f"p_{number}.png")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    return vision.load_vision(str(folder), dtype="float32", device="cpu")


def a_task(folder: Path, name: str, tokens: int = 900, **options: Any) -> vision.VisionTask:
    how: dict[str, Any] = {"count": 9, "seed": 0, "data": folder / "data", **options}
    return vision.make(vision.load_processor(str(folder)), name, tokens=tokens, **how)


METHODS = [*parse_methods("dense"), Method("tiny", sparse()), Method("whole", select_everything())]


@pytest.mark.parametrize("name", vision.TASKS)
def test_a_task_answers_with_every_method(folder: Path, loaded: Loaded, name: str) -> None:
    task = a_task(folder, name)
    assert task.numbers == len(task.queries) == len(task.tokens) > 0
    for number in range(task.numbers):
        samples = list(task.measure(number, METHODS, loaded))
        assert [s.method for s in samples] == [m.name for m in METHODS]
        dense, small, whole = samples
        assert dense.answer == whole.answer
        assert dense.figures["keys_read_share"] == 1
        assert small.figures["keys_read_share"] < 0.5
        assert small.figures["fast_steps"] > small.figures["slow_steps"] > 0
        assert small.figures["full_steps"] == 0
        assert small.figures["prompt_tokens"] == task.tokens[number]
        for sample in samples:
            assert sample.error is None
            assert sample.score == vision.score(task.asked[number], sample.answer)
            assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample


def test_the_dense_answer_is_the_models_own(folder: Path, loaded: Loaded) -> None:
    task = a_task(folder, vision.VIDEOS)
    inputs = vision.encode(task.processor, task.name, task.asked[0])
    assert inputs["pixel_values"].shape[0] == 4
    images = inputs["input_ids"] == loaded.model.config.image_token_id
    assert int(images.sum()) == 4 * tv.PER_IMAGE
    out = loaded.model.generate(**inputs, max_new_tokens=8, do_sample=False)
    text = loaded.tokenizer.decode(out[0, images.shape[1] :], skip_special_tokens=True)
    assert next(task.measure(0, METHODS, loaded)).answer == text


def test_what_is_too_long_is_counted(folder: Path) -> None:
    whole, short = (a_task(folder, vision.DOCUMENTS, tokens) for tokens in (900, 600))
    assert (whole.numbers, whole.skipped) == (3, [])
    assert short.numbers == 2
    (entry,) = short.skipped
    assert (entry["task"], entry["length"], entry["samples"]) == ("mmlongbench_doc", 600, 1)
    assert f"up to {max(whole.tokens) + 64}" in entry["reason"]
    assert {a.kind for a in whole.asked} == {"single page", "unanswerable"}


def test_questions_depend_on_the_seed_alone(folder: Path) -> None:
    drawn = [a_task(folder, vision.DOCUMENTS, count=2, seed=s).asked for s in (0, 0, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) > 1


def test_a_method_that_is_not_supported_is_shown_with_its_error(
    folder: Path, loaded: Loaded
) -> None:
    beams = loaded.model.generation_config.num_beams
    loaded.model.generation_config.num_beams = 2
    try:
        (sample,) = a_task(folder, vision.VIDEOS).measure(0, METHODS[:1], loaded)
    finally:
        loaded.model.generation_config.num_beams = beams
    assert sample.score is None
    assert "beam search" in str(sample.error)


def test_what_cannot_be_right_is_told(folder: Path, tmp_path: Path) -> None:
    processor = vision.load_processor(str(folder))
    with pytest.raises(InputError, match="needs a local copy"):
        vision.make(processor, vision.VIDEOS, tokens=900, count=1, seed=0, data=None)
    with pytest.raises(InputError, match="'docs' is unknown: one of mmlongbench_doc, videomme"):
        vision.make(processor, "docs", tokens=900, count=1, seed=0, data=folder)
    silent = tv.processor()
    silent.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        vision.make(silent, vision.VIDEOS, tokens=9, count=1, seed=0, data=folder / "data")
    text = tiny_checkpoint.save(tmp_path / "text")
    with pytest.raises(InputError, match="takes no images"):
        vision.load_vision(str(text))
    with pytest.raises(InputError, match="does not exist"):
        vision.load_vision(str(tmp_path / "nothing"))


def test_positions_bound_a_prompt(folder: Path, loaded: Loaded) -> None:
    """What `make` lets through is refused by the model where the length is beyond its positions."""
    task = a_task(folder, vision.VIDEOS)
    text = loaded.model.config.get_text_config()
    held, text.max_position_embeddings = text.max_position_embeddings, 100
    try:
        with pytest.raises(InputError, match="the model 100 positions"):
            list(task.measure(0, METHODS[:1], loaded))
    finally:
        text.max_position_embeddings = held


def test_facts_of_a_checkpoint(folder: Path) -> None:
    facts = model_facts(str(folder))
    assert facts["architecture"] == "LlavaForConditionalGeneration"
    assert (facts["supported"], facts["sparse_layers"]) == (True, [0, 1])
