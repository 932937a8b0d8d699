"""Kernels of an indexer and of a sparse prefill against their references on odd shapes and odd
values."""

from __future__ import annotations

import itertools
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reread.config import SparsePrefill
from reread.errors import UnsupportedError
from reread.indexer.apply import best_keys, step_scores
from reread.indexer.model import rotate
from reread.ops import reference
from reread.prefill import PrefillMeter, prefill_row
from reread.types import BlockSelection

triton_ops = pytest.importorskip("reread.ops.triton")
from reread.ops.triton import index, index_decode, prefill  # noqa: E402  # needs Triton
from reread.ops.triton.workspace import Workspace  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TINIEST = 1e-45  # the smallest denormal
HUGE = 3.4e38


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


# -- top-K of blocks


def topk_both(scores: Tensor, low: int, windows: list[int], sizes: list[int]) -> None:
    """Equal to the reference, and to a sort by hand."""
    got = index.block_topk(scores.to(DEVICE), low=low, windows=windows, sizes=sizes).cpu()
    want = reference.best(scores, low, windows, sizes).indices
    assert torch.equal(got, want)
    for row, values, window, size in zip(got, scores.tolist(), windows, sizes, strict=True):
        by_hand = sorted(range(low, window), key=lambda j, v=values: (-v[j], j))[:size]
        assert row[:size].tolist() == sorted(by_hand)
        assert (row[size:] == -1).all()


VALUES = st.sampled_from(
    [0.0, -0.0, TINIEST, -TINIEST, 1e-38, -1e-38, HUGE, -HUGE, 1.0, -1.0, 1.0 + 2**-23, 0.5, 1e-3]
)


@settings(deadline=None, max_examples=25)
@given(st.lists(VALUES, min_size=1, max_size=24), st.integers(0, 6), st.data())
def test_topk_of_odd_values(values: list[float], low: int, data: st.DataObject) -> None:
    scores = torch.tensor([[7.0] * low + values, [-7.0] * low + values[::-1]])
    windows = [data.draw(st.integers(0, scores.shape[1])) for _ in range(2)]
    sizes = [data.draw(st.integers(0, max(0, window - low))) for window in windows]
    topk_both(scores, low, windows, sizes)


@pytest.mark.parametrize("value", [0.0, -0.0, -3.5, HUGE, -HUGE, TINIEST])
def test_topk_where_all_are_equal_takes_the_first(value: float) -> None:
    scores = torch.full((3, 1500), value)
    topk_both(scores, 2, [1500, 1500, 700], [1, 1498, 300])


def test_both_zeros_tie_and_denormals_do_not() -> None:
    scores = torch.tensor([[-0.0, 0.0, -0.0, TINIEST, 0.0, -TINIEST]])
    for size in range(7):
        topk_both(scores, 0, [6], [size])


@pytest.mark.parametrize("width", [1023, 1024, 1025, 2049, 4100])
def test_topk_around_the_size_of_a_list_and_of_a_step(width: int) -> None:
    scores = randn(2, width, seed=width).cpu()
    scores[1] = scores[1].round()
    topk_both(scores, 0, [width, width - 1], [width, 300])
    topk_both(scores, 1, [width, 1], [1, 0])


def test_topk_with_more_ties_than_the_list_holds() -> None:
    """The guess lists more than it has room for, or too few: the whole row is counted."""
    scores = torch.zeros(3, 6000)
    scores[0, ::7] = 1.0
    scores[1, 5000:] = torch.linspace(-1, -2, 1000)
    scores[2, 1:6000:2] = -1.0
    topk_both(scores, 0, [6000, 6000, 6000], [900, 340, 341])


def test_windows_of_width_zero_and_one_among_others() -> None:
    scores = randn(5, 60).cpu()
    topk_both(scores, 4, [0, 4, 5, 60, 3], [0, 0, 1, 20, 0])


