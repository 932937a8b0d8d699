"""The one place where policy and ops meet: one layer's attention in one decode step, row by row
slow or fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import ops
from .compact import CompactKV
from .config import AFRESH, Config
from .indexer.apply import best_keys, step_scores
from .layer import LayerState
from .ops.reference import attend
from .oracle import step_mass
from .policy.selector import select
from .types import KVView, Reading, Selection, StepKind, Watched

HOST = "reference"  # row by row is the reference's way, on any device; the kernels' is `device`
DEFAULT_ROOM = 64  # steps that a compact copy has room for where no interval bounds them


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What all layers of one decode step have in common. Made by the session from the Controller's
    decision.

    Attributes:
        kinds: per row.
        starts: per row, the first valid cache position.
        length: cached columns, the current token included; equal for all rows.
        valid: bool [B, length] where some row has holes, else None.
        counted: per row, whether the step goes into the statistics (not after the row's end).
    """

    kinds: tuple[StepKind, ...]
    starts: tuple[int, ...]
    length: int
    valid: Tensor | None
    counted: tuple[bool, ...]


@dataclass(slots=True)
class Meter:
    """Counts what really ran: rows x layers by kind, and keys read against keys a dense step would
    have read."""

    runs: list[dict[StepKind, int]]
    keys_read: int = 0
    keys_cached: int = 0

    @classmethod
    def of(cls, rows: int) -> Meter:
        return cls([dict.fromkeys(StepKind, 0) for _ in range(rows)])

    def widen(self, rows: int) -> None:
        """Room for at least so many rows."""
        self.runs += Meter.of(max(0, rows - len(self.runs))).runs

    def add(self, row: int, kind: StepKind, read: int, cached: int, layers: int = 1) -> None:
        self.runs[row][kind] += layers
        self.keys_read += read * layers
        self.keys_cached += cached * layers


@torch.no_grad()
def decode_step(
    state: LayerState,
    q: Tensor,
    plan: StepPlan,
    config: Config,
    scale: float,
    meter: Meter,
    iq: Tensor | None = None,
) -> Tensor:
    """Attention of one new token per row; its key and value are already in `state.kv`.

    Args:
        q: [B, H, D].
        iq: [B, n, 1, d] index queries, where an indexer reads along.

    Returns:
        [B, H, Dv].
    """
    view = KVView(
        state.kv.keys, state.kv.values, plan.starts, (plan.length,) * q.shape[0], plan.valid
    )
    out = q.new_empty(*q.shape[:2], view.v.shape[-1])
    for b, kind in enumerate(plan.kinds):
        row = view.row(b)
        cached = plan.length - plan.starts[b] if plan.valid is None else int(plan.valid[b].sum())
        read, reading = cached, None
        if kind is StepKind.FAST and config.mode in AFRESH:
            own = None if iq is None else iq[b]
            out[b], read, reading = read_afresh(state, b, q[b : b + 1], row, config, scale, own)
        elif kind is StepKind.FAST:
            out[b], read, reading = read_chosen(state, b, q[b], row, config, scale)
        elif kind is StepKind.FULL:
            out[b], _ = _first(ops.decode_dense(q[b : b + 1], row, scale=scale, backend=HOST))
            state.chosen[b] = None
        else:
            out[b] = _slow(state, b, q[b : b + 1], row, config, scale)
        if plan.counted[b]:
            meter.add(b, kind, read, cached)
        if state.watch is not None:
            state.watch(Watched(b, kind, q[b], row, scale, reading))
    state.tail = None
    return out


