"""Mode "exact": how many drafted tokens stand, by number of drafted tokens and by budget, and what
it gains on a CPU.

    python -m benchmarks.exact acceptance            SmolLM2 continues real text
    python -m benchmarks.exact evidence              which queries of a verification choose
    python -m benchmarks.exact reuse                 for how long a choice serves drafts
    python -m benchmarks.exact drafters --indexer DIR    drafts by an indexer and by the Selector
    python -m benchmarks.exact speed                 the same, against the faster of two dense arms
    python -m benchmarks.exact needle --model FOLDER --tokens 16384

acceptance, speed: fp32, one row. Greedy text of so small a model soon repeats itself, which is easy
to draft, so acceptance is given for sampled text (temperature 1, its own seed) as well. Greedy
tokens are compared with those of `Config.preset("dense")`; a difference ends the run.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

import reread
from benchmarks.common import console, save, show
from benchmarks.decode_cpu import DENSE, DENSE_ARMS, PREALLOCATED, greedy, run
from reread import Config, ops, verifying
from reread.attention import chosen_by
from reread.evaluation import needle, texts
from reread.evaluation.fidelity import fork, prefill
from reread.evaluation.provenance import provenance
from reread.indexer.model import Indexer
from reread.integrations.hf.cache import cache_keyword
from reread.integrations.hf.exact import loop
from reread.integrations.hf.load import Loaded, load

KINDS = ("prose", "source", "tables")
GRID = ((256, 4), (256, 8), (512, 2), (512, 4), (512, 8), (1024, 8))
EXACT = Config.preset("exact")


def fixed(k: int, tokens: int) -> Config:
    """The preset with another budget and always `tokens` drafted, unless a draft ends early."""
    return EXACT.updated({"k": k, "draft.tokens": tokens, "draft.adapt": False})


def generate(
    loaded: Loaded, cache: DynamicCache, ids: Tensor, config: Config, new: int, sample: bool,
    seed: int = 0,
) -> reread.Output:  # fmt: skip
    """`new` tokens behind a cache that holds all of `ids` but the last."""
    options: dict[str, Any] = {**greedy(new), cache_keyword(loaded.model): fork(cache)}
    if sample:
        options |= {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return reread.generate(
            loaded.model, ids, config=config, tokenizer=loaded.tokenizer, **options
        )


def read(loaded: Loaded, kind: str, context: int) -> tuple[Tensor, DynamicCache]:
    """The first `context` tokens of a kind of text, and a cache of all but the last."""
    ids = torch.tensor([loaded.tokenizer.encode(texts.KINDS[kind]())[:context]])
    return ids, prefill(loaded.model, ids[:, :-1], Config(), chunk=1024)


def figures(stats: reread.Stats) -> dict[str, Any]:
    """What a run's drafts were worth."""
    drafts = stats.drafts
    assert drafts is not None
    return {
        "acceptance": drafts.acceptance,
        "accepted_per_verify": drafts.accepted_per_verify,
        "drafted": drafts.drafted,
        "verified": drafts.verified,
        "lengths": drafts.lengths,
        "keys_read_share": stats.keys_read_share,
    }


def require_equal(ours: Tensor, dense: Tensor, what: str) -> None:
    """Exact means equal, or there is nothing to report."""
    if not torch.equal(ours, dense):
        raise SystemExit(f"{what}: the tokens differ from dense decoding")


def acceptance(args: argparse.Namespace) -> dict[str, Any]:
    """Every kind of text, budget and number of drafted tokens."""
    loaded, rows = load("smollm2", dtype="float32"), []
    for kind in KINDS:
        console.log(f"{kind}: reading")
        ids, cache = read(loaded, kind, args.context)
        dense = generate(loaded, cache, ids, Config.preset("dense"), args.new, False)
        for k, tokens in GRID:
            row: dict[str, Any] = {"text": kind, "k": k, "tokens": tokens}
            for sample in (False, True):
                output = generate(loaded, cache, ids, fixed(k, tokens), args.new, sample)
                if not sample:
                    require_equal(output.sequences, dense.sequences, f"{kind}, {k}, {tokens}")
                row["sampled" if sample else "greedy"] = figures(output.stats)
            rows.append(row)
            console.log(f"{kind} k={k} tokens={tokens}: {row['greedy']['acceptance']:.3f}")
    return {"rows": rows, "model": "smollm2", "context": args.context, "new": args.new}


def evidence(args: argparse.Namespace) -> dict[str, Any]:
    """Sampled text, K = 256: the next draft's keys chosen by the first query of a verification (as
    mode "exact" does), by the last that stands, or by all that stand."""
    loaded, rows = load("smollm2", dtype="float32"), []
    for kind in KINDS:
        console.log(f"{kind}: reading")
        ids, cache = read(loaded, kind, args.context)
        for way in ("first", "last", "all"):
            with choosing_by(way):
                output = generate(loaded, cache, ids, fixed(256, 8), args.new, True)
            rows.append({"text": kind, "queries": way, **figures(output.stats)})
            console.log(f"{kind}, {way}: {rows[-1]['acceptance']:.3f}")
    return {"rows": rows, "model": "smollm2", "context": args.context, "new": args.new}


