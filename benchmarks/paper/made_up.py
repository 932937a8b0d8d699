"""A few made-up documents in the data sets' own forms, for smoke runs; they are of no data set."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NAMES = ("Ada", "Ben", "Cleo", "Dov")
PLACES = ("Turku", "Lima", "Oslo", "Pune")
SENTENCES = 60


def write(folder: Path) -> Path:
    """Write them, each file anew, and return the folder."""
    for name in ("qasper", "gov_report"):
        _lines(folder / "longbench" / f"{name}.jsonl", [_story(i) for i in range(4)])
    _lines(folder / "longbench2" / "academic_single.jsonl", [_book(i) for i in range(4)])
    for split in ("test", "dev"):
        _lines(folder / "mmlu" / "anatomy" / f"{split}.jsonl", [_sum(i) for i in range(8)])
    _table(folder / "gpqa" / "gpqa_diamond.csv", [_riddle(i) for i in range(4)])
    return folder


def _text(number: int) -> str:
    """Sentences of which one says who lives where."""
    told = [f"On day {day} the river carried stone {day * 7 + number}." for day in range(SENTENCES)]
    told.insert(SENTENCES // 3, f"{NAMES[number % 4]} lives in {PLACES[number % 4]}.")
    return " ".join(told)


def _story(number: int) -> dict[str, Any]:
    name = NAMES[number % 4]
    return {
        "context": _text(number),
        "input": f"Where does {name} live?",
        "question": f"Where does {name} live?",
        "answers": [PLACES[number % 4]],
        "all_classes": [],
        "length": SENTENCES * 8,
    }


def _book(number: int) -> dict[str, Any]:
    return {
        "context": _text(number),
        "question": f"Where does {NAMES[number % 4]} live?",
        "choices": list(PLACES),
        "answer": number % 4,
        "difficulty": ("easy", "hard")[number % 2],
        "length": ("short", "medium", "long")[number % 3],
    }


def _sum(number: int) -> dict[str, Any]:
    choices = [str(number + more) for more in range(4)]
    return {"question": f"What is {number} + 1?", "choices": choices, "answer": 1}


def _riddle(number: int) -> dict[str, Any]:
    wrong = {f"Incorrect Answer {n}": f"{number + n + 1}" for n in (1, 2, 3)}
    return {"Question": f"What is {number} + 1?", "Correct Answer": f"{number + 1}", **wrong}


def _lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
