"""A folder of results, read and checked before anything is drawn."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError
from ..tasks.base import Sample

RUN, SAMPLES, SPEED, GAPS = "run.json", "samples.jsonl", "speed.jsonl", "gaps.json"
MAPPINGS = ("config", "methods", "versions", "device")  # of run.json, with one value per name
GAP_NUMBERS = ("value", "low", "high", "length", "cases")
LISTS = {"places": ("task", "length", "samples"), "skipped": ("task", "length", "reason")}
TYPES: dict[str, type | tuple[type, ...]] = {
    "task": str, "method": str, "kind": str, "answer": str, "length": int, "number": int,
    "query": int, "samples": int, "reason": str, "figures": dict, "extra": dict,
    "score": (int, float, type(None)), "depth": (int, float, type(None)),
    "error": (str, type(None)),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Folder:
    """What a result folder holds.

    Attributes:
        run: run.json, with every key that the report reads.
        samples: in the order they were measured.
        speed: lines of speed.jsonl; () where no speed was measured.
        gaps: result of `reread eval gaps`, if there is one.
        notes: what was odd about the files.
    """

    path: Path
    run: dict[str, Any]
    samples: tuple[Sample, ...]
    speed: tuple[dict[str, Any], ...]
    gaps: dict[str, Any] | None
    notes: tuple[str, ...]


def read_folder(path: Path) -> Folder:
    """Everything in a result folder.

    Raises:
        InputError: there is no run.json, or a file holds something else; names file and line.
    """
    if not there(path / RUN):
        raise InputError(f"{path} holds no {RUN}: give a folder written by `reread eval`")
    run = check_run(path / RUN, _object(str(path / RUN), _text(path / RUN)))
    notes: list[str] = []
    samples = tuple(check_sample(at, values) for at, values in _lines(path / SAMPLES, notes))
    speed = tuple(check_speed(at, values) for at, values in _lines(path / SPEED, notes))
    gaps = _gaps(path / GAPS) if there(path / GAPS) else None
    return Folder(path, run, samples, speed, gaps, tuple(notes))


def there(path: Path) -> bool:
    """Whether there is such a file; a name that cannot be one says no."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def finite(value: Any) -> bool:
    """Whether a value is a number that can be drawn."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _object(at: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{at} is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise InputError(f"{at} holds no JSON object")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def check_run(path: Path, found: Mapping[str, Any]) -> dict[str, Any]:
    """The content of run.json, with every key that is read.

    Raises:
        InputError: a value cannot be what its key says.
    """
    run: dict[str, Any] = {**{name: {} for name in MAPPINGS}, "notes": [], "commit": None}
    run |= {name: [] for name in LISTS} | dict(found)
    for name in MAPPINGS:
        run[name] = {} if run[name] is None else run[name]
        if not isinstance(run[name], dict):
            raise InputError(f"{path}: {name!r} is no JSON object")
    for name, keys in LISTS.items():
        entries = run[name]
        if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
            raise InputError(f"{path}: {name!r} is no list of JSON objects")
        for entry in entries:
            _check(f"{path}: an entry of {name!r}", entry, keys)
    for name, method in run["methods"].items():
        if not isinstance(method, dict):
            raise InputError(f"{path}: method {name!r} is no JSON object")
    if not isinstance(run["notes"], list):
        raise InputError(f"{path}: 'notes' is no list")
    return run


def _lines(path: Path, notes: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where a line stands, and its values. The last line may end early: the run was cut off."""
    if not path.is_file():
        return
    text = _text(path)
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        at = f"{path}, line {number}"
        try:
            values = _object(at, line)
        except InputError:
            if number < len(lines):
                raise
            notes.append(f"The last line of {path.name} ends early; it was left out.")
            return
        yield at, values


def _check(at: str, values: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    for key in keys:
        if key not in values:
            raise InputError(f"{at} has no {key!r}")
        wanted = TYPES[key]
        value = values[key]
        if not isinstance(value, wanted) or isinstance(value, bool) or _too_large(value):
            raise InputError(f"{at}: {key!r} is {values[key]!r}, which it cannot be")


def _too_large(value: Any) -> bool:
    return isinstance(value, int | float) and not finite(value)


def check_sample(at: str, values: Any) -> Sample:
    """A line as a sample, without figures that are no numbers.

    Raises:
        InputError: it is none; begins with `at`.
    """
    if not isinstance(values, dict):
        raise InputError(f"{at} holds no JSON object")
    _check(at, values, ("task", "length", "method", "number", "kind", "score"))
    _check(at, values, tuple(key for key in TYPES if key in values))
    for key in ("score", "depth"):
        if values.get(key) is not None and not 0 <= values[key] <= 1:
            raise InputError(f"{at}: {key!r} is {values[key]!r}, which is not between 0 and 1")
    figures = {name: v for name, v in values.get("figures", {}).items() if finite(v)}
    try:
        return Sample.from_dict({**values, "figures": figures})
    except TypeError as error:
        raise InputError(f"{at} is no sample of `reread eval` ({error})") from error


def check_speed(at: str, values: Any) -> dict[str, Any]:
    """A line of times.

    Raises:
        InputError: it is none; begins with `at`.
    """
    if not isinstance(values, dict):
        raise InputError(f"{at} holds no JSON object")
    _check(at, values, ("method", "length"))
    return values


def _gaps(path: Path) -> dict[str, Any]:
    found = _object(str(path), _text(path))
    gaps = found.get("gaps")
    keys = ("task", "length", "gap", "of", "kind", "value", "low", "high", "cases")
    if not isinstance(gaps, list):
        raise InputError(f"{path} is no result of `reread eval gaps`: it has no list of gaps")
    for gap in gaps:
        if not isinstance(gap, dict) or any(key not in gap for key in keys):
            raise InputError(f"{path}: a gap lacks some of {', '.join(keys)}: {gap!r}")
        if not all(finite(gap[key]) for key in GAP_NUMBERS):
            raise InputError(f"{path}: a gap's value or interval is no number: {gap!r}")
        if not isinstance(gap["of"], list):
            raise InputError(f"{path}: a gap is of no list of methods: {gap!r}")
    if not isinstance(found.get("notes") or [], list):
        raise InputError(f"{path}: 'notes' is no list")
    return found
