"""The nouns of the house. Shape letters used everywhere:

B batch rows, T queries of one call, L cached tokens, H query heads, Hkv KV heads, G = H / Hkv,
D head dim,
K selected positions, N keys that one fast step reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

# rows of the tensor that tells the kernels what a step is, int32 [len(FIELDS), B]
FIELDS = ("starts", "lengths", "low", "high", "window", "dense", "refresh", "fast", "asked")


class StepKind(Enum):
    """How one row reads its cache in one decode step."""

    FAST = "fast"  # sink + selected + recent
    SLOW = "slow"  # everything, and the Selector chooses again
    FULL = "full"  # everything: the budget covers all keys, or mode="dense"; no choice


@dataclass(frozen=True, slots=True)
class Selection:
    """Which cached positions each KV head may read besides sink and recent.

    Attributes:
        indices: int32 [B, Hkv, K], ascending, padded with -1 behind the last valid entry.
        counts: int32 [B, Hkv], how many entries of each row of `indices` are valid.
    """

    indices: Tensor
    counts: Tensor

    def __post_init__(self) -> None:
        assert self.indices.dim() == 3
        assert self.counts.shape == self.indices.shape[:2]
        assert self.indices.dtype == self.counts.dtype == torch.int32


@dataclass(frozen=True, slots=True)
class BlockSelection:
    """Which cached positions each block of one row's prompt queries may read besides sink and
    window, shared by all heads.

    Attributes:
        indices: int32 [Nq, K], ascending, padded with -1 behind the block's size.
        sizes: per block, how many entries of its row are valid.
    """

    indices: Tensor
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.indices.dim() == 2
        assert self.indices.shape[0] == len(self.sizes)


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What fast steps of one row read: the sink up to `sink_end`, `selected`, and everything from
    `window_start` on.

    Attributes:
        selected: whole numbers [Hkv, K], positions in neither of the other two.
    """

    selected: Tensor
    sink_end: int
    window_start: int


@dataclass(frozen=True, slots=True)
class KVView:
    """Keys and values as they lie in a contiguous cache, with each row's valid span.

    Attributes:
        k: [B, Hkv, L, D] keys after RoPE and QK-norm, at their original positions.
        v: [B, Hkv, L, Dv] values.
        starts: per row, the first valid position (left padding lies before it).
        lengths: per row, one past the last valid position.
        valid: bool [B, L] where the valid positions have holes (padding between two turns); None
            means every position in [start, length) is valid.
    """

    k: Tensor
    v: Tensor
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    valid: Tensor | None = None

    def __post_init__(self) -> None:
        rows = self.k.shape[0]
        assert self.k.shape[:3] == self.v.shape[:3]
        assert len(self.starts) == len(self.lengths) == rows

    def row(self, b: int) -> KVView:
        """The same view of row `b` alone (no copy)."""
        return KVView(
            self.k[b : b + 1],
            self.v[b : b + 1],
            self.starts[b : b + 1],
            self.lengths[b : b + 1],
            None if self.valid is None else self.valid[b : b + 1],
        )


@dataclass(frozen=True, slots=True)
class Watched:
    """One row of one layer in one decode step, as whoever watches sees it; nothing is a copy.

    Attributes:
        q: [H, D], after RoPE and QK-norm.
        kv: the row's keys and values, the new token's included.
        reading: of a fast step; None where everything was read.
    """

    row: int
    kind: StepKind
    q: Tensor
    kv: KVView
    scale: float
    reading: Reading | None
