"""Smoke runs: every table's own code on a CPU, with a stand-in, tiny lengths and made-up data."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from reread.errors import InputError
from reread.evaluation.needle import Vocabulary
from reread.evaluation.tasks import english, needle_task
from reread.integrations.hf.indexers import new_indexer
from reread.integrations.hf.load import load, load_tokenizer

from . import made_up
from .asked import Asked
from .expected import Quality, Run, Table

MODEL = "REREAD_NEEDLE"  # environment variable: folder of the stand-in
BESIDE = Path(__file__).resolve().parents[3] / "shared" / "models" / "needle-27m"
BUILTIN = "smollm2"
LONGEST, STEP = 960, 64  # tokens: of a table's longest length, and less for each shorter one
CASES = 1
DIVISOR = 16  # of all budgets
LEAST_K, RECENT = 8, 16
SCORERS = ("jieba", "fuzzywuzzy", "rouge")  # packages that LongBench's metrics import
NO_VISION = "the stand-in is no vision-language checkpoint"


def stand_in(table: Table, model: str | None) -> str:
    """What is measured in the model's place: --model, the folder that REREAD_NEEDLE names, the
    needle checkpoint beside the repository, or SmolLM2; the latter where answers end at strings.

    Raises:
        InputError: --model cannot spell those strings.
    """
    stops = isinstance(table.work, Quality) and any(run.stops for run in table.work.runs)
    if stops:
        if model is not None and question_task(model) == needle_task.NAME:
            raise InputError(
                f"--model {model!r} has no tokens for the strings that end answers of "
                f"{table.name}: --model {BUILTIN}"
            )
        return model or BUILTIN
    if named := model or os.environ.get(MODEL):
        return named
    return str(BESIDE) if (BESIDE / "config.json").is_file() else BUILTIN


def prepare(table: Table, asked: Asked, notes: list[str]) -> Asked:
    """The stand-in, data that are made up and an untrained indexer, where the table needs them.

    Raises:
        InputError: the stand-in cannot be loaded, or the out folder not be written.
    """
    model = asked.model
    assert model is not None
    limit = CASES if asked.limit is None else asked.limit
    asked = replace(asked, limit=limit, device="cpu")
    notes.append(f"stand-in {Path(model).name}, {limit} cases of each task, budgets / 16")
    if isinstance(table.work, Quality) and asked.data is None and _uses_data(table.work):
        try:
            folder = made_up.write(asked.out / "made-up-data")
        except OSError as error:
            raise InputError(f"{asked.out} cannot be written ({error.strerror})") from error
        notes.append(f"documents were made up, in {folder.name} of the out folder")
        asked = replace(asked, data=folder)
    if asked.indexer is None and _uses_indexer(table):
        notes.append("the indexer is untrained")
        asked = replace(asked, indexer=_untrained(model, asked.out / "untrained-indexer"))
    return asked


def _uses_data(work: Quality) -> bool:
    tasks = [task for run in work.runs if not run.vision for task in run.smoke]
    return any(task.startswith(("longbench", "gpqa", "mmlu")) for task in tasks)


def _uses_indexer(table: Table) -> bool:
    if not isinstance(table.work, Quality):
        return table.name.endswith("ttft")
    return any(method.startswith("prefill") for method in table.work.arms.values())


def _untrained(model: str, folder: Path) -> Path:
    """An indexer from the stand-in's own projections."""
    folder.mkdir(parents=True, exist_ok=True)
    new_indexer(load(model, device="cpu").model).save(folder)
    return folder


def lengths(table: Table) -> dict[int, int]:
    """Published length -> tiny one, in the same order."""
    assert isinstance(table.work, Quality)
    every = sorted({n for run in table.work.runs for n in run.lengths}, reverse=True)
    return {length: LONGEST - STEP * rank for rank, length in enumerate(every)}


def tasks(run: Run, model: str) -> tuple[str, ...]:
    """A few of the run's tasks; where packages that score them are missing, needle's."""
    scored = all(find_spec(name) for name in SCORERS)
    if scored or not any(task.startswith("longbench_") for task in run.smoke):
        return run.smoke
    return (question_task(model),)


def question_task(model: str) -> str:
    """The retrieval task that the stand-in has words for."""
    try:
        Vocabulary.of(load_tokenizer(model).get_vocab())
    except InputError:
        return english.NAME
    return needle_task.NAME


def shrunk(method: str) -> str:
    """The method with a budget for tiny texts."""
    base = re.split("[:@]", method)[0]
    if base not in ("default", "paper", "prefill", "dense"):
        return method
    smaller = re.sub(r"(?<=[:.]k=)\d+", _smaller, method)
    if base in ("default", "paper"):
        smaller += "" if ":k=" in smaller else f":k={512 // DIVISOR}"
        smaller += f":recent={RECENT}"
    return smaller


def _smaller(found: re.Match[str]) -> str:
    return str(max(LEAST_K, int(found[0]) // DIVISOR))
