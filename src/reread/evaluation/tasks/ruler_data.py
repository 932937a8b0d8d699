"""What RULER's texts are made of and lm-eval does not hold: essays, questions with documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...errors import InputError
from .lm_common import is_offline, lm_eval_module
from .lm_files import SHOWN, find, rows

ESSAYS = "ruler/essays"
PUNKT = "tokenizers/punkt_tab/english/"
SQUAD = ("ruler/squad.json", "SQuAD's dev-v2.0.json")
HOTPOT = ("ruler/hotpot.json", "HotpotQA's hotpot_dev_distractor_v1.json")

Questions = tuple[list[dict[str, Any]], list[str]]


def essay_words(module: Any, task: str, data: Path | None) -> list[str]:
    """All essays as words; NLTK can split them into sentences afterwards.

    Args:
        module: lm-eval's prepare_niah.

    Raises:
        InputError: no essays, or no model that splits sentences.
    """
    wanted = f'{ESSAYS}.jsonl, lines {{"text": ...}} as in baber/paul_graham_essays'
    files = [] if data is None else find(data, [ESSAYS], "train", whole=True)
    if files:
        words = _words(files)
    else:
        words = list(_hub(task, data, wanted, lambda: module.get_haystack("essay")))
    _require_sentences(task, data)
    return words


def _words(files: list[Path]) -> list[str]:
    try:
        texts = [str(row["text"]) for file in files for row in rows(file)]
    except KeyError as error:
        raise InputError(f"{files[0]}: every row needs a field {error}") from error
    words = " ".join(texts).split()
    if not words:
        raise InputError(f"{files[0]}: the essays are empty")
    return words


def _require_sentences(task: str, data: Path | None) -> None:
    """NLTK's English model, from its own places or from the data folder."""
    nltk = lm_eval_module("nltk")
    if _splits_sentences(nltk):
        return
    if data is not None and (data / "nltk_data").is_dir():
        folder = str((data / "nltk_data").resolve())
        nltk.data.path.append(folder)
        try:
            if _splits_sentences(nltk):  # NLTK keeps the model from here on
                return
        finally:
            nltk.data.path.remove(folder)
    if is_offline() or not (nltk.download("punkt_tab", quiet=True) and _splits_sentences(nltk)):
        wanted = f"nltk_data/{PUNKT}, NLTK's model punkt_tab"
        raise InputError(_message(task, data, wanted, "NLTK has none of its own either"))


def _splits_sentences(nltk: Any) -> bool:
    try:
        nltk.sent_tokenize("One. Two.")
    except LookupError:
        return False
    return True


def squad(module: Any, task: str, data: Path | None) -> Questions:
    """Questions and documents of SQuAD; those without an answer are left out."""
    tree = _local(data, SQUAD[0])
    if tree is None:
        return _of_hub(module.read_squad, task, data, SQUAD)
    try:
        articles = [article["paragraphs"] for article in tree["data"]]
        documents = sorted({p["context"] for paragraphs in articles for p in paragraphs})
        place = {text: number for number, text in enumerate(documents)}
        questions = [
            {
                "query": asked["question"],
                "outputs": [answer["text"] for answer in asked["answers"]],
                "context": [place[p["context"]]],
                # what is added first comes from the same article
                "more_context": [
                    place[other["context"]]
                    for other in paragraphs
                    if other["context"] != p["context"]
                ],
            }
            for paragraphs in articles
            for p in paragraphs
            for asked in p["qas"]
            if not asked.get("is_impossible")
        ]
    except (KeyError, TypeError) as error:
        raise _misshapen(data, SQUAD, error) from error
    return _some(questions, documents, data, SQUAD)


def hotpot(module: Any, task: str, data: Path | None) -> Questions:
    """Questions and documents of HotpotQA."""
    tree = _local(data, HOTPOT[0])
    if tree is None:
        return _of_hub(module.read_hotpotqa, task, data, HOTPOT)
    try:
        texts = [[f"{title}\n{''.join(lines)}" for title, lines in q["context"]] for q in tree]
        documents = sorted({text for group in texts for text in group})
        place = {text: number for number, text in enumerate(documents)}
        questions = [
            {
                "query": asked["question"],
                "outputs": [asked["answer"]],
                "context": [place[text] for text in group],
            }
            for asked, group in zip(tree, texts, strict=True)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise _misshapen(data, HOTPOT, error) from error
    return _some(questions, documents, data, HOTPOT)


def _local(data: Path | None, name: str) -> Any:
    """A JSON file of the folder, None where it is not there."""
    if data is None or not (data / name).is_file():
        return None
    try:
        return json.loads((data / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{data / name} cannot be read: {error}") from error


def _some(
    questions: list[dict[str, Any]], documents: list[str], data: Path | None, kind: tuple[str, str]
) -> Questions:
    if not questions:
        raise _misshapen(data, kind, ValueError("it has no question"))
    return questions, documents


def _misshapen(data: Path | None, kind: tuple[str, str], error: Exception) -> InputError:
    what = f"no field {error}" if isinstance(error, KeyError) else str(error)
    return InputError(f"{data}/{kind[0]} is not of the form of {kind[1]}: {what}")


def _of_hub(read: Any, task: str, data: Path | None, kind: tuple[str, str]) -> Questions:
    questions, documents = _hub(task, data, f"{kind[0]}, {kind[1]}", read)
    return questions, documents


def _hub(task: str, data: Path | None, wanted: str, ask: Any) -> Any:
    """What `ask` downloads."""
    if is_offline():
        reason = "the hub must not be asked (HF_HUB_OFFLINE)"
        raise InputError(_message(task, data, wanted, reason))
    try:
        return ask()
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(_message(task, data, wanted, str(error)[:SHOWN])) from error


def _message(task: str, data: Path | None, wanted: str, reason: str) -> str:
    where = "give --data DIR with" if data is None else f"{data} lacks"
    return f"task {task!r}: {where} {wanted}; {reason}"
