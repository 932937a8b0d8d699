"""The cache keeps what it was given in bounded memory; the compact copy holds what is read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reread.compact import CompactKV
from reread.kv import GrowingKV, Placement
from reread.types import KVView

B, HKV, D, DV = 2, 3, 4, 5


def pieces(sizes: list[int], seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(B, HKV, t, D, generator=g), torch.randn(B, HKV, t, DV, generator=g))
        for t in sizes
    ]


def filled(sizes: list[int], **kw: bool) -> tuple[GrowingKV, Tensor, Tensor]:
    kv, parts = GrowingKV(**kw), pieces(sizes)
    for k, v in parts:
        kv.append(k, v)
    return kv, torch.cat([k for k, _ in parts], 2), torch.cat([v for _, v in parts], 2)


@given(st.lists(st.integers(1, 70), min_size=1, max_size=12))
def test_appending_piece_by_piece_equals_concatenation(sizes: list[int]) -> None:
    kv, k, v = filled(sizes)
    assert kv.length == sum(sizes)
    assert torch.equal(kv.keys, k)
    assert torch.equal(kv.values, v)


@given(st.lists(st.integers(1, 70), min_size=1, max_size=12))
def test_norms_are_those_of_the_cached_keys(sizes: list[int]) -> None:
    kv, k, _ = filled(sizes, with_norms=True)
    assert kv.norms is not None
    assert kv.norms.dtype == torch.float32
    torch.testing.assert_close(kv.norms, k.norm(dim=-1))


def test_norms_are_absent_unless_asked_for_and_can_be_added_later() -> None:
    kv, k, _ = filled([5, 7])
    assert kv.norms is None
    kv.track_norms()
    more = pieces([3], seed=9)[0]
    kv.append(*more)
    assert kv.norms is not None
    torch.testing.assert_close(kv.norms, torch.cat([k, more[0]], 2).norm(dim=-1))


@pytest.mark.parametrize("prompt", [1, 1000, 4096])
def test_memory_stays_within_an_eighth_of_what_is_cached(prompt: int) -> None:
    kv = GrowingKV()
    kv.append(*pieces([prompt])[0])
    one = pieces([1])[0]
    for _ in range(200):
        kv.append(*one)
        exact = B * HKV * (D + DV) * 4 * kv.length
        slack = B * HKV * (D + DV) * 4 * 64  # a short cache grows by 64 positions at a time
        assert exact <= kv.nbytes <= max(1.125 * exact, exact + slack)


def test_decoding_does_not_copy_the_cache_at_every_token() -> None:
    kv, *_ = filled([2000])
    addresses = set()
    for _ in range(250):
        kv.append(*pieces([1])[0])
        addresses.add(kv.keys.data_ptr())
    assert len(addresses) <= 4


def test_a_reserved_length_is_allocated_once_and_exactly() -> None:
    kv = GrowingKV()
    kv.reserve(300)
    kv.append(*pieces([100])[0])
    before = kv.keys.data_ptr()
    for _ in range(200):
        kv.append(*pieces([1])[0])
    assert kv.keys.data_ptr() == before
    assert kv.nbytes == B * HKV * 300 * (D + DV) * 4


def test_cropping_forgets_the_newest_only() -> None:
    kv, k, _ = filled([10, 5], with_norms=True)
    kv.crop(12)
    new = pieces([2], seed=4)[0]
    kv.append(*new)
    want = torch.cat([k[:, :, :12], new[0]], 2)
    assert torch.equal(kv.keys, want)
    assert kv.norms is not None
    torch.testing.assert_close(kv.norms, want.norm(dim=-1))


@given(st.data())
def test_passes_that_place_rows_keep_index_keys_beside_keys(data: st.DataObject) -> None:
    """Each row at its own columns, some rows or all, over what was refused, and past the room."""
    rows, (kv, keys, _) = 2, filled([9])
    kv.append_index(keys[:, :1])
    want = [list(own[0, :, 0]) for own in keys]
    ends = [9, 9]
    for n in range(data.draw(st.integers(1, 30))):
        new = data.draw(st.integers(1, 9))
        some = data.draw(st.sampled_from([(0,), (1,), (0, 1), (1, 0)]))
        first = tuple(data.draw(st.integers(max(5, ends[b] - 3), ends[b])) for b in some)
        k = torch.full((len(some), *keys.shape[1:2], new, keys.shape[3]), float(n + 1))
        k += torch.rand(k.shape, generator=torch.Generator().manual_seed(n))
        kv.placement = Placement(some, first)
        kv.append(k, torch.nn.functional.pad(k, (0, 1)))
        kv.append_index(k[:, :1])
        kv.placement = None
        for own, b, at in zip(k, some, first, strict=True):
            want[b][at : at + new] = list(own[0, :, 0])
            ends[b] = at + new
            del want[b][ends[b] :]
        kv.crop(max(ends))
        assert kv.indexed == kv.length
        for b in range(rows):
            assert torch.equal(kv.index[b, 0, : ends[b], 0], torch.stack(want[b]))
            assert torch.equal(kv.index[b, 0, : ends[b]], kv.keys[b, 0, : ends[b]])


def test_rows_can_be_repeated_and_picked() -> None:
    kv, k, v = filled([6], with_norms=True)
    kv.reindex(torch.tensor([1, 1, 0]))
    assert torch.equal(kv.keys, k[[1, 1, 0]])
    assert torch.equal(kv.values, v[[1, 1, 0]])
    assert kv.norms is not None
    assert kv.norms.shape == (3, HKV, 6)


def compact(
    start: int, selected: list[list[int]], window: int, sink: int, valid: Tensor | None = None
) -> CompactKV:
    kv, *_ = filled([20])
    view = KVView(kv.keys[:1], kv.values[:1], (start,), (20,), valid)
    return CompactKV(view, torch.tensor(selected).reshape(HKV, -1).long(), window, sink, room=2)


def test_a_compact_copy_holds_sink_selected_and_recent_of_each_head() -> None:
    _, k, v = filled([20])
    selected = [[6, 9], [7, 8], [6, 13]]
    copy = compact(3, selected, window=15, sink=2)
    for h in range(HKV):
        read = [3, 4, *selected[h], *range(15, 20)]
        got = sorted(map(tuple, copy.keys[h].tolist()))
        assert got == sorted(map(tuple, k[0, h, read].tolist()))
        assert sorted(map(tuple, copy.values[h].tolist())) == sorted(
            map(tuple, v[0, h, read].tolist())
        )


def test_keys_and_values_of_a_compact_copy_stay_paired() -> None:
    _, k, v = filled([20])
    copy = compact(0, [[5], [6], [7]], window=17, sink=1)
    for h in range(HKV):
        for n in range(copy.count):
            j = next(j for j in range(20) if torch.equal(k[0, h, j], copy.keys[h, n]))
            assert torch.equal(v[0, h, j], copy.values[h, n])


def test_a_compact_copy_leaves_out_positions_that_do_not_exist() -> None:
    valid = torch.ones(1, 20, dtype=torch.bool)
    valid[0, [1, 17]] = False
    _, k, _ = filled([20])
    copy = compact(0, [[5], [6], [7]], window=16, sink=2, valid=valid)
    want = k[0, 0, [0, 5, 16, 18, 19]]
    assert sorted(map(tuple, copy.keys[0].tolist())) == sorted(map(tuple, want.tolist()))


def test_a_compact_copy_grows_past_its_room_without_losing_anything() -> None:
    copy = compact(0, [[5], [6], [7]], window=16, sink=1)
    before, added = copy.keys.clone(), []
    for i in range(7):
        k, v = pieces([1], seed=50 + i)[0]
        copy.append(k[0, :, 0], v[0, :, 0])
        added.append((k[0], v[0]))
    assert torch.equal(copy.keys, torch.cat([before, *(k for k, _ in added)], 1))
    assert torch.equal(copy.values[:, -7:], torch.cat([v for _, v in added], 1))


def test_sink_and_window_that_meet_do_not_count_a_key_twice() -> None:
    _, k, _ = filled([20])
    copy = compact(0, [[], [], []], window=3, sink=8)
    assert copy.count == 20
    assert torch.equal(copy.keys[0], k[0, 0])


def test_the_cache_is_not_written_to_by_its_compact_copy() -> None:
    kv, k, _ = filled([20])
    copy = CompactKV(
        KVView(kv.keys[:1], kv.values[:1], (0,), (20,)), torch.zeros(HKV, 0).long(), 16, 2, room=1
    )
    copy.append(torch.full((HKV, D), 9.0), torch.full((HKV, DV), 9.0))
    copy.keys.fill_(7.0)
    assert torch.equal(kv.keys, k)
