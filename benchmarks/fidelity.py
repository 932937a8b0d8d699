"""Teacher-forced fidelity on real text: how close are slow-fast distributions to dense ones?

    python -m benchmarks.fidelity --json

SmolLM2 in fp32 reads 4096 tokens of prose, source code or tables, then the text that follows it,
token by token. For every variant: share of steps whose argmax equals dense's, KL(dense || variant)
in nats (mean over rows, with a 95 % bootstrap interval), share of slow steps, share of keys read.
The default preset's constants are chosen from this table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.common import RESULTS, console, save, show
from reread import Config
from reread.evaluation import fidelity, texts
from reread.evaluation.provenance import provenance
from reread.integrations.hf.load import load

BUDGETS = (256, 512, 1024, 2048)
# when a boundary counts, at K = 512
RESTS: dict[str, dict[str, Any]] = {
    "t_min 1": {"t_min": 1},
    "t_min 2": {"t_min": 2},
    "t_min 4": {"t_min": 4},
    "t_min 6": {"t_min": 6},
    "t_max 12": {"t_max": 12},
}
# around the default with t_min 1, where every boundary counts: what each part does, at K = 512
AROUND: dict[str, dict[str, Any]] = {
    "interval 16": {"boundary": False, "t_max": 16},
    "interval 10": {"boundary": False, "t_max": 10},
    "interval 8": {"boundary": False, "t_max": 8},
    "interval 4": {"boundary": False, "t_max": 4},
    "boundary": {"boundary": True, "t_max": None, "uncertainty": None},
    "boundary, interval 16": {"boundary": True, "t_max": 16, "uncertainty": None},
    "uncertainty 4": {"boundary": False, "t_max": None, "uncertainty": 4.0},
    "uncertainty 3, interval 16": {"boundary": False, "t_max": 16, "uncertainty": 3.0},
    "uncertainty 4, interval 16": {"boundary": False, "t_max": 16, "uncertainty": 4.0},
    "uncertainty 5, interval 16": {"boundary": False, "t_max": 16, "uncertainty": 5.0},
    "all three, uncertainty 4": {"boundary": True, "t_max": 16, "uncertainty": 4.0},
    "all three, uncertainty 5": {"boundary": True, "t_max": 16, "uncertainty": 5.0},
    "first step fast": {"first_step": False},
    "no refinement": {"refine": "none"},
    "soft_nms": {"refine": "soft_nms"},
    "span 4, 12": {"back": 4, "ahead": 12},
    "span 8, 8": {"back": 8, "ahead": 8},
    "span 16, 16": {"back": 16, "ahead": 16},
    "span 8, 56": {"back": 8, "ahead": 56},
    "prior": {"lambda_clip": 0.02},
    "recent 128": {"recent": 128},
    "recent 512": {"recent": 512},
    "cross-head": {"alpha_cross": 0.35},
}
# the paper's triggers and ours around the other's selector
CROSSED: dict[str, tuple[str, dict[str, Any]]] = {
    "default selector, paper triggers": (
        "default",
        {"boundary": True, "t_max": 64, "t_min": 1, "k": 2048},
    ),
    "paper selector, default triggers": ("paper", {"k": 512}),
}


def variants() -> dict[str, Config]:
    """Every row of the table by name."""
    default, paper = Config.preset("default"), Config.preset("paper")
    rows = {f"default, K={k}": default.updated({"k": k}) for k in BUDGETS}
    rows |= {f"paper, K={k}": paper.updated({"k": k}) for k in BUDGETS}
    rows |= {name: default.updated(changes) for name, changes in RESTS.items()}
    default = default.updated({"t_min": 1})
    rows |= {name: default.updated(changes) for name, changes in AROUND.items()}
    triggers = default.to_dict()["triggers"]
    for name, (preset, changes) in CROSSED.items():
        config = Config.preset(preset).updated(changes)
        if preset == "paper":
            config = Config.from_dict({**config.to_dict(), "triggers": triggers})
        rows[name] = config
    return rows


def bootstrap(values: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """95 % interval of the mean, resampling rows; the same draws for every variant."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(values), (draws, len(values)), generator=generator)
    means = torch.tensor(values)[picks].mean(dim=1)
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975])).tolist()
    return low, high


