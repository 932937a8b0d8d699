"""Several new tokens a row into the cache; one at a time is in `test_kernels`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed: its kernels cannot run here")

from reread.ops import triton as kernels


@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_append(data: st.DataObject) -> None:
    """Several tokens a row, each row at its own length; nothing else is touched."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens, heads = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    lengths = data.draw(st.lists(st.integers(tokens, 24), min_size=1, max_size=4))
    rows, dim = len(lengths), 64
    # as a stacked projection gives them: positions first, keys beside values
    both = (
        torch.randn(rows, tokens, 2 * heads, dim, device=device).to(torch.float16).transpose(1, 2)
    )
    k, v = both[:, :heads], both[:, heads:]
    want = torch.full((2, rows, heads, 24, dim), torch.nan, dtype=torch.float16, device=device)
    got, norms = want.clone(), torch.full((rows, heads, 24), -1.0, device=device)
    want_norms = norms.clone()
    for b, length in enumerate(lengths):
        span = slice(length - tokens, length)
        want[0, b, :, span], want[1, b, :, span] = k[b], v[b]
        want_norms[b, :, span] = torch.linalg.vector_norm(k[b].float(), dim=-1)
    ends = torch.tensor(lengths, dtype=torch.int32, device=device)
    kernels.append(k, v, kernels.Cache(got[0], got[1], torch.zeros_like(ends), ends), norms=norms)
    assert torch.equal(got.nan_to_num(9.0), want.nan_to_num(9.0))
    torch.testing.assert_close(norms, want_norms)
