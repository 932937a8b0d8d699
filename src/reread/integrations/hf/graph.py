"""A whole decode step as CUDA graphs: layers compiled around an opaque attention op, one graph per
shape of step.

The model's own forward runs, with three things changed while it is traced and captured: its
attention implementation is the op below, its cache passes new keys and values through, and its
decoder layers are compiled (once for all of them: which layer it is comes in as a tensor, so
nothing is specialised on it). Afterwards the model is as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, library, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from ...cuda import new_stream
from ...device import Arena
from ...steps import StepShape
from .cache import cache_keyword
from .fuse import ATTENTION as PROJECTIONS
from .fuse import BESIDE, First, Stack, shared_parameters, stack_siblings, stacked

ATTENTION = "reread_step"
HANDLE = "reread_layer"  # keyword that tells the attention op its layer, int64 []
RECOMPILES = 64  # batch sizes, dtypes and models that one process may compile for


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
        q: [B, H, 1, D]; k, v: [B, Hkv, 1, D]; layer: int64 [], on the CPU.
        index: [B, 1, 2 d], what an indexer's projections gave; None without one.

    Returns:
        [B, 1, H, D].
    """
    step = _Active.step
    assert step is not None, "the op runs only within a step"
    raw = None if index is None else index[:, 0]
    out = step.attention(int(layer), q[:, :, 0], k[:, :, 0], v[:, :, 0], scale, raw)
    return out.unsqueeze(1)


@decode_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, layer: Tensor, scale: float, index: Tensor | None) -> Tensor:
    return q.new_empty(q.shape[0], 1, q.shape[1], v.shape[3])


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
    layer = kwargs.get(HANDLE)
    if layer is None:
        layer = torch.tensor(module.layer_idx)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    first = module._modules.get("q_proj")
    index = first.rest() if isinstance(first, First) and BESIDE in first.names else None
    return torch.ops.reread.decode_attention(query, key, value, layer, scale, index), None


class PassingCache(Cache):
    """Hands new keys and values through: the attention op writes them where they belong."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return 2, 0


def _call_layer(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


_COMPILED: dict[str, Callable[..., Any]] = {}


def _compiled(device: torch.device) -> Callable[..., Any]:
    """One function for all layers of all models; on the CPU it is traced, not compiled."""
    backend = "inductor" if device.type == "cuda" else "eager"
    if backend not in _COMPILED:
        # combo kernels: queries and keys are normalised and rotated in one launch
        options: Any = {"combo_kernels": True} if backend == "inductor" else None
        _COMPILED[backend] = torch.compile(
            _call_layer, fullgraph=True, dynamic=False, backend=backend, options=options
        )
    return _COMPILED[backend]


def decoder_layers(model: nn.Module, count: int) -> list[nn.Module]:
    """The model's decoder layers, each with one attention of its own index; [] if not to be
    found."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            owners = [
                [m.layer_idx for m in layer.modules() if hasattr(m, "layer_idx")]
                for layer in module
            ]
            if all(set(found) == {i} for i, found in enumerate(owners)):
                return list(module)
    return []


class Weights:
    """What is done to a model's weights for its captured steps; undone by `close`."""

    def __init__(
        self, model: nn.Module, layers: list[nn.Module], beside: Sequence[Tensor] = ()
    ) -> None:
        """beside: per layer, an indexer's query and key projection, [2 d, hidden]."""
        self.layers = layers
        shared = shared_parameters(model)
        self.stacks: list[Stack] = []
        for i, layer in enumerate(layers):
            self.stacks += stack_siblings(layer, shared, beside[i] if beside else None)
        self._model = model
        self._addresses = self._where()

    def _where(self) -> tuple[int, ...]:
        return tuple(p.data_ptr() for p in self._model.parameters())

    @property
    def index_beside(self) -> bool:
        """Whether every layer's index projections are computed with those of its attention."""
        return len(self.layers) > 0 and len(self.layers) == sum(
            stack.names == PROJECTIONS for stack in self.stacks
        )

    @property
    def moved(self) -> bool:
        """Whether a parameter was replaced since, so that captured steps read stale memory."""
        return self._where() != self._addresses or not all(s.in_place for s in self.stacks)

    def close(self) -> None:
        """Separate parameters again."""
        for stack in self.stacks:
            stack.split()
        self.stacks = []


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
        self.ids = torch.zeros(arena.rows, 1, dtype=torch.long, device=arena.device)
        self.positions = torch.zeros_like(self.ids)
        self._graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self.captures = arena.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self.captures else None

    def run(self, shape: StepShape, ids: Tensor, positions: Tensor | None, length: int) -> Any:
        """One step; the arena has been told what it is.

        Args:
            ids: int64 [B, 1]; positions: [B, 1] or None, which is length - 1.

        Returns:
            the model's output; its logits are good until the next step.
        """
        self.ids.copy_(ids)
        if positions is None:
            self.positions.fill_(length - 1)
        else:
            self.positions.copy_(positions.expand_as(self.positions))
        return self.replay(shape)

    def replay(self, shape: StepShape) -> Any:
        """The step as the arena knows it once more, captured or not."""
        if shape not in self._graphs:
            return self._first(shape)
        graph, output = self._graphs[shape]
        graph.replay()
        return output

    @torch.inference_mode(False)
    @torch.no_grad()
    def _first(self, shape: StepShape) -> Any:
        """Run the step as it is, which compiles what needs it, and capture it for the next time."""
        with self._swapped(shape):
            if not self.captures:
                return self._step()
            stream = new_stream(self.arena.device)
            stream.wait_stream(torch.cuda.current_stream(self.arena.device))
            with torch.cuda.stream(stream):
                output = self._step()
            torch.cuda.current_stream(self.arena.device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                captured = self._step()
            self._graphs[shape] = (graph, captured)
            return output

    def _step(self) -> Any:
        self.arena.lanes.restart()
        output = self._forward(
            input_ids=self.ids,
            position_ids=self.positions,
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
        config = self._model.config.get_text_config(decoder=True)
        before = config._attn_implementation
        AttentionInterface.register(ATTENTION, _attention)
        config._attn_implementation_internal = ATTENTION
        _Active.step, _Active.shape = self, shape
        try:
            with contextlib.ExitStack() as stack:
                if self.compiled or self.arena.index is not None:
                    stack.enter_context(stacked(self._weights.stacks))
                if self.compiled:
                    stack.enter_context(_recompiles())
                    stack.enter_context(_layers_compiled(self._weights.layers, self.arena.device))
                yield
        finally:
            config._attn_implementation_internal = before
            _Active.step = None
            AttentionInterface._global_mapping.pop(ATTENTION, None)


@contextmanager
def _layers_compiled(layers: list[nn.Module], device: torch.device) -> Iterator[None]:
    compiled = _compiled(device)
    for i, layer in enumerate(layers):
        layer.forward = _bind(compiled, layer, torch.tensor(i))
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _bind(compiled: Callable[..., Any], layer: nn.Module, handle: Tensor) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return compiled(layer, *args, **{HANDLE: handle}, **kwargs)

    return forward


def _recompiles() -> Any:
    """Room for one compilation per batch size, where torch would give up after eight."""
    return torch._dynamo.config.patch(recompile_limit=RECOMPILES)
