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


def eval_fidelity_4k() -> str:
    """What fast steps see and miss, by kind of text; dense itself shows how stable attention is."""
    figures = (
        "agreement", "kl", "slow_rate", "keys_read_share", "mass_fast", "useless_share",
        "stability_inside", "stability_across",
    )  # fmt: skip
    rows = []
    for line in load("eval_fidelity_4k")["lines"]:
        if line["method"] != "dense" and line["kind"] != "all":
            values = (line["figures"].get(name) for name in figures)
            shown = ("–" if value is None else f"{value:.3f}" for value in values)
            rows.append((line["kind"], line["method"], *shown))
    head = (
        "text", "method", "agreement", "KL (nats)", "slow steps", "keys read", "mass read",
        "useless", "stable inside", "across",
    )  # fmt: skip
    return table(head, rows)
