"""Whole decode steps in mode "indexed": projections, scores over all index keys, top-K and sparse
attention in every layer of every step; random weights, so speed alone is claimed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..device import Arena
from ..errors import NumericalError
from ..indexer.apply import best_keys, step_scores
from ..integrations.hf.graph import StepGraphs, Weights, decoder_layers
from ..integrations.hf.indexed import Reader
from ..integrations.hf.indexers import new_indexer
from ..kv import Buffers
from ..ops import reference
from ..steps import StepShape
from ..types import KVView, Selection, StepKind
from .checks import difference, require_close
from .harness import Bench, timing
from .timing import Record

if TYPE_CHECKING:
    from ..ops.triton import Chosen

WIDTH = 64
AGREEMENT = 0.99  # sums in another order may swap keys at the end of the list
CLAIM = "random weights and a random-init indexer: runtime headroom, quality not claimed"


class CheckedArena(Arena):
    """What the kernels chose and what they made of it, against the reference, layer by layer on the
    same inputs: near-ties of random keys fall otherwise in another run.

    Attributes:
        agreement: smallest share of a choice that the reference chose too.
        error: largest relative error of a row's attention, in the 2-norm.
    """

    agreement = 1.0
    error = 0.0
    rows_checked: tuple[int, ...] = ()
    _queries: Tensor | None = None

    def _chosen(self, layer: int, shape: StepShape, index: Tensor | None, *, raw: bool) -> Chosen:
        assert index is not None
        assert self.index is not None
        self._queries = self.index.append(layer, index[:, None])[:, 0]
        return super()._chosen(layer, shape, self._queries, raw=False)

    def attend(
        self,
        layer: int,
        q: Tensor,
        shape: StepShape,
        scale: float,
        new: tuple[Tensor, Tensor] | None = None,
        index: Tensor | None = None,
    ) -> Tensor:
        """See `Arena.attend`; fast steps only."""
        out = super().attend(layer, q, shape, scale, new, index)
        assert self.index is not None
        assert self._queries is not None
        buffer, length = self.buffers[layer], int(self.field("lengths")[0])
        low, high = int(self.field("low")[0]), int(self.field("high")[0])
        for b in self.rows_checked:
            iq = self._queries[b].view(1, 1, -1)
            scores = step_scores(iq, self.index.caches[layer][b], low, high, 0)
            want = best_keys(scores, low, self.config.k)
            got = self.index.indices[b, 0]
            same = float(torch.isin(got, want).float().mean())
            self.agreement = min(self.agreement, same)
            row, heads = slice(b, b + 1), buffer.k.shape[1]
            view = KVView(buffer.k[row], buffer.v[row], (0,), (length,))
            counts = self.index.counts[row].expand(-1, heads).contiguous()
            selection = Selection(got.expand(1, heads, -1).contiguous(), counts)
            exact = reference.decode_sparse(
                q[row], view, selection, [high], sink=self.config.sink, scale=scale
            )
            self.error = max(self.error, difference(out[row].flatten(1), exact.flatten(1)))
        return out


def indexed_arm(bench: Bench, fastest: Record) -> Record:
    """Milliseconds of a step, checked first; `fastest`: the fastest dense arm."""
    indexed = _with_index(bench)
    graphs = indexed.graphs(_arena(indexed, Arena))
    kinds, ages = [StepKind.FAST] * bench.rows, [0] * bench.rows
    indexed.step(graphs, kinds, ages)
    checked = _arena(indexed, CheckedArena)
    assert isinstance(checked, CheckedArena)
    checked.rows_checked = tuple(sorted({0, bench.rows - 1}))
    plain = StepGraphs(
        indexed.model, indexed.model.forward, checked, indexed.weights, compiled=False
    )
    plain.captures = False
    indexed.step(plain, kinds, ages)
    require_close(checked.error, "attention of an indexed step")
    if checked.agreement < AGREEMENT:
        raise NumericalError(f"only {checked.agreement:.2%} of a choice is the reference's")
    timed = timing(indexed, graphs, kinds)
    layers = bench.shape.layers
    read = bench.context * bench.rows * WIDTH * 2 * layers / bench.bandwidth * 1e3
    floor = bench.floor_ms(bench.config.budget) + read
    return {
        **timed, "speedup": fastest["ms"] / timed["ms"], "floor_ms": floor,
        "roofline": floor / timed["ms"], "tokens_per_s": bench.rows / timed["ms"] * 1e3,
        "error": checked.error, "agreement": checked.agreement, "extra_bytes": graphs.arena.nbytes,
        "width": WIDTH, "claim": CLAIM,
    }  # fmt: skip


def _arena(bench: Bench, kind: type[Arena]) -> Arena:
    return kind(bench.states, bench.shape.heads, bench.config, theta=1e6)


def _with_index(bench: Bench) -> Bench:
    """The same caches with index keys beside them, the same model with index projections."""
    model: Any = bench.model
    indexer = new_indexer(model, WIDTH, 1, "random")
    rows = Reader(model, indexer, indexer.card.layers).rows
    for state in bench.states.values():
        own = state.kv.buffers()
        size = (bench.rows, 1, own.k.shape[2], WIDTH)
        index = torch.empty(size, device=own.k.device, dtype=own.k.dtype).normal_()
        length = state.kv.length
        state.kv.length = 0
        state.kv.use(Buffers(own.k, own.v, own.norms, index))
        state.kv.length = state.kv.indexed = length
    weights = Weights(model, decoder_layers(model, bench.shape.total_layers), rows)
    return dataclasses.replace(bench, weights=weights)