def _first(result: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    out, mass = result
    return out[0], None if mass is None else mass[0]


def read_chosen(
    state: LayerState, b: int, q: Tensor, row: KVView, config: Config, scale: float
) -> tuple[Tensor, int, Reading]:
    """A fast step of one row, its newest position included: q [H, D] -> [H, Dv], the keys read per
    KV head, and which."""
    compact = state.chosen[b]
    if not isinstance(compact, CompactKV):
        # the first step after a prefill, chosen by the prefill's own last queries
        compact = state.chosen[b] = select_from_tail(state, b, row, config, scale)
    compact.append(row.k[0, :, -1], row.v[0, :, -1])
    out = attend(q, compact.keys, compact.values, scale)
    return out, compact.count, compact.reading


def read_afresh(
    state: LayerState,
    b: int,
    q: Tensor,
    row: KVView,
    config: Config,
    scale: float,
    iq: Tensor | None,
) -> tuple[Tensor, int, Reading]:
    """A fast step of one row that chooses its own keys, shared by all KV heads, by an indexer's
    query iq [n, 1, d] or in mode "oracle" by its own mass. Otherwise as `read_chosen`, q [1, H, D].
    """
    low, high = allowed_span(row, config)
    start, valid = row.starts[0], None if row.valid is None else row.valid[0]
    if config.mode == "oracle":
        scores = step_mass(q[0], row.k[0], start, scale, valid)[low:high]
    else:
        assert iq is not None, "an indexer chooses by its queries"
        # other rows of a pass may stand at later columns
        scores = step_scores(iq, state.kv.index[b, :, : row.lengths[0]], low, high, start)
    found = best_keys(scores, low, config.k, None if valid is None else valid[low:high])
    shared = found.expand(1, row.k.shape[1], -1)
    counts = torch.full(shared.shape[:2], found.numel(), dtype=torch.int32, device=q.device)
    window = min(high, row.lengths[0])
    selection = Selection(shared, counts)
    out = ops.decode_sparse(
        q, row, selection, [window], sink=low - start, scale=scale, backend=HOST
    )
    reading = Reading(shared[0], min(low, window), window)
    return out[0], reads(row, window, low - start) + found.numel(), reading


def reads(row: KVView, window: int, sink: int) -> int:
    """Keys of sink and recent window that exist."""
    start, length = row.starts[0], row.lengths[0]
    if row.valid is None:
        return min(sink, window - start) + length - window
    valid = row.valid[0]
    return int(valid[start : min(start + sink, window)].sum() + valid[window:length].sum())


def _slow(
    state: LayerState, b: int, q: Tensor, row: KVView, config: Config, scale: float
) -> Tensor:
    allowed = allowed_span(row, config)
    out, mass = _first(ops.decode_dense(q, row, scale=scale, allowed=[allowed], backend=HOST))
    assert mass is not None
    state.chosen[b] = chosen_by(state, b, row, mass, allowed, config)
    return out


def select_from_tail(
    state: LayerState, b: int, row: KVView, config: Config, scale: float
) -> CompactKV:
    """What a row's drafts or fast steps read first, by the prefill's last queries; row: its cache,
    which may have grown since."""
    before, mass, allowed = tail_mass(state, b, row, config, scale)
    return chosen_by(state, b, before, mass, allowed, config)


def tail_mass(
    state: LayerState, b: int, row: KVView, config: Config, scale: float
) -> tuple[KVView, Tensor, tuple[int, int]]:
    """Evidence of the prefill's last queries for row `b`.

    Args:
        row: the row's cache, which may have grown since the prefill.

    Returns:
        the cache as those queries saw it, mass fp32 [Hkv, L], and J.
    """
    assert state.tail is not None, "a fast step needs a selection or the prefill's tail"
    end = state.tail_end
    before = KVView(
        row.k[:, :, :end],
        row.v[:, :, :end],
        row.starts,
        (end,),
        None if row.valid is None else row.valid[:, :end],
    )
    allowed = allowed_span(before, config)
    mass = ops.tail_evidence(
        state.tail[b : b + 1],
        before,
        [state.tail_positions[b].tolist()],
        scale=scale,
        allowed=[allowed],
        alpha=config.selector.alpha,
    )[0]
    return before, mass, allowed


def allowed_span(row: KVView, config: Config) -> tuple[int, int]:
    """J = [low, high) of one row: all positions but its sink and its recent window.

    Sink and window are counted over the positions that exist, so padding between two turns takes
    no place in them. The current token is in the window.
    """
    start, length = row.starts[0], row.lengths[0]
    if row.valid is None:
        low = start + config.sink
        return low, max(low, length - config.recent)
    exist = row.valid[0, :length].nonzero().flatten()
    count = exist.numel()
    low = int(exist[config.sink]) if count > config.sink else length
    high = int(exist[count - config.recent]) if count > config.recent else start
    return low, max(low, high)


def choose(
    state: LayerState, b: int, row: KVView, mass: Tensor, allowed: Sequence[int], config: Config
) -> tuple[Tensor, Tensor]:
    """The Selector for one row. mass: [Hkv, L].

    Returns:
        indices int32 [Hkv, K'], ascending, and counts int32 [Hkv].
    """
    low, high = allowed
    span = slice(low, high)
    norms = state.kv.norms
    return select(
        mass[:, span],
        None if norms is None else norms[b, :, span],
        config.selector,
        config.k,
        low,
        None if row.valid is None else row.valid[0, span],
    )


def chosen_by(
    state: LayerState, b: int, row: KVView, mass: Tensor, allowed: Sequence[int], config: Config
) -> CompactKV:
    """Choose again for one row and gather what was chosen. mass: [Hkv, L]."""
    low, high = allowed
    indices, counts = choose(state, b, row, mass, allowed, config)
    # validity is per row, so all KV heads keep equally many
    kept = int(counts[0]) if counts.numel() else 0
    room = config.triggers.t_max or DEFAULT_ROOM
    window_start = min(high, row.lengths[0])  # a row shorter than the sink has no window
    sink = low - row.starts[0]
    return CompactKV(row, indices[:, :kept].long(), window_start, sink, room)
