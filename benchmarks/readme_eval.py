"""The README's tables of `reread eval`, from their result files."""

from __future__ import annotations

from typing import Any

from benchmarks.readme_parts import load, table

LENGTHS = ("4k", "16k", "64k")
TIMED = ("16k", "64k")
KINDS = ("code", "note", "chain")


def _percent(values: list[float | None], digits: int) -> str:
    """One share for all lengths, or one for each; dense reads everything."""
    shown = [f"{100 * (1 if v is None else v):.{digits}f}" for v in values]
    return f"{shown[0] if len(set(shown)) == 1 else ' / '.join(shown)}%"


def _lines(result: dict[str, Any], method: str) -> dict[str, dict[str, Any]]:
    """One method's lines by kind of question."""
    return {line["kind"]: line for line in result["lines"] if line["method"] == method}


def _points(line: dict[str, Any]) -> str:
    """Difference to dense with its interval, in whole points: more digits would mean nothing."""
    if line["difference"] is None:
        return ""
    points = [round(100 * line[key]) for key in ("difference", "low", "high")]
    mean, low, high = (f"{p:+d}" if p else "0" for p in points)
    return f"{mean} ({low} to {high})"


def eval_needle() -> str:
    """Every method of `reread eval`, ours first, at three lengths."""
    results = [load(f"eval_needle_{length}") for length in LENGTHS]
    methods = sorted(
        results[0]["methods"].items(),
        key=lambda item: (item[1]["press"] is not None, item[1]["share"] == 0.5),
    )
    rows = []
    for method, _ in methods:
        cells: list[str] = []
        fast: list[float | None] = []
        every: list[float | None] = []
        for result in results:
            lines = _lines(result, method)
            figures = lines["all"]["figures"]
            kept = figures.get("kept_share")
            fast.append(figures.get("fast_keys_share", kept))
            every.append(figures.get("keys_read_share", kept))
            cells.append(
                "failed"
                if any(line["failed"] for line in lines.values())
                else " / ".join(f"{lines[kind]['score']:.2f}" for kind in KINDS)
            )
            cells.append(_points(lines["all"]))
        rows.append((method, *cells, _percent(fast, 1), _percent(every, 0)))
    head = (
        "method", *(text for n in LENGTHS for text in (n.upper(), "points to dense")),
        "keys of a fast step", "keys read in all",
    )  # fmt: skip
    return table(head, rows)


def eval_speed() -> str:
    """Quality and speed of the same methods on the same configuration."""
    results = [load(f"eval_needle_{length}") for length in TIMED]
    rows = []
    for line in results[0]["speed"]:
        method, cells = line["method"], []
        for result in results:
            own = next(s for s in result["speed"] if s["method"] == method)
            scored = _lines(result, method).get("all")
            low, high = min(own["ms_per_token_runs"]), max(own["ms_per_token_runs"])
            cells += [
                "–" if scored is None else f"{scored['score']:.3f}",
                f"{1000 * own['ttft_s']:.0f}",
                f"{own['ms_per_token']:.2f} ({low:.2f} to {high:.2f})",
            ]
        rows.append((method, *cells, f"{line['slow_rate']:.2f}", line["path"]))
    names = ("right", "TTFT, ms", "ms per token")
    head = (
        "method", *(f"{name}, {n.upper()}" for n in TIMED for name in names), "slow steps", "ran",
    )  # fmt: skip
    return table(head, rows)


def eval_fidelity() -> str:
    """What fast steps see and miss, by kind of text; dense itself shows how stable attention is."""
    figures = (
        "agreement", "kl", "slow_rate", "keys_read_share", "mass_fast", "useless_share",
        "stability_inside", "stability_across",
    )  # fmt: skip
    rows = []
    for length in ("4k", "8k"):
        for line in load(f"eval_fidelity_{length}")["lines"]:
            if line["method"] != "dense" and line["kind"] != "all":
                values = (line["figures"].get(name) for name in figures)
                shown = ("–" if value is None else f"{value:.3f}" for value in values)
                rows.append((f"{line['kind']}, {length.upper()}", line["method"], *shown))
    head = (
        "text", "method", "agreement", "KL (nats)", "slow steps", "keys read", "mass read",
        "useless", "stable inside", "across",
    )  # fmt: skip
    return table(head, rows)


def _gap_results() -> list[dict[str, Any]]:
    """The files of `reread eval gaps`, one a length."""
    return [load(f"gaps_{length}") for length in LENGTHS]


def _by_variant(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["variant"]: row for row in result["rows"]}


def gap_rows() -> str:
    """Accuracy of every prefill by length, and the time to the first token where it was taken."""
    named = list(zip(LENGTHS, _gap_results(), strict=True))
    timed = [n for n, result in named if any(row["ttft_s"] for row in result["rows"])]
    rows = []
    for variant in _by_variant(named[0][1]):
        cells, times = [variant], []
        for length, result in named:
            row = _by_variant(result)[variant]
            cells.append(" / ".join(f"{row['accuracy'][kind]:.3f}" for kind in KINDS))
            cells.append(f"{row['share_read']:.1%}")
            if length in timed:
                times.append(f"{1000 * row['ttft_s']:.0f}" if row["ttft_s"] else "–")
        rows.append([*cells, *times])
    head = (
        "prefill", *(text for n in LENGTHS for text in (n.upper(), "keys")),
        *(f"TTFT, ms, {n.upper()}" for n in timed),
    )  # fmt: skip
    return table(head, rows)


def gap_smollm2() -> str:
    """Accuracy of every prefill of a language model, by task."""
    rows: dict[str, list[str]] = {}
    tasks = []
    for row in load("gaps_smollm2")["rows"]:
        tasks += [row["task"]] if row["task"] not in tasks else []
        cell = f"{row['accuracy']['all']:.2f} of {sum(row['cases'].values())}"
        rows.setdefault(row["variant"], []).extend((cell, f"{row['share_read']:.1%}"))
    head = ("prefill", *(text for task in tasks for text in (task, "keys")))
    return table(head, [[name, *cells] for name, cells in rows.items()])


GAPS = {
    "budget: dense − oracle per query": ("dense", "oracle per query"),
    "indexer: oracle − indexer per query": ("oracle per query", "indexer per query"),
    "sharing and kernels: indexer per query − shared by 64": (
        "indexer per query",
        "indexer shared by 64",
    ),
    "all three: dense − indexer shared by 64": ("dense", "indexer shared by 64"),
}


def gap_parts() -> str:
    """Where the accuracy of a prefill goes, in points, by length."""
    rows = []
    for words, (first, second) in GAPS.items():
        cells = [words]
        for result in _gap_results():
            own = _by_variant(result)
            lost = (own[first]["accuracy"][k] - own[second]["accuracy"][k] for k in KINDS)
            # no minus before a zero
            cells.append(" / ".join(f"{round(100 * value, 1) + 0.0:.1f}" for value in lost))
        rows.append(cells)
    return table(("points lost", *(length.upper() for length in LENGTHS)), rows)
