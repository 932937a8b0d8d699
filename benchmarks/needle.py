"""Retrieval on the needle checkpoint: dense, default and paper presets, by kind of question.

    python -m benchmarks.needle --model FOLDER --json

The checkpoint answers right with dense attention at every length, so what a variant loses is the
variant's loss. It is not part of this repository.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from benchmarks.common import console, save, show
from reread import Config
from reread.evaluation.needle import KINDS, Vocabulary, evaluate, make_texts
from reread.evaluation.provenance import provenance
from reread.integrations.hf.load import load


def variants() -> dict[str, Config | None]:
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


def measure(args: argparse.Namespace, tokens: int) -> list[dict[str, Any]]:
    """The table's rows for texts of `tokens` tokens."""
    loaded = load(args.model, dtype=args.dtype, device=args.device)
    texts = make_texts(
        Vocabulary.of(loaded.tokenizer.get_vocab()),
        tokens=tokens,
        count=args.texts,
        questions=args.questions,
        seed=args.seed,
    )
    known: dict[str, Config | None] = {"transformers": None, **variants()}
    chosen = {name: known[name] for name in args.variants.split(",")} if args.variants else known
    rows = []
    found = evaluate(loaded.model, loaded.tokenizer, texts, chosen, chunk=args.chunk)
    for name, config in chosen.items():
        kinds = found[name]
        slow = sum(r.slow_steps for r in kinds.values())
        steps = sum(r.slow_steps + r.fast_steps + r.full_steps for r in kinds.values())
        read = [share for r in kinds.values() for share in r.read]
        row = {
            "variant": name,
            "tokens": tokens,
            **{kind: kinds[kind].accuracy for kind in KINDS},
            "slow_rate": slow / steps if steps else 0.0,
            "keys_read_share": sum(read) / len(read) if read else 1.0,
            "fast_keys_share": config.budget / tokens if config else 1.0,
            "ran": sorted({ran for r in kinds.values() for ran in r.runners}),
            "settings": config.to_dict() if config else None,
        }
        rows.append(row)
        console.log(", ".join(f"{kind} {kinds[kind].accuracy:.3f}" for kind in KINDS), name)
    return rows


def main() -> None:
    """Run the benchmark and write the result file, anew after every length."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of the needle checkpoint")
    parser.add_argument("--tokens", default="4096", help="lengths, between commas")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--questions", type=int, default=3, help="of each kind, per text")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--variants", default="", help="some of them, between commas")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens per prefill pass")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--name", default="needle", help="name of the result file")
    parser.add_argument("--commit", default="", help="for a copy of the tree without its history")
    parser.add_argument("--json", action="store_true", help="print the result on stdout too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows: list[dict[str, Any]] = []
    known = provenance(args.device)  # before a result file changes the tree
    for tokens in map(int, args.tokens.split(",")):
        rows += measure(args, tokens)
        result = {
            "rows": rows,
            "config": {
                "model": "needle-27m",
                "dtype": args.dtype,
                "cases_per_kind": args.texts * args.questions,
                "seed": args.seed,
            },
            **known,
            "commit": args.commit or known["commit"],
        }
        path = save(args.name, result)
    columns = ("variant", "tokens", *KINDS, "slow_rate", "keys_read_share")
    show("share of answer words right", rows, columns)
    console.print(f"written to {path}")
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
