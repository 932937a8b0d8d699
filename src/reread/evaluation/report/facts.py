"""What was run and what was not: counts, failures, skipped tasks, configurations, speed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..tasks.base import Sample
from .cells import NOTHING, Cell, Row, Table, counted, percent, whole
from .reading import Folder, finite
from .sums import Summary

Facts = list[tuple[str, str]]


def headline(folder: Folder, summary: Summary) -> Facts:
    """What was compared, on which model, and how much of it there is."""
    run = folder.run
    config = run["config"]
    unique = {sample.key: sample for sample in folder.samples}.values()
    failed = sum(sample.score is None for sample in unique)
    lengths = sorted({line.length for line in summary.lines})
    tasks = dict.fromkeys(line.task for line in summary.lines)
    found = [
        ("methods", ", ".join(summary.methods)),
        ("tasks", ", ".join(tasks)),
        ("lengths", ", ".join(map(whole, lengths)) + " tokens" if lengths else None),
        ("samples", f"{whole(len(unique) - failed)} measured, {whole(failed)} failed"),
        ("skipped", skipped_words(run["skipped"])),
        ("still to measure", counted(sum(m.samples for m in summary.missing), "sample")),
        ("number format", config.get("dtype_used") or config.get("dtype")),
        ("device", device_name(run["device"]) or config.get("device")),
        ("seed", config.get("seed")),
        ("limit", config.get("limit")),
        ("commit", run["commit"]),
    ]
    return [(name, str(value)) for name, value in found if value not in (None, "")]


def lead(folder: Folder, summary: Summary) -> str:
    """The report in one sentence."""
    unique = {sample.key: sample for sample in folder.samples}.values()
    failed = sum(sample.score is None for sample in unique)
    lengths = sorted({line.length for line in summary.lines})
    tasks = len({line.task for line in summary.lines})
    at = f" at {listed(list(map(whole, lengths)))} tokens" if lengths else ""
    return (
        f"{counted(len(summary.methods), 'method')} on {counted(tasks, 'task')}{at}: "
        f"{counted(len(unique) - failed, 'sample')} measured, {whole(failed)} failed, "
        f"{skipped_words(folder.run['skipped'])} skipped."
    )


def listed(parts: Sequence[str]) -> str:
    """ "4096, 8192 and 16384"."""
    return " and ".join([*([", ".join(parts[:-1])] if parts[1:] else []), *parts[-1:]])


def device_name(device: Mapping[str, Any]) -> str:
    """ "NVIDIA H200 (cuda)" from what a run noted about its device."""
    name, kind = device.get("name"), device.get("kind")
    return f"{name} ({kind})" if name and kind else str(name or kind or "")


def skipped_words(skipped: Sequence[Mapping[str, Any]]) -> str:
    """How many tasks and samples were skipped."""
    if not skipped:
        return "nothing"
    samples = sum(e["samples"] for e in skipped if isinstance(e.get("samples"), int))
    tasks = counted(len(skipped), "task at one length", "tasks at one length")
    return f"{tasks} ({counted(samples, 'sample')})" if samples else tasks


def skipped_table(skipped: Sequence[Mapping[str, Any]]) -> Table:
    """Tasks that were not run, and why."""
    rows = tuple(
        Row(
            head=str(entry["task"]),
            note=f"{whole(entry['length'])} tokens",
            cells=(
                Cell(text=_count(entry.get("samples"))),
                Cell(text=str(entry["reason"]), words=True),
            ),
        )
        for entry in skipped
    )
    heads = ("task", "samples", "reason")
    return Table(
        name="skipped",
        caption="Tasks that were skipped, and why.",
        heads=heads,
        groups=(("", rows),),
    )


def _share(value: Any) -> str:
    return percent(value) if finite(value) else NOTHING


def _count(value: Any) -> str:
    return whole(value) if finite(value) else NOTHING


def failures_table(samples: Sequence[Sample]) -> Table:
    """Every error once for each method, task and length."""
    unique = {sample.key: sample for sample in samples}.values()
    totals = Counter((s.method, s.task, s.length) for s in unique)
    errors = Counter(
        ((s.method, s.task, s.length), s.error or "no score and no error")
        for s in unique
        if s.score is None
    )
    rows = tuple(
        Row(
            head=where[0],
            note=f"{where[1]} at {whole(where[2])} tokens",
            cells=(
                Cell(text=f"{whole(count)} of {whole(totals[where])}", mark="failed"),
                Cell(text=error, words=True),
            ),
        )
        for (where, error), count in errors.most_common()
    )
    heads = ("method", "failed", "error")
    return Table(
        name="failures", caption="Samples that failed, and why.", heads=heads, groups=(("", rows),)
    )


def missing_table(summary: Summary) -> Table:
    """What an interrupted run has still to measure."""
    rows = tuple(
        Row(
            head=missing.task,
            note=f"{whole(missing.length)} tokens",
            cells=(
                Cell(text=missing.method, words=True),
                Cell(text=whole(missing.samples)),
            ),
        )
        for missing in summary.missing
    )
    heads = ("task", "method", "samples")
    return Table(
        name="missing",
        caption="Samples that are still to be measured.",
        heads=heads,
        groups=(("", rows),),
    )


def speed_table(speed: Sequence[Mapping[str, Any]]) -> Table:
    """Every line of speed.jsonl; of two for a method and length, the later one."""
    latest = {(line["length"], line["method"]): line for line in speed}
    groups: dict[int, list[Row]] = {}
    for (length, method), line in latest.items():
        cells = (
            _number(line.get("ttft_s"), 1000.0),
            _number(line.get("ms_per_token"), 1.0),
            Cell(text=_share(line.get("keys_read_share"))),
            Cell(text=_count(line.get("prefill_tokens"))),
            Cell(text=_count(line.get("new_tokens"))),
            Cell(text=_count(line.get("runs"))),
            Cell(text=str(line.get("error") or line.get("path") or NOTHING), words=True),
            Cell(text=str(line.get("device") or NOTHING), words=True),
        )
        groups.setdefault(length, []).append(Row(head=method, cells=cells))
    return Table(
        name="speed",
        caption="Time to the first token, and per token after it.",
        heads=("method", "TTFT, ms", "ms per token", "keys read", "prompt", "new tokens", "runs",
               "ran", "on"),
        groups=tuple((f"{whole(length)} tokens", tuple(rows)) for length, rows in groups.items()),
    )  # fmt: skip


def _number(value: Any, scale: float) -> Cell:
    return Cell(text=f"{scale * value:.1f}" if finite(value) else "not measured")


def differing_settings(methods: Mapping[str, Mapping[str, Any]]) -> Table:
    """Settings in which the methods differ: a row each, a column per method."""
    flat = {name: dict(_flat("", method)) for name, method in methods.items()}
    configured = [flat[name] for name, method in methods.items() if not method.get("press")]
    rows = []
    for key in dict.fromkeys(key for values in flat.values() for key in values):
        differ = len({values.get(key) for values in configured}) > 1
        if differ or key not in {known for values in configured for known in values}:
            cells = tuple(Cell(text=flat[name].get(key, NOTHING), words=True) for name in flat)
            rows.append(Row(head=key, cells=cells))
    return Table(
        name="settings",
        caption="Settings in which the methods differ.",
        heads=("setting", *methods),
        groups=(("", tuple(rows)),) if rows else (),
    )


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat("" if key == "config" and not prefix else f"{prefix}{key}.", value)
        elif value is not None:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)
