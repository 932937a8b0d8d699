"""Scores of a published table, by the library behind `reread eval`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from reread.errors import InputError
from reread.evaluation.baselines.run import find_python
from reread.evaluation.methods import PRESSES
from reread.evaluation.report.sums import summarise
from reread.evaluation.suite.request import Request
from reread.evaluation.suite.run import evaluate
from reread.evaluation.suite.store import Folder
from reread.evaluation.tasks import registry
from reread.evaluation.tasks.answering import Answering
from reread.evaluation.tasks.base import Sample

from . import smoke
from .asked import Asked, Measured
from .expected import Expected, Found, Quality, Run, Table

FIELDS = ("difficulty", "length")  # of LongBench-V2's questions
FAMILIES = ("ruler", "longbench2", "longbench", "gpqa", "mmlu", "mmlongbench_doc", "videomme")
SHARED = 0.999  # of a prompt's pairs read: from here on nothing was left out


@dataclass(frozen=True, slots=True)
class Entry:
    """A sample and where in the table it counts.

    Attributes:
        arm: of the table. length: as published, also where a smoke run is shorter.
        fields: values of the question's fields.
    """

    sample: Sample
    arm: str
    length: int
    fields: frozenset[str] = frozenset()

    def counts(self, row: Expected) -> bool:
        """Whether it belongs to the row, whichever arm."""
        part, task = row.spot.part, self.sample.task
        inside = part == "all" or part in self.fields or task.startswith(part)
        return inside and row.spot.length in (0, self.length)

    @property
    def place(self) -> tuple[str, int, int, int]:
        """What another arm has to have as well."""
        return self.sample.task, self.length, self.sample.number, self.sample.query


def measure(table: Table, asked: Asked) -> Measured:
    """Run what is missing in the folder and add it up.

    Raises:
        InputError, ConfigError, UnsupportedError: what cannot be right or is not there.
    """
    work = table.work
    assert isinstance(work, Quality)
    measured = Measured()
    lacking = _lacking(work, asked)
    entries: list[Entry] = []
    reasons = dict(lacking)
    for number, run in enumerate(work.runs):
        if asked.smoke and run.vision:
            measured.notes.append(f"{', '.join(run.tasks)}: not run, {smoke.NO_VISION}")
            continue
        arms = {name: work.arms[name] for name in run.arms if name not in lacking}
        entries += _entries(table, number, arms, asked, measured)
    rows = [row for row in table.rows if row.model == asked.label]
    for row in rows:
        if not row.absent:
            found = value_of(row, entries, work.mean, reasons)
            measured.found[row] = judgeable(found, work, asked)
    return measured


def _lacking(work: Quality, asked: Asked) -> dict[str, str]:
    """Arms that can not run, and why; only a smoke run goes on without them."""
    baselines = [name for name, method in work.arms.items() if method.split("@")[0] in PRESSES]
    if not baselines or not asked.smoke:
        return {}
    try:
        find_python()
    except InputError as error:
        return dict.fromkeys(baselines, str(error))
    return {}


def _entries(
    table: Table, number: int, arms: Mapping[str, str], asked: Asked, measured: Measured
) -> Iterator[Entry]:
    """Samples of one of the table's runs."""
    assert isinstance(table.work, Quality)
    run = table.work.runs[number]
    if asked.smoke:
        arms = {name: smoke.shrunk(method) for name, method in arms.items()}
        lengths = smoke.lengths(table)
    else:
        lengths = {length: length for length in run.lengths}
    request = _request(table, number, run, arms, lengths, asked)
    folder = evaluate(request, asked.report)
    samples = list(folder.samples.values())
    summary = summarise(folder.run, samples)
    measured.details.append({**folder.run, "lines": [asdict(line) for line in summary.lines]})
    for skipped in folder.run["skipped"]:
        measured.notes.append(
            f"{skipped['task']} at {skipped['length']} tokens, {skipped['samples']} samples: "
            f"not run, {skipped['reason']}"
        )
    fields = _fields(request, folder) if run.fields else {}
    published = {lengths[length]: length for length in run.lengths}
    for sample in samples:
        for arm, method in arms.items():
            if sample.method == method:
                told = fields.get((sample.task, sample.length, sample.number), frozenset())
                yield Entry(sample, arm, published[sample.length], told)


