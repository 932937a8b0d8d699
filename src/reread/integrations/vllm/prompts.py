"""Which tokens of a pass are read sparsely, and what reads them; the rest of a prompt keeps
vLLM's own dense attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...prefill import PIECE_BYTES, PrefillMeter, covers, prefill_pages, prefill_row
from ...prefilling import SparsePrefill
from ...types import KVView
from .compat import BatchRow
from .index_pages import IndexPages


@dataclass(frozen=True, slots=True)
class SparsePart:
    """Prompt tokens of one row that an indexer chooses for; begin, end: their positions; first:
    the first of them among the tokens of the pass."""

    row: int
    first: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class DenseRun:
    """Consecutive tokens of the pass that are read densely, of one or more consecutive rows.

    Attributes:
        row: the first of them; first: its first token among the tokens of the pass.
        queries: per row, how many tokens; lengths: per row, positions up to the last of them.
    """

    row: int
    first: int
    queries: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def last(self) -> int:
        """One past its last token."""
        return self.first + sum(self.queries)


def split(
    rows: Sequence[BatchRow], front: int, config: SparsePrefill
) -> tuple[tuple[DenseRun, ...], tuple[SparsePart, ...]]:
    """What of a pass is read how; tokens behind a prompt are in neither where it has a sparse part.

    Args:
        front: rows at the beginning that have one token each, and are left out.
        config: with `dense_below` known.
    """
    runs: list[DenseRun] = []
    parts: list[SparsePart] = []
    first = front
    for at, row in enumerate(rows[front:], front):
        begin, end = row.cached, min(row.prompt, row.cached + row.new)
        dense = row.new
        if begin < end and not covers(0, end, config):
            edge = (config.dense_below or 0) // config.b_sel * config.b_sel
            dense = max(0, min(edge, end) - begin)
            parts.append(SparsePart(at, first + dense, begin + dense, end))
        if dense:
            before = runs.pop() if runs and runs[-1].last == first else DenseRun(at, first, (), ())
            queries, lengths = (*before.queries, dense), (*before.lengths, begin + dense)
            runs.append(DenseRun(before.row, before.first, queries, lengths))
        first += row.new
    return tuple(runs), tuple(parts)


@dataclass(slots=True)
class PromptReader:
    """Reads prompts sparsely, by what an indexer chooses.

    Attributes:
        config: with `dense_below` known.
        meter: keys that prompts read.
    """

    index: IndexPages
    config: SparsePrefill
    meter: PrefillMeter = field(default_factory=PrefillMeter)

    def count_dense(self, begin: int, end: int, layers: int) -> None:
        """Queries at [begin, end) of a row read everything, in so many layers."""
        for _ in range(layers):
            self.meter.dense(begin, end, 0)

    def attend_row(self, name: str, q: Tensor, row: KVView, first: int, table: Tensor,
                   scale: float) -> Tensor:  # fmt: skip
        """The newest T positions of one row by the reference: q [H, T, D] -> the same.

        Args:
            row: its keys and values; first: the first of these tokens among those of the pass.
            table: int, its pages in order.
        """
        own = self.index.queries(name, first, q.shape[1])
        index = own, self.index.keys(name, table, row.lengths[0])
        return prefill_row(q, row.k[0], row.v[0], 0, self.config, scale, self.meter, index=index)

    def attend_pages(self, name: str, q: Tensor, pages: tuple[Tensor, Tensor], table: Tensor,
                     part: SparsePart, out: Tensor, scale: float) -> None:  # fmt: skip
        """Sparse attention of a part by the kernels.

        Args:
            q, out: [N, H, D] of the whole pass.
            pages: keys and values, each [pages, Hkv, page size, D]; table: int32 [most pages], the
                row's in order.
        """
        count = part.end - part.begin
        at = slice(part.first, part.first + count)
        own = self.index.queries(name, part.first, count)
        prefill_pages(
            q[at].transpose(0, 1), pages, table, part.end, self.config, scale, self.meter,
            index=(own, self.index.keys(name, table, part.end)), backend="triton",
            out=out[at].transpose(0, 1),
        )  # fmt: skip

    def scratch_bytes(self, longest: int, tokens: int) -> int:
        """The most that `attend_pages` allocates for a pass of so many tokens, of rows of at most
        `longest`: scores, what is chosen, and one row's index keys and queries."""
        config, card = self.config, self.index.indexer.card
        blocks = min(max(1, PIECE_BYTES // (4 * longest)), -(-tokens // config.b_sel) + 1)
        chosen = min(config.budget(longest), longest) + config.sink
        # of a block: its row of scores; the list that a choice is made from; the choice, twice
        per_block = 4 * longest + 8 * max(1024, 6 * chosen) + 8 * chosen
        width = card.heads * card.width
        return blocks * per_block + 8 * longest * width + 16 * tokens * width

    def warm_up(
        self, name: str, pages: tuple[Tensor, Tensor], heads: int, longest: int, table: Tensor
    ) -> None:
        """Compile the kernels, so that no request waits for it. table: int32, of pages that are
        there, for `longest` positions."""
        tokens = min(longest, 2 * self.config.b_sel)
        dim, device = pages[0].shape[3], pages[0].device
        q = torch.zeros(tokens, heads, dim, dtype=pages[0].dtype, device=device)
        hidden = torch.zeros(tokens, self.index.indexer.card.hidden, dtype=q.dtype, device=device)
        nowhere = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        self.index.read(name, hidden, torch.zeros_like(nowhere), nowhere)
        meter, self.meter = self.meter, PrefillMeter()
        # a choice's list has a size that depends on the budget, and so on the position
        ends = [longest, min(longest, (self.config.dense_below or 0) + tokens)]
        while ends[0] // 2 > ends[-1]:
            ends.insert(0, ends[0] // 2)
        for end in ends:
            part = SparsePart(0, 0, end - tokens, end)
            self.attend_pages(name, q, pages, table, part, torch.empty_like(q), dim**-0.5)
        self.index.forget()
        self.meter = meter
