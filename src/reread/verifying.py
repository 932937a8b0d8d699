"""One layer's attention in the passes of mode "exact": sparse steps that draft, and dense passes
that verify several positions of a row at once and leave the Selector its evidence."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import ops
from .attention import (
    HOST,
    allowed_span,
    chosen_by,
    read_afresh,
    read_chosen,
    select_from_tail,
)
from .compact import CompactKV
from .config import Config
from .layer import Evidence, LayerState
from .types import KVView


@dataclass(slots=True)
class Pass:
    """One forward of some rows of a cache, each at its own columns.

    Attributes:
        rows: the cache's row of each row of the pass.
        starts: per row of the pass, the first column that is no padding.
        ends: per row of the pass, one past its newest column.
        verify: whether it reads everything; else each row reads what was chosen for it.
        valid: bool [B, columns] of the cache where some row has holes, else None.
        idle: rows (of the cache) that read nothing: their text is over.
        evidence: rows (of the cache) whose verification leaves evidence for the next choice.
        kept: rows (of the cache) whose drafts go on with what was chosen before.
        read: keys that each row of the pass reads per KV head and layer, filled in as it runs.
    """

    rows: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    verify: bool
    valid: Tensor | None = None
    idle: frozenset[int] = frozenset()
    evidence: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()
    read: dict[int, int] = field(default_factory=dict)

    def view(self, state: LayerState, i: int) -> KVView:
        """Keys and values of row `i` of the pass, its newest included."""
        b, end = self.rows[i], self.ends[i]
        valid = None if self.valid is None else self.valid[b : b + 1, :end]
        k, v = state.kv.keys, state.kv.values
        return KVView(
            k[b : b + 1, :, :end], v[b : b + 1, :, :end], (self.starts[i],), (end,), valid
        )


@torch.no_grad()
def attend(
    state: LayerState,
    q: Tensor,
    step: Pass,
    config: Config,
    scale: float,
    iq: Tensor | None = None,
) -> Tensor:
    """Attention of a pass; its keys and values are already in `state.kv`, index keys too.

    Args:
        q: [N, H, T, D], the newest T positions of each row of the pass; T is 1 in a draft.
        iq: [N, n, T, d], their index queries, by which drafts choose; None: what was chosen
            before serves them.

    Returns:
        [N, T, H, Dv]; zeros for idle rows.
    """
    out = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], state.kv.values.shape[-1])
    for i, b in enumerate(step.rows):
        if b in step.idle:
            continue
        row = step.view(state, i)
        if step.verify:
            wanted = b in step.evidence
            if b not in step.kept:
                state.chosen[b] = None
            found = _verify(state, b, q[i : i + 1], row, config, scale, wanted)
            out[i] = found[0].transpose(0, 1)
            step.read[i] = row.lengths[0] - row.starts[0]
        elif iq is not None:
            own = q[i : i + 1, :, 0]
            out[i, 0], step.read[i], _ = read_afresh(state, b, own, row, config, scale, iq[i])
        else:
            out[i, 0], step.read[i] = _draft(state, b, q[i, :, 0], row, config, scale)
    return out


def _draft(
    state: LayerState, b: int, q: Tensor, row: KVView, config: Config, scale: float
) -> tuple[Tensor, int]:
    """One sparse step: q [H, D]."""
    if not isinstance(state.chosen[b], CompactKV):
        state.chosen[b] = _choose(state, b, row, config, scale)
    out, read, _ = read_chosen(state, b, q, row, config, scale)
    return out, read


def _choose(state: LayerState, b: int, row: KVView, config: Config, scale: float) -> CompactKV:
    """From the first query of the latest verification, which stood whatever was drafted behind it,
    or from the prefill's last ones. The newest position of `row` is not part of it."""
    found = state.evidence.get(b)
    before = _shorter(row, 1)
    if found is None:
        return select_from_tail(state, b, before, config, scale)
    mass = ops.tail_evidence(
        found.query[None, :, None],
        _shorter(before, before.lengths[0] - found.position - 1),
        [[found.position]],
        scale=scale,
        allowed=[found.allowed],
        alpha=config.selector.alpha,
    )
    return chosen_by(state, b, before, mass[0], found.allowed, config)


def _shorter(row: KVView, by: int) -> KVView:
    """The view without its newest positions."""
    end = row.lengths[0] - by
    valid = None if row.valid is None else row.valid[:, :end]
    return KVView(row.k[:, :, :end], row.v[:, :, :end], row.starts, (end,), valid)


def _verify(
    state: LayerState, b: int, q: Tensor, row: KVView, config: Config, scale: float, wanted: bool
) -> Tensor:
    """Dense attention of one row: q [1, H, T, D] -> [1, H, T, Dv]; wanted: whether its first query
    is kept as evidence."""
    if wanted:
        behind = q.shape[2] - 1
        allowed = allowed_span(_shorter(row, behind), config)
        # a copy: what the model computed it in is used again
        at = row.lengths[0] - behind - 1
        state.evidence[b] = Evidence(q[0, :, 0].clone(), at, allowed)
    return ops.verify_dense(q, row, scale=scale, backend=HOST)[0]
