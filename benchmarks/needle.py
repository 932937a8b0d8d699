"""Retrieval on the needle checkpoint: dense, default and paper presets, by kind of question.

    python -m benchmarks.needle --model FOLDER --json

The checkpoint answers right with dense attention at every length, so what a variant loses is the
variant's loss. It is not part of this repository.
"""

from __future__ import annotations

import argparse
import json

import torch

from benchmarks.common import console, save, show
from reread import Config
from reread.evaluation.needle import KINDS, Vocabulary, evaluate, make_texts
from reread.evaluation.provenance import provenance
from reread.integrations.hf.load import load


def variants() -> dict[str, Config]:
    """Rows of the table; the paper's preset with its own constants and at the default's budget."""
    default, paper = Config.preset("default"), Config.preset("paper")
    return {
        "dense": Config.preset("dense"),
        "default": default,
        "default, K=256": default.updated({"k": 256}),
        "default, boundary": default.updated({"boundary": True}),
        "default, no boundary": default.updated({"boundary": False}),
        "paper": paper,
        "paper, K=512": paper.updated({"k": 512}),
        "paper, no Soft-NMS": paper.updated({"refine": "none"}),
    }


def main() -> None:
    """Run the benchmark and write benchmarks/results/needle.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of the needle checkpoint")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--questions", type=int, default=3, help="of each kind, per text")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--name", default="needle", help="name of the result file")
    parser.add_argument("--json", action="store_true", help="print the result on stdout too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded = load(args.model, dtype="float32", device=args.device)
    texts = make_texts(
        Vocabulary.of(loaded.tokenizer.get_vocab()),
        tokens=args.tokens,
        count=args.texts,
        questions=args.questions,
        seed=args.seed,
    )
    rows = []
    for name, config in variants().items():
        found = evaluate(loaded.model, loaded.tokenizer, texts, {name: config})[name]
        slow = sum(r.slow_steps for r in found.values())
        steps = sum(r.slow_steps + r.fast_steps + r.full_steps for r in found.values())
        row = {
            "variant": name,
            **{kind: found[kind].accuracy for kind in KINDS},
            "slow_rate": slow / steps,
            "settings": config.to_dict(),
        }
        rows.append(row)
        console.log(", ".join(f"{kind} {found[kind].accuracy:.3f}" for kind in KINDS), name)
    result = {
        "rows": rows,
        "config": {
            "model": "needle-27m",
            "tokens": args.tokens,
            "cases_per_kind": args.texts * args.questions,
            "seed": args.seed,
        },
        **provenance(args.device),
    }
    path = save(args.name, result)
    show("share of answer words right", rows, ("variant", *KINDS, "slow_rate"))
    console.print(f"written to {path}")
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
