"""RULER through lm-eval's generators: prompts fit, hold what they ask for, come out the same."""

from __future__ import annotations

import copy
import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reread import InputError
from reread.evaluation.tasks import ruler_lm
from reread.evaluation.tasks.base import Answer, Case
from reread.evaluation.tasks.lm_common import encode
from reread.integrations.hf.load import load_tokenizer

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'reread[eval]'")
pytest.importorskip("wonderwords", reason="lm-eval's words are missing: pip install wonderwords")

TOKENS = 1024
ALONE = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
ESSAYS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
QA = ("qa_squad", "qa_hotpot")
NEW = {"vt": 30, "cwe": 120, "fwe": 50, "qa_squad": 32, "qa_hotpot": 32}  # the others: 128


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer("smollm2")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Essays, a sentence model without abbreviations, and questions, as the originals have them."""
    place = tmp_path_factory.mktemp("data")
    model = place / "nltk_data" / "tokenizers" / "punkt_tab" / "english"
    model.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (model / name).write_text("", encoding="utf-8")
    (place / "ruler").mkdir()
    essays = [
        {"text": " ".join(f"Essay {i} has a line {j}, and it says little." for j in range(30))}
        for i in range(4)
    ]
    lines = "".join(json.dumps(essay) + "\n" for essay in essays)
    (place / "ruler" / "essays.jsonl").write_text(lines, encoding="utf-8")
    write(place / "ruler" / "squad.json", {"data": [article(i) for i in range(6)]})
    write(place / "ruler" / "hotpot.json", [question(i) for i in range(12)])
    return place


def write(path: Path, tree: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree), encoding="utf-8")


def article(i: int) -> dict[str, Any]:
    def paragraph(j: int) -> dict[str, Any]:
        asked = {"question": f"Who lives in house {i}-{j}?", "answers": [{"text": f"Bob {i}-{j}"}]}
        none = {"question": "And where?", "answers": [], "is_impossible": True}
        return {
            "context": f"In house {i}-{j} lives Bob {i}-{j}. " + "It is a house. " * 5,
            "qas": [{**asked, "is_impossible": False}, none],
        }

    return {"title": f"Street {i}", "paragraphs": [paragraph(j) for j in range(3)]}


def question(i: int) -> dict[str, Any]:
    context = [
        [f"Title {i}-{j}", [f"Line one of {i}-{j}.", " And one more." * 9]] for j in range(3)
    ]
    return {"question": f"What is {i}?", "answer": f"one of {i}-1", "context": context}


def made(tokenizer: Any, short: str, data: Path | None = None, **changes: Any) -> Any:
    given = {"tokens": TOKENS, "count": 3, "seed": 0, "data": data, **changes}
    return ruler_lm.make(tokenizer, f"ruler_{short}", **given)


def text_of(tokenizer: Any, case: Case) -> str:
    text: str = tokenizer.decode(case.context + case.queries[0].ids)
    return text


def test_the_names_are_rulers() -> None:
    assert set(ruler_lm.TASKS) == {f"ruler_{name}" for name in (*ALONE, *ESSAYS, *QA)}


@pytest.mark.parametrize("name", [*ALONE, *ESSAYS, *QA])
def test_prompts_fill_the_length_with_their_answers(tokenizer: Any, data: Path, name: str) -> None:
    task = made(tokenizer, name, data)
    assert (task.name, task.length, len(task.cases)) == (f"ruler_{name}", TOKENS, 3)
    for case in task.cases:
        (query,) = case.queries
        assert query.new_tokens == NEW.get(name, 128)
        assert query.kind == name
        used = len(case.context) + len(query.ids)
        assert 0.9 * (TOKENS - query.new_tokens) <= used <= TOKENS - query.new_tokens
        # the whole is one text's tokens, and the question is a small part of it
        text = text_of(tokenizer, case)
        assert tuple(encode(tokenizer, text, False)) == case.context + query.ids
        assert 0 < len(query.ids) < 150
        assert "<|im_start|>assistant" in tokenizer.decode(query.ids)


@pytest.mark.parametrize("name", [*ALONE, *ESSAYS, *QA])
def test_what_is_expected_stands_in_the_text_and_scores(
    tokenizer: Any, data: Path, name: str
) -> None:
    task = made(tokenizer, name, data)
    for case in task.cases:
        (query,) = case.queries
        said = tokenizer.decode(case.context)
        assert query.expected
        assert all(text in said for text in query.expected)
        assert task.score(query, Answer(text=" and ".join(query.expected))) == 1
        assert task.score(query, Answer(text="nothing of it")) == 0
        part = task.score(query, Answer(text=query.expected[0].upper()))
        assert part == pytest.approx(1 / len(query.expected))


def test_a_needle_stands_at_its_depth(tokenizer: Any, data: Path) -> None:
    for name in ("niah_single_1", "niah_multikey_1", "niah_multikey_2"):
        for case in made(tokenizer, name, data).cases:
            (query,) = case.queries
            text = tokenizer.decode(case.context)
            assert query.depth == pytest.approx(text.index(query.expected[0]) / len(text), abs=0.15)
    assert made(tokenizer, "niah_multivalue", data).cases[0].queries[0].depth is None
    assert made(tokenizer, "vt").cases[0].queries[0].depth is None


@pytest.mark.parametrize("name", ["vt", "cwe", "fwe", "niah_multikey_2", "qa_squad"])
def test_the_same_arguments_make_the_same_prompts(tokenizer: Any, data: Path, name: str) -> None:
    python, numpy = random.getstate(), np.random.get_state()[1].tolist()
    first = made(tokenizer, name, data).cases
    assert random.getstate() == python
    assert np.random.get_state()[1].tolist() == numpy
    assert made(tokenizer, name, data).cases == first
    assert made(tokenizer, name, data, count=2).cases == first[:2]
    assert made(tokenizer, name, data, seed=1).cases != first
    assert len({*first}) == 3


def test_without_a_chat_template_the_answer_begins_behind_the_question(
    tokenizer: Any, data: Path
) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = None
    for name, end in (("cwe", "?\n\nAnswer:"), ("qa_squad", "? Answer:")):
        (case, *_) = made(tokenizer, name, data).cases
        assert end in tokenizer.decode(case.queries[0].ids)


def test_a_qa_task_has_no_more_cases_than_questions_that_fit(tokenizer: Any, data: Path) -> None:
    assert len(made(tokenizer, "qa_squad", data, count=50).cases) == 18  # three in each article


@pytest.mark.parametrize("name", ALONE)
def test_too_few_tokens_are_refused(tokenizer: Any, name: str) -> None:
    with pytest.raises(InputError, match="tokens=150 is too short"):
        made(tokenizer, name, tokens=150)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("niah_single_2", "ruler/essays.jsonl"),
        ("qa_squad", "ruler/squad.json"),
        ("qa_hotpot", "ruler/hotpot.json"),
    ],
)
def test_missing_data_are_named(tokenizer: Any, tmp_path: Path, name: str, file: str) -> None:
    for folder in (None, tmp_path):
        with pytest.raises(InputError, match=f"ruler_{name}.*{file}"):
            made(tokenizer, name, folder)
    with pytest.raises(InputError, match="is no folder"):
        made(tokenizer, name, tmp_path / "nowhere")


def test_a_missing_sentence_model_is_named(tokenizer: Any, tmp_path: Path, data: Path) -> None:
    import nltk

    # NLTK keeps the one that another test has found
    nltk.tokenize._get_punkt_tokenizer.cache_clear()
    with suppress(LookupError):
        nltk.sent_tokenize("One. Two.")
        pytest.skip("NLTK has a sentence model of its own here")
    write(tmp_path / "ruler" / "essays.json", [{"text": "One line. Another line."}])
    with pytest.raises(InputError, match="punkt_tab"):
        made(tokenizer, "niah_single_2", tmp_path)


@pytest.mark.parametrize(
    ("name", "file", "text", "said"),
    [
        ("qa_squad", "squad.json", "{", "cannot be read"),
        ("qa_squad", "squad.json", '{"data": [{}]}', "no field 'paragraphs'"),
        ("qa_squad", "squad.json", '{"data": []}', "no question"),
        ("qa_hotpot", "hotpot.json", '[{"question": "?"}]', "no field 'context'"),
        ("niah_single_2", "essays.jsonl", '{"text": "a"}\n{', "line 2"),
        ("niah_single_2", "essays.jsonl", '{"body": "a"}', "field 'text'"),
        ("niah_single_2", "essays.json", '{"text": "a"}', "a list of objects"),
        ("niah_single_2", "essays.parquet", "no parquet", "cannot be read"),
    ],
)
def test_broken_data_are_refused(
    tokenizer: Any, tmp_path: Path, name: str, file: str, text: str, said: str
) -> None:
    (tmp_path / "ruler").mkdir()
    (tmp_path / "ruler" / file).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=said):
        made(tokenizer, name, tmp_path)


def test_an_unknown_name_is_refused(tokenizer: Any) -> None:
    for name in ("nothing", "ruler_nothing", "vt"):
        with pytest.raises(InputError, match="is unknown"):
            ruler_lm.make(tokenizer, name, tokens=TOKENS, count=1, seed=0, data=None)
