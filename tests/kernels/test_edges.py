"""Kernels at the edges of what they cover."""

from __future__ import annotations

import pytest
import torch

from reread.config import SelectorConfig, Span
from reread.errors import UnsupportedError
from reread.policy import selector

pytest.importorskip("triton", reason="triton is not installed: its kernels cannot run here")

from reread.ops import triton as kernels

from .cases import SMALL
from .test_kernels import Run, check_dense


@pytest.mark.parametrize("name", ["crowded", "crowded far below", "tiny", "huge", "one value"])
def test_top_k_where_one_bin_holds_almost_everything(name: str, device: torch.device) -> None:
    """More members of the boundary bin than one block, and scores beyond the counted range."""
    n, k = 4500, 1000
    unit = torch.rand(1, 2, n, generator=torch.Generator().manual_seed(0))
    mass = {
        "crowded": 1e-4 * (1 + 0.05 * unit),
        "crowded far below": 1e-9 * unit,
        "tiny": torch.exp(-24 - 40 * unit),
        "huge": torch.exp(8 + 12 * unit),
        "one value": torch.full_like(unit, 1e-4),
    }[name].to(device)
    config = SelectorConfig(refine=None, eps=1e-30 if name == "tiny" else 1e-8)
    work = kernels.Workspace(1, 2, 2, 64, n, device)
    indices = torch.empty(1, 2, k, dtype=torch.int32, device=device)
    counts = torch.empty(1, 2, dtype=torch.int32, device=device)
    low, high = (torch.tensor([x], dtype=torch.int32, device=device) for x in (3, n - 7))
    kernels.select(mass, low, high, config, work=work, indices=indices, counts=counts)
    want, _ = selector.select(mass[0, :, 3 : n - 7], None, config, k, 3)
    assert torch.equal(indices[0], want)
    assert not bool(work.hists.any())
    assert not bool(work.cursors.any())


def test_windows_beyond_the_kernels_are_refused_by_size() -> None:
    x = torch.zeros(1, 1, 8)
    i = torch.zeros(1, 1, 1, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="1101 positions: at most 1025"):
        kernels.select(
            x, i[0, 0], i[0, 0], SelectorConfig(refine=Span(back=100, ahead=1000)),
            work=kernels.Workspace(1, 1, 1, 64, 8, torch.device("cpu")), indices=i, counts=i[0],
        )  # fmt: skip


def test_evidence_survives_a_sink_that_outweighs_everything(device: torch.device) -> None:
    """By more than fp32 can hold: J needs a maximum of its own."""
    run = Run(SMALL[0], device)
    x, heads = run.x, run.x.case.kv_heads
    mean = x.q.view(3, heads, -1, x.case.dim).mean(2)
    for b, start in enumerate(x.starts):
        x.k[b, :, start] = 200 * mean[b]
    logits = (x.q[0].view(heads, -1, x.case.dim) * x.k[0, :, None, 0]).sum(-1) * x.scale
    assert float(logits.max()) > 100
    check_dense(run)
