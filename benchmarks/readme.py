"""Write the README's tables from the result files: `python -m benchmarks.readme [--check]`.

Each table stands between `<!-- NAME -->` and `<!-- end NAME -->`. With --check nothing is written,
and the exit code is 1 if README and result files differ.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.readme_gpu import (
    gpu_decode,
    gpu_kernels,
    gpu_prefill,
    gpu_refresh,
    gpu_ttft,
    needle_gpu,
)
from benchmarks.readme_parts import load, table

README = Path(__file__).parent.parent / "README.md"


def fidelity() -> str:
    """Presets by budget, then what each part does."""
    head = ("variant", "agreement", "KL (nats)", "95 %", "slow steps", "keys read")
    rows = []
    for row in load("fidelity")["rows"]:
        low, high = row["kl_interval"]
        rows.append(
            (
                row["variant"],
                f"{row['agreement']:.3f}",
                f"{row['kl']:.4f}",
                f"{low:.3f}–{high:.3f}",
                f"{row['slow_rate']:.3f}",
                f"{row['keys_read_share']:.2f}",
            )
        )
    return table(head, rows)


def decode_cpu() -> str:
    """Tokens per second by context and arm."""
    head = ("context, arm", "tokens/s", "× fastest dense", "× transformers", "keys read")
    rows = [
        (
            f"{row['context']}, {row['arm']}",
            f"{row['tokens_per_s']:.1f}",
            f"{row['speedup']:.2f}",
            f"{row['speedup_over_transformers']:.2f}",
            f"{row['keys_read_share']:.2f}",
        )
        for row in load("decode_cpu")["rows"]
    ]
    return table(head, rows)


def needle() -> str:
    """Share of answer words right by length and kind of question."""
    kinds = ("code", "note", "chain")
    head = ("variant", *(f"{kind}, {n}" for n in ("4K", "16K") for kind in kinds), "slow steps")
    longer = {row["variant"]: row for row in load("needle_16k")["rows"]}
    rows = [
        (
            row["variant"],
            *(f"{row[kind]:.2f}" for kind in kinds),
            *(f"{longer[row['variant']][kind]:.2f}" for kind in kinds),
            f"{row['slow_rate']:.2f}",
        )
        for row in load("needle")["rows"]
    ]
    return table(head, rows)


def gap_rows(name: str) -> str:
    """A file of `reread eval gaps`: accuracy by row."""
    kinds = ("code", "note", "chain", "all")
    head = ("prefill", *kinds, "keys read", "ran")
    rows = [
        (
            row["variant"],
            *(f"{row['accuracy'][kind]:.3f}" for kind in kinds),
            f"{row['share_read']:.1%}",
            row["path"],
        )
        for row in load(name)["rows"]
        # at 16K shared blocks still chose by raw scores, which is no longer what runs
        if name != "gaps_16k" or row["chooser"] != "indexer" or row["b_sel"] == 1
    ]
    return table(head, rows)


def indexed_needle() -> str:
    """Who chooses in every decode step, two lengths."""
    kinds = ("code", "note", "chain")
    result = load("indexed_needle")
    lengths = ("16384 tokens", "65536 tokens")
    head = ("variant", *(f"{kind}, {n}" for n in ("16K", "64K") for kind in kinds), "keys, 64K")
    rows = []
    for short, long in zip(*(result[name]["rows"] for name in lengths), strict=True):
        figures = [f"{row[kind]:.2f}" for row in (short, long) for kind in kinds]
        rows.append((short["variant"], *figures, f"{long['keys_read']:.1%}"))
    return table(head, rows)


def indexed_stretched() -> str:
    """The same at 64K with an indexer that was trained for longer texts."""
    kinds = ("code", "note", "chain")
    rows = [
        (row["variant"], *(f"{row[kind]:.2f}" for kind in kinds))
        for row in load("indexed_needle_stretched")["65536 tokens"]["rows"]
    ]
    return table(("variant", *kinds), rows)


def indexed_fidelity() -> str:
    """Agreement and KL by who chooses, on real text."""
    found = load("indexed_fidelity")["smollm2"]["rows"]
    kinds = list(dict.fromkeys(row["text"] for row in found))
    by = {(row["text"], row["variant"]): row for row in found}
    head = ("variant", *(f"{kind}: agreement, KL" for kind in kinds), "slow steps", "keys read")
    rows = []
    for variant in dict.fromkeys(row["variant"] for row in found):
        own = [by[kind, variant] for kind in kinds]
        rows.append(
            (
                variant,
                *(f"{row['agreement']:.3f}, {row['kl']:.3f}" for row in own),
                f"{sum(row['slow'] for row in own) / len(own):.2f}",
                f"{sum(row['keys_read'] for row in own) / len(own):.2f}",
            )
        )
    return table(head, rows)


def eval_needle_4k() -> str:
    """Every method of `reread eval`, the best of ours and of the baselines as they were asked."""
    result = load("eval_needle_4k")
    kinds = ("code", "note", "chain", "all")
    rows = []
    ours_first = sorted(result["methods"].items(), key=lambda item: item[1]["press"] is not None)
    for method, _ in ours_first:
        lines = {line["kind"]: line for line in result["lines"] if line["method"] == method}
        whole = lines["all"]
        figures = whole["figures"]
        kept = figures.get("kept_share")
        fast = figures.get("fast_keys_share", kept)
        scores = [
            "failed" if lines[kind]["failed"] else f"{lines[kind]['score']:.3f}" for kind in kinds
        ]
        gap = "" if whole["difference"] is None else f"{100 * whole['difference']:+.1f}"
        if gap:
            gap += f" ({100 * whole['low']:+.1f} to {100 * whole['high']:+.1f})"
        shares = ("100%" if fast is None else f"{fast:.1%}", figures.get("keys_read_share", kept))
        rows.append(
            (method, *scores, gap, shares[0], "" if shares[1] is None else f"{shares[1]:.0%}")
        )
    head = ("method", *kinds, "points to dense (95 %)", "keys of a fast step", "keys read in all")
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


def distill() -> str:
    """Indexers of several kinds: how well they predict, at and beyond the training context."""
    head = ("variant", "KL", "recall", "mass", "KL, longer", "recall, longer", "mass, longer")
    rows = []
    for row in load("distill")["rows"]:
        figures = [
            f"{part[name]:.3f}"
            for part in (row["after"], row["longer"])
            for name in ("kl", "recall", "mass")
        ]
        rows.append((row["variant"], *figures))
    return table(head, rows)


TABLES: dict[str, Callable[[], str]] = {
    "eval_needle_4k": eval_needle_4k,
    "eval_fidelity_4k": eval_fidelity_4k,
    "gpu_prefill": gpu_prefill,
    "gpu_ttft": gpu_ttft,
    "gaps_4k": functools.partial(gap_rows, "gaps_4k"),
    "gaps_16k": functools.partial(gap_rows, "gaps_16k"),
    "indexed_needle": indexed_needle,
    "indexed_stretched": indexed_stretched,
    "indexed_fidelity": indexed_fidelity,
    "distill": distill,
    "gpu_decode": gpu_decode,
    "gpu_kernels": gpu_kernels,
    "gpu_refresh": gpu_refresh,
    "needle_gpu": needle_gpu,
    "decode_cpu": decode_cpu,
    "fidelity": fidelity,
    "needle": needle,
}


def render(text: str) -> str:
    """The README with every table made anew."""
    for name, make in TABLES.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"README.md has no place for the table {name!r}")
        body = make()
        text = pattern.sub(lambda m, body=body: f"{m[1]}{body}\n{m[2]}", text)  # type: ignore[misc]
    return text


def main() -> None:
    """Write the README, or check it."""
    text = README.read_text(encoding="utf-8")
    made = render(text)
    if "--check" in sys.argv[1:]:
        if made != text:
            raise SystemExit("README.md is stale: run python -m benchmarks.readme")
        return
    README.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
