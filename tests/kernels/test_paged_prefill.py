"""A sparse prefill over vLLM's pages against rows that are contiguous: interpreted on the CPU, as
it is on a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from reread.indexer.model import Indexer, IndexerCard, rotate
from reread.integrations.vllm.compat import BatchRow
from reread.integrations.vllm.index_pages import IndexPages
from reread.integrations.vllm.prompts import DenseRun, PromptReader, SparsePart, split
from reread.prefill import PrefillMeter, prefill_pages, prefill_row, resolved
from reread.prefilling import SparsePrefill

pytest.importorskip("reread.ops.triton")
from reread.ops.triton import frequencies, turn_and_store  # needs Triton, checked above

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def randn(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=g).to(DEVICE)


def in_pages(rows: Tensor, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """[2, Hkv, L, D] keys and values as vLLM lays them, [pages, 2, size, Hkv, D], in any order
    among pages of others, and the table."""
    length = rows.shape[2]
    count = -(-length // size)
    order = torch.randperm(count + 5, generator=torch.Generator().manual_seed(seed))[:count]
    table = order.to(DEVICE, torch.int32)
    cache = randn(count + 5, 2, size, rows.shape[1], rows.shape[3], seed=7)
    for at in range(length):
        cache[table[at // size].long(), :, at % size] = rows[:, :, at]
    return cache, table


CASES = [
    # length, new, k, b_sel, sink, local
    (300, 300, 20, 16, 4, 8),
    (517, 130, 64, 64, 4, 32),
    (260, 260, 500, 32, 4, 8),
    (120, 1, 10, 64, 4, 8),
    (333, 77, 33, 1, 0, 1),
    (400, 200, 40, 128, 4, 16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("size", [16, 48])
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_pages_give_what_a_row_gives(case: tuple[int, ...], size: int, backend: str) -> None:
    length, new, k, b_sel, sink, local = case
    config = SparsePrefill(k=k, b_sel=b_sel, sink=sink, local=local, chooser="indexer")
    q, rows = randn(new, 6, 64), randn(2, 2, length, 64)
    index = randn(1, new, 16), randn(1, length, 16)
    meters = PrefillMeter(), PrefillMeter()
    want = prefill_row(
        q.transpose(0, 1), *rows, 0, config, 0.125, meters[0], index=index, backend=backend
    )
    cache, table = in_pages(rows, size)
    pages = tuple(x.transpose(1, 2) for x in cache.unbind(1))
    out = torch.full_like(q, 9.0)
    prefill_pages(
        q.transpose(0, 1), pages, table, length, config, 0.125, meters[1], index=index,
        backend=backend, out=out.transpose(0, 1),
    )  # fmt: skip
    torch.testing.assert_close(out.transpose(0, 1), want, atol=1e-6, rtol=1e-6)
    assert (meters[0].read, meters[0].cached) == (meters[1].read, meters[1].cached)


@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize("tokens", [1, 33, 70])
def test_keys_go_to_their_slots(width: int, tokens: int) -> None:
    """Tokens of several rows, some of which are none."""
    raw = randn(tokens, 3 * width)[:, : 2 * width]
    g = torch.Generator().manual_seed(tokens)
    positions = torch.randint(0, 3000, (tokens,), generator=g).to(DEVICE)
    slots = torch.randperm(200, generator=g)[:tokens].to(DEVICE)
    slots[::5] = -1
    index = torch.full((200, width), 9.0, device=DEVICE)
    got = turn_and_store(raw, index, frequencies(width, 1e4, DEVICE), positions, slots)
    want = rotate(raw[:, :width], positions, 1e4) * math.sqrt(1 / width)
    torch.testing.assert_close(got, want, atol=2e-3, rtol=0)
    expected = torch.full_like(index, 9.0)
    expected[slots[slots >= 0]] = rotate(raw[:, width:], positions, 1e4)[slots >= 0]
    torch.testing.assert_close(index, expected, atol=2e-3, rtol=0)


def reader_of(config: SparsePrefill, *, kernels: bool, heads: int = 1) -> PromptReader:
    card = IndexerCard(
        layers=(0, 3), hidden=24, width=16, theta=1e4, backbone="none", heads=heads
    )  # fmt: skip
    torch.manual_seed(0)
    index = IndexPages(
        Indexer(card), {"a": 0, "b": 3}, torch.float32, DEVICE, kernels=kernels
    )  # fmt: skip
    index.allocate({"a": (40, 16), "b": (40, 16)})
    return PromptReader(index, config)


def test_a_prompt_in_chunks_by_kernels_and_by_the_reference() -> None:
    """Two chunks of one row, whose index keys are read back from pages."""
    config = resolved(SparsePrefill(k=20, b_sel=16, local=8, chooser="indexer"), "reference")
    length, first = 300, 160
    hidden, q, rows = randn(length, 24), randn(length, 4, 64), randn(2, 2, length, 64)
    cache, table = in_pages(rows, 16)
    pages = tuple(x.transpose(1, 2) for x in cache.unbind(1))
    at = torch.arange(length, device=DEVICE)
    slots = table.long()[at // 16] * 16 + at % 16
    outs = []
    for kernels in (True, False):
        reader = reader_of(config, kernels=kernels)
        out = torch.zeros_like(q)
        for begin, end in ((0, first), (first, length)):
            span = slice(begin, end)
            # a token of another row goes before
            x = torch.cat([hidden[:1] + 1, hidden[span]])
            places = torch.cat([at[:1], at[span]]), torch.cat([slots[:1] * 0 - 1, slots[span]])
            reader.index.read("b", x, *places)
            queries = torch.cat([q[:1] * 0, q[span]])
            part, to = SparsePart(0, 1, begin, end), torch.zeros_like(queries)
            if kernels:
                reader.attend_pages("b", queries, pages, table, part, to, 0.2)
            else:
                own = reader.index.queries("b", 1, end - begin)
                keys = reader.index.keys("b", table, end)
                to[1:] = prefill_row(
                    queries[1:].transpose(0, 1), *rows[:, :, :end], 0, config, 0.2, reader.meter,
                    index=(own, keys),
                ).transpose(0, 1)  # fmt: skip
            out[span] = to[1:]
            reader.index.forget()
        outs.append(out)
    torch.testing.assert_close(*outs, atol=2e-5, rtol=2e-5)


def test_kernels_are_compiled_before_requests() -> None:
    """On pages that all lie at 0, and nothing is counted."""
    reader = reader_of(SparsePrefill(k=8, b_sel=16, chooser="indexer"), kernels=True)
    pages = tuple(randn(3, 2, 16, 64) for _ in range(2))
    table = torch.zeros(20, dtype=torch.int32, device=DEVICE)
    reader.warm_up("a", pages, 4, 300, table)
    assert reader.meter == PrefillMeter()
    assert not reader.index.keys("a", table, 300).any()


def test_bytes_are_counted() -> None:
    reader = reader_of(SparsePrefill(k=8, b_sel=16, chooser="indexer"), kernels=False, heads=2)
    assert reader.index.slot_bytes == 2 * 2 * 16 * 4
    assert reader.index.nbytes == 40 * 16 * reader.index.slot_bytes
    few, many = (reader.scratch_bytes(4096, tokens) for tokens in (64, 4096))
    assert 4 * 4096 < few < many


def rows(*given: tuple[int, int, int]) -> list[BatchRow]:
    """Of prompt, cached, new."""
    return [BatchRow(f"r{i}", None, *values) for i, values in enumerate(given)]


def spans(dense: tuple[DenseRun, ...], sparse: tuple[SparsePart, ...]) -> Any:
    return (
        [(d.row, d.first, d.queries, d.lengths) for d in dense],
        [(s.row, s.first, s.begin, s.end) for s in sparse],
    )


def test_what_of_a_pass_is_read_how() -> None:
    config = SparsePrefill(k=8, b_sel=16, sink=4, local=8, chooser="indexer", dense_below=72)
    # a short prompt; one over the edge (64, whole blocks); one far in; one with a replay behind it
    batch = rows((5, 9, 1), (40, 0, 40), (300, 32, 128), (900, 512, 64), (100, 96, 10), (30, 0, 30))
    assert spans(*split(batch, 1, config)) == (
        [(1, 1, (40, 32), (40, 64)), (5, 243, (30,), (30,))],
        [(2, 73, 64, 160), (3, 169, 512, 576), (4, 233, 96, 100)],
    )
    # tokens behind a prompt, and a prompt that fits the budget, are dense
    batch = rows((10, 12, 6), (20, 0, 20))
    assert spans(*split(batch, 0, config)) == ([(0, 0, (6, 20), (18, 20))], [])
