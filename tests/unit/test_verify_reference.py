"""Several queries a row in one call against one at a time, with padding and holes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reread import ops
from reread.types import KVView


@given(seed=st.integers(0, 2**31 - 1), queries=st.integers(1, 9), holes=st.booleans())
def test_as_one_query_at_a_time(seed: int, queries: int, holes: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    starts, lengths = (0, 3, 6), (24, 17, 6 + queries)
    k, v = torch.randn(3, 2, 24, 8, generator=g), torch.randn(3, 2, 24, 5, generator=g)
    q = torch.randn(3, queries, 4, 8, generator=g).transpose(1, 2)
    allowed = [(2, 20), (4, 4 + seed % 13), (7, 7)]
    valid = torch.rand(3, 24, generator=g) > 0.3 if holes else None
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        k[b, :, :start], k[b, :, length:] = math.nan, math.nan
        v[b, :, :start], v[b, :, length:] = math.nan, math.nan
        if valid is not None:
            valid[b, start] = True
    kv = KVView(k, v, starts, lengths, valid)
    out, mass = ops.verify_dense(q, kv, scale=0.3, allowed=allowed)
    assert mass is not None
    plain, none = ops.verify_dense(q, kv, scale=0.3)
    assert none is None
    torch.testing.assert_close(plain, out)
    for t in range(queries):
        behind = queries - 1 - t
        short = KVView(k, v, starts, tuple(n - behind for n in lengths), valid)
        seen = [
            (low, max(low, min(high, n)))
            for (low, high), n in zip(allowed, short.lengths, strict=True)
        ]
        want, want_mass = ops.decode_dense(q[:, :, t].contiguous(), short, scale=0.3, allowed=seen)
        torch.testing.assert_close(out[:, :, t], want)
        torch.testing.assert_close(mass[:, :, t], want_mass)


@pytest.mark.parametrize("length", [5, 7])
def test_queries_before_the_row_read_nothing(length: int) -> None:
    k = torch.randn(1, 1, 8, 4)
    out, mass = ops.verify_dense(
        torch.randn(1, 2, 6, 4), KVView(k, k, (4,), (length,)), scale=1.0, allowed=[(4, length)]
    )
    assert mass is not None
    blind = 6 - (length - 4)
    assert not bool(out[:, :, :blind].any())
    assert not bool(mass[:, :, :blind].any())
    torch.testing.assert_close(mass.sum(-1)[0, 0, blind:], torch.ones(6 - blind))


def test_nan_shows() -> None:
    k = torch.randn(1, 1, 8, 4)
    k[0, 0, 3] = math.nan
    out, _ = ops.verify_dense(torch.randn(1, 1, 2, 4), KVView(k, k, (0,), (8,)), scale=1.0)
    assert bool(out.isnan().all())
