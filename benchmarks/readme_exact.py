"""The README's tables of mode "exact"."""

from __future__ import annotations

from benchmarks.readme_parts import load, size, table


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


def exact_acceptance() -> str:
    """Drafted tokens that stand, by budget and longest draft."""
    head = (
        "text", "K", "drafted at most", "greedy: stand", "of them a verification",
        "sampled: stand", "of them a verification",
    )  # fmt: skip
    rows = [
        (
            row["text"], str(row["k"]), str(row["tokens"]),
            *(
                f"{row[way][key]:.{digits}f}"
                for way in ("greedy", "sampled")
                for key, digits in (("acceptance", 2), ("accepted_per_verify", 1))
            ),
        )
        for row in load("exact_acceptance")["rows"]
    ]  # fmt: skip
    return table(head, rows)


def exact_needle() -> str:
    """The same on needle-27m's answers at 64K."""
    head = ("K", "drafted at most", "stand", "of them a verification", "keys read", "answers")
    rows = [
        (
            str(row["k"]), str(row["tokens"]), f"{row['acceptance']:.2f}",
            f"{row['accepted_per_verify']:.1f}", f"{row['keys_read_share']:.2f}",
            "dense's" if row["answers_of_dense"] else "others",
        )
        for row in load("exact_needle")["rows"]
    ]  # fmt: skip
    return table(head, rows)


def gpu_exact() -> str:
    """Whole cycles of drafting and verifying on a GPU, by the drafted tokens that stand."""
    rates = [f"{rate:g}" for rate in (0.8, 0.9, 0.95, 0.98)]
    head = (
        "model, batch × context", "fastest dense, ms", "draft, ms", "verification of 9, ms",
        *(f"× at {rate} (drafted)" for rate in rates),
    )  # fmt: skip
    rows = []
    for row in load("gpu_exact")["exact"]["rows"]:
        found = row["exact"]
        dense = next(arm for arm in row["dense"] if arm["arm"] == row["fastest_dense"])
        at = [found[f"at {rate}"] for rate in rates]
        rows.append(
            (
                f"{row['shape']}, {row['rows']} × {size(row['context'])}",
                f"{dense['ms']:.2f} ({dense['arm']})", f"{found['fast']['ms']:.2f}",
                f"{found['verify']['9']['ms']:.2f}",
                *(f"{one['speedup']:.2f} ({one['drafted']})" for one in at),
            )
        )  # fmt: skip
    return table(head, rows)


def exact_bf16() -> str:
    """Greedy texts in bfloat16 that leave those of dense decoding, one window at a time."""
    head = ("arm", "windows that differ", "per 1000 tokens", "widest margin there, logits")
    rows = [
        (
            row["arm"], f"{row['differ']} of {row['windows']}", f"{row['per_1000']:.1f}",
            f"{row['margin_max']:.2f}",
        )
        for row in load("exact_bf16")["rows"]
    ]  # fmt: skip
    return table(head, rows)