def test_more_than_can_be_chosen_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="k=16385 of a sparse prefill: at most 16384"):
        index.block_topk(torch.zeros(1, 16_390), low=0, windows=[16_390], sizes=[16_385])


# -- scores of blocks


def scores_by_hand(iq: Tensor, ik: Tensor, edges: list[int], start: int) -> Tensor:
    """Per block the highest log2 of any of its queries' predicted mass, in float64."""
    every = iq.double() @ ik.double().T
    at = torch.arange(len(ik), device=DEVICE)
    seen_from = torch.arange(edges[0], edges[-1], device=DEVICE)
    hidden = (at[None, :] > seen_from[:, None]) | (at[None, :] < start)
    every = torch.log_softmax(every.masked_fill(hidden, float("-inf")), dim=-1) / math.log(2)
    blocks = [every[a - edges[0] : b - edges[0]].amax(0) for a, b in pairwise(edges)]
    return torch.stack(blocks).float()


@pytest.mark.parametrize(
    ("edges", "windows", "start", "sink"),
    [
        ([70, 71], [64], 3, 0),
        ([128, 130, 146, 147], [127, 9, 65], 9, 1),
        ([0, 16, 32], [0, 0], 0, 4),
        ([100, 228], [99], 0, 0),
        ([70, 134, 198], [66, 130], 70, 2),
        ([90, 93, 96, 99, 102, 103], [64, 65, 1, 90, 63], 0, 0),
    ],
)
@pytest.mark.parametrize("width", [16, 128])
def test_block_scores(
    edges: list[int], windows: list[int], start: int, sink: int, width: int
) -> None:
    count, length, low = edges[-1] - edges[0], edges[-1], start + sink
    # rows of wider tensors; padding in front of the row has high scores
    iq, ik = randn(count, 2 * width)[:, :width], randn(length, 3 * width, seed=1)[:, :width]
    want = scores_by_hand(iq, ik, edges, start)
    ik[:start] = 1e4
    got = index.index_scores(
        iq, ik, start=start, edges=edges, windows=windows, sink=sink,
        tuning=index.Tuning(keys=16, tiles=2, group=2),
    )  # fmt: skip
    for n, window in enumerate(windows):
        torch.testing.assert_close(got[n, low:window], want[n, low:window], atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize(("count", "first", "start"), [(1, 0, 0), (3, 200, 130), (131, 5, 5)])
def test_log_sums(count: int, first: int, start: int, factor: float) -> None:
    """Of queries that see one key, few and many; also where one key outweighs all others."""
    iq, ik = randn(count, 16) * factor, randn(first + count + 4, 16, seed=1)
    ik[:start] = torch.nan
    got = index.log_sums(iq, ik[: first + count], start=start, first=first)
    want = [
        torch.logsumexp(ik[start : first + t + 1].double() @ iq[t].double(), 0) / math.log(2)
        for t in range(count)
    ]
    torch.testing.assert_close(got, torch.stack(want).float(), atol=1e-4, rtol=1e-5)


def test_a_block_beyond_what_shares_a_choice_is_refused() -> None:
    iq, ik = torch.zeros(129, 16), torch.zeros(129, 16)
    with pytest.raises(UnsupportedError, match="129 queries that share a choice: at most 128"):
        index.index_scores(iq, ik, start=0, edges=[0, 129], windows=[0], sink=0)


# -- attention of blocks


@pytest.mark.parametrize(
    ("dim", "group", "rows"),
    [(64, 1, 256), (64, 3, 256), (64, 8, 32), (128, 8, 256), (128, 3, 32), (256, 3, 32),
     (256, 1, 32), (64, 3, 16)],
)  # fmt: skip
def test_sparse_prefill_of_views(dim: int, group: int, rows: int) -> None:
    """Queries, keys and values are views with strides of their own, the output is a transposed
    view; a tile has few rows, so heads are split among programs."""
    kv_heads, start, sink = 2, 3, 2
    edges, windows, sizes = [37, 40, 56, 60], [20, 4, 60 - 7], [9, 0, 30]
    count, length = edges[-1] - edges[0], edges[-1]
    windows[2] = min(windows[2], edges[2])
    q = randn(count, kv_heads * group, dim, seed=1).transpose(0, 1)
    k = randn(length + 9, kv_heads, 2 * dim, seed=2)[:length].transpose(0, 1)
    k, v = k[..., :dim], k[..., dim:]
    k[:, :start], v[:, :start] = torch.nan, torch.nan
    lists = torch.full((3, 30), -1, dtype=torch.int32)
    g = torch.Generator().manual_seed(0)
    for n, size in enumerate(sizes):
        span = windows[n] - start - sink
        picked = torch.randperm(max(span, 0), generator=g)[:size] + start + sink
        lists[n, :size] = picked.sort().values.to(torch.int32)
    selection = BlockSelection(lists.to(DEVICE), tuple(sizes))
    spans = {"start": start, "edges": edges, "windows": windows, "sink": sink}
    base = torch.full((count, kv_heads * group, dim + 8), 7.0, device=DEVICE)
    out = base[..., :dim].transpose(0, 1)
    tuning = prefill.PrefillTuning(rows=rows, keys=16, warps=4, stages=2)
    got = triton_ops.prefill_sparse(
        q, k, v, selection, **spans, scale=dim**-0.5, out=out, tuning=tuning
    )
    want = reference.prefill_sparse(
        q, k.nan_to_num(), v.nan_to_num(), selection, **spans, scale=dim**-0.5
    )
    assert got.data_ptr() == base.data_ptr()
    torch.testing.assert_close(out, want, atol=3e-5, rtol=3e-5)
    assert (base[..., dim:] == 7.0).all()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "v_dim", "why"),
    [
        (4, 2, 32, 32, "head dims 32 of keys"),
        (4, 2, 64, 128, "head dims 64 of keys and 128 of values"),
        (34, 2, 64, 64, "17 query heads a KV head: at most 16"),
    ],
)
def test_layers_that_the_kernel_does_not_cover(
    heads: int, kv_heads: int, dim: int, v_dim: int, why: str
) -> None:
    q, k, v = (
        torch.zeros(heads, 4, dim),
        torch.zeros(kv_heads, 4, dim),
        torch.zeros(kv_heads, 4, v_dim),
    )
    none = BlockSelection(torch.full((1, 1), -1, dtype=torch.int32), (0,))
    with pytest.raises(UnsupportedError, match=why):
        triton_ops.prefill_sparse(
            q, k, v, none, start=0, edges=[0, 4], windows=[0], sink=0, scale=1.0
        )


