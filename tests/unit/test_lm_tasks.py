"""LongBench, LongBench v2, GPQA and MMLU: lm-eval's code over small files in the hub's form."""

from __future__ import annotations

import ast
import csv
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from reread import InputError
from reread.evaluation.tasks import lm_tasks
from reread.evaluation.tasks.base import Answer, Query
from reread.evaluation.tasks.lm_common import encode

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'reread[eval]'")

TOKENS = 512
SCORERS = all(importlib.util.find_spec(name) for name in ("jieba", "fuzzywuzzy", "rouge"))
needs_scorers = pytest.mark.skipif(
    not SCORERS, reason="LongBench's scorers are not installed: pip install 'lm_eval[longbench]'"
)
SUMS = [
    {"question": f"What is {i}+1?", "choices": [str(i + n) for n in range(4)], "answer": 1}
    for i in range(8)
]
GPQA = [
    {
        "Question": f"Which is {i}?", "Correct Answer": f"right {i}",
        **{f"Incorrect Answer {n}": f"wrong {n}" for n in (1, 2, 3)},
    }
    for i in range(8)
]  # fmt: skip
BOOKS = [
    {
        "context": f"Page {i}. " * 20 * (1 + i * 30), "question": f"Who wrote {i}?",
        "choices": ["Ann", "Bob", "Cid", "Dan"], "answer": i % 4,
    }
    for i in range(4)
]  # fmt: skip
STORIES = [
    {
        "context": f"Bob {i} met a fox. " * (4 + 60 * i), "input": "", "question": "Who met it?",
        "answers": [f"Bob {i}", "a man"], "all_classes": ["Bob", "Ann"], "length": 9,
    }
    for i in range(4)
]  # fmt: skip


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Words of these tests as tokens, and a chat template."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=1200, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    rows = [json.dumps(row) for row in (*SUMS, *GPQA, *BOOKS, *STORIES)]
    text = "The following are multiple choice questions (with answers).\nAnswer: A\nAnswer: B"
    made.train_from_iterator([*rows, text, "A. 1 B. 2 C. 3 D. 4"], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=special[1])
    wrapped.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return wrapped


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Every file form once."""
    from pyarrow import Table
    from pyarrow.parquet import write_table

    lines(tmp_path / "longbench" / "narrativeqa.jsonl", STORIES)
    lines(tmp_path / "longbench" / "trec.jsonl", STORIES)
    books = tmp_path / "longbench2" / "academic_single.json"
    books.parent.mkdir()
    books.write_text(json.dumps(BOOKS), encoding="utf-8")
    anatomy = tmp_path / "mmlu" / "anatomy"
    anatomy.mkdir(parents=True)
    write_table(Table.from_pylist(SUMS[:5]), anatomy / "test-00000-of-00002.parquet")
    write_table(Table.from_pylist(SUMS[5:]), anatomy / "test-00001-of-00002.parquet")
    write_table(Table.from_pylist(SUMS), anatomy / "dev.parquet")
    (tmp_path / "gpqa").mkdir()
    with (tmp_path / "gpqa" / "gpqa_diamond.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(GPQA[0]))
        writer.writeheader()
        writer.writerows(GPQA)
    return tmp_path


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def made(tokenizer: Any, name: str, data: Path | None, **changes: Any) -> Any:
    given = {"tokens": TOKENS, "count": 3, "seed": 0, "data": data, **changes}
    return lm_tasks.make(tokenizer, name, **given)


def said(tokenizer: Any, case: Any) -> str:
    text: str = tokenizer.decode(case.context + case.queries[0].ids)
    return text


def chosen(query: Query, right: int) -> Answer:
    """An answer for which one choice is the most likely."""
    return Answer(logprobs=tuple(-1.0 - (n != right) for n in range(len(query.choices))))


def test_groups_expand_into_lm_evals_tasks() -> None:
    assert len(lm_tasks.expand("longbench")) == 21
    assert lm_tasks.expand("longbench_code") == ("longbench_lcc", "longbench_repobench-p")
    assert len(lm_tasks.expand("mmlu")) == 57
    assert len(lm_tasks.expand("mmlu_stem")) == 19
    assert "longbench2_code" in lm_tasks.expand("longbench2")
    for name in ("gpqa_diamond", "mmlu_anatomy", "longbench_2wikimqa"):
        assert lm_tasks.expand(name) == (name,)
        assert lm_tasks.is_task(name)
    assert lm_tasks.is_task("mmlu")
    for name in ("needle", "mmlu_nothing", "longbenchx", ""):
        assert not lm_tasks.is_task(name)
        with pytest.raises(InputError, match="is unknown"):
            lm_tasks.expand(name)


def test_mmlu_asks_after_five_examples(tokenizer: Any, data: Path) -> None:
    task = made(tokenizer, "mmlu_anatomy", data, count=8)
    assert (task.metric, task.skipped, len(task.cases)) == ("acc", 0, 8)
    for case in task.cases:
        (query,) = case.queries
        text = said(tokenizer, case)
        assert text.startswith("The following are multiple choice questions")
        assert text.count("Answer:") == 6
        assert text.endswith("Answer:")
        assert SUMS[query.data]["question"] in text
        assert [tokenizer.decode(choice) for choice in query.choices] == [" A", " B", " C", " D"]
        assert query.expected == ("B",)
        assert [task.score(query, chosen(query, n)) for n in range(4)] == [0, 1, 0, 0]


def test_choices_are_the_tokens_that_follow_the_prompt(tokenizer: Any, data: Path) -> None:
    for name in ("mmlu_anatomy", "gpqa_diamond", "longbench2_academic_single"):
        for case in made(tokenizer, name, data).cases:
            (query,) = case.queries
            for choice in query.choices:
                whole = said(tokenizer, case) + tokenizer.decode(choice)
                ids = tuple(encode(tokenizer, whole, True))
                assert ids == case.context + query.ids + choice
                assert len(ids) <= TOKENS


def test_gpqa_mixes_its_choices_by_the_seed(tokenizer: Any, data: Path) -> None:
    def orders(seed: int) -> dict[int, tuple[str, ...]]:
        cases = made(tokenizer, "gpqa_diamond", data, count=8, seed=seed).cases
        return {case.queries[0].data: case.queries[0].expected for case in cases}

    assert orders(0) == orders(0) != orders(1)
    task = made(tokenizer, "gpqa_diamond", data)
    for case in task.cases:
        (query,) = case.queries
        letter = query.expected[0]
        assert f"{letter} right {query.data}" in said(tokenizer, case)
        right = "ABCD".index(letter[1])
        scores = [task.score(query, chosen(query, n)) for n in range(4)]
        assert scores == [float(n == right) for n in range(4)]


@pytest.mark.parametrize("variant", ["generative_n_shot", "cot_zeroshot"])
def test_gpqa_can_be_generated(tokenizer: Any, data: Path, variant: str) -> None:
    task = made(tokenizer, f"gpqa_diamond_{variant}", data, tokens=1024)
    assert task.metric == "exact_match"
    for case in task.cases:
        (query,) = case.queries
        assert not query.choices
        assert query.new_tokens == 256
        assert "</s>" in query.until
        assert said(tokenizer, case).endswith("<|im_start|>assistant\n")
        assert task.score(query, Answer(text=f"So. The answer is {query.expected[0]}.")) == 1
        assert task.score(query, Answer(text="The answer is (Z).")) == 0


def test_a_long_text_loses_its_middle(tokenizer: Any, data: Path) -> None:
    task = made(tokenizer, "longbench2_academic_single", data, count=4)
    assert (task.skipped, task.truncated) == (0, 3)
    for case in task.cases:
        (query,) = case.queries
        text, row = said(tokenizer, case), BOOKS[query.data]
        assert text.startswith("Please read the following text")
        assert tokenizer.decode(query.ids).lstrip().startswith("</text>")
        assert str(row["question"]) in tokenizer.decode(query.ids)
        used = len(case.context) + len(query.ids)
        assert used <= TOKENS - 1
        if query.data:
            assert used >= TOKENS - 8
        assert task.score(query, chosen(query, query.data)) == 1


def test_what_must_stay_whole_is_skipped_and_counted(tokenizer: Any, tmp_path: Path) -> None:
    long = [{**row, "question": "Why? " * (300 * (i % 2))} for i, row in enumerate(SUMS)]
    lines(tmp_path / "mmlu" / "anatomy" / "test.jsonl", long)
    lines(tmp_path / "mmlu" / "anatomy" / "dev.jsonl", SUMS)
    task = made(tokenizer, "mmlu_anatomy", tmp_path, count=8)
    assert (len(task.cases), task.skipped, task.truncated) == (4, 4, 0)
    with pytest.raises(InputError, match="longer than 20 tokens"):
        made(tokenizer, "mmlu_anatomy", tmp_path, tokens=20)


def test_the_same_arguments_make_the_same_cases(tokenizer: Any, data: Path) -> None:
    first = made(tokenizer, "gpqa_diamond_n_shot", data).cases
    assert made(tokenizer, "gpqa_diamond_n_shot", data).cases == first
    assert made(tokenizer, "gpqa_diamond_n_shot", data, count=2).cases == first[:2]
    assert made(tokenizer, "gpqa_diamond_n_shot", data, seed=1).cases != first


@needs_scorers
def test_longbench_is_scored_by_its_own_metrics(tokenizer: Any, data: Path) -> None:
    task = made(tokenizer, "longbench_narrativeqa", data, count=4)
    assert (task.metric, task.truncated) == ("score", 3)
    for case in task.cases:
        (query,) = case.queries
        assert query.new_tokens == 128
        assert query.expected == (f"Bob {query.data}", "a man")
        assert "Question: Who met it?" in tokenizer.decode(query.ids)
        assert tokenizer.decode(query.ids).endswith("<|im_start|>assistant\n")
        assert task.score(query, Answer(text=f"Bob {query.data}")) == 1
        assert task.score(query, Answer(text="It was a man, no one else")) == pytest.approx(2 / 7)
        assert task.score(query, Answer(text="nobody")) == 0


@needs_scorers
def test_longbenchs_examples_are_asked_without_a_chat_template(tokenizer: Any, data: Path) -> None:
    (case, *_) = made(tokenizer, "longbench_trec", data, count=1).cases
    (query,) = case.queries
    assert "<|im_start|>" not in said(tokenizer, case)
    assert query.until == ("\n",)


@pytest.mark.skipif(SCORERS, reason="LongBench's scorers are installed")
def test_longbenchs_missing_scorers_are_named(tokenizer: Any, data: Path) -> None:
    with pytest.raises(InputError, match=r"lm_eval\[longbench\]"):
        made(tokenizer, "longbench_narrativeqa", data)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("mmlu_astronomy", "mmlu/astronomy.jsonl"),
        ("longbench_qasper", "longbench/qasper.jsonl"),
        ("longbench2_code", "longbench2/code_repo_qa.jsonl"),
        ("gpqa_diamond", "gpqa/gpqa_diamond.jsonl"),
    ],
)
def test_missing_data_are_named(tokenizer: Any, tmp_path: Path, name: str, file: str) -> None:
    for folder in (None, tmp_path):
        with pytest.raises(InputError, match=f"{name}.*{file}.*the hub's"):
            made(tokenizer, name, folder)
    with pytest.raises(InputError, match="is no folder"):
        made(tokenizer, name, tmp_path / "nowhere")


def test_missing_examples_are_named(tokenizer: Any, tmp_path: Path) -> None:
    lines(tmp_path / "mmlu" / "anatomy.jsonl", SUMS)
    with pytest.raises(InputError, match=r"split 'dev'.*mmlu/anatomy/dev\.jsonl"):
        made(tokenizer, "mmlu_anatomy", tmp_path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "line 1"),
        ("", "at least one"),
        ("[1]", "a list of objects"),
        ('{"question": "?", "answer": 1}', "'choices' is undefined"),
    ],
)
def test_broken_data_are_refused(tokenizer: Any, data: Path, text: str, complaint: str) -> None:
    for shard in (data / "mmlu" / "anatomy").glob("test*"):
        shard.unlink()
    (data / "mmlu" / "anatomy" / "test.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=complaint):
        made(tokenizer, "mmlu_anatomy", data)


def test_a_group_is_no_task(tokenizer: Any, data: Path) -> None:
    for name in ("mmlu", "longbench", "needle"):
        with pytest.raises(InputError, match="unknown"):
            made(tokenizer, name, data)


def test_nothing_is_imported_before_it_is_needed() -> None:
    files = [*Path(lm_tasks.__file__).parent.glob("[lr][mu]*_*.py")]
    assert len(files) >= 7
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names.append(str(node.module))
            slow = {"lm_eval", "datasets", "nltk", "pyarrow"} & {n.split(".")[0] for n in names}
            assert not slow, file


def test_a_missing_lm_eval_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    lm_tasks._manager.cache_clear()
    with pytest.raises(InputError, match=r"reread\[eval\]"):
        lm_tasks.is_task("mmlu")
