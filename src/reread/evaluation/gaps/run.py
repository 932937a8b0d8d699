"""The three gaps of sparse prefill, measured on the same cases: what the budget costs (oracle),
what prediction costs (indexer), and what sharing a choice and the kernels cost (realisation).

Decoding is dense in every row, so that only the prefill differs, and sparse rows set dense_below=0,
so that short lengths are sparse, too.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...config import Backend, Config
from ...errors import InputError
from ...indexer.checkpoint import check_writable
from ...indexer.model import WEIGHTS, Indexer
from ...integrations.hf.indexers import backbone_identity
from ...integrations.hf.load import (
    Loaded,
    load,
    load_config,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
)
from ...prefilling import Chooser, SparsePrefill
from ..intervals import DENSE
from ..provenance import describe_device, provenance
from .results import Results
from .sums import INDEXER, ORACLE, SAMPLED, accuracies, variant
from .tasks import FUSED, Task, Way, check_tasks, make_task, ttft

SCHEDULE = "schedule"
NOTES = (
    "decoding is dense in every row; sparse rows set dense_below=0, so that short lengths are "
    "sparse, too",
    "intervals: 95 %, by resampling cases, the same ones in both rows of a gap",
)
SAMPLED_NOTE = (
    "no indexer was given: the training-free 'sampled' chooser stands in its place; with one query "
    "a block it is the oracle per query, which is not run twice"
)
# (what runs, units done, units in all)
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What `reread eval gaps` is asked for; see its options.

    Attributes:
        k: None: the schedule by position, see `SparsePrefill.budget`.
        limit: texts of each task and length.
    """

    model: str
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    out: Path
    indexer: Path | None = None
    k: int | None = 256
    b_sel: tuple[int, ...] = (16, 32, 64, 128)
    limit: int = 4
    seed: int = 0
    local: int = 16
    dtype: str = "auto"
    device: str = "auto"

    def check(self) -> Indexer | None:
        """Refuse what cannot be right before anything is loaded; returns the indexer.

        Raises:
            InputError: names the option. ConfigError: k, b_sel or local.
        """
        check_tasks(self.tasks)
        for name in ("lengths", "b_sel"):
            values = getattr(self, name)
            if not values or any(value < 1 for value in values):
                raise InputError(f"{name}={values} is not possible: whole numbers of at least 1")
        if self.limit < 1:
            raise InputError(f"limit={self.limit} is not possible: at least 1")
        if self.seed < 0:
            raise InputError(f"seed={self.seed} is not possible: at least 0")
        self.variants()
        resolve_dtype(self.dtype)
        if self.out.is_dir():
            raise InputError(f"out {self.out} is a folder: give a file")
        return None if self.indexer is None else Indexer.load(self.indexer)

    def variants(self) -> dict[str, tuple[str, int, Config]]:
        """Chooser, b_sel and config of each row, by its name."""
        found = {DENSE: (DENSE, 1, Config(mode="dense", runner="eager"))}
        choosers: tuple[Chooser, ...] = ("oracle", "sampled" if self.indexer is None else "indexer")
        for name in choosers:
            # see SAMPLED_NOTE
            blocks = sorted({*self.b_sel} if name == SAMPLED else {1, *self.b_sel})
            for block in blocks:
                if name == SAMPLED and block == 1:
                    continue
                prefill = SparsePrefill(
                    chooser=name, k=self.k, b_sel=block, local=self.local, dense_below=0
                )
                # the oracle is a reference on any device
                backend: Backend = "reference" if name == ORACLE else "auto"
                config = Config(mode="dense", runner="eager", prefill=prefill, backend=backend)
                found[variant(name, block)] = (name, block, config)
        return found

    def settings(self) -> dict[str, Any]:
        """What all rows of a file have in common, before the model is loaded."""
        digest = None
        if self.indexer is not None:
            digest = hashlib.sha256((self.indexer / WEIGHTS).read_bytes()).hexdigest()[:16]
        device = describe_device(resolve_device(self.device))
        return {
            # where a folder lies does not matter, and the backbone's hash is noted besides
            "model": Path(self.model).name,
            "indexer": digest,
            "k": SCHEDULE if self.k is None else self.k,
            "limit": self.limit,
            "seed": self.seed,
            "local": self.local,
            "dtype": self.dtype,
            "device": device["name"],
        }