@settings(deadline=None, max_examples=6)
@given(
    length=st.integers(1, 70), share=st.floats(0, 1), pad=st.floats(0, 1), k=st.integers(1, 20),
    b_sel=st.sampled_from([1, 3, 16, 64]), sink=st.integers(0, 5), local=st.integers(1, 12),
    dense_below=st.sampled_from([0, 0, 9, 40]),
)  # fmt: skip
def test_any_row_is_the_references(
    length: int, share: float, pad: float, k: int, b_sel: int, sink: int, local: int,
    dense_below: int,
) -> None:  # fmt: skip
    new = max(1, round(length * share))
    start = round((length - 1) * pad)
    config = SparsePrefill(
        k=k, b_sel=b_sel, sink=sink, local=local, dense_below=dense_below, chooser="indexer"
    )
    q, keys, values = (randn(h, n, 64, seed=h * n) for h, n in ((2, new), (1, length), (1, length)))
    pair = randn(1, new, 16, seed=5), randn(1, length, 16, seed=6)
    meters = [PrefillMeter(), PrefillMeter()]
    got, want = (
        prefill_row(q, keys, values, start, config, 0.125, meter, index=pair, backend=backend)
        for backend, meter in zip(("triton", "reference"), meters, strict=True)
    )
    torch.testing.assert_close(got, want, atol=3e-5, rtol=3e-5)
    assert (got[:, : max(0, start - (length - new))] == 0).all()
    assert (meters[0].read, meters[0].cached) == (meters[1].read, meters[1].cached)


