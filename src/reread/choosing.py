"""What an indexer does in the decode steps of one conversation on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .kv import Buffers

if TYPE_CHECKING:
    from .ops.triton import Workspace


class IndexLane:
    """Index caches at fixed addresses, and scratch for the choice of every step.

    Attributes:
        caches: per layer the index keys, [B, 1, capacity, d].
        indices, counts: what the latest layer's fast rows read, int32 [B, 1, K] and [B, 1]; layers
            follow each other, so that one serves them all.
    """

    def __init__(
        self, buffers: Mapping[int, Buffers], theta: float, k: int, field: Callable[[str], Tensor]
    ) -> None:
        """k: positions chosen; field: a row of the step tensor by its name."""
        from .ops.triton import Workspace, frequencies

        self.caches: dict[int, Tensor] = {}
        for layer, buffer in buffers.items():
            assert buffer.index is not None, "an index cache for every layer"
            self.caches[layer] = buffer.index
        first = next(iter(self.caches.values()))
        rows, _, capacity, width = first.shape
        self._field = field
        self._turns = frequencies(width, theta, first.device)
        self._work: Workspace = Workspace(rows, 1, 1, 16, capacity, first.device)
        self.indices = torch.zeros(rows, 1, k, dtype=torch.int32, device=first.device)
        self.counts = torch.zeros(rows, 1, dtype=torch.int32, device=first.device)

    @property
    def nbytes(self) -> int:
        """Bytes of selection and scratch."""
        return int(self.indices.nbytes + self.counts.nbytes + self._work.nbytes)

    def append(self, layer: int, raw: Tensor) -> Tensor:
        """Cache the index keys of the newest T tokens; raw: [B, T, 2 d], see `turn_and_append`.
        Returns the index queries [B, T, d]."""
        from .ops.triton import turn_and_append

        starts, lengths = self._field("starts"), self._field("lengths")
        index = self.caches[layer]
        return turn_and_append(raw, index, self._turns, starts, lengths)

    def choose(self, layer: int, queries: Tensor) -> None:
        """What the step's fast rows read: see `indices`."""
        from .ops.triton import choose_keys

        choose_keys(
            queries, self.caches[layer], (self._field("low"), self._field("high")),
            work=self._work, active=self._field("fast"), indices=self.indices, counts=self.counts,
        )  # fmt: skip

    def clean(self) -> None:
        """Leave no half-done counts after a step that failed."""
        self._work.clean()
