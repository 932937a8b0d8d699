"""Indexers of several widths and heads for the needle checkpoint: KL, recall and mass at k.

    python -m benchmarks.distill_table --model FOLDER --tokens N --device cuda --dtype bfloat16

Every variant learns from the same contexts and is measured on the same held-out ones, at the
training context and at four times that. The file is written anew after every variant; a run that is
started again with the same settings leaves out what is there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, console, show
from reread.evaluation.corpus import Corpus, needle_corpus
from reread.evaluation.distilling import means
from reread.evaluation.provenance import provenance
from reread.indexer.checkpoint import read_json, write_json
from reread.indexer.distill import Context, Distiller, Schedule, assess
from reread.indexer.loss import top_of
from reread.indexer.model import Indexer
from reread.integrations.hf.indexers import new_indexer
from reread.integrations.hf.load import load
from reread.integrations.hf.teacher import Teacher

LONGER = 4  # times the training context
COLUMNS = (
    "variant",
    "kl",
    "recall",
    "mass",
    "kl_longer",
    "recall_longer",
    "mass_longer",
    "seconds",
)


@dataclass(frozen=True)
class Variant:
    """One indexer."""

    width: int
    heads: int = 1
    init: str = "svd"
    stretch: float = 8.0

    @property
    def name(self) -> str:
        far = "" if self.stretch == Variant.stretch else f"-stretch{self.stretch:g}"
        return f"d{self.width}-h{self.heads}-{self.init}{far}"


VARIANTS = (
    Variant(32),
    Variant(64),
    Variant(128),
    Variant(64, init="random"),
    Variant(16, heads=4),
    Variant(64, heads=4),
    Variant(64, stretch=4.0),
    Variant(64, stretch=1.0),
)


def measure(
    indexer: Indexer, teacher: Teacher, contexts: Sequence[Context], queries: int
) -> dict[str, Any] | None:
    """Metrics per layer and their means; None where the contexts do not fit."""
    if not contexts:
        return None
    try:
        found = assess(indexer, teacher, contexts, queries=queries)
    except torch.OutOfMemoryError:
        return None
    layers = {str(layer): values for layer, values in found.items()}
    k = top_of(len(contexts[0].ids))
    return {"context": len(contexts[0].ids), "k": k, **means(layers), "layers": layers}


def distil(
    variant: Variant, model: Any, corpus: Corpus, longer: Sequence[Context], args: Any
) -> tuple[Indexer, dict[str, Any]]:
    """Train one variant and measure it."""
    indexer = new_indexer(model, variant.width, variant.heads, variant.init, seed=args.seed)
    steps = args.tokens // (args.context * args.accumulate)
    schedule = Schedule(
        steps=steps,
        lr=args.lr,
        accumulate=args.accumulate,
        queries=args.queries,
        seed=args.seed,
        stretch=variant.stretch,
    )
    distiller = Distiller(indexer.to(model.device), schedule)
    with Teacher(model) as teacher:
        distiller.calibrate(corpus.training(0), teacher)
        before = measure(indexer, teacher, corpus.held_out, args.queries)
        started = time.perf_counter()
        while not distiller.done:
            distiller.step(corpus.training, teacher)
            if distiller.progress.step % max(1, steps // 10) == 0:
                done = f"step {distiller.progress.step}/{steps}"
                console.log(f"{variant.name}: {done}, mean KL {distiller.progress.kl:.4f}")
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        row = {
            "variant": variant.name, "width": variant.width, "heads": variant.heads,
            "init": variant.init, "stretch": variant.stretch, "steps": steps, "seconds": seconds,
            "before": before,
            "after": measure(indexer, teacher, corpus.held_out, args.queries),
            "longer": measure(indexer, teacher, longer, args.queries),
            "history": distiller.progress.history,
        }  # fmt: skip
    return indexer, row


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """A line of the printed table."""
    after, longer = row["after"], row["longer"] or {}
    return {
        "variant": row["variant"],
        **{name: after[name] for name in ("kl", "recall", "mass")},
        **{f"{name}_longer": longer.get(name) for name in ("kl", "recall", "mass")},
        "seconds": row["seconds"],
    }


def parse() -> argparse.Namespace:
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of the needle checkpoint")
    parser.add_argument("--tokens", type=int, required=True, help="to learn from, per variant")
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--queries", type=int, default=1024)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path, default=RESULTS / "distill.json")
    parser.add_argument("--keep", type=Path, help="folder for the indexers, one for each variant")
    parser.add_argument("--only", help="names of variants, between commas")
    parser.add_argument("--commit", help="the commit to note, for a copy without its history")
    return parser.parse_args()


def main() -> None:
    """Run the benchmark."""
    args = parse()
    loaded = load(args.model, dtype=args.dtype, device=args.device)
    model = loaded.model
    known = provenance(model.device)
    known["commit"] = args.commit or known["commit"]
    names = ("context", "tokens", "lr", "queries", "accumulate", "seed")
    config = {
        "model": "needle-27m",
        "dtype": str(model.dtype).removeprefix("torch."),
        **{name: getattr(args, name) for name in names},
    }
    corpus = needle_corpus(loaded.tokenizer, context=args.context, seed=args.seed)
    limit = model.config.get_text_config(decoder=True).max_position_embeddings
    far = LONGER * args.context
    longer = (
        needle_corpus(loaded.tokenizer, context=far, seed=args.seed, held_out=2).held_out
        if far <= limit
        else ()
    )
    older = read_json(args.json) or {}
    rows = older.get("rows", []) if older.get("config") == config else []
    wanted = args.only.split(",") if args.only else [variant.name for variant in VARIANTS]
    for variant in VARIANTS:
        if variant.name not in wanted or variant.name in [row["variant"] for row in rows]:
            continue
        indexer, row = distil(variant, model, corpus, longer, args)
        rows = [*rows, row]
        write_json(args.json, {"rows": rows, "config": config, **known})
        if args.keep is not None:
            record = {**indexer.card.record, "config": config, **row, **known}
            indexer.card = replace(indexer.card, record=json.loads(json.dumps(record)))
            indexer.save(args.keep / variant.name)
    show(f"held-out contexts of {args.context} and {far}", [flat(row) for row in rows], COLUMNS)


if __name__ == "__main__":
    main()
