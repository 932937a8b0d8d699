"""Choosing the keys of every decode step: an indexer between the per-step oracle and the Selector.

    python -m benchmarks.indexed needle --model FOLDER --indexer DIR --tokens 16384
    python -m benchmarks.indexed fidelity --indexer DIR

needle: greedy answers on the needle checkpoint, the text read densely; share of answer words right.
fidelity: SmolLM2 reads 4096 tokens of real text, then what follows token by token; share of steps
whose argmax equals dense's, and KL(dense || variant) in nats. Each with the share of keys read by
decode steps. The indexer of SmolLM2 is distilled from `texts.training`, which `data` writes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, console, show
from reread import Config
from reread.evaluation import fidelity, needle, texts
from reread.evaluation.provenance import provenance
from reread.indexer.checkpoint import write_json
from reread.integrations.hf.load import load

COMPARED = {
    "needle": "share of answer words right, greedy; the text is read by dense attention",
    "fidelity": "teacher-forced next-token distributions against dense ones on the same text",
}


def variants(indexer: str, budgets: Sequence[int]) -> dict[str, Config]:
    """Rows of both tables: by the budget k, who chooses."""
    indexed = Config.preset("indexed").updated({"indexer": indexer})
    found = {"dense": Config.preset("dense")}
    for k in budgets:
        changes = {"k": k}
        found[f"oracle at every step, k={k}"] = indexed.updated(
            {"indexer": None, "mode": "oracle", **changes}
        )
        found[f"indexer at every step, k={k}"] = indexed.updated(changes)
        found[f"Selector (default), k={k}"] = Config().updated(changes)
    found["indexer, a dense step in 32, k=256"] = indexed.updated({"t_max": 32})
    found["Selector (default), k=512"] = Config()
    return found


def run_needle(args: argparse.Namespace) -> dict[str, Any]:
    """One length of the needle checkpoint."""
    loaded = load(args.model, dtype=args.dtype, device=args.device)
    made = needle.make_texts(
        needle.Vocabulary.of(loaded.tokenizer.get_vocab()),
        tokens=args.tokens, count=args.texts, questions=args.questions, seed=args.seed,
    )  # fmt: skip
    every = variants(args.indexer, args.budgets)
    configs = {k: v for k, v in every.items() if args.oracle or "oracle" not in k}
    with console.status(f"{args.tokens} tokens"):
        found = needle.evaluate(loaded.model, loaded.tokenizer, made, configs, chunk=args.chunk)
    rows: list[dict[str, Any]] = []
    for name, kinds in found.items():
        row: dict[str, Any] = {"variant": name, "tokens": args.tokens}
        row |= {kind: result.accuracy for kind, result in kinds.items()}
        reads = [share for result in kinds.values() for share in result.read]
        row |= {"keys_read": sum(reads) / len(reads), "cases": len(kinds["code"].shares)}
        row["runner"] = sorted({r for result in kinds.values() for r in result.runners})
        rows.append(row)
    return {"rows": rows}


def run_fidelity(args: argparse.Namespace) -> dict[str, Any]:
    """All kinds of text; means over the rows of each."""
    loaded = load("smollm2", dtype="float32")
    told, length = variants(args.indexer, args.budgets), args.context + args.steps
    rows: list[dict[str, Any]] = []
    for kind, text in texts.KINDS.items():
        ids = fidelity.rows_of(loaded.tokenizer, [text()], args.samples, length)
        context, rest = ids[:, : args.context], ids[:, args.context :]
        with console.status(f"{kind}: reading"):
            reading = told["indexer, a dense step in 32, k=256"]
            cache = fidelity.prefill(loaded.model, context, reading)
            dense = fidelity.dense_reference(loaded.model, cache, rest)
        for name, config in list(told.items())[1:]:
            with console.status(f"{kind}: {name}"):
                found = fidelity.measure(loaded.model, cache, rest, dense, config, loaded.tokenizer)
            means = {
                key: sum(values) / len(values)
                for key, values in (
                    ("agreement", found.agreement), ("kl", found.kl), ("slow", found.slow_rate)
                )
            }  # fmt: skip
            rows.append(
                {"text": kind, "variant": name, **means, "keys_read": found.keys_read_share}
            )
            print(json.dumps(rows[-1]), flush=True)
    return {"rows": rows}


def whole_numbers(text: str) -> list[int]:
    """ "64,256" as [64, 256]."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Run one table; rows of other lengths in the file are kept."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=("needle", "fidelity", "data"))
    parser.add_argument("--model", help="folder of the needle checkpoint")
    parser.add_argument("--indexer", help="folder of the model's indexer")
    parser.add_argument("--out", type=Path, help="file that `data` writes")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--questions", type=int, default=3, help="of each kind, per text")
    parser.add_argument("--samples", type=int, default=2, help="rows of each kind of text")
    parser.add_argument("--context", type=int, default=4096, help="tokens read before the steps")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budgets", type=whole_numbers, default=[64, 256], help="k of the rows")
    parser.add_argument("--chunk", type=int, default=needle.PREFILL_CHUNK, help="tokens per pass")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--oracle", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--commit", default="", help="for a copy of the tree without its history")
    args = parser.parse_args()
    if args.table == "data":
        args.out.write_text(texts.training(), encoding="utf-8")
        return
    found = run_needle(args) if args.table == "needle" else run_fidelity(args)
    known = provenance(args.device)
    path = args.json or RESULTS / f"indexed_{args.table}.json"
    card = json.loads((Path(args.indexer) / "record.json").read_text())
    settings = {
        k: v
        for k, v in vars(args).items()
        if k in ("texts", "questions", "samples", "context", "steps", "seed", "chunk")
    }
    entry = {
        **known, "commit": args.commit or known["commit"], "config": settings, "indexer": card,
        **found,
    }  # fmt: skip
    whole = json.loads(path.read_text()) if path.exists() else {"compared": COMPARED[args.table]}
    # of the part that was measured last; each part has its own besides
    whole |= {key: entry[key] for key in ("versions", "device", "commit", "config")}
    whole[f"{args.tokens} tokens" if args.table == "needle" else "smollm2"] = entry
    write_json(path, whole)
    show(args.table, found["rows"], [c for c in found["rows"][0] if c != "runner"])


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
