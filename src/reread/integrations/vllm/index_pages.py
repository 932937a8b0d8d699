"""An indexer inside vLLM: what computes index queries and keys of prompts, and where the keys lie:
beside vLLM's pages, a slot a token, so that whatever shares a page shares its index keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ...errors import ConfigError
from ...indexer.model import Indexer


class IndexPages:
    """Index keys of all sparse layers of a worker.

    Attributes:
        indexer: in the model's dtype, on its device.
    """

    def __init__(
        self,
        indexer: Indexer,
        layers: Mapping[str, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        kernels: bool,
    ) -> None:
        """layers: index in the model of each sparse layer; kernels: whether the Triton kernels
        turn what the projections give, else PyTorch."""
        self.indexer = indexer.to(device=device, dtype=dtype).requires_grad_(False)
        self._layers, self._dtype, self._device = dict(layers), dtype, device
        self._keys: dict[str, Tensor] = {}
        self._page: dict[str, int] = {}
        self._queries: dict[str, Tensor] = {}
        self._turns: Tensor | None = None
        self._rows: dict[str, Tensor] = {}
        if kernels:
            from ...ops.triton import frequencies

            self._turns = frequencies(indexer.card.width, indexer.card.theta, device)
            parts: tuple[Any, ...] = self.indexer.query, self.indexer.key
            for name, layer in layers.items():
                self._rows[name] = torch.cat([part[str(layer)].weight for part in parts])

    @property
    def slot_bytes(self) -> int:
        """Bytes of a token's index keys, all layers."""
        card = self.indexer.card
        return len(self._layers) * card.heads * card.width * self._dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all index keys."""
        return sum(keys.nbytes for keys in self._keys.values())

    def allocate(self, pages: Mapping[str, tuple[int, int]]) -> None:
        """Make room, once vLLM's pages are there: of each layer, how many and of how many positions
        each.

        Raises:
            ConfigError: there is no memory for it.
        """
        width = self.indexer.card.heads * self.indexer.card.width
        try:
            for name, (count, size) in pages.items():
                # zeros: a page's unused end is gathered, though nothing reads it
                shape = count * size, width
                self._keys[name] = torch.zeros(shape, dtype=self._dtype, device=self._device)
                self._page[name] = size
        except RuntimeError as error:
            # on the CPU it is a plain one
            if not isinstance(error, torch.OutOfMemoryError) and "alloc" not in str(error):
                raise
            raise ConfigError(
                "the indexer's keys do not fit beside vLLM's pages: lower kv_cache_memory_bytes or "
                "num_gpu_blocks_override"
            ) from error

    def read(self, name: str, x: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Compute index queries and keys of a pass's tokens in the layer `name`.

        Args:
            x: [N, hidden], the layer's input; positions, slots: int [>= N], each token's in its
                row, and its slot in the pages; below 0: it is none.
        """
        keys, card = self._keys.get(name), self.indexer.card
        if keys is None:
            return  # vLLM warms up before there are pages
        self._queries.clear()  # the layer before has attended
        if self._turns is not None:
            from ...ops.triton import turn_and_store

            raw = linear(x, self._rows[name])
            queries = turn_and_store(raw, keys, self._turns, positions, slots)
            self._queries[name] = queries[None]
            return
        layer, count = self._layers[name], len(x)
        places, kept = positions[:count], slots[:count] >= 0
        made = self.indexer.keys(layer, x, places).transpose(0, 1).flatten(1)
        keys[slots[:count][kept]] = made[kept].to(self._dtype)
        self._queries[name] = self.indexer.queries(layer, x, places).to(self._dtype)
        assert self._queries[name].shape == (card.heads, count, card.width)

    def queries(self, name: str, first: int, count: int) -> Tensor:
        """Index queries [n, count, d] of the pass's tokens from `first` on, in the layer that was
        read last."""
        return self._queries[name][:, first : first + count]

    def keys(self, name: str, table: Tensor, length: int) -> Tensor:
        """Index keys [n, length, d] of one row; table: int, its pages in order."""
        size, heads = self._page[name], self.indexer.card.heads
        pages = self._keys[name].view(-1, size, heads * self.indexer.card.width)
        own = torch.index_select(pages, 0, table[: -(-length // size)])
        return own.view(-1, heads, self.indexer.card.width)[:length].transpose(0, 1)

    def forget(self) -> None:
        """The pass is over: its queries are of no use."""
        self._queries.clear()
