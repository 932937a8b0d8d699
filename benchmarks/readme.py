"""Write the README's tables from the result files: `python -m benchmarks.readme [--check]`.

Each table stands between `<!-- NAME -->` and `<!-- end NAME -->`. With --check nothing is written,
and the exit code is 1 if README and result files differ.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS

README = Path(__file__).parent.parent / "README.md"


def load(name: str) -> dict[str, Any]:
    """One result file."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


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


def gpu_rows() -> list[dict[str, Any]]:
    """Every cell's newest measurement of whole decode steps, with the overlap that users get."""
    found: dict[tuple[str, int, int], dict[str, Any]] = {}
    for name in ("gpu_decode", "gpu_decode_apart"):
        if not (RESULTS / f"{name}.json").is_file():
            continue  # the second is gone once the first was measured anew
        result = load(name)
        for row in result["decode"]["rows"]:
            overlap = next(o for o in ("rows", "refresh") if o in row["slow_fast"])
            key = row["shape"], row["rows"], row["context"]
            found[key] = {**row, "ours": row["slow_fast"][overlap], "commit": result["commit"][:7]}
    return list(found.values())


def size(positions: int) -> str:
    """131072 as 128K."""
    return f"{positions // 1024}K"


def gpu_decode() -> str:
    """Whole decode steps by cell, at four rates of slow steps."""
    gaps = {"20": "1 in 20", "9": "1 in 9", "6.8": "1 in 6.8", "6": "1 in 6"}
    head = (
        "model, batch × context", "fastest dense, ms", "fast step, ms", "not attention, ms",
        *(f"× at {words}" for words in gaps.values()), "roofline, dense / 1 in 20", "commit",
    )  # fmt: skip
    rows = []
    for row in gpu_rows():
        dense = next(arm for arm in row["dense"] if arm["arm"] == row["fastest_dense"])
        bare = next(arm["bare_ms"] for arm in row["dense"] if "bare_ms" in arm)
        ours = row["ours"]
        rows.append(
            (
                f"{row['shape']}, {row['rows']} × {size(row['context'])}",
                f"{dense['ms']:.2f} ({dense['arm']})",
                f"{ours['fast']['ms']:.2f}",
                f"{bare:.2f}",
                *(f"{ours[f'1/{gap}']['speedup']:.2f}" for gap in gaps),
                f"{dense['roofline']:.2f} / {ours['1/20']['roofline']:.2f}",
                row["commit"],
            )
        )
    return table(head, rows)


def gpu_kernels() -> str:
    """Sparse attention over the fastest dense attention, by share of keys; and the refresh."""
    records = load("gpu_kernels")["records"]
    head = ("rows × keys", "fastest dense, µs", "share of keys", "sparse, µs", "×", "roofline")
    rows = []
    shapes = sorted({(r["rows"], r["length"]) for r in records}, reverse=True)
    for batch, length in shapes:
        here = [r for r in records if (r["rows"], r["length"]) == (batch, length)]
        dense = min(r["us"] for r in here if r["kernel"] == "dense")
        for r in here:
            if r["kernel"] == "sparse" and r["run"] == 32:
                rows.append(
                    (
                        f"{batch} × {size(length)}",
                        f"{dense:.0f}",
                        f"{r['keys'] / length:.1%}",
                        f"{r['us']:.1f}",
                        f"{r['speedup']:.1f}",
                        f"{r['roofline']:.2f}",
                    )
                )
    return table(head, rows)


def gpu_refresh() -> str:
    """What choosing again costs beside dense attention."""
    head = ("rows × keys", "K", "evidence and Selector, µs", "share of the dense attention")
    rows = [
        (
            f"{r['rows']} × {size(r['length'])}",
            str(r["k"]),
            f"{r['refresh_us']:.0f}",
            f"{r['share_of_dense']:.2f}",
        )
        for r in load("gpu_kernels")["records"]
        if r["kernel"] == "refresh"
    ]
    return table(head, rows)


def needle_gpu() -> str:
    """Share of answer words right by length and kind of question, bfloat16 on a GPU."""
    kinds = ("code", "note", "chain")
    head = ("variant, tokens", *kinds, "keys of a fast step", "slow steps", "keys read in all")
    rows = [
        (
            f"{row['variant']}, {round(row['tokens'] / 1024)}K",
            *(f"{row[kind]:.2f}" for kind in kinds),
            f"{row['fast_keys_share']:.1%}" if row["slow_rate"] else "100%",
            f"{row['slow_rate']:.2f}",
            f"{row['keys_read_share']:.2f}",
        )
        for row in load("needle_gpu")["rows"]
    ]
    return table(head, rows)


def gaps() -> str:
    """What a prefill budget costs, by the oracle."""
    kinds = ("code", "note", "chain")
    head = ("prefill", *kinds, "keys read")
    rows = [
        (
            row["variant"],
            *(f"{row[kind]:.2f}" for kind in kinds),
            f"{row['share_read']:.2f}",
        )
        for row in load("gaps")["rows"]
    ]
    return table(head, rows)


TABLES: dict[str, Callable[[], str]] = {
    "gaps": gaps,
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
