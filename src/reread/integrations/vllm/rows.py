"""One layer's attention in one forward pass, request by request: prompt tokens densely, each other
token as the slow or fast step that it is."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ... import ops
from ...attention import HOST, allowed_span, chosen_by, read_chosen
from ...compact import CompactKV
from ...kv import Buffers, GrowingKV
from ...prefill import covers
from ...types import KVView, StepKind
from .pages import gather
from .requests import Registry, RowPlan


@dataclass(frozen=True, slots=True)
class LayerPass:
    """One layer in one forward pass.

    Attributes:
        name: the layer's.
        q: [N, H, D]; k, v: [N, Hkv, D] of the new tokens of all requests.
        cache: [blocks, Hkv, block, 2 D], the new tokens included.
        tables: int [rows, pages].
        scale: factor on the logits.
    """

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    cache: Tensor
    tables: Tensor
    scale: float


@torch.no_grad()
def attend_rows(registry: Registry, layer: LayerPass, out: Tensor) -> None:
    """Attention of all new tokens of all requests, into out [N, H, D]."""
    for row, plan in enumerate(registry.plans):
        _Row(registry, layer, plan, layer.tables[row]).attend(out)


class _Row:
    """One request in one layer of one pass."""

    def __init__(self, registry: Registry, layer: LayerPass, plan: RowPlan, table: Tensor) -> None:
        self.registry, self.layer, self.plan = registry, layer, plan
        self.table = table
        self.state = plan.request.layer(layer.name)
        self._gathered: tuple[Tensor, Tensor] | None = None

    def attend(self, out: Tensor) -> None:
        plan, first = self.plan, self.plan.first
        if plan.prompt:
            out[first : first + plan.prompt] = self._prompt()
        for step, kind in enumerate(plan.kinds):
            at = first + plan.prompt + step
            length = plan.cached + plan.prompt + step + 1
            out[at], read = self._decode(kind, at, length)
            self.state.tail = None
            if step >= plan.replayed:
                self.registry.meter.add(0, kind, read, length)
        self.state.kv = GrowingKV()  # what was gathered is of use in this pass only

    def _view(self, length: int) -> KVView:
        """The request's keys and values up to position `length`; read from the pages once."""
        if self._gathered is None:
            plan, layer = self.plan, self.layer
            self._gathered = gather(layer.cache, self.table, plan.cached + plan.new)
        k, v = self._gathered
        return KVView(k[:, :, :length], v[:, :, :length], (0,), (length,))

    def _prompt(self) -> Tensor:
        """Attention of the new prompt tokens, dense or by what an indexer chooses: [T, H, D]."""
        plan, layer, registry = self.plan, self.layer, self.registry
        end = plan.cached + plan.prompt
        view = self._view(end)
        q = layer.q[plan.first : plan.first + plan.prompt].transpose(0, 1)[None]
        if registry.keeps_tail:
            self.state.kv.length = end
            self.state.remember_tail(q, registry.config.selector.tail_queries)
        reader = registry.reader
        if reader is not None and not covers(0, end, reader.config):
            given = layer.name, q[0], view, plan.first, self.table, layer.scale
            return reader.attend_row(*given).transpose(0, 1)
        if reader is not None:
            reader.count_dense(plan.cached, end, 1)
        return attend_causal(q, view.k, view.v, layer.scale)[0].transpose(0, 1)

    def _decode(self, kind: StepKind, at: int, length: int) -> tuple[Tensor, int]:
        """One decode step of the token `at`: [H, D], and the keys it read per KV head."""
        state, layer, config = self.state, self.layer, self.registry.config
        q = layer.q[at]
        if kind is StepKind.FAST:
            if isinstance(state.chosen[0], CompactKV):
                newest = layer.k[at][None, :, None], layer.v[at][None, :, None]
                row = KVView(*newest, (0,), (1,))
            else:
                row = self._view(length)
                self._hold(row)
            out, read, _ = read_chosen(state, 0, q, row, config, layer.scale)
            return out, read
        row = self._view(length)
        if kind is StepKind.FULL:
            dense, _ = ops.decode_dense(q[None], row, scale=layer.scale, backend=HOST)
            state.chosen[0] = None
            return dense[0], length
        allowed = allowed_span(row, config)
        dense, mass = ops.decode_dense(
            q[None], row, scale=layer.scale, allowed=[allowed], backend=HOST
        )
        assert mass is not None
        self._choose(row, mass[0], allowed)
        return dense[0], length

    def _choose(self, row: KVView, mass: Tensor, allowed: tuple[int, int]) -> None:
        began = time.perf_counter()
        self._hold(row)
        state, registry = self.state, self.registry
        state.chosen[0] = chosen_by(state, 0, row, mass, allowed, registry.config)
        registry.refreshes += 1
        registry.refresh_s += time.perf_counter() - began

    def _hold(self, row: KVView) -> None:
        """Show the layer's state the gathered keys, whose norms the Selector may want."""
        norms = None
        if self.registry.config.selector.lambda_clip > 0:
            norms = torch.linalg.vector_norm(row.k, dim=-1, dtype=torch.float32)
        self.state.kv = GrowingKV()
        self.state.kv.use(Buffers(row.k, row.v, norms))
        self.state.kv.wrote(row.lengths[0])


def attend_causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The newest T positions ask: q [1, H, T, D], k and v [1, Hkv, L, D] -> [1, H, T, D]."""
    new, length = q.shape[2], k.shape[2]
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    if new == length:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    positions = torch.arange(length - new, length, device=q.device)
    mask = torch.arange(length, device=q.device)[None, :] <= positions[:, None]
    return scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None], scale=scale)