def measure_gaps(request: Request, report: Report | None = None) -> dict[str, Any]:
    """Run the rows that the result file does not hold yet, and return what it then holds.

    Args:
        report: called with the row's name, units done and units in all.

    Raises:
        InputError, ConfigError, UnsupportedError: what cannot be right, before work starts.
    """
    indexer = request.check()
    results = Results(request.out, request.settings())
    tasks, skipped = _make_tasks(request)
    check_writable(request.out.resolve().parent)
    loaded = load(request.model, dtype=request.dtype, device=request.device)
    own = backbone_identity(loaded.model)
    if request.indexer is not None:
        indexer = Indexer.load(request.indexer, backbone=own)
    known = provenance(loaded.model.device)  # before a result file changes the tree
    told = [*NOTES, *([SAMPLED_NOTE] if indexer is None else [])]
    card = None if indexer is None else asdict(indexer.card)
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    results.note(
        {"backbone": own, "dtype_used": dtype}, skipped=skipped, notes=told, indexer=card, **known
    )
    _run(request, results, tasks, loaded, indexer, report or (lambda name, done, total: None))
    results.write()
    return results.value


def _make_tasks(
    request: Request,
) -> tuple[dict[tuple[str, int], Task], list[dict[str, Any]]]:
    """The tasks at each length, and what the model has too few positions for."""
    text = load_config(request.model).get_text_config(decoder=True)
    positions = getattr(text, "max_position_embeddings", None)
    tokenizer = load_tokenizer(request.model)
    tasks, skipped = {}, []
    for length in dict.fromkeys(request.lengths):
        for name in dict.fromkeys(request.tasks):
            if positions is not None and length > positions:
                reason = f"the model has {positions} positions"
                skipped.append({"task": name, "length": length, "reason": reason})
                continue
            tasks[name, length] = make_task(
                tokenizer, name, tokens=length, count=request.limit, seed=request.seed
            )
    if not tasks:
        raise InputError(f"nothing to measure: the model has {positions} positions")
    return tasks, skipped


def _run(
    request: Request, results: Results, tasks: Mapping[tuple[str, int], Task], loaded: Loaded,
    indexer: Indexer | None, report: Report,
) -> None:  # fmt: skip
    """All rows that are missing, each written as soon as it is there."""
    missing = [
        (place, task, name, *of)
        for place, task in tasks.items()
        for name, of in request.variants().items()
        if not results.has(*place, name, of[2])
    ]
    total, done = sum(entry[1].units for entry in missing), 0

    for (task_name, length), task, name, chooser, block, config in missing:
        label = f"{task_name} {length}, {name}"

        def tick(label: str = label) -> None:
            nonlocal done
            done += 1
            report(label, done, total)

        report(label, done, total)
        used = chooser == INDEXER
        way = Way(config, indexer if used else None, request.indexer if used else None)
        row = {
            "task": task_name, "length": length, "variant": name, "chooser": chooser,
            "b_sel": block, "commit": results.value["commit"],
        }  # fmt: skip
        results.add({**row, **_measure(task, loaded, way, tick)})


def _measure(task: Task, loaded: Loaded, way: Way, tick: Callable[[], None]) -> dict[str, Any]:
    """One row's figures."""
    began = time.perf_counter()
    out = task.run(loaded, way, tick)
    seconds = time.perf_counter() - began
    prefill = way.config.prefill
    path = ", ".join(sorted(out.paths))
    timed = prefill is None or path == FUSED
    return {
        "k": None if prefill is None else SCHEDULE if prefill.k is None else prefill.k,
        "accuracy": accuracies(out.shares),
        "cases": {kind: len(found) for kind, found in out.shares.items()},
        "share_read": sum(out.read) / len(out.read),
        "path": path,
        "ttft_s": ttft(loaded, task.sample(), way) if timed else None,
        "seconds": seconds,
        "config": way.config.to_dict(),
        "shares": out.shares,
    }
