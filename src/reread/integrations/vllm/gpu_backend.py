"""The attention backend that takes the place of vLLM's FLASH_ATTN. Prompts, and layers that are
not full attention over a decoder's own text, keep FlashAttention; decode rows of the others are
ours."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from ...errors import UnsupportedError
from .checks import check_layer
from .compat import attention_layers
from .lanes import LaneRegistry, Pass, Replay
from .prompts import DenseRun, SparsePart

Dense = tuple[tuple[int, int, FlashAttentionMetadata], ...]


class RereadFlashBackend(FlashAttentionBackend):  # type: ignore[misc]  # vLLM is absent where types are checked
    """vLLM's FlashAttention backend with another implementation of decode steps."""

    @staticmethod
    def get_impl_cls() -> type[RereadFlashImpl]:
        return RereadFlashImpl

    @staticmethod
    def get_builder_cls() -> type[RereadFlashBuilder]:
        return RereadFlashBuilder


@dataclass
class RereadFlashMetadata(FlashAttentionMetadata):  # type: ignore[misc]  # vLLM is absent where types are checked
    """Of a group of layers that are ours.

    Attributes:
        decodes: rows at the front of the batch with one token each, which our kernels attend.
        dense: of tokens behind them, for FlashAttention: the first, one past the last, and theirs.
        sparse: of tokens behind them that an indexer chooses for.
        replays: steps that rows behind them take one after the other.
        positions: of all tokens in their rows; None where nothing asks.
    """

    decodes: int = 0
    dense: Dense = ()
    sparse: tuple[SparsePart, ...] = ()
    replays: tuple[Replay, ...] = ()
    positions: Tensor | None = None


class RereadFlashBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]  # vLLM is absent where types are checked
    """Called once a pass for each group of layers, when the batch is arranged: the place to plan
    the pass."""

    reorder_batch_threshold = 1  # rows of one token go to the front
    supports_update_block_table = False

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        if _full(kv_cache_spec):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        support: AttentionCGSupport = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        return support

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layers = attention_layers(self.vllm_config)
        impls = [layers[name].impl for name in self.layer_names if name in layers]
        sparse = [i for i in impls if isinstance(i, RereadFlashImpl) and i.sparse]
        ours = {i.registry for i in sparse}
        assert len(ours) < 2, "one worker has one registry"
        if sparse and len(sparse) < len(impls):
            raise UnsupportedError(
                "full-attention and other layers in one group of vLLM's cache are not supported "
                "with reread: leave disable_hybrid_kv_cache_manager unset"
            )
        self._registry: LaneRegistry | None = next(iter(ours), None)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return self._registry is None and bool(super().use_cascade_attention(*args, **kwargs))

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        given = common_attn_metadata
        if self._registry is None:
            return super().build(common_prefix_len, given, fast_build)
        served = self._registry.plan()
        if served is None:
            # a pass that serves nobody: vLLM captures or warms up
            self._registry.arena.tell([], self._registry.tokens())
            served = Pass(given.num_reqs, given.num_reqs if given.max_query_len == 1 else 0)
        if served.decodes == served.rows:
            return _ours(given, given.num_reqs)  # with those that are padding
        n = served.decodes
        if served.dense is None:
            whole = super().build(0, _behind(given, n), fast_build)
            dense: Dense = ((n, given.num_actual_tokens, whole),)
        else:
            # without a schedule of FlashAttention's own: there is one buffer for it
            build = functools.partial(super().build, 0, fast_build=True)
            dense = tuple((r.first, r.last, build(_of_run(given, r))) for r in served.dense)
        positions = None if self._registry.reader is None else given.positions
        return _ours(
            given, n, dense=dense, sparse=served.sparse, replays=served.replays, positions=positions
        )


def _full(spec: Any) -> bool:
    return isinstance(spec, FullAttentionSpec) and spec.sliding_window is None


def _ours(
    given: Any,
    decodes: int,
    **behind: Any,
) -> RereadFlashMetadata:
    base = {
        "num_actual_tokens": given.num_actual_tokens,
        "max_query_len": given.max_query_len,
        "query_start_loc": given.query_start_loc,
        "max_seq_len": given.max_seq_len,
        "seq_lens": given.seq_lens,
        "block_table": given.block_table_tensor,
        "slot_mapping": given.slot_mapping,
        "use_cascade": False,
        "common_prefix_len": 0,
        "cu_prefix_query_lens": None,
        "prefix_kv_lens": None,
        "suffix_kv_lens": None,
    }
    return RereadFlashMetadata(**base, decodes=decodes, **behind)


