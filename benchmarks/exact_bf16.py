"""Mode "exact" in bfloat16: how often its greedy text leaves that of one-token dense decoding,
beside how often plain dense decoding leaves its own when only the batch around a row changes.

    python -m benchmarks.exact_bf16 --model smollm2 --device cuda

Every arm continues the same windows of real text. `dense, alone` is transformers' own generate() on
one window at a time, to which each other arm is compared: windows whose text differs anywhere, and
tokens before the first difference (behind it the two read different texts). The margin is the
distance of the two best logits of `dense, alone` at a first difference: rounding can only turn what
is close; a wrong key would show as a wide one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import reread
from benchmarks.common import console, save, show
from reread import Config
from reread.evaluation import texts
from reread.evaluation.provenance import provenance
from reread.integrations.hf.load import Loaded, load

KINDS = ("prose", "source", "tables")
ALONE = "dense, alone"
COLUMNS = ("arm", "differ", "equal_tokens", "per_1000", "margin_max")


def windows(loaded: Loaded, count: int, tokens: int) -> Tensor:
    """`count` windows of `tokens` tokens, of each kind of text in turn, int64 [count, tokens]."""
    ids = {kind: loaded.tokenizer.encode(texts.KINDS[kind]()) for kind in KINDS}
    rows = []
    for i in range(count):
        text, first = ids[KINDS[i % len(KINDS)]], i // len(KINDS) * tokens
        if len(text) < first + tokens:
            raise SystemExit(f"{KINDS[i % len(KINDS)]}: no window {i} of {tokens} tokens")
        rows.append(text[first : first + tokens])
    return torch.tensor(rows)


def dense(loaded: Loaded, ids: Tensor, new: int) -> tuple[Tensor, Tensor]:
    """transformers' own decoding: new tokens [B, new] and the margin of each, fp32 [B, new]."""
    out = loaded.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new,
        min_new_tokens=new, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    best = torch.stack(out.logits, dim=1).float().topk(2, dim=-1).values
    return out.sequences[:, ids.shape[1] :].cpu(), (best[..., 0] - best[..., 1]).cpu()


def ours(loaded: Loaded, ids: Tensor, new: int, config: Config) -> reread.Output:
    """The same through `reread.generate`."""
    return reread.generate(
        loaded.model, ids, config=config, tokenizer=loaded.tokenizer,
        do_sample=False, max_new_tokens=new, min_new_tokens=new,
    )  # fmt: skip


def compared(alone: Tensor, margins: Tensor, other: Tensor) -> dict[str, Any]:
    """First differences of each window."""
    differs = alone != other
    firsts = [int(row.float().argmax()) if bool(row.any()) else None for row in differs]
    at = [float(margins[b, i]) for b, i in enumerate(firsts) if i is not None]
    equal = sum(alone.shape[1] if first is None else first for first in firsts)
    return {
        "differ": len(at), "windows": len(firsts), "equal_tokens": equal, "firsts": firsts,
        "per_1000": 1000 * len(at) / max(1, equal + len(at)), "margins": at,
        "margin_max": max(at, default=0.0),
    }  # fmt: skip


class Run:
    """All windows by one arm, some rows at a time."""

    def __init__(self, loaded: Loaded, ids: Tensor, new: int) -> None:
        self.loaded, self.ids, self.new = loaded, ids, new
        self.stats: list[reread.Stats] = []
        self.margins: list[Tensor] = []

    def dense(self, rows: int) -> Tensor:
        """By transformers alone."""
        found = []
        for part in torch.split(self.ids, rows):
            tokens, margins = dense(self.loaded, part, self.new)
            found.append(tokens)
            self.margins.append(margins)
        return torch.cat(found)

    def ours(self, rows: int, config: Config) -> Tensor:
        """By `reread.generate`."""
        outputs = [
            ours(self.loaded, part, self.new, config) for part in torch.split(self.ids, rows)
        ]
        self.stats = [output.stats for output in outputs]
        return torch.cat([o.sequences[:, self.ids.shape[1] :].cpu() for o in outputs])

    def drafts(self) -> dict[str, Any]:
        """What drafted tokens were worth, over all windows; and how the steps ran."""
        if not self.stats:
            return {}
        ran = {f"{stats.backend}, {stats.runner}" for stats in self.stats}
        drafts = [stats.drafts for stats in self.stats if stats.drafts is not None]
        drafted, accepted, verified = (
            sum(getattr(d, name) for d in drafts) for name in ("drafted", "accepted", "verified")
        )
        counts = {"drafted": drafted, "accepted": accepted, "verified": verified}
        return {"ran": sorted(ran), **(counts if drafts else {})}


def measure(loaded: Loaded, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every arm against one-token dense decoding of each window alone."""
    ids = windows(loaded, args.windows, args.context).to(loaded.model.device)
    batch, exact = args.batch, Config.preset("exact")
    fixed = exact.updated({"draft.adapt": False})
    first = Run(loaded, ids, args.new)
    alone = first.dense(1)
    margins = torch.cat(first.margins)
    arms: dict[str, Callable[[Run], Tensor]] = {
        f"dense, {batch} rows": lambda run: run.dense(batch),
        "exact, alone": lambda run: run.ours(1, exact),
        "exact, alone, always drafting": lambda run: run.ours(1, fixed),
        f"exact, {batch} rows": lambda run: run.ours(batch, exact),
        "dense kernel, alone": lambda run: run.ours(1, Config.preset("dense")),
        f"dense kernel, {batch} rows": lambda run: run.ours(batch, Config.preset("dense")),
        "dense, alone, again": lambda run: run.dense(1),
    }
    rows = []
    for name, decode in arms.items():
        begun, run = time.monotonic(), Run(loaded, ids, args.new)
        row = {"arm": name, **compared(alone, margins, decode(run)), **run.drafts()}
        rows.append({**row, "seconds": time.monotonic() - begun})
        console.log(" ".join(f"{key}={rows[-1][key]}" for key in COLUMNS))
    return rows


def main() -> None:
    """Run all arms and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--context", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--new", type=int, default=128, help="tokens that are generated")
    parser.add_argument("--batch", type=int, default=8, help="rows of the larger batches")
    parser.add_argument("--commit", default="", help="for a copy of the tree without its history")
    parser.add_argument("--name", default="exact_bf16")
    args = parser.parse_args()
    loaded = load(args.model, dtype=args.dtype, device=args.device)
    rows = measure(loaded, args)
    known = provenance(args.device)
    kept = {
        **known, "commit": args.commit or known["commit"],
        "config": {**Config.preset("exact").to_dict(), **vars(args)}, "rows": rows,
    }  # fmt: skip
    path = save(args.name, kept)
    show("texts that leave dense decoding", rows, COLUMNS)
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