def _request(
    table: Table, number: int, run: Run, arms: Mapping[str, str], lengths: Mapping[int, int],
    asked: Asked,
) -> Request:  # fmt: skip
    assert asked.model is not None
    tasks = smoke.tasks(run, asked.model) if asked.smoke else run.tasks
    uses_indexer = any(method.startswith("prefill") for method in arms.values())
    if uses_indexer and asked.indexer is None:
        raise InputError(f"table {table.name} needs a distilled indexer: give --indexer DIR")
    return Request(
        model=asked.model, tasks=tasks, methods=",".join(arms.values()),
        lengths=tuple(lengths[length] for length in run.lengths),
        out=asked.out / f"{'smoke' if asked.smoke else asked.label}-{number}",
        limit=run.limit if asked.limit is None else asked.limit,
        indexer=asked.indexer if uses_indexer else None, data=asked.data, speed="off",
        dtype=asked.dtype, device=asked.device,
    )  # fmt: skip


def _fields(request: Request, folder: Folder) -> dict[tuple[str, int, int], frozenset[str]]:
    """Values of FIELDS of each case: the same request makes the same cases."""
    tokenizer = registry.tokenizer_for(request.tasks, request.model)
    source = request.source()
    found = {}
    for place in folder.run["places"]:
        name, length = place["task"], place["length"]
        task = registry.make_task(tokenizer, name, length, source)
        assert isinstance(task, Answering)
        made: Any = task.task  # lm-eval's, with its documents
        for number, case in enumerate(made.cases):
            doc = made.task.task_docs[case.queries[0].data]
            values = (str(doc.get(field, "")) for field in FIELDS)
            found[name, length, number] = frozenset(values) - {""}
    return found


def value_of(
    row: Expected, entries: Sequence[Entry], mean: str, reasons: Mapping[str, str]
) -> Found:
    """What a row's samples come to.

    Args:
        mean: see `Quality`. reasons: arms that did not run, and why.
    """
    spot = row.spot
    arms = [spot.arm, spot.against] if spot.against else [spot.arm]
    sides: list[dict[Any, Entry]] = []
    for arm in arms:
        if arm in reasons:
            return Found(reason=reasons[arm])
        here = {entry.place: entry for entry in entries if entry.arm == arm and entry.counts(row)}
        failed = [entry.sample.error for entry in here.values() if entry.sample.score is None]
        if failed:
            return Found(reason=f"{len(failed)} samples of {arm} failed: {failed[0]}")
        sides.append(here)
    common = set.intersection(*map(set, sides))
    if not common:
        return Found(reason=f"no sample of {' and '.join(arms)} for it")
    chosen = [[side[place] for place in sorted(common)] for side in sides]
    if spot.figure == "sparsity":
        shares = [entry.sample.figures["prefill_keys_share"] for entry in chosen[0]]
        return Found(100 * (1 - fmean(shares)))
    values = [100 * average(side, mean) for side in chosen]
    value = values[0] - values[1] if spot.against else values[0]
    return Found(value, next(filter(None, map(_dense_after_all, chosen)), ""))


def average(entries: Sequence[Entry], mean: str) -> float:
    """Mean score, 0 to 1: over samples, over tasks, or over families of tasks."""

    def group(entry: Entry) -> str:
        task = entry.sample.task
        if mean == "families":
            return next((name for name in FAMILIES if task.startswith(name)), task)
        return task

    if mean == "samples":
        return fmean(entry.sample.score or 0.0 for entry in entries)
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(group(entry), []).append(entry)
    inner = "tasks" if mean == "families" else "samples"
    return fmean(average(members, inner) for members in groups.values())


def _dense_after_all(entries: Sequence[Entry]) -> str:
    """Why the scores of a sparse arm are dense's by construction; "" where they are not."""
    first = entries[0].sample.figures
    if "prefill_keys_share" in first:
        read = fmean(entry.sample.figures["prefill_keys_share"] for entry in entries)
        return "the prompts lie within the budget: nothing was left out" if read > SHARED else ""
    fast = sum(entry.sample.figures.get("fast_steps", 0.0) for entry in entries)
    if "fast_keys_share" in first and not fast:
        return f"no fast step ran in {entries[0].arm}: it is dense by construction"
    return ""


def judgeable(found: Found, work: Quality, asked: Asked) -> Found:
    """With fewer cases than the tolerance is for, nothing is judged."""
    needed = max(run.limit for run in work.runs)
    if found.value is None or asked.limit is None or asked.limit >= needed or found.reason:
        return found
    return Found(found.value, f"--limit {asked.limit}: the tolerance is for more cases")
