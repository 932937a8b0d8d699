"""What one full-attention layer of one conversation holds between forward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .compact import CompactKV
from .errors import UnsupportedError
from .kv import Buffers, GrowingKV
from .ops import refusal
from .types import Watched


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """What one row's fast steps read on the GPU, where the arena holds the positions.

    Attributes:
        window_start: first position of the recent window.
        count: selected positions per KV head.
    """

    window_start: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """What the latest verification of one row leaves for the Selector.

    Attributes:
        query: [H, D], after RoPE.
        position: its column.
        allowed: J = [low, high) as it had it.
    """

    query: Tensor
    position: int
    allowed: tuple[int, int]


@dataclass(slots=True, eq=False, weakref_slot=True)
class LayerState:
    """One full-attention layer of one conversation.

    Attributes:
        kv: all keys and values.
        chosen: per row what fast steps read (a copy on the CPU, on the GPU what the arena holds),
            None before the first selection or after it was invalidated.
        tail: the last W queries of the prefill, [B, H, <= W, D], evidence for a selection without
            a slow step.
        tail_positions: int64 [B, <= W], where those queries stand in the cache, -1 for padding.
        tail_end: cached columns when the tail was taken.
        scale: factor on the logits, as the prefill used it.
        evidence: by row, of mode "exact".
        watch: told of every row of every decode step that runs row by row; None: nobody watches.
    """

    kv: GrowingKV = field(default_factory=GrowingKV)
    chosen: list[CompactKV | DeviceRow | None] = field(default_factory=list)
    tail: Tensor | None = None
    tail_positions: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.long))
    tail_end: int = 0
    scale: float = 1.0
    evidence: dict[int, Evidence] = field(default_factory=dict)
    watch: Callable[[Watched], None] | None = None

    def invalidate(self) -> None:
        """Forget selections and tail: the cache changed in a way that they do not know."""
        self.chosen = [None] * len(self.chosen)
        self.tail, self.tail_end = None, 0
        self.evidence.clear()

    def remember_tail(self, q: Tensor, width: int, exist: Tensor | None = None) -> None:
        """Keep each row's newest `width` prefill queries, whatever the chunks and the padding.

        Args:
            q: [B, H, T, D] after RoPE; exist: bool [B, T], False for padding (None: no padding).
        """
        rows, new = q.shape[0], q.shape[2]
        start = self.kv.length - new
        # behind padding only the newest count; sorting a long prompt would hold up the device
        if exist is None or bool(exist[:, -width:].all()):
            new, q, exist = min(new, width), q[:, :, -width:], None
        positions = torch.arange(self.kv.length - new, self.kv.length).expand(rows, -1)
        if exist is not None:
            positions = positions.where(exist.cpu(), -1)
        if self.tail is not None and self.tail_end == start:
            q = torch.cat([self.tail, q], dim=2)
            positions = torch.cat([self.tail_positions, positions], dim=1)
        self.tail_end = self.kv.length
        if bool((positions >= 0).all()):
            self.tail, self.tail_positions = q[:, :, -width:].clone(), positions[:, -width:]
            return
        # newest last; padding moves to the front and drops out
        order = (positions >= 0).long().argsort(dim=1, stable=True)[:, -width:]
        columns = order.to(q.device)[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])
        self.tail = q.gather(2, columns)
        self.tail_positions = positions.gather(1, order)

    def can_select(self, row: int) -> bool:
        """Whether a fast step of `row` would know what to read."""
        return self.chosen[row] is not None or self.tail is not None


def check_buffers(buffers: Mapping[int, Buffers], heads: int) -> None:
    """Refuse caches that the kernels do not cover; heads: query heads.

    Raises:
        UnsupportedError: names the value.
    """
    from .ops.triton import unsupported

    for i, buffer in buffers.items():
        rows, _, _, dim = buffer.k.shape
        reason = unsupported(buffer.k.new_empty(rows, heads, dim), buffer.k)
        if buffer.k.shape != buffer.v.shape:
            reason = f"layer {i}'s values of another shape than its keys"
        if reason is not None:
            raise UnsupportedError(refusal(reason))
