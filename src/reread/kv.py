"""Where keys and values lie: a preallocated cache that only grows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import InputError
from .ops import MAX_LENGTH

GROWTH_SHARE = (
    16  # a full buffer grows by 1/16 of its length: at most 6.25 % of the KV bytes lie idle...
)
GROWTH_STEP = 64  # ...or by this many positions, where that is more


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """Where a layer's keys and values lie, room for growth included.

    Attributes:
        k, v: [B, Hkv, capacity, D].
        norms: fp32 [B, Hkv, capacity], where they are kept.
        index: [B, n, capacity, d] keys of an indexer, where there is one.
    """

    k: Tensor
    v: Tensor
    norms: Tensor | None
    index: Tensor | None = None

    def __eq__(self, other: object) -> bool:
        """The same memory, not the same values."""
        return isinstance(other, Buffers) and (
            self.k is other.k
            and self.v is other.v
            and self.norms is other.norms
            and self.index is other.index
        )

    def __hash__(self) -> int:
        return hash((id(self.k), id(self.v), id(self.norms), id(self.index)))


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the keys of a pass go whose rows stand at different columns.

    Attributes:
        rows: the cache's row of each row of the pass.
        columns: its first new column there.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]


class GrowingKV:
    """Keys and values of one layer, [B, Hkv, capacity, D], written in place and never moved within
    a row.

    Key norms are kept beside them when `with_norms` (fp32 [B, Hkv, capacity], written with the
    key). An indexer's keys lie beside them too; `indexed` positions have one. `moves` counts how
    often the memory became another. While `placement` is set, `append` and `append_index` write
    where it says.
    """

    def __init__(self, *, with_norms: bool = False) -> None:
        self.with_norms = with_norms
        self.length = 0
        self.reserved = 0
        self.moves = 0
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._norms: Tensor | None = None
        self._index: Tensor | None = None
        self.indexed = 0
        self.index_owner = ""
        self.placement: Placement | None = None

    def reserve(self, positions: int) -> None:
        """Ask for room for `positions` in total at the next growth, so that a known length is
        allocated once."""
        self.reserved = max(self.reserved, positions)

    def append(self, k: Tensor, v: Tensor) -> None:
        """Write keys and values [B, Hkv, T, D] behind what is there."""
        if self.placement is not None:
            self._place(k.detach(), v.detach(), self.placement)
            return
        end = self.length + k.shape[2]
        self._k = self._room(self._k, k, end)
        self._v = self._room(self._v, v, end)
        self._k[:, :, self.length : end] = k.detach()
        self._v[:, :, self.length : end] = v.detach()
        if self.with_norms:
            norms = torch.linalg.vector_norm(k.detach(), dim=-1, dtype=torch.float32)
            self._norms = self._room(self._norms, norms, end)
            self._norms[:, :, self.length : end] = norms
        self.length = end

    def _place(self, k: Tensor, v: Tensor, placement: Placement) -> None:
        """Write each row at its own columns; `length` becomes the end of the longest."""
        assert self._k is not None
        assert self._v is not None
        end = max(self.length, max(placement.columns) + k.shape[2])
        self._k, self._v = self._room(self._k, self._k, end), self._room(self._v, self._v, end)
        if self._norms is not None:
            self._norms = self._room(self._norms, self._norms, end)
        for i, (row, first) in enumerate(zip(placement.rows, placement.columns, strict=True)):
            span = slice(first, first + k.shape[2])
            self._k[row, :, span], self._v[row, :, span] = k[i], v[i]
            if self._norms is not None:
                norms = torch.linalg.vector_norm(k[i], dim=-1, dtype=torch.float32)
                self._norms[row, :, span] = norms
        self.length = end

    def claim_index(self, owner: str) -> None:
        """Before an indexer reads on; owner: a digest of its weights. An InputError if it has not
        read everything that is cached."""
        if not self.length:
            self._index = self._index if owner == self.index_owner else None
            self.index_owner = owner
        elif self.indexed < self.length or owner != self.index_owner:
            read = self.indexed if owner == self.index_owner else 0
            raise InputError(
                f"the cache holds {self.length} tokens, of {read} this indexer has read: "
                "read the whole text with it attached"
            )

    def append_index(self, keys: Tensor) -> None:
        """Write the index keys [B, n, T, d] of the newest T positions, or where `placement` says;
        `append` has written the keys of the same pass."""
        new = keys.shape[2]
        room = self.index_room(new, keys)
        if self.placement is None:
            room[:, :, self.length - new : self.length] = keys.detach()
            return
        places = zip(self.placement.rows, self.placement.columns, keys.detach(), strict=True)
        for row, first, own in places:
            room[row, :, first : first + new] = own

    def index_room(self, new: int, like: Tensor) -> Tensor:
        """The index cache [B, n, capacity, d] for the caller to write the newest `new` positions,
        which count as written. like: another tensor [B, n, ..., d] of the same dtype."""
        assert self.indexed >= self.length - new, "see claim_index"
        # a pass of some rows says nothing of how many the cache has
        like = like if self._index is None else self._index
        self._index = self._room(self._index, like, self.length, self.indexed)
        self.indexed = self.length
        return self._index

    def _room(
        self, buffer: Tensor | None, new: Tensor, end: int, filled: int | None = None
    ) -> Tensor:
        """A buffer that holds `end` positions; `filled` of them, or all cached, are kept."""
        if buffer is not None and buffer.shape[2] >= end:
            return buffer
        self.moves += 1
        growth = max(GROWTH_STEP, end // GROWTH_SHARE)
        capacity = max(end + (0 if self.reserved >= end else growth), self.reserved)
        if end <= MAX_LENGTH:
            # growth alone must not carry a cache beyond what the kernels address
            capacity = min(capacity, MAX_LENGTH) if self.reserved <= MAX_LENGTH else capacity
        # a cache made in inference mode may go on outside of it
        with torch.inference_mode(False):
            grown = torch.empty(
                (*new.shape[:2], capacity, *new.shape[3:]), dtype=new.dtype, device=new.device
            )
        if buffer is not None:
            kept = self.length if filled is None else filled
            grown[:, :, :kept] = buffer[:, :, :kept]
        return grown

    def buffers(self) -> Buffers:
        """The memory itself; it must have been written once."""
        assert self._k is not None
        assert self._v is not None
        return Buffers(self._k, self._v, self._norms, self._index)

    def use(self, buffers: Buffers) -> None:
        """Write into memory that is there already; only while nothing is cached."""
        assert self.length == 0
        self.moves += 1
        self._k, self._v, self._norms = buffers.k, buffers.v, buffers.norms
        self._index = buffers.index
        self.with_norms = buffers.norms is not None

    def advance(self, *, indexed: bool = False) -> None:
        """A captured step wrote one position; indexed: and its index key."""
        assert self._k is not None
        assert self.length < self._k.shape[2]
        self.indexed += int(indexed)
        self.length += 1

    def wrote(self, end: int, *, indexed: bool = False) -> None:
        """A captured pass wrote up to column `end`, exclusive; indexed: and its index keys."""
        assert self._k is not None
        assert end <= self._k.shape[2]
        self.length = max(self.length, end)
        if indexed:
            self.indexed = self.length

    def ensure_room(self, positions: int = 1) -> None:
        """Grow now if so many more positions would not fit."""
        end = self.length + positions
        if self._k is None or self._v is None or end <= self._k.shape[2]:
            return
        self._k = self._room(self._k, self._k, end)
        self._v = self._room(self._v, self._v, end)
        if self._norms is not None:
            self._norms = self._room(self._norms, self._norms, end)
        if self._index is not None:
            self._index = self._room(self._index, self._index, end, self.indexed)

    @property
    def index(self) -> Tensor:
        """[B, n, L, d] index keys of all cached positions, a view."""
        assert self._index is not None
        assert self.indexed == self.length
        return self._index[:, :, : self.length]

    @property
    def keys(self) -> Tensor:
        """[B, Hkv, L, D], a view."""
        assert self._k is not None
        return self._k[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        """[B, Hkv, L, Dv], a view."""
        assert self._v is not None
        return self._v[:, :, : self.length]

    @property
    def norms(self) -> Tensor | None:
        """fp32 [B, Hkv, L] L2 norms of the cached keys, a view; None unless asked for."""
        return None if self._norms is None else self._norms[:, :, : self.length]

    @property
    def capacity(self) -> int:
        """Positions that fit without growing."""
        return 0 if self._k is None else int(self._k.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys, values and norms, room for growth included."""
        buffers = (self._k, self._v, self._norms, self._index)
        return sum(t.nbytes for t in buffers if t is not None)

    def crop(self, length: int) -> None:
        """Forget everything from position `length` on."""
        assert 0 <= length <= self.length
        self.length = length
        self.indexed = min(self.indexed, length)

    def track_norms(self) -> None:
        """Start keeping key norms; those of keys already here are computed now."""
        if self.with_norms:
            return
        self.with_norms = True
        self.moves += 1
        if self._k is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            self._norms = torch.linalg.vector_norm(self._k, dim=-1, dtype=torch.float32)

    def reindex(self, rows: Tensor) -> None:
        """Keep the batch rows `rows` (int64), in that order."""
        self.moves += 1
        for name in ("_k", "_v", "_norms", "_index"):
            buffer = getattr(self, name)
            if buffer is not None:
                with torch.inference_mode(False):
                    kept = buffer.index_select(0, rows.to(buffer.device).clone())
                setattr(self, name, kept)
