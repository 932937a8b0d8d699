"""Draw the README's picture from the result files: `python -m benchmarks.plots`.

Tokens per second by context, dense and slow-fast, for the 4B shape at batch 4.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from benchmarks.readme_gpu import gpu_rows
from benchmarks.readme_parts import size

TARGET = Path(__file__).parent.parent / "docs" / "decode_h200.svg"
SHAPE, BATCH = "qwen3-4b", 4


def series() -> dict[str, list[tuple[int, float]]]:
    """Context and tokens per second of each line."""
    rows = sorted(
        (r for r in gpu_rows() if (r["shape"], r["rows"]) == (SHAPE, BATCH)),
        key=lambda r: r["context"],
    )

    def dense(row: dict[str, Any]) -> float:
        return max(arm["tokens_per_s"] for arm in row["dense"] if "tokens_per_s" in arm)

    lines = {"fastest dense": [(r["context"], dense(r)) for r in rows]}
    for gap, words in (("20", "one slow step in 20"), ("6.8", "one slow step in 6.8")):
        key = f"1/{gap}"
        lines[f"default preset, {words}"] = [
            (r["context"], r["ours"][key]["tokens_per_s"]) for r in rows
        ]
    return lines


def draw(target: Path) -> None:
    """Write the picture as SVG."""
    # the same file for the same data, wherever it is drawn
    mpl.rcParams.update({"svg.hashsalt": "reread", "svg.fonttype": "none"})
    figure, axes = plt.subplots(figsize=(7, 4))
    styles = zip(("o-", "s--", "^:"), series().items(), strict=True)
    for style, (label, points) in styles:
        axes.plot(*zip(*points, strict=True), style, label=label)
    contexts = [context for context, _ in next(iter(series().values()))]
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [size(context) for context in contexts])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("context (tokens a row)")
    axes.set_ylabel("tokens per second, 4 rows")
    axes.set_title("Qwen3-4B shape, random weights, batch 4, one H200")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None, "Creator": None})
    plt.close(figure)


if __name__ == "__main__":
    draw(TARGET)
