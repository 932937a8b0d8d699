"""Other dense decode attention on the same caches: PyTorch's backends, and what else is installed.

Each rival is a function that makes, for one shape, a call `layer -> [B, H, D]`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .caches import DTYPE, Bench

Step = Callable[[int], Tensor]
PAGE = 16


def _sdpa(bench: Bench, backend: SDPBackend) -> Step:
    """Grouped-query attention, which the backends read each key once for. The G queries of a KV
    head as query positions would be the same product, and cuDNN takes several times as long."""
    shape = bench.shape
    q = bench.q.view(shape.rows, shape.heads, 1, shape.dim)

    def step(layer: int) -> Tensor:
        cache = bench.caches[layer]
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(
                q, cache.k, cache.v, scale=bench.scale, enable_gqa=True
            )
        return out.view_as(bench.q)

    return step


def _cudnn(bench: Bench) -> Step:
    return _sdpa(bench, SDPBackend.CUDNN_ATTENTION)


def _flash(bench: Bench) -> Step:
    return _sdpa(bench, SDPBackend.FLASH_ATTENTION)


def _flash_attn_3(bench: Bench) -> Step:
    attend = import_module("flash_attn_interface").flash_attn_with_kvcache

    def step(layer: int) -> Tensor:
        cache = bench.caches[layer]
        out = attend(
            bench.q[:, None], cache.k.transpose(1, 2), cache.v.transpose(1, 2),
            cache_seqlens=bench.lengths, softmax_scale=bench.scale,
        )  # fmt: skip
        out = out[0] if isinstance(out, tuple) else out
        return torch.as_tensor(out).view_as(bench.q)

    return step


def _flashinfer(bench: Bench) -> Step:
    """Its paged kernel: the same memory read as pages [Hkv, 16, D], which `paged` puts in order."""
    flashinfer = import_module("flashinfer")
    if bench.length % PAGE:
        raise ValueError(f"a length of {bench.length}: whole pages of {PAGE}")
    shape, device = bench.shape, bench.device
    pages = shape.length // PAGE
    table = torch.arange(shape.rows * pages, dtype=torch.int32, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=device), "HND", use_tensor_cores=True
    )
    wrapper.plan(
        torch.arange(shape.rows + 1, dtype=torch.int32, device=device) * pages, table,
        torch.full((shape.rows,), PAGE, dtype=torch.int32, device=device),
        shape.heads, shape.kv_heads, shape.dim, PAGE,
        q_data_type=DTYPE, kv_data_type=DTYPE, sm_scale=bench.scale,
    )  # fmt: skip

    def step(layer: int) -> Tensor:
        cache = bench.caches[layer]
        return torch.as_tensor(wrapper.run(bench.q, (_pages(cache.k), _pages(cache.v))))

    return step


def _pages(x: Tensor) -> Tensor:
    """[B, Hkv, L, D] contiguous -> the same memory as [pages, Hkv, 16, D]."""
    return x.reshape(-1, x.shape[1], PAGE, x.shape[3])


def paged(x: Tensor) -> Tensor:
    """The cache [B, Hkv, L, D] that `_pages` makes of the memory of x."""
    rows, heads, length, dim = x.shape
    pages = _pages(x).view(rows, length // PAGE, heads, PAGE, dim)
    return pages.transpose(1, 2).reshape(rows, heads, length, dim)


RIVALS: dict[str, Callable[[Bench], Step]] = {
    "cudnn (SDPA)": _cudnn,
    "flash (SDPA)": _flash,
    "flash_attn_3": _flash_attn_3,
    "flashinfer": _flashinfer,
}
