"""How keys and values lie in vLLM's pages on the CPU: a plain layout of our own, because that of
vLLM's CPU kernels is private to them."""

from __future__ import annotations

import torch
from torch import Tensor


def as_pages(cache: Tensor) -> Tensor:
    """A view of a layer's cache [blocks, Hkv, block, 2 D], as vLLM allocates it, in which one
    head's keys of one page lie together, its values behind them: [blocks, Hkv, 2, block, D]."""
    blocks, heads, size, width = cache.shape
    return cache.view(blocks, heads, 2, size, width // 2)


def write(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store new keys and values.

    Args:
        cache: [blocks, Hkv, block, 2 D].
        k, v: [N, Hkv, D].
        slots: int64 [N], page * block size + place in the page; negative: nowhere.
    """
    pages = as_pages(cache)
    count = slots.shape[0]
    k, v = k[:count], v[:count]
    if bool((slots < 0).any()):
        kept = slots >= 0
        slots, k, v = slots[kept], k[kept], v[kept]
    page, place = slots // cache.shape[2], slots % cache.shape[2]
    pages[page, :, 0, place] = k.to(cache.dtype)
    pages[page, :, 1, place] = v.to(cache.dtype)


def gather(cache: Tensor, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """One request's keys and values in the order of its positions.

    Args:
        cache: [blocks, Hkv, block, 2 D].
        table: int [>= pages], the request's pages in order.
        length: positions to read.

    Returns:
        k, v: each [1, Hkv, length, D], contiguous up to the last page's end.
    """
    pages, size = as_pages(cache), cache.shape[2]
    own = table[: -(-length // size)].long()
    found = torch.index_select(pages, 0, own)
    # [pages, Hkv, 2, block, D] -> [2, Hkv, pages * block, D]
    k, v = found.permute(2, 1, 0, 3, 4).flatten(2, 3)
    return k[None, :, :length], v[None, :, :length]