# -- turning and caching


@pytest.mark.parametrize("width", [16, 64, 128])
@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_turned_and_cached_as_the_model_does(width: int, tokens: int) -> None:
    """Left padding within and beyond the new tokens; nothing else of the cache is touched."""
    theta, capacity = 10_000.0, 60
    starts, lengths = [0, 40, 3, 50], [tokens, 50, 50, 50]
    at = torch.tensor(lengths)[:, None] - tokens + torch.arange(tokens)
    positions = (at - torch.tensor(starts)[:, None]).clamp(min=0).to(DEVICE)
    raw = randn(4, tokens, 3 * width)[..., : 2 * width]
    base = torch.full((4, 1, capacity, 2 * width), 9.0, device=DEVICE)
    cache = base[..., :width]
    got = index_decode.turn_and_append(
        raw, cache, index_decode.frequencies(width, theta, DEVICE),
        torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
    )  # fmt: skip
    want = rotate(raw[..., :width], positions, theta) * math.sqrt(1 / width)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    keys = rotate(raw[..., width:], positions, theta)
    expected = torch.full_like(base, 9.0)
    for b, length in enumerate(lengths):
        expected[b, 0, length - tokens : length, :width] = keys[b]
    torch.testing.assert_close(base, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("theta", [10_000.0, 5_000_000.0])
def test_far_positions_turn_as_the_model_does(theta: float) -> None:
    width, length, tokens = 32, 100_003, 3
    raw = randn(1, tokens, 2 * width)
    cache = torch.zeros(1, 1, length, width, device=DEVICE)
    span = [torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in (2, length)]
    got = index_decode.turn_and_append(
        raw, cache, index_decode.frequencies(width, theta, DEVICE), *span
    )
    positions = torch.arange(length - 2 - tokens, length - 2, device=DEVICE)[None]
    want = rotate(raw[..., :width], positions, theta) * math.sqrt(1 / width)
    # angles of 1e5 in float32 are exact to about 0.004
    torch.testing.assert_close(got, want, atol=1e-2, rtol=0)
    torch.testing.assert_close(
        cache[0, 0, -tokens:], rotate(raw[0, :, width:], positions[0], theta), atol=3e-2, rtol=0
    )
    assert not cache[0, 0, :-tokens].any()


# -- choosing in a decode step


def chosen_by_kernel(
    queries: Tensor, cache: Tensor, lows: list[int], highs: list[int], active: list[int], k: int
) -> tuple[Tensor, Tensor, Workspace]:
    rows, _, capacity, _ = cache.shape
    work = Workspace(rows, 1, 1, 16, capacity, DEVICE)
    indices = torch.full((rows, 1, k), -77, dtype=torch.int32, device=DEVICE)
    counts = torch.full((rows, 1), -77, dtype=torch.int32, device=DEVICE)
    low, high, on = (
        torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (lows, highs, active)
    )
    index_decode.choose_keys(
        queries, cache, (low, high), work=work, active=on, indices=indices, counts=counts
    )
    assert not work.hists.any()
    assert not work.cursors.any()
    return indices.cpu(), counts.cpu(), work


@pytest.mark.parametrize("k", [1, 12, 200])
@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "large", "small"])
def test_a_step_chooses_what_the_reference_chooses(k: int, kind: str) -> None:
    """Rows of all and of no candidates, one that is not active, and fields of ties; whole numbers,
    so that both ways have the same scores to the bit."""
    lows, highs = [0, 5, 30, 7, 0, 99], [99, 90, 30, 8, 100, 100]
    active = [1, 1, 1, 1, 0, 1]
    q = randn(6, 16, seed=1).mul(3).round()
    cache = randn(6, 1, 100, 16, seed=2).mul(3).round()
    if kind == "ties":
        cache = cache.clamp(-1, 1) * (torch.arange(16, device=DEVICE) < 2)
    if kind == "zeros":
        cache.zero_()
        cache[:, :, ::3] *= -1
    if kind == "large":
        cache *= 2.0**100
    if kind == "small":
        cache *= 2.0**-120
    for b, (low, high) in enumerate(zip(lows, highs, strict=True)):
        cache[b, 0, :low] = torch.nan
        cache[b, 0, high:] = torch.nan
    indices, counts, _ = chosen_by_kernel(q, cache, lows, highs, active, k)
    for b, (low, high) in enumerate(zip(lows, highs, strict=True)):
        if not active[b]:
            assert (indices[b] == -77).all()
            assert counts[b] == -77
            continue
        scores = step_scores(q[b, None, None].cpu(), cache[b].cpu(), low, high, 0)
        want = best_keys(scores, low, k)
        listed = scores.tolist()
        by_hand = sorted(range(high - low), key=lambda j, s=listed: (-s[j], j))[:k]
        assert want.tolist() == [low + j for j in sorted(by_hand)]
        assert counts[b] == want.numel() == min(k, high - low)
        assert indices[b, 0, : want.numel()].tolist() == want.tolist()
        assert (indices[b, 0, want.numel() :] == -1).all()


