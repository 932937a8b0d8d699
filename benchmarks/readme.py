"""Write the README's tables from the result files: `python -m benchmarks.readme [--check]`.

Each table stands between `<!-- NAME -->` and `<!-- end NAME -->`. With --check nothing is written,
and the exit code is 1 if README and result files differ.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.readme_eval import (
    eval_fidelity,
    eval_needle,
    eval_speed,
    gap_parts,
    gap_rows,
    gap_smollm2,
)
from benchmarks.readme_exact import (
    exact_acceptance,
    exact_bf16,
    exact_needle,
    exact_speed,
    gpu_exact,
)
from benchmarks.readme_gpu import (
    gpu_decode,
    gpu_indexed,
    gpu_kernels,
    gpu_prefill,
    gpu_refresh,
    gpu_ttft,
    needle_gpu,
    paged_gpu,
    vllm_gpu,
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


def indexed_needle() -> str:
    """Who chooses in every decode step, two lengths, one indexer."""
    kinds = ("code", "note", "chain")
    short, long = (
        {row["variant"]: row for row in load(name)[section]["rows"]}
        for name, section in (
            ("indexed_needle", "16384 tokens"),
            ("indexed_needle_stretched", "65536 tokens"),
        )
    )
    head = (
        "variant", *(f"{kind}, 16K" for kind in kinds), "keys, 16K",
        *(f"{kind}, 64K" for kind in kinds), "keys, 64K",
    )  # fmt: skip
    rows = []
    for variant in sorted({**short, **long}, key=_by_budget):
        cells = [variant]
        for row in (short.get(variant), long.get(variant)):
            if row is None:
                cells += ["–"] * (len(kinds) + 1)
            else:
                cells += [*(f"{row[kind]:.2f}" for kind in kinds), f"{row['keys_read']:.1%}"]
        rows.append(cells)
    return table(head, rows)


def _by_budget(variant: str) -> int:
    """The k that a variant names, dense first; sorting keeps the order of the file otherwise."""
    return int(variant.partition("k=")[2] or 0)


def indexed_others() -> str:
    """Indexers at 64K that were trained otherwise."""
    kinds = ("code", "note", "chain")
    rows = []
    for name, section, words in (
        ("indexed_needle", "65536 tokens", "distilled at 16K, positions not stretched"),
        ("indexed_needle_stretched", "65536 tokens, distilled at 64K", "distilled at 64K"),
    ):
        part = load(name)[section]
        row = next(
            r for r in part["rows"] if "indexer" in r["variant"] and r["variant"].endswith("k=256")
        )
        figures = (f"{row[kind]:.2f}" for kind in kinds)
        rows.append((words, *figures, str(row["cases"]), part["commit"][:7]))
    return table(("indexer, k=256", *kinds, "cases", "commit"), rows)


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
    "exact_speed": exact_speed,
    "exact_acceptance": exact_acceptance,
    "exact_needle": exact_needle,
    "exact_bf16": exact_bf16,
    "gpu_exact": gpu_exact,
    "vllm_gpu": vllm_gpu,
    "paged_gpu": paged_gpu,
    "eval_needle": eval_needle,
    "eval_speed": eval_speed,
    "eval_fidelity": eval_fidelity,
    "gpu_prefill": gpu_prefill,
    "gpu_ttft": gpu_ttft,
    "gap_rows": gap_rows,
    "gap_parts": gap_parts,
    "gap_smollm2": gap_smollm2,
    "indexed_needle": indexed_needle,
    "indexed_others": indexed_others,
    "indexed_fidelity": indexed_fidelity,
    "gpu_indexed": gpu_indexed,
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
