"""One conversation on the GPU: everything that a decode step reads and writes, at fixed addresses.

Same meaning as `attention.decode_step`, all rows at once. What differs from step to step (lengths,
windows, which rows read everything) is one small tensor on the device, so a step can be captured as
a CUDA graph and replayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .attention import DeviceRow, LayerState, Meter, StepPlan
from .config import Config
from .errors import InputError, UnsupportedError
from .types import StepKind

if TYPE_CHECKING:
    from .ops.triton import Cache, Workspace

# rows of the step tensor, int32 [len(FIELDS), B]
FIELDS = ("starts", "lengths", "low", "high", "window", "dense", "refresh")
RING = 4  # workspaces that asynchronous refreshes take turns in (SFI, section 4)
STAGING = 8  # steps that the host may run ahead of the device


class StepShape(Enum):
    """Which kernels one step of all rows needs; each is captured as a graph of its own."""

    FAST = "fast"  # every row reads what was selected
    MIXED = "mixed"  # each row says on the device what it reads
    SLOW = "slow"  # every row reads everything, some or all choose again
    DENSE = "dense"  # every row reads everything, none chooses

    @classmethod
    def of(cls, kinds: tuple[StepKind, ...]) -> StepShape:
        """The smallest shape that covers the rows' kinds."""
        found = set(kinds)
        if found == {StepKind.FAST}:
            return cls.FAST
        if found == {StepKind.FULL}:
            return cls.DENSE
        return cls.MIXED if StepKind.FAST in found else cls.SLOW

    @property
    def refreshes(self) -> bool:
        """Whether rows choose again in it."""
        return self in (StepShape.MIXED, StepShape.SLOW)


@dataclass(frozen=True, slots=True)
class RowStep:
    """One row of one step, as the host knows it. All in cache positions; see `KVView`."""

    start: int
    length: int
    low: int
    high: int
    window: int
    kind: StepKind

    @classmethod
    def of(cls, plan: StepPlan, b: int, known: DeviceRow | None, config: Config) -> RowStep:
        """Row `b` of `plan`; `known`: what it selected last, needed for a fast step."""
        start, length = plan.starts[b], plan.length
        low = start + config.sink
        high = max(low, length - config.recent)
        kind = plan.kinds[b]
        if kind is StepKind.FAST:
            assert known is not None, "a fast step needs a selection"
            return cls(start, length, low, high, known.window_start, kind)
        # a row shorter than the sink has no window
        return cls(start, length, low, high, min(high, length), kind)

    def keys(self, known: DeviceRow | None, sink: int) -> int:
        """Keys that the row reads per KV head."""
        if self.kind is not StepKind.FAST:
            return self.length - self.start
        assert known is not None
        return min(sink, self.window - self.start) + known.count + self.length - self.window

    def values(self) -> tuple[int, ...]:
        """In the order of FIELDS."""
        dense, refresh = self.kind is not StepKind.FAST, self.kind is StepKind.SLOW
        return (
            self.start, self.length, self.low, self.high, self.window, int(dense), int(refresh)
        )  # fmt: skip