@contextlib.contextmanager
def choosing_by(way: str) -> Iterator[None]:
    """Inside it the first row's drafts are chosen by other queries of the latest verification."""
    held: dict[int, Tensor] = {}  # queries of each layer, [H, T, D]
    attend, choose = verifying._verify, verifying._choose

    def keep(state: Any, b: int, q: Tensor, *rest: Any) -> Tensor:
        held[id(state)] = q[0].clone()
        return attend(state, b, q, *rest)

    def instead(state: Any, b: int, row: Any, config: Config, scale: float) -> Any:
        found = state.evidence.get(b)
        if found is None or way == "first":
            return choose(state, b, row, config, scale)
        stands = row.lengths[0] - 1 - found.position
        first = stands - 1 if way == "last" else 0
        before = verifying._shorter(row, 1)
        mass = ops.tail_evidence(
            held[id(state)][None, :, first:stands], before,
            [range(found.position + first, found.position + stands)],
            scale=scale, allowed=[found.allowed], alpha=config.selector.alpha,
        )  # fmt: skip
        return chosen_by(state, b, before, mass[0], found.allowed, config)

    verifying._verify, verifying._choose = keep, instead
    try:
        yield
    finally:
        verifying._verify, verifying._choose = attend, choose


def reuse(args: argparse.Namespace) -> dict[str, Any]:
    """Sampled text: for how many tokens drafts go on with what was chosen."""
    loaded, rows = load("smollm2", dtype="float32"), []
    for kind in KINDS:
        console.log(f"{kind}: reading")
        ids, cache = read(loaded, kind, args.context)
        for tokens in (0, loop.REUSE, 2 * loop.REUSE):
            with mock.patch.object(loop, "REUSE", tokens):
                output = generate(loaded, cache, ids, fixed(EXACT.k, 8), args.new, True)
            rows.append({"text": kind, "reuse": tokens, **figures(output.stats)})
            console.log(f"{kind}, {tokens}: {rows[-1]['accepted_per_verify']:.2f}")
    return {"rows": rows, "model": "smollm2", "context": args.context, "new": args.new}


