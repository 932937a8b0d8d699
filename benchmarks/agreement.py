"""Do the GPU kernels choose and answer as the reference does? Teacher-forced decoding of one model
with both backends.

    python -m benchmarks.agreement --model FOLDER --name agreement

In fp32: share of the positions chosen by slow steps that both backends choose, and steps whose
argmax is the same. In bf16: the latter.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from benchmarks.common import console, save
from reread import Config, attach
from reread.compact import CompactKV
from reread.evaluation.needle import Vocabulary, make_texts
from reread.evaluation.provenance import provenance
from reread.integrations.hf.cache import RereadLayer, cache_keyword
from reread.integrations.hf.load import load


def run(model: Any, tokenizer: Any, ids: Tensor, steps: int, config: Config) -> dict[str, Any]:
    """Feed the last `steps` columns of ids one by one after a prefill of the others.

    Returns:
        argmax int64 [steps, B]; chosen: per slow step and layer, the positions of row 0 per KV
        head; runner.
    """
    keyword, cache = cache_keyword(model), DynamicCache(config=model.config)
    argmax, chosen = [], []
    with torch.no_grad(), attach(model, config, tokenizer=tokenizer) as session:
        model(ids[:, :-steps], logits_to_keep=1, **{keyword: cache})
        with session.decoding():
            for i in range(ids.shape[1] - steps, ids.shape[1]):
                out = model(ids[:, i : i + 1], **{keyword: cache})
                argmax.append(out.logits[:, -1].argmax(dim=-1))
                chosen.append(positions(session, cache))
        stats = session.stats
    slow = sum(stats.slow_steps) / (steps * ids.shape[0])
    return {
        "argmax": torch.stack(argmax).cpu(), "chosen": chosen, "slow_rate": slow,
        "ran": f"{stats.backend}, {stats.runner}",
    }  # fmt: skip


def positions(session: Any, cache: Any) -> list[list[set[int]]]:
    """What fast steps of row 0 read, by layer and KV head."""
    found = []
    for i, layer in enumerate(cache.layers):
        assert isinstance(layer, RereadLayer)
        kept = layer.state.chosen[0]
        if isinstance(kept, CompactKV):
            heads = kept.selected.tolist()
        else:
            # the arena is the session's own affair, which a check like this one may look into
            arena = session._conversations._known[cache].arena
            heads = arena.indices[i][0, :, : kept.count if kept else 0].tolist()
        found.append([set(head) for head in heads])
    return found


def overlap(a: list[list[list[set[int]]]], b: list[list[list[set[int]]]]) -> float:
    """Share of the positions in `a` that `b` has in the same step, layer and head."""
    both = total = 0
    for layers_a, layers_b in zip(a, b, strict=True):
        for heads_a, heads_b in zip(layers_a, layers_b, strict=True):
            for x, y in zip(heads_a, heads_b, strict=True):
                both, total = both + len(x & y), total + len(x)
    return both / max(total, 1)


def main() -> None:
    """Run both dtypes and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of the needle checkpoint")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--name", default="agreement")
    parser.add_argument("--commit", default="", help="for a copy of the tree without its history")
    args = parser.parse_args()
    rows, known = [], provenance("cuda")  # before a result file changes the tree
    for dtype in ("float32", "bfloat16"):
        loaded = load(args.model, dtype=dtype, device="cuda")
        words = Vocabulary.of(loaded.tokenizer.get_vocab())
        texts = make_texts(words, tokens=args.tokens, count=args.rows, questions=1, seed=3)
        encode = loaded.tokenizer.convert_tokens_to_ids
        ids = torch.tensor([encode(text.words) for text in texts], device="cuda")
        found = {
            backend: run(loaded.model, loaded.tokenizer, ids, args.steps, Config(backend=backend))
            for backend in ("triton", "reference")
        }
        ours, reference = found["triton"], found["reference"]
        row = {
            "dtype": dtype,
            "same_argmax": float((ours["argmax"] == reference["argmax"]).float().mean()),
            "same_positions": overlap(ours["chosen"], reference["chosen"]),
            "slow_rate": ours["slow_rate"],
            "ran": [ours["ran"], reference["ran"]],
        }
        rows.append(row)
        console.log(row)
        config = {**Config().to_dict(), "model": "needle-27m"}
        config |= {name: getattr(args, name) for name in ("tokens", "steps", "rows")}
        result = {"rows": rows, "config": config, **known}
        # anew after each dtype, so that an interrupted run keeps what it has
        save(args.name, {**result, "commit": args.commit or known["commit"]})


if __name__ == "__main__":
    main()