class Arena:
    """Fixed addresses of one conversation's decode steps: caches, selections, step tensor, scratch.

    Attributes:
        rows, capacity: B, and cached positions that the buffers hold.
        layers: indices of the layers that are made sparse, in order.
        indices, counts: per layer what fast steps read, int32 [B, Hkv, K] and [B, Hkv].
        step: int32 [len(FIELDS), B].
    """

    def __init__(
        self,
        states: Mapping[int, LayerState],
        heads: int,
        config: Config,
        *,
        asynchronous: bool = False,
    ) -> None:
        """Around the caches that `states` hold already.

        Args:
            heads: query heads H.
            asynchronous: refresh on a second stream, under the next layers' attention.

        Raises:
            UnsupportedError: a shape that the kernels do not cover.
        """
        from .ops.triton import Workspace, unsupported

        self.config = config
        self.layers = tuple(states)
        self.buffers = {i: state.kv.buffers() for i, state in states.items()}
        k = next(iter(self.buffers.values())).k
        self.rows, self.kv_heads, self.capacity, dim = k.shape
        self.device = k.device
        for i, buffer in self.buffers.items():
            reason = unsupported(k.new_empty(self.rows, heads, dim), buffer.k)
            if buffer.k.shape != buffer.v.shape:
                reason = f"layer {i}'s values of another shape than its keys"
            if reason is not None:
                raise UnsupportedError(refusal(reason))
        int32 = {"dtype": torch.int32, "device": self.device}
        k_max = min(config.k, self.capacity)
        self.indices = {i: torch.zeros(self.rows, self.kv_heads, k_max, **int32) for i in states}
        self.counts = {i: torch.zeros(self.rows, self.kv_heads, **int32) for i in states}
        self.step = torch.zeros(len(FIELDS), self.rows, **int32)
        sparse = config.mode == "slow-fast"
        self.works = [
            Workspace(
                self.rows, heads, self.kv_heads, dim, self.capacity, self.device, evidence=sparse
            )
            for _ in range(RING if asynchronous and sparse else 1)
        ]
        self.side = torch.cuda.Stream(self.device, priority=0) if asynchronous else None
        self._staging = _Staging(self.step)
        self._begun: list[torch.cuda.Event | None] = [None] * len(self.works)
        self._turn = 0
        self._forked = False

    @property
    def nbytes(self) -> int:
        """Bytes beside the caches themselves: selections and scratch."""
        tensors = [*self.indices.values(), *self.counts.values(), self.step]
        return sum(t.nbytes for t in tensors) + sum(work.nbytes for work in self.works)

    def holds(self, states: Mapping[int, LayerState]) -> bool:
        """Whether these are still the caches it was made around."""
        return tuple(states) == self.layers and all(
            states[i].kv.buffers() == buffer for i, buffer in self.buffers.items()
        )

    def begin(self, plan: StepPlan, states: Mapping[int, LayerState]) -> list[RowStep]:
        """Tell the device what the step of `plan` is; what fast rows read must be selected."""
        if plan.valid is not None:
            raise UnsupportedError(
                refusal("an attention_mask with padding between two turns of a row")
            )
        known = [_device_row(states[self.layers[0]].chosen[b]) for b in range(self.rows)]
        steps = [RowStep.of(plan, b, known[b], self.config) for b in range(self.rows)]
        self._staging.upload([step.values() for step in steps])
        self.restart()
        return steps

    def restart(self) -> None:
        """The first layer of a step comes next."""
        self._turn, self._forked = 0, False
        self._begun = [None] * len(self.works)

    def finish(
        self,
        plan: StepPlan,
        steps: list[RowStep],
        states: Mapping[int, LayerState],
        meter: Meter,
    ) -> None:
        """Note on the host what the step, run in all layers, has read and selected."""
        for b, step in enumerate(steps):
            known = states[self.layers[0]].chosen[b]
            if plan.counted[b]:
                read = step.keys(_device_row(known), self.config.sink)
                meter.add(b, step.kind, read, step.length - step.start, len(self.layers))
            if step.kind is not StepKind.FAST:
                found = None
                if step.kind is StepKind.SLOW:
                    count = max(0, min(self.indices[self.layers[0]].shape[2], step.high - step.low))
                    found = DeviceRow(step.window, count)
                for state in states.values():
                    state.chosen[b] = found
        for state in states.values():
            state.tail = None

    def seed(self, b: int, layer: int, indices: Tensor, counts: Tensor) -> None:
        """Put in a selection that was made elsewhere: indices [Hkv, K'], counts [Hkv]."""
        self.indices[layer][b, :, : indices.shape[1]] = indices
        self.counts[layer][b] = counts

    def inherit(self, other: Arena) -> None:
        """Take over the selections of an arena with smaller caches."""
        for i in self.layers:
            k = other.indices[i].shape[2]
            self.indices[i][..., :k] = other.indices[i]
            self.counts[i].copy_(other.counts[i])

    # -- on the device

    def field(self, name: str) -> Tensor:
        """One row of the step tensor, int32 [B]."""
        return self.step[FIELDS.index(name)]

    def cache(self, layer: int) -> Cache:
        """The layer's keys and values for the kernels."""
        from .ops.triton import Cache

        buffer = self.buffers[layer]
        return Cache(buffer.k, buffer.v, self.field("starts"), self.field("lengths"))

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write each row's new key and value, [B, Hkv, D], at its newest position."""
        from .ops.triton import append

        norms = self.buffers[layer].norms
        append(k, v, self.cache(layer), norms=norms)

    def attend(self, layer: int, q: Tensor, shape: StepShape, scale: float) -> Tensor:
        """Attention of one new token per row, and the refresh of the rows that choose again.

        Args:
            q: [B, H, D]; the new keys and values are in the cache already.

        Returns:
            [B, H, D].
        """
        from .ops import triton as kernels

        q, kv = q.contiguous(), self.cache(layer)
        slot = self._turn % len(self.works)
        self._turn += 1
        work, allowed = self.works[slot], (self.field("low"), self.field("high"))
        chosen = kernels.Chosen(
            self.indices[layer], self.counts[layer], self.field("window"), self.config.sink
        )
        if shape is StepShape.FAST:
            return kernels.decode_sparse(q, kv, chosen, scale=scale, work=work)
        if shape is StepShape.DENSE:
            return kernels.decode_dense(q, kv, scale=scale, work=work)
        self._wait_for(slot)
        if shape is StepShape.MIXED:
            dense = self.field("dense")
            out = kernels.decode_mixed(
                q, kv, chosen, dense, scale=scale, work=work, allowed=allowed
            )
        else:
            out = kernels.decode_dense(q, kv, scale=scale, work=work, allowed=allowed)
        self._refresh(layer, kv, q.shape[1], slot)
        return out

    def _refresh(self, layer: int, kv: Cache, heads: int, slot: int) -> None:
        if self.side is None:
            self._choose(layer, kv, heads, self.works[slot])
            return
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.side):
            self._choose(layer, kv, heads, self.works[slot])
            done = torch.cuda.Event()
            done.record()
        self._begun[slot] = done
        self._forked = True

    def _choose(self, layer: int, kv: Cache, heads: int, work: Workspace) -> None:
        from .ops.triton import refresh

        refresh(
            kv, self.config.selector, heads=heads, work=work,
            allowed=(self.field("low"), self.field("high")), active=self.field("refresh"),
            indices=self.indices[layer], counts=self.counts[layer],
            norms=self.buffers[layer].norms,
        )  # fmt: skip

    def _wait_for(self, slot: int) -> None:
        """Before a workspace is used again, the refresh that reads it must be done."""
        event = self._begun[slot]
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def barrier(self) -> None:
        """The end of a step: every refresh is done before the next step reads a selection."""
        if self.side is not None and self._forked:
            torch.cuda.current_stream(self.device).wait_stream(self.side)
        self._forked = False


