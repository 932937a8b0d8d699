"""The result file of gaps: which run it belongs to, its rows, and what they add up to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...config import Config
from ...errors import InputError
from ...indexer.checkpoint import read_json, write_json
from .sums import default_blocks, gaps_of


class Results:
    """The result file, written anew after every row."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Raises InputError where the file holds another run, and names what differs."""
        self.path = path
        held = read_json(path)
        self.value: dict[str, Any] = {"config": dict(settings), "rows": [], "skipped": []}
        if held is None:
            return
        there = held.get("config")
        if not isinstance(there, dict) or not isinstance(held.get("rows"), list):
            raise InputError(f"{path} is no result of `reread eval gaps`: give another --out")
        self._check_same(there, settings)
        self.value = {**held, "config": {**there, **settings}}

    def _check_same(self, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        differing = [
            f"{name} is {there.get(name)!r} there and {value!r} now"
            for name, value in here.items()
            if there.get(name, value) != value
        ]
        if differing:
            raise InputError(
                f"{self.path} holds another run ({'; '.join(differing)}): give another --out"
            )

    def note(self, settings: Mapping[str, Any], **known: Any) -> None:
        """Settings that are known once the model is loaded, and whatever else describes the run.

        Raises:
            InputError: they are another run's.
        """
        self._check_same(self.value["config"], settings)
        self.value["config"] |= settings
        self.value |= known

    def has(self, task: str, length: int, name: str, config: Config) -> bool:
        """Whether a row is there already with this config."""
        # as it reads once it was written
        key, wanted = (task, length, name), json.loads(json.dumps(config.to_dict()))
        return any(_key(row) == key and row["config"] == wanted for row in self.value["rows"])

    def add(self, row: dict[str, Any]) -> None:
        """Add a row, or replace the one of its name, and write the file."""
        rows = [held for held in self.value["rows"] if _key(held) != _key(row)]
        self.value["rows"] = [*rows, row]
        self.write()

    def write(self) -> None:
        """Gaps anew from the rows, then the file in one step."""
        rows = self.value["rows"]
        self.value |= {"gaps": gaps_of(rows), "default_b_sel": default_blocks(rows)}
        write_json(self.path, self.value)


def _key(row: Mapping[str, Any]) -> tuple[str, int, str]:
    return row["task"], row["length"], row["variant"]
