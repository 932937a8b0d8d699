"""Every method of `reread eval` on the needle checkpoint, the baselines of others included.

    python -m benchmarks.eval_needle --model FOLDER --tokens 4096 --dtype float32 --out DIR
    python -m benchmarks.eval_needle --model FOLDER --tokens 65536 --device cuda --dtype bfloat16 \
        --out DIR --name eval_needle_64k

The samples go to --out, from where an interrupted run continues; their sums to
benchmarks/results/NAME.json. "@3%": keys for 3 % of the prompt, in every method.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from benchmarks.common import console, save
from reread.evaluation.methods import PRESSES
from reread.evaluation.report.sums import summarise
from reread.evaluation.suite.request import Request
from reread.evaluation.suite.run import evaluate

SHARE = "3%"
OURS = ("dense", "default", f"default@{SHARE}", "paper", f"paper@{SHARE}", f"oracle@{SHARE}")
INDEXER = f"indexer@{SHARE}"
HALF = "50%"


def methods(*, baselines: bool, indexer: bool) -> str:
    """All of ours, then each baseline at the same share and at one half."""
    names = [*OURS, *([INDEXER] if indexer else [])]
    if baselines:
        names += [f"{press}@{share}" for press in PRESSES for share in (SHARE, HALF)]
    return ",".join(names)


def main() -> None:
    """Run what is missing and write the sums."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of the needle checkpoint")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--limit", type=int, default=2, help="texts, of nine questions each")
    parser.add_argument("--indexer", type=Path, default=Path("benchmarks/indexers/needle-27m"))
    parser.add_argument("--no-baselines", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, required=True, help="folder of the samples")
    parser.add_argument("--name", default="eval_needle_4k", help="name of the result file")
    args = parser.parse_args()
    request = Request(
        model=args.model, tasks=("needle",), lengths=(args.tokens,), out=args.out,
        methods=methods(baselines=not args.no_baselines, indexer=args.indexer.is_dir()),
        indexer=args.indexer if args.indexer.is_dir() else None, limit=args.limit,
        device=args.device, dtype=args.dtype,
    )  # fmt: skip

    def report(name: str, done: int, total: int) -> None:
        console.log(f"{done}/{total} {name}")

    folder = evaluate(request, report)
    summary = summarise(folder.run, list(folder.samples.values()))
    lines = [dataclasses.asdict(line) for line in summary.lines]
    result = {**folder.run, "lines": lines, "speed": folder.speeds()}
    console.print(f"written to {save(args.name, result)}")


if __name__ == "__main__":
    main()
