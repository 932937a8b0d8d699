"""Data sets from a local folder, in the form in which the hub gives them, or from the hub.

A data set is looked for as a file with all of its rows or as a folder with a file for each split:

    DIR/NAME.EXT                 the split that is evaluated
    DIR/NAME/SPLIT.EXT           one split; a shard's name, SPLIT-00000-of-00001.EXT, is right too

EXT is jsonl (one object a line), json (a list of objects, or {"data": [...]}), parquet or csv.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import InputError
from .lm_common import is_offline, lm_eval_module

EXTENSIONS = ("jsonl", "json", "parquet", "csv")
SHOWN = 300  # characters of another library's message that an error repeats

Row = dict[str, Any]


def require_folder(data: Path | None) -> None:
    """Refuse a data folder that is not there."""
    if data is not None and not data.is_dir():
        raise InputError(f"--data {str(data)!r} is no folder")


def find(data: Path, names: Sequence[str], split: str, *, whole: bool) -> list[Path]:
    """Files with the rows of a split, in order; [] where there are none.

    Args:
        whole: a file of all rows will do.
    """
    for name in names:
        folder = data / name
        for extension in EXTENSIONS:
            if whole and (data / f"{name}.{extension}").is_file():
                return [data / f"{name}.{extension}"]
            if (folder / f"{split}.{extension}").is_file():
                return [folder / f"{split}.{extension}"]
            if shards := sorted(folder.glob(f"{split}-*.{extension}")):
                return shards
    return []


def rows(path: Path) -> list[Row]:
    """All rows of a file.

    Raises:
        InputError: it cannot be read, is not what its name says, or is empty.
    """
    try:
        found = _READERS[path.suffix[1:]](path)
    except (OSError, UnicodeDecodeError, ValueError, csv.Error) as error:
        raise InputError(f"{path} cannot be read: {str(error)[:SHOWN]}") from error
    if not found or not all(isinstance(row, dict) for row in found):
        raise InputError(f"{path}: a list of objects is needed, at least one")
    return found


def _json(path: Path) -> list[Row]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(found, dict):
        found = found.get("data")
    if not isinstance(found, list):
        raise ValueError('a list of objects is needed, or {"data": [...]}')
    return found


def _jsonl(path: Path) -> list[Row]:
    found = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                found += [json.loads(line)] if line.strip() else []
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
    return found


def _parquet(path: Path) -> list[Row]:
    parquet = lm_eval_module("pyarrow.parquet")
    try:
        found: list[Row] = parquet.read_table(path).to_pylist()
    except lm_eval_module("pyarrow").ArrowException as error:
        raise ValueError(str(error)) from error
    return found


def _csv(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


_READERS = {"json": _json, "jsonl": _jsonl, "parquet": _parquet, "csv": _csv}


def load_splits(
    task: str, data: Path | None, names: Sequence[str], splits: Sequence[str], hub: tuple[str, Any]
) -> dict[str, Any]:
    """Data sets of `datasets`, one for each split, from the folder, and the rest from the hub.

    Args:
        names: of the data set below the folder, the first one found wins.
        splits: the one that is evaluated first.
        hub: id of the data set and its subset.

    Raises:
        InputError: a split that is in neither place.
    """
    datasets = lm_eval_module("datasets")
    found: dict[str, Any] = {}
    for split in splits:
        whole = split == splits[0]
        files = [] if data is None else find(data, names, split, whole=whole)
        if files:
            found[split] = datasets.Dataset.from_list([row for file in files for row in rows(file)])
    missing = [split for split in splits if split not in found]
    if missing:
        wanted = _wanted(task, data, names, missing[0], whole=missing[0] == splits[0])
        wanted += f", in the form of the hub's {hub[0]}, {hub[1]}"
        if is_offline():
            raise InputError(f"{wanted}; the hub must not be asked (HF_HUB_OFFLINE)")
        try:
            for split in missing:
                found[split] = datasets.load_dataset(path=hub[0], name=hub[1], split=split)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise InputError(f"{wanted}; the hub says: {str(error)[:SHOWN]}") from error
    return found


def _wanted(task: str, data: Path | None, names: Sequence[str], split: str, *, whole: bool) -> str:
    places = [f"{name}.jsonl" for name in names] if whole else []
    places += [f"{name}/{split}.jsonl" for name in names]
    where = "give --data DIR with" if data is None else f"{data} lacks"
    return (
        f"task {task!r}: no data for its split {split!r}: {where} {' or '.join(places)} (.json, "
        ".parquet and .csv are right too)"
    )
