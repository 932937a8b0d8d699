"""The README's tables of mode "exact"."""

from __future__ import annotations

from benchmarks.readme_parts import load, table


def exact_speed() -> str:
    """Continuing real text on a CPU, against the faster of two dense arms."""
    rows = []
    for row in load("exact_speed")["rows"]:
        fastest = max(row["dense"], row["transformers"])
        rows.append(
            (
                f"{row['text']}, {'sampled' if 'sampled' in row['arm'] else 'greedy'}",
                f"{fastest:.1f}", f"{row['tokens_per_s']:.1f}", f"{row['speedup']:.2f}",
                f"{row['acceptance']:.2f}", f"{row['accepted_per_verify']:.1f}",
                f"{row['keys_read_share']:.2f}",
            )
        )  # fmt: skip
    head = (
        "text", "dense, tokens/s", "exact, tokens/s", "×", "drafted that stand",
        "of them a verification", "keys read",
    )  # fmt: skip
    return table(head, rows)