def together(way: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of all drafted tokens of some runs: the share that stands, and how many a verification."""
    accepted = sum(run["acceptance"] * run["drafted"] for run in runs)
    drafted, verified = (sum(run[name] for run in runs) for name in ("drafted", "verified"))
    return {f"{way}_stand": accepted / drafted, f"{way}_of_them": accepted / verified}


def drafters(args: argparse.Namespace) -> dict[str, Any]:
    """Drafts of always 8 tokens, unless one ends early, by the Selector and by an indexer."""
    loaded, rows = load(args.model or "smollm2", dtype="float32"), []
    chooses = {"selector": EXACT, "indexer": EXACT.updated({"indexer": args.indexer})}
    for kind in KINDS:
        console.log(f"{kind}: reading")
        ids = torch.tensor([loaded.tokenizer.encode(texts.KINDS[kind]())[: args.context]])
        # index keys lie beside the others; the Selector passes them over
        cache = prefill(loaded.model, ids[:, :-1], chooses["indexer"], chunk=1024)
        dense = generate(loaded, cache, ids, Config.preset("dense"), args.new, False)
        for k in (256, 1024):
            for name, base in chooses.items():
                config = base.updated({"k": k, "draft.tokens": 8, "draft.adapt": False})
                row: dict[str, Any] = {"text": kind, "k": k, "drafter": name}
                for way, seeds in (("greedy", 1), ("sampled", args.seeds)):
                    sample, found = way == "sampled", []
                    for seed in range(seeds):
                        of = loaded, cache, ids, config, args.new, sample, seed
                        output = generate(*of)
                        if not sample:
                            same = output.sequences, dense.sequences
                            require_equal(*same, f"{kind}, {k}, {name}")
                        found.append({**figures(output.stats), "decode_s": output.stats.decode_s})
                    row |= {way: found, **together(way, found)}
                rows.append(row)
                console.log(f"{kind} k={k} {name}: {row['sampled_of_them']:.2f}")
    record = Indexer.load(Path(args.indexer)).card.record
    settings = {"model": "smollm2", "context": args.context, "new": args.new}
    # without the paths of whoever distilled it
    kept = {name: record[name] for name in ("steps", "tokens_read") if name in record}
    kept["context"] = record.get("settings", {}).get("context")
    return {"rows": rows, **settings, "indexer_record": kept}


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Arms in turn, several rounds, medians."""
    loaded, rows = load("smollm2", dtype="float32"), []
    for kind in KINDS:
        console.log(f"{kind}: reading")
        ids, cache = read(loaded, kind, args.context)
        found: dict[str, list[float]] = {}
        last: dict[str, Any] = {}
        for i in range(args.rounds):
            for arm in DENSE_ARMS:
                timed = run(loaded, cache, ids, arm, args.new)
                found.setdefault(arm, []).append(timed["tokens_per_s"])
                last[arm] = timed["tokens"]
            for sample in (False, True):
                output = generate(loaded, cache, ids, EXACT, args.new, sample)
                name = "exact, sampled" if sample else "exact"
                found.setdefault(name, []).append(output.stats.tokens_per_s)
                last[name] = figures(output.stats)
                if not sample:
                    new = output.sequences[0, ids.shape[1] :]
                    require_equal(new, last[DENSE], kind)
            console.log(f"{kind}, round {i + 1}/{args.rounds}: {found}")
        median = {arm: statistics.median(times) for arm, times in found.items()}
        fastest = max(median[DENSE], median[PREALLOCATED])
        for name in ("exact", "exact, sampled"):
            rows.append(
                {
                    "text": kind, "arm": name, "tokens_per_s": median[name],
                    "speedup": median[name] / fastest, "dense": median[DENSE],
                    "transformers": median[PREALLOCATED], "runs": found, **last[name],
                }
            )  # fmt: skip
    return {"rows": rows, "model": "smollm2", "context": args.context, "new": args.new}


def run_needle(args: argparse.Namespace) -> dict[str, Any]:
    """Answers of the needle checkpoint, which in fp32 have to be as right as dense's."""
    loaded = load(args.model, dtype=args.dtype, device=args.device)
    made = needle.make_texts(
        needle.Vocabulary.of(loaded.tokenizer.get_vocab()),
        tokens=args.tokens, count=args.texts, questions=args.questions, seed=0,
    )  # fmt: skip
    configs = {"dense": Config.preset("dense")}
    configs |= {f"{k}, {tokens}": fixed(k, tokens) for k, tokens in GRID}
    rows: list[dict[str, Any]] = []
    for name, config in configs.items():
        console.log(name)
        kinds = needle.evaluate(loaded.model, loaded.tokenizer, made, {name: config})[name]
        shares = {kind: result.shares for kind, result in kinds.items()}
        if name == "dense":
            dense = shares
            continue
        if shares != dense and args.dtype == "float32":
            raise SystemExit(f"{name}: answers differ from dense decoding's")
        drafts = [one for result in kinds.values() for one in result.drafts]
        drafted, accepted = (sum(getattr(d, n) for d in drafts) for n in ("drafted", "accepted"))
        reads = [share for result in kinds.values() for share in result.read]
        rows.append(
            {
                "k": config.k, "tokens": config.draft.tokens, "acceptance": accepted / drafted,
                "accepted_per_verify": accepted / sum(d.verified for d in drafts),
                "keys_read_share": sum(reads) / len(reads),
                "answers_of_dense": shares == dense,
            }
        )  # fmt: skip
    return {"rows": rows, "model": Path(args.model).name, "tokens": args.tokens}


RUNS = {
    "acceptance": acceptance, "evidence": evidence, "reuse": reuse, "drafters": drafters,
    "speed": speed, "needle": run_needle,
}  # fmt: skip
COLUMNS = {
    "acceptance": ("text", "k", "tokens"),
    "evidence": ("text", "queries", "acceptance", "accepted_per_verify"),
    "reuse": ("text", "reuse", "acceptance", "accepted_per_verify"),
    "drafters": (
        "text",
        "k",
        "drafter",
        "greedy_stand",
        "greedy_of_them",
        "sampled_stand",
        "sampled_of_them",
    ),
    "speed": ("text", "arm", "tokens_per_s", "speedup", "acceptance"),
    "needle": ("k", "tokens", "acceptance", "accepted_per_verify", "keys_read_share"),
}


def main() -> None:
    """Run one part and write benchmarks/results/exact_PART.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=RUNS)
    parser.add_argument("--model", help="needle, drafters: folder of the checkpoint")
    parser.add_argument("--indexer", help="drafters: folder of the indexer")
    parser.add_argument("--context", type=int, default=4096, help="tokens that are read")
    parser.add_argument("--new", type=int, default=96, help="tokens that are generated")
    parser.add_argument("--seeds", type=int, default=3, help="drafters: sampled texts of each kind")
    parser.add_argument("--rounds", type=int, default=3, help="of speed")
    parser.add_argument("--tokens", type=int, default=16384, help="needle: tokens of a text")
    parser.add_argument("--texts", type=int, default=1)
    parser.add_argument("--questions", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--commit", default="", help="for a copy of the tree without its history")
    parser.add_argument("--name", help="of the result file; exact_PART without it")
    args = parser.parse_args()
    if args.part == "needle" and args.model is None:
        parser.error("needle needs --model FOLDER")
    if args.part == "drafters" and args.indexer is None:
        parser.error("drafters needs --indexer FOLDER")
    found = RUNS[args.part](args)
    rows = found.pop("rows")
    known = provenance(args.device)
    known["commit"] = args.commit or known["commit"]
    kept = {**known, "config": {**EXACT.to_dict(), **found}, "rows": rows}
    path = save(args.name or f"exact_{args.part}", kept)
    show(f"exact, {args.part}", rows, COLUMNS[args.part])
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