def _behind(given: Any, rows: int) -> Any:
    """What is left of a batch without its first `rows` rows of one token each."""
    if rows == 0:
        return given
    whole = given.num_reqs
    per_row = {
        field.name: value[rows:]
        for field in fields(CommonAttentionMetadata)
        if isinstance(value := getattr(given, field.name), Tensor)
        and value.dim() > 0
        and value.shape[0] == whole
        and field.name not in ("slot_mapping", "positions")
    }
    per_token = {"slot_mapping": given.slot_mapping[rows:]}
    if given.positions is not None:
        per_token["positions"] = given.positions[rows:]
    return given.replace(
        **per_row,
        **per_token,
        query_start_loc=given.query_start_loc[rows:] - rows,
        query_start_loc_cpu=given.query_start_loc_cpu[rows:] - rows,
        num_reqs=whole - rows,
        num_actual_tokens=given.num_actual_tokens - rows,
    )


def _of_run(given: Any, run: DenseRun) -> Any:
    """What a batch says of the tokens of a run."""
    device, rows = given.seq_lens.device, len(run.queries)
    starts = torch.tensor([0, *itertools.accumulate(run.queries)], dtype=torch.int32)
    lengths = torch.tensor(run.lengths, dtype=torch.int32)
    at = slice(run.first, run.last)
    return given.replace(
        query_start_loc=starts.to(device, non_blocking=True),
        query_start_loc_cpu=starts,
        seq_lens=lengths.to(device, non_blocking=True),
        num_reqs=rows,
        num_actual_tokens=run.last - run.first,
        max_query_len=max(run.queries),
        max_seq_len=max(run.lengths),
        block_table_tensor=given.block_table_tensor[run.row : run.row + rows],
        slot_mapping=given.slot_mapping[at],
        positions=None if given.positions is None else given.positions[at],
    )


class RereadFlashImpl(FlashAttentionImpl):  # type: ignore[misc]  # vLLM is absent where types are checked
    """One layer's attention; made when the model is built, before weights load.

    Attributes:
        sparse: whether the layer is ours.
        registry: the worker's, set once the model is there; None: nothing runs yet.

    Raises:
        UnsupportedError: a full-attention layer with a term that the ops do not know.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sparse = self.attn_type == AttentionType.DECODER and self.sliding_window == (-1, -1)
        self.registry: LaneRegistry | None = None
        if self.sparse:
            check_layer(self, quantised="fp8" in str(self.kv_cache_dtype))

    def read_along(self, name: str, x: Tensor, metadata: Any, slots: Tensor) -> None:
        """The layer's input x [N, hidden], before it attends; see `listening`."""
        if not isinstance(metadata, RereadFlashMetadata) or metadata.positions is None:
            return  # decode steps alone: only prompts are asked about
        assert self.registry is not None
        assert self.registry.reader is not None
        count = min(len(x), len(slots))
        self.registry.reader.index.read(name, x[:count], metadata.positions, slots)

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if not isinstance(attn_metadata, RereadFlashMetadata):
            given = layer, query, key, value, kv_cache, attn_metadata, output
            result: Tensor = super().forward(*given, *args, **kwargs)
            return result
        plan = attn_metadata
        assert self.registry is not None, "the worker hands its registry over after loading"
        for first, last, metadata in plan.dense:
            at = slice(first, last)
            own = query[at], key[at], value[at], kv_cache, metadata, output[at]
            super().forward(layer, *own, *args, **kwargs)
        # [pages, 2, size, Hkv, D]: each as [pages, Hkv, size, D]
        k, v = kv_cache.unbind(1)
        self._ours(
            plan, str(layer.layer_name), query, (k.transpose(1, 2), v.transpose(1, 2)), output
        )
        return output

    def _ours(
        self,
        plan: RereadFlashMetadata,
        name: str,
        query: Tensor,
        pages: tuple[Tensor, Tensor],
        output: Tensor,
    ) -> None:
        """Everything that FlashAttention does not do."""
        assert self.registry is not None
        arena, n = self.registry.arena, plan.decodes
        for part in plan.sparse:
            assert self.registry.reader is not None, "who planned the part"
            table = plan.block_table[part.row]
            self.registry.reader.attend_pages(name, query, pages, table, part, output, self.scale)
        if n:
            q, table = query[:n].contiguous(), plan.block_table[:n]
            arena.attend(name, q, pages, table, output[:n], self.scale)
        for replay in plan.replays:
            first, table = replay.first, plan.block_table[replay.row : replay.row + 1]
            for board in replay.boards:
                at = slice(first, first + board.rows)
                q, own = query[at].contiguous(), table.expand(board.rows, -1)
                arena.attend(name, q, pages, own, output[at], self.scale, board)
                first += board.rows
