"""What layers with a cache of their own kind (sliding windows, recurrent states) held at one
moment, to go back to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..cache import RereadLayer


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    return value


def _back(now: Any, then: Any) -> Any:
    """`then`, in the memory of `now` where that fits: captured kernels know its address."""
    if isinstance(then, Tensor):
        if isinstance(now, Tensor) and now.shape == then.shape and now.dtype == then.dtype:
            return now.copy_(then)
        return then.clone()
    if isinstance(then, dict):
        old = now if isinstance(now, dict) else {}
        return {key: _back(old.get(key), inner) for key, inner in then.items()}
    return then


class Snapshot:
    """Of every layer that reread does not keep itself; those are cropped instead."""

    @torch.no_grad()
    def __init__(self, cache: Cache) -> None:
        others = [layer for layer in cache.layers if not isinstance(layer, RereadLayer)]
        self._held = [(layer, _copy(vars(layer))) for layer in others]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back; the snapshot can be used again."""
        for layer, then in self._held:
            now = vars(layer)
            for name, value in then.items():
                now[name] = _back(now.get(name), value)
