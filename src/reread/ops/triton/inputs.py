"""What the kernels read, at fixed addresses: a cache, contiguous or in pages, and what fast rows
read of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chosen:
    """What fast rows read, all int32 on the device.

    Attributes:
        indices: [B, Hkv, K] ascending, padded behind `counts`; [B, 1, K] where all KV heads of a
            row share them.
        counts: [B, Hkv] or [B, 1].
        window_start: [B] first position of the recent window.
        sink: first positions of a row that are always read.
        lanes: [B], which of the lists is a row's: indices and counts have as many as there are
            lanes; None: row b has list b.
    """

    indices: Tensor
    counts: Tensor
    window_start: Tensor
    sink: int
    lanes: Tensor | None = None

    @property
    def shared(self) -> bool:
        """Whether all KV heads of a row have one list."""
        return self.indices.shape[1] == 1


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values with each row's valid span.

    Attributes:
        k, v: [B, Hkv, L, D]; with `tables` pages of all rows, [pages, Hkv, page size, D].
        starts, lengths: int32 [B] on the device.
        tables: int32 [B, most pages], each row's pages in order; its last stride is 1.
        longest: with `tables`, positions of the longest row.
    """

    k: Tensor
    v: Tensor
    starts: Tensor
    lengths: Tensor
    tables: Tensor | None = None
    longest: int = 0

    @property
    def strides(self) -> tuple[int, ...]:
        """Row (or page), head and position strides of keys, then of values."""
        return (*self.k.stride()[:3], *self.v.stride()[:3])

    @property
    def width(self) -> int:
        """Positions of a row that there is room for."""
        return int(self.k.shape[2]) if self.tables is None else self.longest

    @property
    def page(self) -> int:
        """Positions of a page; 0: the rows are contiguous."""
        return 0 if self.tables is None else int(self.k.shape[2])

    @property
    def paging(self) -> tuple[Tensor, int]:
        """The tables and the stride of their rows, for the kernels."""
        # without tables the kernels read none: any pointer will do
        return (self.starts, 0) if self.tables is None else (self.tables, self.tables.stride(0))


Allowed = tuple[Tensor, Tensor]
