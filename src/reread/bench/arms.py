"""Dense decode attention of others, each in the place of ours inside the same compiled and captured
model."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..config import Config
from ..device import Arena
from ..layer import LayerState
from ..ops import reference
from ..steps import StepShape
from ..types import KVView, Selection
from .checks import named

# q [B, H, D], k and v [B, Hkv, L, D], scale -> [B, H, D]
Attention = Callable[[Tensor, Tensor, Tensor, float], Tensor]


@dataclass(frozen=True, slots=True)
class DenseArm:
    """One implementation of dense decode attention.

    Attributes:
        name: as printed.
        attention: None for our own kernel.
        missing: why it cannot run here; "" if it can.
    """

    name: str
    attention: Attention | None
    missing: str = ""


def sdpa(backend: SDPBackend) -> Attention:
    """PyTorch's attention with one backend; each KV head is read once for its query heads."""

    def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(
                q[:, :, None], k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out[:, :, 0]

    return attention


def flash_attention_3() -> DenseArm:
    """FlashAttention-3's decode attention, where it is installed."""
    if importlib.util.find_spec("flash_attn_interface") is None:
        return DenseArm("flash_attn_3", None, "flash_attn_interface is not installed")
    flash_attn_func = import_module("flash_attn_interface").flash_attn_func

    def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out = flash_attn_func(q[:, None], k.transpose(1, 2), v.transpose(1, 2), softmax_scale=scale)
        return torch.as_tensor(out[0] if isinstance(out, tuple) else out)[:, 0]

    return DenseArm("flash_attn_3", attention)


def flashinfer() -> DenseArm:
    """FlashInfer's decode attention, row by row from contiguous caches, where it is installed."""
    if importlib.util.find_spec("flashinfer") is None:
        return DenseArm("flashinfer", None, "flashinfer is not installed")
    single_decode_with_kv_cache = import_module("flashinfer").single_decode_with_kv_cache

    def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        rows = [
            single_decode_with_kv_cache(q[b], k[b], v[b], kv_layout="HND", sm_scale=scale)
            for b in range(q.shape[0])
        ]
        return torch.stack(rows)

    return DenseArm("flashinfer", attention)


def dense_arms() -> list[DenseArm]:
    """All of them; those that are not installed say so."""
    return [
        DenseArm("cudnn", sdpa(SDPBackend.CUDNN_ATTENTION)),
        DenseArm("flash", sdpa(SDPBackend.FLASH_ATTENTION)),
        DenseArm("reread-dense", None),
        flash_attention_3(),
        flashinfer(),
    ]


def pick(names: str) -> list[DenseArm]:
    """The arms that `names` names, see `checks.named`."""
    return named(names, dense_arms())


class DenseArena(Arena):
    """An arena whose dense steps run another attention."""

    def __init__(
        self,
        states: Mapping[int, LayerState],
        heads: int,
        attention: Attention | None,
        length: int,
    ) -> None:
        """length: cached positions that every row reads."""
        super().__init__(states, heads, Config.preset("dense"))
        self._attention, self._length = attention, length

    def dense(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """See `Arena.dense`."""
        if self._attention is None:
            return super().dense(layer, q, scale)
        buffer = self.buffers[layer]
        k, v = buffer.k[:, :, : self._length], buffer.v[:, :, : self._length]
        return self._attention(q, k, v, scale)


class NoAttention(Arena):
    """An arena whose attention does nothing: what is left is the rest of the model."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        shape: StepShape,
        scale: float,
        new: tuple[Tensor, Tensor] | None = None,
        index: Tensor | None = None,
    ) -> Tensor:
        """The queries themselves."""
        return q.clone()


class ReferenceArena(Arena):
    """Reads what another arena selected; some rows' attention is the reference's."""

    rows_checked: tuple[int, ...] = ()

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
        buffer, window = self.buffers[layer], self.field("window").tolist()
        length = int(self.field("lengths")[0])
        for b in self.rows_checked:
            row = slice(b, b + 1)
            view = KVView(buffer.k[row], buffer.v[row], (0,), (length,))
            selection = Selection(self.indices[layer][row], self.counts[layer][row])
            out[row] = reference.decode_sparse(
                q[row], view, selection, window[row], sink=self.config.sink, scale=scale
            )
        return out
