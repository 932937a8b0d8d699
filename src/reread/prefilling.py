"""How a prompt is read sparsely (OSP, arXiv 2606.07703): a frozen dataclass beside those of
decoding."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Literal, get_args

from .checks import require, require_int

Chooser = Literal["indexer", "oracle", "sampled"]
# the budget grows from 256 tokens at 4K to 2048 at 100K, evenly in the logarithms (OSP)
SHORT, LONG = (4096, 256), (100_000, 2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsePrefill:
    """Which earlier tokens each block of a prompt's queries reads, in every full-attention layer.

    All heads of a layer share the choice. The first `sink` tokens, and everything from `local`
    tokens before the block on, are always read; causality holds within the block.

    Attributes:
        indexer: folder of an indexer that was distilled for the model.
        chooser: "indexer": the mass that it predicts, of a block's queries the highest. "oracle":
            the exact attention mass, averaged over heads and over the block's queries; a
            reference, never an accelerator, for it computes dense attention first. "sampled": the
            same mass as `samples` of the block's queries see it, without training. None:
            "indexer" where one is given, else "oracle".
        k: tokens chosen for a block; None: by the block's position, see `budget`.
        b_sel: consecutive queries that share a choice; 1: each its own. Blocks count from a row's
            first token; a chunk of the prefill that ends within a block cuts it in two.
        sink, local: see above; local is at least 1, the token itself.
        samples: queries of a block, evenly spaced and the last one among them.
        dense_below: blocks that end within the first so many tokens of a row read everything;
            None: on the GPU the length from which sparse blocks were measured to be faster, else 0,
            for nothing is saved there at any length.
    """

    indexer: str | None = None
    chooser: Chooser | None = None
    k: int | None = None
    b_sel: int = 64
    sink: int = 4
    local: int = 128
    samples: int = 8
    dense_below: int | None = None

    def __post_init__(self) -> None:
        set_once = object.__setattr__
        if isinstance(self.indexer, os.PathLike):
            set_once(self, "indexer", os.fspath(self.indexer))
        ok = self.indexer is None or (isinstance(self.indexer, str) and self.indexer != "")
        require(ok, "prefill.indexer", self.indexer, "the folder of an indexer, or None")
        if self.chooser is None:
            set_once(self, "chooser", "oracle" if self.indexer is None else "indexer")
        known = get_args(Chooser)
        ok = self.chooser in known
        require(ok, "prefill.chooser", self.chooser, f"one of {', '.join(known)}")
        ok = self.indexer is None or self.chooser == "indexer"
        require(ok, "prefill.chooser", self.chooser, "'indexer' where prefill.indexer is given")
        if self.k is not None:
            require_int("prefill.k", self.k, 1)
        require_int("prefill.b_sel", self.b_sel, 1)
        require_int("prefill.sink", self.sink, 0)
        require_int("prefill.local", self.local, 1)
        require_int("prefill.samples", self.samples, 1)
        if self.dense_below is not None:
            require_int("prefill.dense_below", self.dense_below, 0)

    def budget(self, position: int) -> int:
        """Tokens that are chosen for a block which ends at `position` of its row: `k`, or the
        schedule of SHORT to LONG, constant outside."""
        if self.k is not None:
            return self.k
        (low, least), (high, most) = SHORT, LONG
        share = math.log(max(position, 1) / low) / math.log(high / low)
        return round(least * math.pow(most / least, min(max(share, 0.0), 1.0)))
