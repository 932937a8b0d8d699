"""How often does real text make a step slow? Mean tokens between slow steps, by trigger setting.

    python -m benchmarks.sentences --json

Every token of the texts goes through the Controller once, as if it had been generated with a
context far above the budget; no model runs. The planner's default rate of slow steps comes from
here. The texts are wrapped at some 75 columns, which a model's answer is not: "joined" is the prose
with the lines of each paragraph (and of each code sample) put into one, a bound on that effect.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common import console, save, show
from reread import Config
from reread.evaluation import texts
from reread.evaluation.provenance import provenance
from reread.integrations.hf.load import load_tokenizer
from reread.integrations.hf.vocabulary import boundary_tokens
from reread.policy.controller import Controller
from reread.policy.trigger import LINE_ENDS, boundary_table

KEYS = 1 << 30  # of the row: above every budget, so that no step is dense
MEASURED = ("prose", "source")  # the mean is over these, each with the same weight
# variant: (changes to the default preset, whether a line's end alone is a boundary)
VARIANTS: dict[str, tuple[dict[str, Any], bool]] = {
    "boundary": ({"t_max": None, "t_min": 1}, True),
    "default": ({}, True),
    "default, t_min 1": ({"t_min": 1}, True),
    "boundary, interval 64": ({"t_max": 64, "t_min": 1}, True),
    "boundary, interval 64, t_min 3": ({"t_max": 64}, True),
    "sentence ends": ({"t_max": None, "t_min": 1}, False),
    "sentence ends, interval 16": ({"t_max": 16}, False),
}


def sentence_table(tokenizer: Any) -> torch.Tensor:
    """The boundary table without line ends: a token counts only if it ends a sentence too."""
    ids = [[i] for i in range(len(tokenizer))]
    pieces = tokenizer.batch_decode(ids, skip_special_tokens=False)
    return boundary_table(re.sub(f"[{LINE_ENDS}]", " ", piece) for piece in pieces)


def joined(text: str) -> str:
    """The text with lines that follow each other in one line; blank lines still part them."""
    return re.sub(r"(?<=\S)\n[ ]*(?=\S)", " ", text)


def count(ids: Sequence[int], config: Config, table: torch.Tensor) -> Counter[str]:
    """Slow steps by reason over one text, one token a step."""
    controller = Controller(config, table, rows=1)
    for token in ids:
        controller.plan([token], [KEYS], [True])
    return controller.reasons


def measure(tokens: dict[str, list[int]], config: Config, table: torch.Tensor) -> dict[str, Any]:
    """Tokens between slow steps by text, and over the measured ones."""
    reasons = {kind: count(ids, config, table) for kind, ids in tokens.items()}
    rates = {kind: reasons[kind].total() / len(ids) for kind, ids in tokens.items()}
    mean = sum(rates[kind] for kind in MEASURED) / len(MEASURED)
    return {
        "slow_every": 1 / mean,
        **{f"slow_every_{kind}": 1 / rate for kind, rate in rates.items()},
        "slow_rate": mean,
        "reasons": {kind: dict(found) for kind, found in reasons.items()},
        "triggers": config.to_dict()["triggers"],
    }


def main() -> None:
    """Run the benchmark and write benchmarks/results/sentences.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="whose tokenizer")
    parser.add_argument("--name", default="sentences", help="name of the result file")
    parser.add_argument("--json", action="store_true", help="print the result on stdout too")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)
    sources = {kind: texts.KINDS[kind]() for kind in MEASURED}
    sources["joined"] = joined(sources["prose"])
    tokens = {
        kind: tokenizer(text, add_special_tokens=False)["input_ids"]
        for kind, text in sources.items()
    }
    tables = {True: boundary_tokens(tokenizer, len(tokenizer)), False: sentence_table(tokenizer)}
    rows = []
    for name, (changes, line_ends) in VARIANTS.items():
        found = measure(tokens, Config().updated(changes), tables[line_ends])
        rows.append({"variant": name, "line_ends": line_ends, **found})
    result = {
        "rows": rows,
        "config": {
            "model": args.model,
            "texts": {kind: texts.digest(text) for kind, text in sources.items()},
            "tokens": {kind: len(ids) for kind, ids in tokens.items()},
            "mean_over": list(MEASURED),
        },
        **provenance("cpu"),
    }
    path = save(args.name, result)
    columns = ("variant", "slow_every", *(f"slow_every_{kind}" for kind in sources))
    show("mean tokens between slow steps", rows, columns)
    console.print(f"written to {path}")
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
