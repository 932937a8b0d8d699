"""Each row's compact copy of what its fast steps read."""

from __future__ import annotations

import torch
from torch import Tensor

from .types import KVView, Reading


class CompactKV:
    """What fast steps of one row read, contiguous: [sink | selected | recent], [Hkv, N, D].

    Made at a slow step; then every new token is appended to its recent part. Positions are baked
    into the keys by RoPE, so the order of the parts does not matter.
    """

    def __init__(
        self, kv: KVView, selected: Tensor, window_start: int, sink: int, room: int
    ) -> None:
        """Gather row 0 of `kv` (a view of a single row).

        Args:
            selected: int64 [Hkv, K] positions, none in sink or window.
            window_start: first position of the recent window.
            room: positions to leave free for the steps until the next refresh.
        """
        start, length = kv.starts[0], kv.lengths[0]
        first = torch.arange(start, min(start + sink, window_start), device=selected.device)
        window: slice | Tensor = slice(window_start, length)
        if kv.valid is not None:
            first = first[kv.valid[0, first]]
            window = torch.arange(window_start, length, device=selected.device)
            window = window[kv.valid[0, window]]
        index = torch.cat([first.expand(selected.shape[0], -1), selected], dim=1)
        self.k, self.count = self._gather(kv.k[0], index, window, room)
        self.v, _ = self._gather(kv.v[0], index, window, room)
        self.room = room
        self.selected = selected
        self.reading = Reading(selected, min(start + sink, window_start), window_start)

    @staticmethod
    @torch.inference_mode(False)
    @torch.no_grad()
    def _gather(
        cache: Tensor, index: Tensor, window: slice | Tensor, room: int
    ) -> tuple[Tensor, int]:
        recent = cache[:, window]
        fixed, count = index.shape[1], index.shape[1] + recent.shape[1]
        out = cache.new_empty(cache.shape[0], count + room, cache.shape[2])
        for h in range(cache.shape[0]):
            torch.index_select(cache[h], 0, index[h], out=out[h, :fixed])
        out[:, fixed:count] = recent
        return out, count

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add one token's key [Hkv, D] and value [Hkv, Dv] to the recent part."""
        if self.count == self.k.shape[1]:
            with torch.inference_mode(False):
                self.k = torch.nn.functional.pad(self.k, (0, 0, 0, self.room))
                self.v = torch.nn.functional.pad(self.v, (0, 0, 0, self.room))
        self.k[:, self.count] = k
        self.v[:, self.count] = v
        self.count += 1

    def replace(self, newest: int, k: Tensor, v: Tensor) -> None:
        """Put keys [Hkv, T, D] and values [Hkv, T, Dv] in the place of the `newest` tokens, which
        were appended last."""
        self.count -= newest
        for t in range(k.shape[1]):
            self.append(k[:, t], v[:, t])

    @property
    def keys(self) -> Tensor:
        """[Hkv, N, D], a view."""
        return self.k[:, : self.count]

    @property
    def values(self) -> Tensor:
        """[Hkv, N, Dv], a view."""
        return self.v[:, : self.count]

    @property
    def nbytes(self) -> int:
        """Bytes of the copy, room included."""
        return self.k.nbytes + self.v.nbytes