def summary(name: str, found: fidelity.Fidelity, kinds: Sequence[str]) -> dict[str, Any]:
    """One row of the table, with the mean of each kind of text."""
    per_kind = len(found.kl) // len(kinds)

    def by_kind(values: Sequence[float]) -> dict[str, float]:
        return {
            kind: sum(values[i * per_kind : (i + 1) * per_kind]) / per_kind
            for i, kind in enumerate(kinds)
        }

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    return {
        "variant": name,
        "agreement": mean(found.agreement),
        "kl": mean(found.kl),
        "kl_interval": bootstrap(found.kl),
        "slow_rate": mean(found.slow_rate),
        "keys_read_share": found.keys_read_share,
        **{f"kl_{kind}": value for kind, value in by_kind(found.kl).items()},
        "agreement_by_kind": by_kind(found.agreement),
        "slow_rate_by_kind": by_kind(found.slow_rate),
        "kl_rows": found.kl,
    }


def select(names: str, known: Mapping[str, Config]) -> dict[str, Config]:
    """The variants whose names contain one of the words between ";"; all for an empty string."""
    words = [word.strip() for word in names.split(";") if word.strip()]
    chosen = {n: c for n, c in known.items() if not words or any(w in n for w in words)}
    if not chosen:
        raise SystemExit(f"no variant matches {names!r}: {'; '.join(known)}")
    return chosen


def settings(chosen: Mapping[str, Config], name: str) -> dict[str, Any] | None:
    """What a row of that name has to have been measured with."""
    return chosen[name].to_dict() if name in chosen else None


def resume(name: str, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of an earlier, perhaps interrupted, run over the same model and texts."""
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        return []
    earlier = json.loads(path.read_text(encoding="utf-8"))
    if earlier["config"] != result["config"] or earlier["versions"] != result["versions"]:
        console.log(f"{path} was made with other settings or versions: starting anew")
        return []
    rows: list[dict[str, Any]] = earlier["rows"]
    return rows


def measure(
    args: argparse.Namespace,
    sources: Mapping[str, str],
    missing: Mapping[str, Config],
    result: dict[str, Any],
) -> None:
    """Measure the missing variants, saving after each."""
    loaded = load(args.model, dtype="float32", device=args.device)
    length = args.context + args.steps
    ids = fidelity.rows_of(loaded.tokenizer, list(sources.values()), args.samples, length)
    ids = ids.to(loaded.model.device)
    context, following = ids[:, : args.context], ids[:, args.context :]

    def tick(done: int, total: int) -> None:
        console.log(f"prefill: {done} of {total} tokens in {ids.shape[0]} rows")

    cache = fidelity.prefill(loaded.model, context, Config(), chunk=1024, tick=tick)
    reference = fidelity.dense_reference(loaded.model, cache, following)
    for i, (name, config) in enumerate(missing.items()):
        found = fidelity.measure(
            loaded.model, cache, following, reference, config, loaded.tokenizer
        )
        row = {
            **summary(name, found, list(sources)),
            "settings": config.to_dict(),
            "commit": result["commit"],
        }
        result["rows"].append(row)
        save(args.name, result)
        console.log(
            f"{i + 1}/{len(missing)} {name}: agreement {row['agreement']:.3f}, "
            f"KL {row['kl']:.4f}, slow {row['slow_rate']:.3f}"
        )


def main() -> None:
    """Run the benchmark and write benchmarks/results/fidelity.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--context", type=int, default=4096, help="tokens read before the first step"
    )
    parser.add_argument("--steps", type=int, default=128, help="teacher-forced steps per row")
    parser.add_argument("--samples", type=int, default=2, help="rows per kind of text")
    parser.add_argument("--variants", default="", help="words to match, separated by ';'")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--name", default="fidelity", help="name of the result file")
    parser.add_argument("--json", action="store_true", help="print the result on stdout too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    chosen = select(args.variants, variants())
    sources = {kind: make() for kind, make in texts.KINDS.items()}
    result = {
        "rows": [],
        "config": {
            "model": args.model,
            "dtype": "float32",
            "context": args.context,
            "steps": args.steps,
            "samples": args.samples,
            "texts": {kind: texts.digest(text) for kind, text in sources.items()},
        },
        **provenance(args.device),
    }
    done = resume(args.name, result)
    result["rows"] = [row for row in done if row["settings"] == settings(chosen, row["variant"])]
    missing = {n: c for n, c in chosen.items() if n not in {r["variant"] for r in result["rows"]}}
    if missing:
        measure(args, sources, missing, result)
    order = list(chosen)
    rows = sorted(result["rows"], key=lambda row: order.index(row["variant"]))
    result["rows"] = rows
    path = save(args.name, result)
    columns = (
        "variant",
        "agreement",
        "kl",
        *(f"kl_{kind}" for kind in sources),
        "slow_rate",
        "keys_read_share",
    )
    show("fidelity to dense, teacher-forced", rows, columns)
    console.print(f"written to {path}")
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