class _Staging:
    """Host to device without waiting: a ring of pinned buffers, each reused once its copy is
    done."""

    def __init__(self, target: Tensor) -> None:
        self._target = target
        pinned = target.is_cuda
        self._ring = [
            torch.zeros(target.shape, dtype=target.dtype, pin_memory=pinned)
            for _ in range(STAGING if pinned else 1)
        ]
        self._copied: list[torch.cuda.Event | None] = [None] * len(self._ring)
        self._next = 0

    def upload(self, rows: list[tuple[int, ...]]) -> None:
        """Copy the rows' values, [B] tuples in the order of FIELDS."""
        slot = self._next
        self._next = (slot + 1) % len(self._ring)
        event = self._copied[slot]
        if event is not None:
            event.synchronize()
        self._ring[slot].copy_(torch.tensor(rows, dtype=torch.int32).T)
        self._target.copy_(self._ring[slot], non_blocking=True)
        if self._target.is_cuda:
            self._copied[slot] = torch.cuda.Event()
            self._copied[slot].record()  # type: ignore[union-attr]  # set in the line above


def _device_row(chosen: object) -> DeviceRow | None:
    return chosen if isinstance(chosen, DeviceRow) else None


def refusal(reason: str) -> str:
    """How a shape that the kernels do not cover is refused."""
    return f"the Triton kernels do not cover {reason}; backend='reference' does, slowly"


def check_memory(device: torch.device, wanted: int, rows: int, positions: int) -> None:
    """Refuse, before anything is lost, a conversation whose keys and values do not fit.

    Args:
        wanted: bytes of keys, values and scratch for `rows` rows of `positions` positions.

    Raises:
        InputError: says what would fit.
    """
    if device.type != "cuda" or not wanted:
        return
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if wanted <= free:
        return
    fits = positions * free // wanted
    raise InputError(
        f"{rows} rows of {positions} positions need {wanted / 2**30:.1f} GiB for keys and values, "
        f"{free / 2**30:.1f} GiB are free: about {fits} positions would fit with {rows} rows, or "
        f"{rows * free // wanted} rows with {positions} positions"
    )
