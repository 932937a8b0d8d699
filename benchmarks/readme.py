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


TABLES: dict[str, Callable[[], str]] = {
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
