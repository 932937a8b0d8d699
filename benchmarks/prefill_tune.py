"""Launch parameters of the sparse prefill's kernels on a GPU: checks, then times, many variants.

    python -m benchmarks.prefill_tune --json prefill_tune.json

One row, the attention of one layer with 32 query heads, 8 KV heads and head dim 128 by default. It
says which parameters are fastest; what they give is measured by benchmarks.prefill_gpu.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from reread import SparsePrefill
from reread.bench.timing import milliseconds
from reread.ops import reference
from reread.ops.triton import index, prefill
from reread.prefill import Piece, pieces
from reread.types import BlockSelection

SINK = 4


def say(*words: Any) -> None:
    """Print at once: a run may be cut off."""
    print(*words, flush=True)


def timed(work: Callable[[], Any], repeats: int = 5) -> float:
    """Median milliseconds."""
    work()
    torch.cuda.synchronize()
    return statistics.median(milliseconds(work) for _ in range(repeats))


class Layer:
    """Random inputs of one layer, and the blocks of its prompt."""

    def __init__(self, length: int, args: argparse.Namespace) -> None:
        made = {"device": "cuda", "dtype": torch.bfloat16}
        torch.manual_seed(0)
        self.length = length
        self.q = torch.randn(args.heads, length, args.dim, **made)
        self.k, self.v = (torch.randn(args.kv_heads, length, args.dim, **made) for _ in range(2))
        self.iq, self.ik = (torch.randn(length, args.width, **made) for _ in range(2))
        self.config = SparsePrefill(k=args.k, b_sel=args.b_sel, dense_below=args.dense_below)
        self.pieces = pieces(0, length, 0, self.config, 1)

    def scores(self, tuning: index.Tuning, piece: Piece) -> Tensor:
        """Of one piece."""
        return index.index_scores(
            self.iq[piece.first : piece.last], self.ik[: piece.last], start=0, edges=piece.edges,
            windows=piece.windows, sink=SINK, tuning=tuning,
        )  # fmt: skip

    def topk(self, scores: Tensor, tuning: index.Tuning, piece: Piece) -> Tensor:
        """Of one piece."""
        return index.block_topk(
            scores, low=SINK, windows=piece.windows, sizes=piece.sizes, tuning=tuning
        )

    def attend(
        self, selection: BlockSelection, tuning: prefill.PrefillTuning, piece: Piece
    ) -> Tensor:
        """Of one piece."""
        return prefill.prefill_sparse(
            self.q[:, piece.first : piece.last], self.k[:, : piece.last], self.v[:, : piece.last],
            selection, start=0, edges=piece.edges, windows=piece.windows, sink=SINK,
            scale=self.q.shape[2] ** -0.5, tuning=tuning,
        )  # fmt: skip

    def chosen(self) -> list[BlockSelection]:
        """By the default parameters."""
        return [
            BlockSelection(self.topk(self.scores(index.DEFAULT, p), index.DEFAULT, p), p.sizes)
            for p in self.pieces
        ]


def check(layer: Layer) -> None:
    """The last block against the references in fp32."""
    piece, chosen = layer.pieces[-1], layer.chosen()[-1]
    scores = layer.scores(index.DEFAULT, piece)
    edge, window, size = piece.edges[-2], piece.windows[-1], piece.sizes[-1]
    logits = layer.iq[edge : piece.last].float() @ layer.ik[: piece.last].float().T
    at = torch.arange(piece.last, device="cuda")
    logits.masked_fill_(at[None, :] > at[edge:, None], float("-inf"))
    want = logits.log_softmax(-1).amax(0) / math.log(2)
    span = slice(SINK, window)
    error = float((scores[-1, span] - want[span]).abs().max())
    found = reference.best(scores[-1:], SINK, [window], [size]).indices[0]
    same = torch.equal(found, chosen.indices[-1, :size])
    last = BlockSelection(chosen.indices[-1:, :size], (size,))
    out = layer.attend(chosen, prefill.tuning_for(layer.q.shape[2], layer.q.dtype), piece)
    exact = reference.prefill_sparse(
        layer.q[:, edge:].float(), layer.k.float(), layer.v.float(), last, start=0,
        edges=(edge, piece.last), windows=(window,), sink=SINK, scale=layer.q.shape[2] ** -0.5,
    )  # fmt: skip
    off = float((out[:, edge - piece.first :].float() - exact).abs().max())
    say(f"check {layer.length}: scores {error:.2e}, same positions {same}, output {off:.2e}")
    assert error < 1e-2
    assert same
    assert off < 2e-2


def variants(layer: Layer, save: Callable[[str, Any, float], None]) -> None:
    """Time every set of parameters; what does not compile is told and left out."""

    def try_one(name: str, tuning: Any, work: Callable[[], Any]) -> None:
        try:
            save(name, tuning, timed(work))
        except Exception as error:  # a variant that does not fit the card is no result
            say(name, tuning, type(error).__name__, str(error).splitlines()[:1])

    every = layer.pieces
    for keys, tiles, group, warps, stages in (
        (64, 32, 4, 4, 3), (64, 32, 2, 4, 3), (64, 64, 4, 4, 3), (64, 32, 4, 4, 4),
        (128, 16, 2, 4, 2), (32, 64, 4, 4, 4), (64, 16, 4, 4, 3), (64, 32, 1, 4, 3),
    ):  # fmt: skip
        made = index.Tuning(keys=keys, tiles=tiles, group=group, warps=warps, stages=stages)
        try_one("scores", made, lambda made=made: [layer.scores(made, p) for p in every])
    scores = [layer.scores(index.DEFAULT, p) for p in every]
    for block, warps, last in itertools.product((2048, 4096), (4, 8), (4, 8)):
        made = replace(index.DEFAULT, block=block, topk_warps=warps, select_warps=last)
        try_one(
            "topk", made,
            lambda made=made: [layer.topk(s, made, p) for s, p in zip(scores, every, strict=True)],
        )  # fmt: skip
    chosen = layer.chosen()
    for rows, keys, warps, stages in (
        (256, 64, 8, 3), (256, 64, 8, 4), (256, 64, 16, 3), (128, 32, 8, 4), (128, 32, 8, 5),
        (128, 32, 4, 4), (128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 3), (128, 64, 4, 3),
        (64, 32, 4, 4), (64, 64, 4, 3), (128, 32, 8, 2), (128, 64, 8, 1), (128, 16, 8, 4),
    ):  # fmt: skip
        tuned = prefill.PrefillTuning(rows=rows, keys=keys, warps=warps, stages=stages)
        try_one(
            "attention", tuned,
            lambda tuned=tuned: [
                layer.attend(s, tuned, p) for s, p in zip(chosen, every, strict=True)
            ],
        )  # fmt: skip


def dense(layer: Layer, save: Callable[[str, Any, float], None]) -> None:
    """PyTorch's own, causal."""
    q, k, v = (x[None] for x in (layer.q, layer.k, layer.v))
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            ms = timed(
                lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), 3
            )
        save("dense", backend.name, ms)


def main() -> None:
    """Check and time; the file is written anew after every figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", default="prefill_tune.json")
    parser.add_argument("--lengths", default="32768,131072")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--k", type=int, default=2048)
    parser.add_argument("--b-sel", type=int, default=64)
    parser.add_argument("--dense-below", type=int, default=0)
    args = parser.parse_args()
    records: list[dict[str, Any]] = []
    for length in map(int, args.lengths.split(",")):

        def save(name: str, tuning: Any, ms: float, length: int = length) -> None:
            records.append({"length": length, "name": name, "tuning": str(tuning), "ms": ms})
            say(f"{length:7} {name:10} {ms:9.3f} ms  {tuning}")
            Path(args.json).write_text(json.dumps(records, indent=1))

        layer = Layer(length, args)
        check(layer)
        dense(layer, save)
        variants(layer, save)
        del layer
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
