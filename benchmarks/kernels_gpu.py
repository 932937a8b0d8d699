"""Times the kernels on one GPU: `reread.bench.kernel` on the shapes that the documentation shows.

python -m benchmarks.kernels_gpu --json benchmarks/results/kernels.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from reread.bench.caches import KernelShape
from reread.bench.kernel import SHARES, measure

BATCHES = [KernelShape(*s) for s in ((32, 16384), (16, 32768))]
LONG = [KernelShape(1, 131072), KernelShape(4, 131072)]
LONG_SHARES = (0.006, *SHARES)
HIDDEN = ("p20", "p80", "heads", "kv_heads", "dim")


def line(record: dict[str, Any]) -> str:
    """One row of the printed table."""
    shown = {k: v for k, v in record.items() if k not in HIDDEN}
    return " ".join(
        f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in shown.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="for a copy of the tree without its history")
    args = parser.parse_args()
    result = measure(BATCHES, progress=print, commit=args.commit)
    result["records"] += measure(LONG, LONG_SHARES, progress=print, commit=args.commit)["records"]
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    print(f"copy bandwidth {result['copy_bandwidth'] / 1e12:.2f} TB/s; absent: {result['absent']}")
    for record in result["records"]:
        print(line(record))


if __name__ == "__main__":
    main()
