"""Sparse prefill on the needle checkpoint: what the budget costs, and what sharing it costs.

    python -m benchmarks.gaps --model FOLDER

The oracle's gap is dense's accuracy minus the oracle's: what no chooser could save at that budget.
Decoding is dense in every row, so that only the prefill differs. `share read` is of the keys that
dense causal attention reads.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.common import console, save, show
from reread import Config, SparsePrefill
from reread.evaluation.needle import KINDS, Vocabulary, evaluate, make_texts
from reread.evaluation.provenance import provenance
from reread.integrations.hf.load import load
from reread.prefill import share_read

BUDGETS = (8, 32, 128)


def variants() -> dict[str, Config]:
    """Rows of the table."""
    found = {"dense": Config.preset("dense")}
    for k in BUDGETS:
        for name, prefill in (
            (f"oracle per query, k={k}", SparsePrefill(k=k, b_sel=1, local=16)),
            (f"oracle shared by 64, k={k}", SparsePrefill(k=k, b_sel=64, local=16)),
            (f"sampled 8 of 64, k={k}", SparsePrefill(k=k, b_sel=64, local=16, chooser="sampled")),
        ):
            found[name] = Config(mode="dense", prefill=prefill)
    return found


def main() -> None:
    """Run the benchmark and write benchmarks/results/gaps.json, anew after every variant."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of the needle checkpoint")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--questions", type=int, default=3, help="of each kind, per text")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded = load(args.model, dtype=args.dtype, device=args.device)
    texts = make_texts(
        Vocabulary.of(loaded.tokenizer.get_vocab()),
        tokens=args.tokens,
        count=args.texts,
        questions=args.questions,
        seed=args.seed,
    )
    rows, known = [], provenance(args.device)  # before a result file changes the tree
    for name, config in variants().items():
        # the reference path on any device: the oracle is a reference
        config = config.updated({"backend": "reference"})
        found = evaluate(loaded.model, loaded.tokenizer, texts, {name: config})[name]
        share = 1.0 if config.prefill is None else share_read(args.tokens, config.prefill)
        row = {
            "variant": name,
            **{kind: found[kind].accuracy for kind in KINDS},
            "share_read": share,
            "settings": config.to_dict(),
        }
        rows.append(row)
        console.log(", ".join(f"{kind} {found[kind].accuracy:.3f}" for kind in KINDS), name)
        result = {
            "rows": rows,
            "config": {
                "model": "needle-27m",
                "tokens": args.tokens,
                "dtype": args.dtype,
                "cases_per_kind": args.texts * args.questions,
                "seed": args.seed,
            },
            **known,
        }
        save("gaps", result)
    show("share of answer words right", rows, ("variant", *KINDS, "share_read"))


if __name__ == "__main__":
    main()