def test_a_step_over_several_chunks() -> None:
    """Candidates begin and end within chunks of 2048; ties cross their borders."""
    q, cache = randn(2, 16, seed=1).mul(2).round(), randn(2, 1, 4500, 16, seed=2).round()
    cache[1] = cache[1, :, :1]
    lows, highs = [2040, 2047], [4400, 4097]
    indices, counts, _ = chosen_by_kernel(q, cache, lows, highs, [1, 1], 700)
    for b, (low, high) in enumerate(zip(lows, highs, strict=True)):
        scores = step_scores(q[b, None, None].cpu(), cache[b].cpu(), low, high, 0)
        assert counts[b] == 700
        assert indices[b, 0].tolist() == best_keys(scores, low, 700).tolist()
    assert indices[1, 0].tolist() == list(range(2047, 2747))


def test_a_workspace_serves_one_step_after_another() -> None:
    """Rows come and go between steps; what an earlier one left in scratch does not matter."""
    q, cache = randn(3, 16, seed=4).round(), randn(3, 1, 80, 16, seed=5).round()
    work = Workspace(3, 1, 1, 16, 80, DEVICE)
    indices = torch.zeros(3, 1, 9, dtype=torch.int32, device=DEVICE)
    counts = torch.zeros(3, 1, dtype=torch.int32, device=DEVICE)
    for active, high in itertools.product(([1, 0, 1], [0, 1, 0], [1, 1, 1]), (80, 4, 41)):
        low = torch.full((3,), 4, dtype=torch.int32, device=DEVICE)
        on = torch.tensor(active, dtype=torch.int32, device=DEVICE)
        index_decode.choose_keys(
            q, cache, (low, torch.full_like(low, high)), work=work, active=on, indices=indices,
            counts=counts,
        )  # fmt: skip
        for b in range(3):
            if active[b]:
                scores = step_scores(q[b, None, None].cpu(), cache[b].cpu(), 4, high, 0)
                want = best_keys(scores, 4, 9).tolist()
                assert indices[b, 0].tolist() == want + [-1] * (9 - len(want))
                assert counts[b] == len(want)


def test_choices_in_half_precision() -> None:
    q, cache = randn(2, 64, seed=1).round().half(), randn(2, 1, 70, 64, seed=2).round().half()
    indices, _, _ = chosen_by_kernel(q, cache, [1, 2], [70, 50], [1, 1], 11)
    for b, (low, high) in enumerate(((1, 70), (2, 50))):
        scores = step_scores(q[b, None, None].cpu(), cache[b].cpu(), low, high, 0)
        assert indices[b, 0].tolist() == best_keys(scores, low, 11).tolist()
