"""One conversation on the GPU: everything that a decode step reads and writes, at fixed addresses.

Same meaning as `attention.decode_step`, all rows at once. What differs from step to step (lengths,
windows, which rows read everything) is one small tensor on the device, so a step can be captured as
a CUDA graph and replayed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .attention import Meter, StepPlan
from .choosing import IndexLane
from .config import Config
from .cuda import Staging
from .drafting import verify_size
from .errors import UnsupportedError
from .lanes import DEFAULT_OVERLAP, Lanes, Overlap
from .layer import LayerState, check_buffers
from .ops import refusal
from .owners import Owners
from .steps import RowStep, StepShape, note_chosen
from .types import FIELDS

if TYPE_CHECKING:
    from .ops.triton import Cache, Chosen, Workspace

HOLES = "an attention_mask with padding behind or between the tokens of a row"


class Arena:
    """Fixed addresses of one conversation's decode steps: caches, selections, step tensor, scratch.

    Attributes:
        rows, capacity: B, and cached positions that the buffers hold.
        layers: indices of the layers that are made sparse, in order.
        indices, counts: per layer what fast steps read, int32 [B, Hkv, K] and [B, Hkv].
        step: int32 [len(FIELDS), B].
        owners: the caches whose memory this is; when they are gone, others may use it.
        unfinished: a step was begun and not finished, so scratch and selections may be half done.
        lanes: scratch, and what runs beside what.
    """

    def __init__(
        self,
        states: Mapping[int, LayerState],
        heads: int,
        config: Config,
        *,
        overlap: Overlap = DEFAULT_OVERLAP,
        theta: float = 0.0,
    ) -> None:
        """Around the caches that `states` hold already.

        Args:
            heads: query heads H.
            overlap: what runs beside what.
            theta: base of an indexer's rotary positions, where the caches hold index keys.

        Raises:
            UnsupportedError: a shape that the kernels do not cover.
        """
        self.config = config
        self.layers = tuple(states)
        self.owners = Owners(states)
        self.buffers = {i: state.kv.buffers() for i, state in states.items()}
        check_buffers(self.buffers, heads)
        k = self.buffers[self.layers[0]].k
        self.rows, self.kv_heads, self.capacity, dim = map(int, k.shape)
        self.device = k.device
        zeros = functools.partial(torch.zeros, dtype=torch.int32, device=self.device)
        k_max = min(config.k, self.capacity)
        self.step = zeros(len(FIELDS), self.rows)
        self.index = IndexLane(self.buffers, theta, k_max, self.field) if theta else None
        self.indices = {i: zeros(self.rows, self.kv_heads, k_max) for i in states}
        self.counts = {i: zeros(self.rows, self.kv_heads) for i in states}
        self._staging = Staging(self.step)
        sparse = config.mode in ("slow-fast", "exact") and not config.indexed
        self.lanes = Lanes(
            overlap if sparse else "none",
            self.device,
            functools.partial(self._workspace, heads, dim, sparse),
        )
        self.unfinished = False

    def _workspace(self, heads: int, dim: int, sparse: bool, evidence: bool) -> Workspace:
        from .ops.triton import Workspace

        return Workspace(
            self.rows, heads, self.kv_heads, dim, self.capacity, self.device,
            evidence=sparse and evidence,
            queries=verify_size(1 + self.config.draft.tokens) if self.config.mode == "exact" else 0,
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes beside the caches themselves: selections and scratch."""
        tensors = [*self.indices.values(), *self.counts.values(), self.step]
        indexed = 0 if self.index is None else self.index.nbytes
        return sum(int(t.nbytes) for t in tensors) + self.lanes.nbytes + indexed

    def own(self, states: Mapping[int, LayerState]) -> None:
        """Give the memory to new caches, which must be empty."""
        assert self.owners.gone
        for i, state in states.items():
            state.kv.use(self.buffers[i])
        self.owners = Owners(states)

    def begin(self, plan: StepPlan, states: Mapping[int, LayerState]) -> list[RowStep]:
        """Tell the device what the step of `plan` is; what fast rows read must be selected."""
        if plan.valid is not None:
            raise UnsupportedError(refusal(HOLES))
        known = states[self.layers[0]].chosen
        steps = [RowStep.of(plan, b, known[b], self.config) for b in range(self.rows)]
        self.tell(steps)
        return steps

    def tell(self, steps: Sequence[RowStep]) -> None:
        """Tell the device what each row's step is."""
        self._staging.upload([step.values() for step in steps])
        self.lanes.restart()
        self.unfinished = True

    def finish(
        self, plan: StepPlan, steps: list[RowStep], states: Mapping[int, LayerState], meter: Meter
    ) -> None:
        """Note on the host what the step, run in all layers, has read and selected."""
        for b, step in enumerate(steps):
            if plan.counted[b]:
                read = step.keys(self.config.sink)
                meter.add(b, step.kind, read, step.length - step.start, len(self.layers))
        self.chose(steps, states)

    def chose(self, steps: Sequence[RowStep], states: Mapping[int, LayerState]) -> None:
        """Note on the host what rows that read everything have selected."""
        note_chosen(steps, states, self.indices[self.layers[0]].shape[2])
        self.unfinished = False

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

    def clean(self) -> None:
        """A step failed on its way: leave no half-done counts to the next one."""
        self.lanes.clean()
        if self.index is not None:
            self.index.clean()

    # -- on the device

    def field(self, name: str) -> Tensor:
        """One row of the step tensor, int32 [B]."""
        return self.step[FIELDS.index(name)]

    def cache(self, layer: int) -> Cache:
        """The layer's keys and values for the kernels."""
        from .ops.triton import Cache

        buffer = self.buffers[layer]
        return Cache(buffer.k, buffer.v, self.field("starts"), self.field("lengths"))

    def attend(
        self, layer: int, q: Tensor, shape: StepShape, scale: float,
        new: tuple[Tensor, Tensor] | None = None, index: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of one new token per row, and the refresh of the rows that choose again.

        Args:
            q: [B, H, D].
            new: each row's new key and value, [B, Hkv, D], to be written at its newest position;
                None: they are there.
            index: what the indexer's projections gave, [B, 2 d], to be turned and cached; without
                `new` its queries [B, d], whose keys are there.

        Returns:
            [B, H, D].
        """
        from .ops import triton as kernels

        q, kv, work = q.contiguous(), self.cache(layer), self.lanes.works[0]
        chosen = self._chosen(layer, shape, index, raw=new is not None)
        norms = self.buffers[layer].norms
        if shape is StepShape.FAST and norms is None:
            return kernels.decode_sparse(q, kv, chosen, scale=scale, work=work, new=new)
        if new is not None:
            kernels.append(*new, kv, norms=norms)
        if shape is StepShape.FAST:
            return kernels.decode_sparse(q, kv, chosen, scale=scale, work=work)
        if shape is StepShape.DENSE:
            return self.dense(layer, q, scale)
        if self.config.indexed:
            dense = self.field("dense")
            return kernels.decode_mixed(q, kv, chosen, dense, scale=scale, work=work)
        work = self.lanes.next()
        out = self._rows(q, kv, chosen, shape, scale, work)
        self.lanes.later(functools.partial(self._choose, layer, kv, q.shape[1], work))
        return out

    def verify(
        self, layer: int, q: Tensor, shape: StepShape, scale: float,
        new: tuple[Tensor, Tensor] | None = None, index: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Dense attention of the newest T positions of the rows that are on, zeros of the others;
        rows that choose again do so by the query that the step tensor names.

        Args:
            q: [B, H, T, D]; new: their keys and values, [B, Hkv, T, D], index: [B, T, 2 d], as for
                `attend`.
            shape: SLOW; DENSE where no row chooses again.

        Returns:
            [B, H, T, D].
        """
        from .ops import triton as kernels

        kv, norms = self.cache(layer), self.buffers[layer].norms
        if new is not None:
            kernels.append(*new, kv, norms=norms)
        if index is not None:
            assert self.index is not None
            self.index.append(layer, index)
        run = functools.partial(
            kernels.verify_dense, q, kv, scale=scale, active=self.field("dense"),
            out=torch.zeros_like(q, memory_format=torch.contiguous_format),
        )  # fmt: skip
        if shape is StepShape.DENSE:
            return run(work=self.lanes.works[0])
        work, allowed = self.lanes.next(), (self.field("low"), self.field("high"))
        out = run(work=work, allowed=allowed, asked=self.field("asked"))
        self.lanes.later(functools.partial(self._choose, layer, kv, q.shape[1], work))
        return out

    def _chosen(self, layer: int, shape: StepShape, index: Tensor | None, *, raw: bool) -> Chosen:
        """What fast rows read; where an indexer chooses it is chosen now."""
        from .ops import triton as kernels

        tail = self.field("window"), self.config.sink
        if index is not None:
            assert self.index is not None
            queries = self.index.append(layer, index[:, None])[:, 0] if raw else index
            if self.config.indexed:
                if shape is not StepShape.DENSE:
                    self.index.choose(layer, queries)
                return kernels.Chosen(self.index.indices, self.index.counts, *tail)
        return kernels.Chosen(self.indices[layer], self.counts[layer], *tail)

    def dense(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """Attention of a step in which every row reads everything, and none chooses."""
        from .ops.triton import decode_dense

        return decode_dense(q, self.cache(layer), scale=scale, work=self.lanes.works[0])

    def _rows(
        self, q: Tensor, kv: Cache, chosen: Chosen, shape: StepShape, scale: float, work: Workspace
    ) -> Tensor:
        """Attention of a step in which rows choose again; it leaves their evidence in `work`."""
        from .ops import triton as kernels

        allowed, dense = (self.field("low"), self.field("high")), self.field("dense")
        if shape is StepShape.SLOW:
            return kernels.decode_dense(q, kv, scale=scale, work=work, allowed=allowed)
        kinds, out = (dense, self.field("fast")), torch.empty_like(q)
        return self.lanes.attend(q, kv, chosen, kinds, allowed, scale=scale, work=work, out=out)

    def _choose(self, layer: int, kv: Cache, heads: int, work: Workspace) -> None:
        from .ops.triton import refresh

        refresh(
            kv, self.config.selector, heads=heads, work=work,
            allowed=(self.field("low"), self.field("high")), active=self.field("refresh"),
            indices=self.indices[layer], counts=self.counts[layer],
            norms=self.buffers[layer].norms,
        )  # fmt: skip
