"""A whole decode step as CUDA graphs: layers compiled around an opaque attention op, one graph per
shape of step.

The model's own forward runs, with three things changed while it is traced and captured: its
attention implementation is the op below, its cache passes new keys and values through, and its
decoder layers are compiled (once for all of them: which layer it is comes in as a tensor, so
nothing is specialised on it). Afterwards the model is as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, library, nn

from ...cuda import new_stream
from ...device import Arena
from ...steps import StepShape
from .cache import cache_keyword
from .compiled import (
    PassingCache,
    Weights,
    attention_of,
    decoder_layers,
    layers_compiled,
    op_arguments,
)
from .fuse import stacked

__all__ = ["StepGraphs", "Weights", "decoder_layers"]

ATTENTION = "reread_step"


class _Active:
    """The step that is being traced, warmed up or captured."""

    step: StepGraphs | None = None
    shape: StepShape = StepShape.FAST


@library.custom_op("reread::decode_attention", mutates_args=())
def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, layer: Tensor, scale: float, index: Tensor | None
) -> Tensor:
    """Append and attend for one layer of the active step.

    Opaque to the compiler, which would otherwise turn the float scale into a float64 tensor.

    Args:
        q: [B, H, T, D]; k, v: [B, Hkv, T, D]; layer: int64 [], on the CPU. T is 1 but for passes
            that verify.
        index: [B, T, 2 d], what an indexer's projections gave; None without one.

    Returns:
        [B, T, H, D].
    """
    step = _Active.step
    assert step is not None, "the op runs only within a step"
    if q.shape[2] > 1:
        out = step.arena.verify(int(layer), q, _Active.shape, scale, (k, v), index)
        return out.transpose(1, 2).contiguous()
    raw = None if index is None else index[:, 0]
    out = step.attention(int(layer), q[:, :, 0], k[:, :, 0], v[:, :, 0], scale, raw)
    return out.unsqueeze(1)


@decode_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, layer: Tensor, scale: float, index: Tensor | None) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in the place of SDPA."""
    layer, scale, index = op_arguments(module, query, scaling, kwargs)
    return torch.ops.reread.decode_attention(query, key, value, layer, scale, index), None


class StepGraphs:
    """The decode steps of one arena.

    Args:
        model: the model whose forward is captured; forward: that forward, without our wrapper.
        weights: of this model, shared by all its arenas.
        compiled: whether its layers are compiled.

    Attributes:
        captures: whether steps become graphs; interpreted kernels on the CPU cannot.
    """

    def __init__(
        self,
        model: Any,
        forward: Callable[..., Any],
        arena: Arena,
        weights: Weights,
        *,
        compiled: bool = True,
    ) -> None:
        self.arena = arena
        self.compiled = compiled and bool(weights.layers)
        self._model, self._forward, self._weights = model, forward, weights
        # ids and positions by the number of tokens of a row, each [B, T]
        self._inputs: dict[int, tuple[Tensor, Tensor]] = {}
        self._graphs: dict[tuple[StepShape, int], tuple[torch.cuda.CUDAGraph, Any]] = {}
        self.captures = arena.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self.captures else None

    def run(self, shape: StepShape, ids: Tensor, positions: Tensor | None, length: int) -> Any:
        """One step; the arena has been told what it is.

        Args:
            ids: int64 [B, T]; positions: [B, T] or None, which is length - 1.

        Returns:
            the model's output; its logits are good until the next step.
        """
        new = ids.shape[1]
        own, places = self.inputs(new)
        own.copy_(ids)
        if positions is None:
            places.fill_(length - 1)
        else:
            places.copy_(positions.expand_as(places))
        return self.replay(shape, new)

    @torch.inference_mode(False)
    def inputs(self, new: int) -> tuple[Tensor, Tensor]:
        """Where steps of so many tokens a row have their ids and positions, int64 [B, T]."""
        if new not in self._inputs:
            ids = torch.zeros(self.arena.rows, new, dtype=torch.long, device=self.arena.device)
            self._inputs[new] = ids, torch.zeros_like(ids)
        return self._inputs[new]

    def replay(self, shape: StepShape, new: int = 1) -> Any:
        """The step as the arena knows it once more, captured or not."""
        if (shape, new) not in self._graphs:
            return self._first(shape, new)
        graph, output = self._graphs[shape, new]
        graph.replay()
        return output

    @torch.inference_mode(False)
    @torch.no_grad()
    def _first(self, shape: StepShape, new: int) -> Any:
        """Run the step as it is, which compiles what needs it, and capture it for the next time."""
        with self._swapped(shape):
            if not self.captures:
                return self._step(new)
            stream = new_stream(self.arena.device)
            stream.wait_stream(torch.cuda.current_stream(self.arena.device))
            with torch.cuda.stream(stream):
                output = self._step(new)
            torch.cuda.current_stream(self.arena.device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                captured = self._step(new)
            self._graphs[shape, new] = (graph, captured)
            return output

    def _step(self, new: int) -> Any:
        self.arena.lanes.restart()
        ids, positions = self.inputs(new)
        output = self._forward(
            input_ids=ids,
            position_ids=positions,
            use_cache=True,
            return_dict=True,
            **{cache_keyword(self._model): PassingCache()},
        )
        self.arena.lanes.barrier()
        return output

    def attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, index: Tensor | None
    ) -> Tensor:
        """One layer of the active step: q [B, H, D], k and v [B, Hkv, D] -> [B, H, D]."""
        return self.arena.attend(layer, q, _Active.shape, scale, (k, v), index)

    @contextmanager
    def _swapped(self, shape: StepShape) -> Iterator[None]:
        """The model as it is traced and captured."""
        _Active.step, _Active.shape = self, shape
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(attention_of(self._model, ATTENTION, _attention))
                if self.compiled or self.arena.index is not None:
                    stack.enter_context(stacked(self._weights.stacks))
                if self.compiled:
                    stack.enter_context(layers_compiled(self._weights.layers, self.arena.device))
                yield
        finally:
            _Active.step = None
