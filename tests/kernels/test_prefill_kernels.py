"""The kernels of a sparse prefill against their references: interpreted on the CPU, as they are on
a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from reread import ops
from reread.config import SparsePrefill
from reread.errors import UnsupportedError
from reread.ops import reference
from reread.prefill import Piece, PrefillMeter, pieces, prefill_row

triton_ops = pytest.importorskip("reread.ops.triton")
from reread.ops.triton import index  # noqa: E402  # needs Triton, checked above

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def piece_of(length: int, new: int, start: int, config: SparsePrefill) -> Piece:
    """The newest positions of a row as one piece."""
    (found,) = pieces(max(length - new, start), length, start, config, 1)
    return found


def index_of(length: int, new: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed + 31 * length + new)
    iq, ik = torch.randn(1, new, width, generator=g), torch.randn(1, length, width, generator=g)
    return iq.to(DEVICE), ik.to(DEVICE)


CASES = [
    # length, new, start, k, b_sel, sink, local
    (300, 300, 0, 20, 16, 4, 8),
    (301, 301, 7, 33, 16, 2, 1),
    (517, 130, 0, 64, 64, 4, 32),
    (260, 260, 0, 500, 32, 4, 8),
    (120, 1, 0, 10, 64, 4, 8),
    (1, 1, 0, 10, 64, 4, 8),
    (257, 257, 256, 10, 64, 4, 8),
    (24, 24, 0, 5, 1, 0, 1),
    (400, 400, 0, 40, 128, 4, 16),
    (200, 200, 0, 9, 24, 3, 5),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("width", [16, 64])
def test_the_same_positions_are_chosen(case: tuple[int, ...], width: int) -> None:
    length, new, start, k, b_sel, sink, local = case
    config = SparsePrefill(k=k, b_sel=b_sel, sink=sink, local=local)
    piece = piece_of(length, new, start, config)
    iq, ik = index_of(length, piece.last - piece.first, width)
    spans = {"start": start, "edges": piece.edges, "windows": piece.windows}
    got = ops.indexer_topk(iq, ik, sizes=piece.sizes, sink=sink, backend="triton", **spans)
    want = reference.indexer_topk(iq, ik, sizes=piece.sizes, sink=sink, **spans)
    assert got.sizes == want.sizes
    assert torch.equal(got.indices, want.indices)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (6, 2, 64), (2, 2, 128)])
def test_the_same_output(case: tuple[int, ...], heads: int, kv_heads: int, dim: int) -> None:
    length, new, start, k, b_sel, sink, local = case
    config = SparsePrefill(k=k, b_sel=b_sel, sink=sink, local=local)
    g = torch.Generator().manual_seed(length)
    q = torch.randn(heads, new, dim, generator=g).to(DEVICE)
    keys, values = (torch.randn(kv_heads, length, dim, generator=g).to(DEVICE) for _ in range(2))
    index_pair = index_of(length, new, 16)
    runs = [
        prefill_row(
            q, keys, values, start, SparsePrefill(
                k=k, b_sel=b_sel, sink=sink, local=local, chooser="indexer"
            ), dim**-0.5, PrefillMeter(), index=index_pair, backend=backend,
        )
        for backend in ("triton", "reference")
    ]  # fmt: skip
    assert config.sink == sink
    torch.testing.assert_close(*runs, atol=2e-5, rtol=2e-5)


def test_blocks_that_read_everything() -> None:
    g = torch.Generator().manual_seed(5)
    q = torch.randn(4, 200, 64, generator=g).to(DEVICE)
    keys, values = (torch.randn(2, 200, 64, generator=g).to(DEVICE) for _ in range(2))
    config = SparsePrefill(k=8, b_sel=16, local=4, chooser="indexer", dense_below=100)
    run = [
        prefill_row(
            q, keys, values, 0, config, 0.125, PrefillMeter(), index=index_of(200, 200, 32),
            backend=backend,
        )
        for backend in ("triton", "reference")
    ]  # fmt: skip
    torch.testing.assert_close(*run, atol=2e-5, rtol=2e-5)
    dense = torch.nn.functional.scaled_dot_product_attention(
        q[:, :96], *(x.repeat_interleave(2, 0)[:, :96] for x in (keys, values)), is_causal=True
    )
    torch.testing.assert_close(run[0][:, :96], dense, atol=2e-5, rtol=2e-5)


def topk_both(scores: Tensor, low: int, windows: list[int], sizes: list[int]) -> None:
    got = index.block_topk(scores, low=low, windows=windows, sizes=sizes)
    want = reference.best(scores, low, windows, sizes).indices
    assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["normal", "ties", "few", "ramp", "huge", "late"])
def test_topk_is_exact(kind: str) -> None:
    """Also where the guess from a sample is wrong: fields of ties, scores sorted by position,
    everything of interest in one place."""
    g = torch.Generator().manual_seed(3)
    scores = torch.randn(3, 9000, generator=g)
    if kind == "ties":
        scores = scores.clamp(-0.1, 0.1)
    if kind == "few":
        scores = (scores > 2.5).float() - 1
    if kind == "ramp":
        scores = torch.arange(9000.0).repeat(3, 1) / 7 - 300
    if kind == "huge":
        scores = scores * 1e30
    if kind == "late":
        scores[:, 1:8000:2] = -50.0
        scores[:, -500:] += 9
    topk_both(scores.to(DEVICE), 3, [9000, 5000, 700], [300, 64, 500])


def test_several_heads_are_refused() -> None:
    iq, ik = torch.randn(2, 8, 16), torch.randn(2, 8, 16)
    with pytest.raises(UnsupportedError, match="an indexer of 2 heads: one head"):
        triton_ops.indexer_topk(iq, ik, start=0, edges=(0, 8), windows=(0,), sizes=(0,), sink=0)
