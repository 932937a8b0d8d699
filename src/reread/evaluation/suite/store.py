"""The folder of a run: what it was asked for, and one line per sample, written as it goes."""

from __future__ import annotations

import copy
import dataclasses
import fcntl
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import InputError
from ...indexer.checkpoint import check_same, read_json, replace_whole, write_json
from ..report.reading import check_run, check_sample, check_speed
from ..tasks.base import Sample

RUN, SAMPLES, SPEED = "run.json", "samples.jsonl", "speed.jsonl"
DECIDES = ("reread", "torch", "transformers")  # versions that one table has to share
Key = tuple[str, int, str, int, int]


class Folder:
    """A result folder, open for one process at a time.

    Use it as a context manager.
    """

    def __init__(
        self, path: Path, settings: Mapping[str, Any], versions: Mapping[str, str]
    ) -> None:
        """Nothing is written yet.

        Args:
            settings: what all samples have in common; versions: of the packages that ran.

        Raises:
            InputError: the folder holds another run, and what differs; or it is no such folder.
        """
        self.path = path
        self.settings = dict(settings)
        held = read_json(path / RUN)
        self._held = copy.deepcopy(held)  # what is there changes with `run`
        # an empty file is that of a run that ended while its model was loading
        if held is None and (path / SAMPLES).exists() and (path / SAMPLES).stat().st_size:
            raise InputError(f"{path} has samples but no {RUN}: give another --out")
        if held is not None:
            if not isinstance(held.get("config"), dict) or not isinstance(
                held.get("methods"), dict
            ):
                raise InputError(f"{path / RUN} is no run of `reread eval`: give another --out")
            held = check_run(path / RUN, held)
            there = held["config"]
            known = {name: there[name] for name in settings if name in there}
            check_same(path, known, {name: settings[name] for name in known})
            then = held["versions"]
            check_same(
                path,
                {name: then.get(name) for name in DECIDES},
                {name: versions.get(name) for name in DECIDES},
            )
        self.run: dict[str, Any] = held or {
            "config": {},
            "methods": {},
            "places": [],
            "skipped": [],
        }
        self.run["config"] |= self.settings
        self.samples: dict[Key, Sample] = {}
        self._file: BinaryIO | None = None

    def settle(self, settings: Mapping[str, Any]) -> None:
        """Settings that are known once the model is loaded.

        Raises:
            InputError: they are another run's.
        """
        held = self.run["config"]
        known = {name: held[name] for name in settings if name in held}
        check_same(self.path, known, {name: settings[name] for name in known})
        held |= settings

    def check_methods(self, methods: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuse a name that stood for another configuration.

        Raises:
            InputError: names it.
        """
        for name, wanted in methods.items():
            there = self.run["methods"].get(name, wanted)
            if there != wanted:
                differing = _differing(there, wanted)
                raise InputError(
                    f"{self.path} holds method {name!r} with another configuration "
                    f"({differing}): give another --out"
                )

    def __enter__(self) -> Folder:
        """Lock the folder and read its samples.

        Raises:
            InputError: another process writes there, or a file cannot be read or written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path / SAMPLES, "ab+")  # closed by __exit__
        except OSError as error:
            raise InputError(f"folder {self.path} cannot be written ({error.strerror})") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if read_json(self.path / RUN) != self._held:
                raise InputError(f"another run has just changed {self.path}: try again")
            self.samples = {sample.key: sample for sample in self._read()}
        except BlockingIOError as error:
            self._file.close()
            raise InputError(f"another run writes to {self.path} at this moment") from error
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            self._file.close()

    def _read(self) -> Iterator[Sample]:
        """All whole lines; what a kill left half written behind them is cut off."""
        assert self._file is not None
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            self._file.truncate(whole)
        # bytes that are no UTF-8 cannot be JSON of ours; the line is named then
        yield from parse_samples(self.path / SAMPLES, data[:whole].decode("utf-8", "replace"))

    def note(self, **values: Any) -> None:
        """Save what describes the run: methods, places, versions and so on.

        Raises:
            InputError: it cannot be written.
        """
        methods = {**self.run["methods"], **values.pop("methods", {})}
        self.run |= {**values, "methods": methods}
        try:
            write_json(self.path / RUN, self.run)
        except InputError:
            raise
        except ValueError as error:  # a name that is no text, or a number that is none
            raise InputError(f"{self.path / RUN} cannot be written ({error})") from error

    def speeds(self) -> list[dict[str, Any]]:
        """Lines of the speed file, without one that a kill left half written.

        Raises:
            InputError: a line that is none.
        """
        path = self.path / SPEED
        if not path.is_file():
            return []
        try:
            *whole, _ = path.read_text(encoding="utf-8").split("\n")
            lines = [json.loads(line) for line in whole]
            for number, line in enumerate(lines, 1):
                check_speed(f"line {number}", line)
        except (ValueError, RecursionError, OSError) as error:
            raise InputError(f"{path} cannot be read ({error}): remove it") from error
        return lines

    def add_speed(self, line: Mapping[str, Any]) -> None:
        """Write the speed file anew with one more line.

        Raises:
            InputError: it cannot be written.
        """
        lines = [*self.speeds(), line]
        text = "".join(json.dumps(entry) + "\n" for entry in lines)
        replace_whole(self.path / SPEED, lambda to: _write(to, text))

    def add(self, sample: Sample) -> None:
        """Append a sample; it is on disk when this returns.

        Raises:
            InputError: it cannot be written; the lines before it are whole.
        """
        assert self._file is not None, "use the folder as a context manager"
        sample = _numbers_only(sample)
        # ASCII: whatever an answer is made of, half a character included, can be written
        line = json.dumps(sample.to_dict(), allow_nan=False) + "\n"
        end = self._file.seek(0, os.SEEK_END)
        try:
            self._file.write(line.encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            self._restore(end)
            raise InputError(
                f"{self.path / SAMPLES} cannot be written ({error.strerror}); the "
                f"{len(self.samples)} samples before are kept, and the same command continues"
            ) from error
        self.samples[sample.key] = sample

    def _restore(self, end: int) -> None:
        """Cut off a half-written line, past the buffer that still holds it."""
        try:
            os.truncate(self.path / SAMPLES, end)
        except OSError:
            return  # a half line at the end is cut off when the folder is opened again

    def forget(self, keys: Iterable[Key]) -> None:
        """Leave samples out, so that they are measured again; of two lines the newer counts."""
        for key in list(keys):
            del self.samples[key]


def _numbers_only(sample: Sample) -> Sample:
    """Without figures that are NaN or infinite; a score that is so failed."""
    figures = {name: value for name, value in sample.figures.items() if math.isfinite(value)}
    sample = dataclasses.replace(sample, figures=figures)
    if sample.score is None or math.isfinite(sample.score):
        return sample
    return dataclasses.replace(sample, score=None, error=f"the score is {sample.score}")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def parse_samples(path: Path, text: str) -> Iterator[Sample]:
    """The samples of a file of lines; the newest of each key comes last.

    Raises:
        InputError: names the line that is none.
    """
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else (), 1):
        try:
            yield check_sample("", json.loads(line))
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{path} line {number} is no sample ({error}): remove the line"
            ) from error


def _differing(there: Mapping[str, Any], here: Mapping[str, Any], path: str = "") -> str:
    """ "k=256 there, 512 now" for each value that differs."""
    found = []
    for name in sorted({*there, *here}):
        a, b = there.get(name), here.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            inner = _differing(a, b, f"{path}{name}.")
            found += [inner] if inner else []
        elif a != b:
            found.append(f"{path}{name}={a!r} there, {b!r} now")
    return "; ".join(found)
