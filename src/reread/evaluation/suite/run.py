"""Run the samples that a folder does not hold yet."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import InputError
from ...integrations.hf.attach import attach
from ...integrations.hf.indexers import backbone_identity
from ...integrations.hf.load import Loaded
from ..methods import Method, needs_baselines
from ..provenance import provenance, versions
from ..tasks import registry
from ..tasks.answering import Answering
from ..tasks.base import Sample, Task
from . import rivals
from .request import Request
from .speed import measure_speed, wanted_speed
from .store import Folder, Key

NOTES = (
    "greedy decoding; penalties and the like in the checkpoint's generation_config do not count",
    "intervals: 95 %, by resampling samples, the same ones of both methods; questions about one "
    "text count as independent, so that few texts make intervals too narrow",
    "baselines evict for good and choose with the whole prompt in sight, the question included; "
    "our methods skip reads and keep the memory",
)
# (what runs, samples done, samples in all)
Report = Callable[[str, int, int], None]
Place = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Work:
    """What of a place is missing: case numbers and the methods that lack a sample there."""

    task: Task
    missing: Mapping[int, tuple[Method, ...]]

    @property
    def samples(self) -> int:
        return sum(
            len(methods) * self.task.queries[number] for number, methods in self.missing.items()
        )


def evaluate(request: Request, report: Report | None = None) -> Folder:
    """Measure what is missing and return the folder, complete.

    Args:
        report: called with what runs, samples done and samples in all.

    Raises:
        InputError, ConfigError, UnsupportedError: what cannot be right, before work starts.
    """
    told = report or (lambda name, done, total: None)
    methods = request.check()
    source = request.source()
    folder = Folder(request.out, request.settings(source), versions())
    folder.check_methods({method.name: method.to_dict() for method in methods})
    python, others = rivals.environment() if needs_baselines(methods) else (None, {})
    tasks, skipped = _make_tasks(request, source)
    with folder:
        loaded = registry.load_for(
            [name for name, _ in tasks], request.model, dtype=request.dtype, device=request.device
        )
        _settle(folder, loaded)
        _try_methods(methods, loaded)
        folder.note(
            methods={method.name: method.to_dict() for method in methods},
            places=_places(folder, tasks), skipped=_merged(folder, skipped),
            notes=_notes(folder, tasks), **provenance(loaded.model.device),
        )  # fmt: skip
        if others:
            folder.note(baselines=others)
        if request.retry_failed:
            folder.forget(_failed(folder, tasks, methods))
        work = {place: _missing(folder, task, methods) for place, task in tasks.items()}
        total = sum(one.samples for one in work.values())
        if total:
            commits = [*folder.run.get("commits", []), folder.run["commit"]]
            folder.note(commits=list(dict.fromkeys(commits)))
        told("reading", 0, total)
        for done, sample in enumerate(_samples(request, work, loaded, python), 1):
            folder.add(sample)
            told(f"{sample.task} {sample.length}, {sample.method}", done, total)
        if wanted_speed(request.speed, loaded):
            measure_speed(folder, methods, tasks, loaded, told)
    return folder


def _make_tasks(
    request: Request, source: registry.Source
) -> tuple[dict[Place, Task], list[dict[str, Any]]]:
    """The tasks at each length, and what the model has too few positions for."""
    positions = request.positions()
    tokenizer = registry.tokenizer_for(registry.expand(request.tasks), request.model)
    tasks: dict[Place, Task] = {}
    skipped: list[dict[str, Any]] = []
    for name, length in request.places():
        if positions is not None and length > positions:
            reason = f"the model has {positions} positions"
            skipped.append(
                {"task": name, "length": length, "reason": reason, "samples": request.limit}
            )
            continue
        task = registry.make_task(tokenizer, name, length, source)
        tasks[name, length] = task
        skipped += getattr(task, "skipped", [])
    if not tasks:
        raise InputError(f"nothing to measure: the model has {positions} positions")
    return tasks, skipped


def _settle(folder: Folder, loaded: Loaded) -> None:
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    folder.settle({"backbone": backbone_identity(loaded.model), "dtype_used": dtype})


def _try_methods(methods: Sequence[Method], loaded: Loaded) -> None:
    """Refuse a method that this model cannot run, before hours of others."""
    for method in methods:
        if method.config is not None:
            with attach(loaded.model, method.config, tokenizer=loaded.tokenizer):
                pass


def _places(folder: Folder, tasks: Mapping[Place, Task]) -> list[dict[str, Any]]:
    """The folder's places with those of this run."""
    found = {(held["task"], held["length"]): held for held in folder.run["places"]}
    for (name, length), task in tasks.items():
        place = {"task": name, "length": length, "samples": sum(task.queries)}
        digest = getattr(task, "digest", None)
        if digest is not None:
            place["digest"] = digest
        there = found.setdefault((name, length), place)
        if there["samples"] != place["samples"]:
            raise InputError(
                f"{folder.path} has {there['samples']} samples of {name} at {length} tokens, this "
                f"run {place['samples']}: give another --out"
            )
        if there.get("digest", digest) != digest:
            raise InputError(
                f"{folder.path} has other samples of {name} at {length} tokens (of other data?): "
                "give another --out"
            )
    return list(found.values())


def _notes(folder: Folder, tasks: Mapping[Place, Task]) -> list[str]:
    told = [note for task in tasks.values() for note in getattr(task, "notes", [])]
    return list(dict.fromkeys([*NOTES, *folder.run.get("notes", []), *told]))


def _merged(folder: Folder, skipped: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    held = folder.run["skipped"]
    return [*held, *(entry for entry in skipped if entry not in held)]


def _failed(folder: Folder, tasks: Container[Place], methods: Sequence[Method]) -> list[Key]:
    """Samples without a score that this run measures; others stay, or they would count as whole."""
    names = {method.name for method in methods}
    return [
        key for key, sample in folder.samples.items()
        if sample.score is None and sample.method in names and key[:2] in tasks
    ]  # fmt: skip


def _missing(folder: Folder, task: Task, methods: Sequence[Method]) -> Work:
    found = {}
    for number, queries in enumerate(task.queries):
        lacking = tuple(
            method
            for method in methods
            if (method.press is None or isinstance(task, Answering))
            and any(
                (task.name, task.length, method.name, number, query) not in folder.samples
                for query in range(queries)
            )
        )
        if lacking:
            found[number] = lacking
    return Work(task, found)


def _samples(
    request: Request, work: Mapping[Place, Work], loaded: Loaded, python: Path | None
) -> Iterator[Sample]:  # fmt: skip
    """Ours place by place and case by case, then those of the baselines."""
    for one in work.values():
        for number, methods in one.missing.items():
            ours = [method for method in methods if method.press is None]
            if ours:
                try:
                    yield from one.task.measure(number, ours, loaded)
                except torch.OutOfMemoryError as error:
                    what = f"{one.task.name} at {one.task.length} tokens"
                    raise InputError(
                        f"{what} does not fit the device's memory ({error})"
                    ) from error
    if python is None:
        return
    for one in work.values():
        if isinstance(one.task, Answering):
            yield from rivals.measure(request.out, one.task.task, one.missing, loaded, python)
