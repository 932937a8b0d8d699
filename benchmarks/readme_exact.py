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


def exact_acceptance() -> str:
    """Drafted tokens that stand, by budget and number drafted; mean over the kinds of text."""
    rows, found = [], load("exact_acceptance")["rows"]
    for k, tokens in sorted({(row["k"], row["tokens"]) for row in found}):
        mine = [row for row in found if (row["k"], row["tokens"]) == (k, tokens)]
        cells = []
        for way in ("greedy", "sampled"):
            ours = [row[way] for row in mine]
            accepted = sum(one["acceptance"] * one["drafted"] for one in ours)
            cells.append(f"{accepted / sum(one['drafted'] for one in ours):.2f}")
            cells.append(f"{accepted / sum(one['verified'] for one in ours):.1f}")
        rows.append((str(k), str(tokens), *cells))
    head = ("K", "drafted at most", "greedy: stand", "a verification", "sampled: stand", "a verif.")
    return table(head, rows)


def exact_needle() -> str:
    """The same on the retrieval checkpoint."""
    rows = [
        (
            str(row["k"]), str(row["tokens"]), f"{row['acceptance']:.2f}",
            f"{row['accepted_per_verify']:.1f}", f"{row['keys_read_share']:.2f}",
        )
        for row in load("exact_needle")["rows"]
    ]  # fmt: skip
    return table(("K", "drafted at most", "stand", "a verification", "keys read"), rows)
