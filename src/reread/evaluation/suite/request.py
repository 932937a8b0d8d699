"""What `reread eval` is asked for, checked before a model is loaded."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...indexer.model import WEIGHTS, Indexer
from ...integrations.hf.load import load_config, resolve_device, resolve_dtype
from .. import texts
from ..methods import Method, parse_methods
from ..provenance import describe_device
from ..tasks import registry

SPEED = ("auto", "on", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """See the options of `reread eval`.

    Attributes:
        limit: cases of each task and length; steps: teacher-forced ones of fidelity.
        max_new_tokens: of lm-eval's generated answers; None: as each task says.
        texts: files for fidelity; (): the texts that come with Python.
        speed: "auto": times where there is a GPU.
        retry_failed: measure samples again that failed.
    """

    model: str
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    methods: str
    out: Path
    limit: int = 4
    seed: int = 0
    indexer: Path | None = None
    data: Path | None = None
    texts: tuple[Path, ...] = ()
    steps: int = 128
    max_new_tokens: int | None = None
    speed: str = "auto"
    retry_failed: bool = False
    dtype: str = "auto"
    device: str = "auto"

    def check(self) -> list[Method]:
        """Refuse what cannot be right; returns the methods.

        Raises:
            InputError: names the option. ConfigError: a method's value.
        """
        names = registry.expand(self.tasks)
        if not self.lengths or min(self.lengths) < 1:
            raise InputError(f"lengths={self.lengths} is not possible: whole numbers of at least 1")
        for name, least in (("limit", 1), ("seed", 0), ("steps", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name}={getattr(self, name)} is not possible: at least {least}")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens={self.max_new_tokens} is not possible: at least 1")
        if self.speed not in SPEED:
            raise InputError(f"speed={self.speed!r} is not possible: one of {', '.join(SPEED)}")
        if self.data is not None and not self.data.is_dir():
            raise InputError(f"data folder {self.data} is not there")
        resolve_dtype(self.dtype)
        resolve_device(self.device)
        _check_out(self.out)
        if self.indexer is not None:
            Indexer.load(self.indexer)
        folder = None if self.indexer is None else str(self.indexer)
        methods = parse_methods(self.methods, folder)
        if names == (registry.FIDELITY,) and all(method.config is None for method in methods):
            raise InputError("baselines answer questions, and task 'fidelity' has none: add a task")
        if self.speed == "on" and not any(map(registry.has_prompts, names)):
            raise InputError(
                "speed='on' needs a prompt to time: add a task with questions, such as needle_en"
            )
        for length in self.lengths:
            for method in methods:
                if method.config is not None:
                    method.at(length)
        if registry.FIDELITY not in names and self.texts:
            raise InputError(f"texts {self.texts[0]} are for task {registry.FIDELITY!r} alone")
        return methods

    def source(self) -> registry.Source:
        """What tasks are made from.

        Raises:
            InputError: a text that cannot be read.
        """
        found: dict[str, str] = {}
        for path in self.texts:
            if path.name in found:
                raise InputError(f"text {path}: another one is named {path.name!r}, too: rename it")
            found[path.name] = _read(path)
        if not found and registry.FIDELITY in registry.expand(self.tasks):
            found = {kind: make() for kind, make in (texts.KINDS | texts.UNMARKED).items()}
        return registry.Source(
            count=self.limit, seed=self.seed, data=self.data, texts=found, steps=self.steps,
            new_tokens=self.max_new_tokens,
        )  # fmt: skip

    def places(self) -> Iterator[tuple[str, int]]:
        """Task and length of each place of the table; a task without lengths has one place."""
        for length in dict.fromkeys(self.lengths):
            for name in registry.expand(self.tasks):
                if registry.has_length(name) or length == max(self.lengths):
                    yield name, length

    def positions(self) -> int | None:
        """How many positions the model has, None where its config does not say."""
        text = load_config(self.model).get_text_config(decoder=True)
        found: int | None = getattr(text, "max_position_embeddings", None)
        return found

    def settings(self, source: registry.Source) -> dict[str, Any]:
        """What all samples of a folder have in common, before the model is loaded."""
        found: dict[str, Any] = {
            # where a folder lies does not matter, and the backbone's hash is noted besides
            "model": Path(self.model).name,
            "limit": self.limit,
            "seed": self.seed,
            "dtype": self.dtype,
            "device": describe_device(resolve_device(self.device))["name"],
        }
        if self.indexer is not None:
            weights = (self.indexer / WEIGHTS).read_bytes()
            found["indexer"] = hashlib.sha256(weights).hexdigest()[:16]
        if source.texts:
            found["texts"] = {name: texts.digest(text) for name, text in source.texts.items()}
            found["steps"] = self.steps
        if self.max_new_tokens is not None:
            found["max_new_tokens"] = self.max_new_tokens
        if self.data is not None:
            found["data"] = _listing(self.data)
        return found


def _check_out(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return  # making it says why it cannot be made
    except OSError as error:
        raise InputError(f"out {path} cannot be used ({error.strerror})") from error
    if not stat.S_ISDIR(mode):
        raise InputError(f"out {path} is a file: give a folder")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").removeprefix("\ufeff")
    except OSError as error:
        raise InputError(f"text {path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"text {path} is not UTF-8: {error.reason} at {error.start}") from error


def _listing(folder: Path) -> str:
    """Digest of the names and sizes of all files of a folder: data may be many gigabytes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{path.relative_to(folder).as_posix()} {path.stat().st_size}" for path in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
