"""What the makers of the README's tables share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from benchmarks.common import RESULTS


def load(name: str) -> dict[str, Any]:
    """One result file."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def size(positions: int) -> str:
    """131072 as 128K."""
    return f"{positions // 1024}K"
