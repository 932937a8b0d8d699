"""Paged caches: bit for bit what the kernels give on the same keys and values in contiguous rows,
with lists that belong to lanes instead of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from .cases import LARGE, ODD, SMALL, Case

pytest.importorskip("triton", reason="triton is not installed: its kernels cannot run here")

from reread.config import SelectorConfig
from reread.ops import triton as kernels

from .test_kernels import Run, close

PAGES = (16, 24, 64)


class Paged(Run):
    """A case whose rows are scattered over pages in a random order; lanes in another. Pages and
    lanes that nobody owns are NaN and poison."""

    def __init__(self, case: Case, device: torch.device, page: int) -> None:
        super().__init__(case, device)
        x = self.x
        rows, capacity = x.q.shape[0], x.k.shape[2]
        most = -(-capacity // page)
        g = torch.Generator().manual_seed(2)
        order = torch.randperm(rows * most + 3, generator=g).to(device, torch.int32)
        tables = torch.full((rows, most + 2), 2**30, dtype=torch.int32, device=device)
        tables[:, :most] = order[: rows * most].view(rows, most)
        # as vLLM lays a layer out: keys and values of a page beside each other
        shape = (rows * most + 3, 2, page, case.kv_heads, case.dim)
        cache = torch.full(shape, torch.nan, dtype=case.dtype, device=device)
        for b in range(rows):
            own = tables[b, :most].long()
            for which, source in enumerate((x.k, x.v)):
                flat = torch.full((most * page, *shape[3:]), torch.nan, dtype=case.dtype)
                flat = flat.to(device)
                flat[:capacity] = source[b].transpose(0, 1)
                cache[own, which] = flat.view(most, page, *shape[3:])
        k, v = (t.transpose(1, 2) for t in cache.unbind(1))
        self.paged = kernels.Cache(k, v, self.kv.starts, self.kv.lengths, tables, capacity)
        self.lanes = torch.randperm(rows + 2, generator=g)[:rows].to(device, torch.int32)
        self.lists = self.by_lane(self.indices), self.by_lane(self.counts)
        self.picked = kernels.Chosen(
            *self.lists, self.chosen.window_start, self.chosen.sink, self.lanes
        )

    def by_lane(self, rows: Tensor) -> Tensor:
        """The rows where their lanes are."""
        out = torch.full((rows.shape[0] + 2, *rows.shape[1:]), -(2**30), dtype=rows.dtype)
        out = out.to(rows.device)
        out[self.lanes.long()] = rows
        return out

    def arguments(self) -> dict[str, Any]:
        return {"scale": self.x.scale, "work": self.work, "tuning": self.tuning}


def check(case: Case, device: torch.device, page: int) -> None:
    run = Paged(case, device, page)
    x, given = run.x, run.arguments()
    rows = range(x.q.shape[0])
    slow = x.int32([int(b % 3 != 1) for b in rows])

    def same(call: Any, *more: Any, chosen: bool) -> None:
        sides = ((run.kv, run.chosen), (run.paged, run.picked))
        got = [
            call(x.q, kv, *((picked,) if chosen else ()), *more, out=torch.zeros_like(x.q), **given)
            for kv, picked in sides
        ]
        if device.type == "cuda":  # another pipeline may fuse sums in another order
            close(got[1], got[0].float(), 1e-2)
        else:
            assert torch.equal(got[0], got[1])

    same(kernels.decode_dense, chosen=False)
    same(kernels.decode_sparse, chosen=True)
    same(kernels.decode_mixed, slow, chosen=True)


def check_choice(case: Case, device: torch.device, page: int) -> None:
    """Rows that choose again write the lists of their lanes, and no others."""
    run = Paged(case, device, page)
    x = run.x
    rows = range(x.q.shape[0])
    slow = x.int32([int(b % 3 != 1) for b in rows])
    on = x.int32([int(b % 3 == 0) for b in rows])
    want, counts = torch.full_like(run.indices, -7), torch.full_like(run.counts, -7)
    got, got_counts = (torch.full_like(t, -7) for t in run.lists)
    common = {"allowed": run.allowed, "scale": x.scale, "work": run.work, "tuning": run.tuning}
    again = {"heads": x.q.shape[1], "work": run.work, "allowed": run.allowed, "active": on}
    config = SelectorConfig()
    kernels.decode_mixed(x.q, run.paged, run.picked, slow, **common)
    kernels.refresh(run.paged, config, indices=got, counts=got_counts, lanes=run.lanes, **again)
    logits = run.work.logits.clone()
    kernels.decode_mixed(x.q, run.kv, run.chosen, slow, **common)
    if not torch.equal(logits.nan_to_num(9.0), run.work.logits.nan_to_num(9.0)):
        assert device.type == "cuda"
        close(logits[slow.bool()].nan_to_num(0), run.work.logits[slow.bool()].nan_to_num(0), 1e-3)
        return
    kernels.refresh(run.kv, config, indices=want, counts=counts, **again)
    lanes = run.lanes.long()
    assert torch.equal(got[lanes], want)
    assert torch.equal(got_counts[lanes], counts)
    others = torch.ones(len(got), dtype=torch.bool, device=device)
    others[lanes] = False
    assert bool((got[others] == -7).all())


def cases(given: Sequence[Case]) -> list[Any]:
    return [
        pytest.param(case, PAGES[i % len(PAGES)], id=f"{case.name}, pages of {PAGES[i % 3]}")
        for i, case in enumerate(given)
        if case.spans[0][1] <= 131072
    ]


@pytest.mark.parametrize(("case", "page"), cases(SMALL))
def test_pages_change_nothing(case: Case, page: int, device: torch.device) -> None:
    check(case, device, page)


@pytest.mark.parametrize(("case", "page"), cases([c for c in SMALL if c.selects]))
def test_choosing_by_lane(case: Case, page: int, device: torch.device) -> None:
    check_choice(case, device, page)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "page"), cases(LARGE))
def test_real_shapes(case: Case, page: int, device: torch.device) -> None:
    check(case, device, page)
    check_choice(case, device, page)


def test_a_row_that_is_padding_reads_nothing(device: torch.device) -> None:
    """Such a row has no key, no page that exists and an empty list; its output is zeros."""
    run = Paged(Case("padding", ODD, splits=1), device, 16)
    assert run.paged.tables is not None
    run.paged.lengths[1] = 0
    run.paged.starts[1] = 0
    run.picked.window_start[1] = 0
    run.picked.counts[run.lanes[1].long()] = 0
    run.paged.tables[1] = 2**30
    slow = run.x.int32([1, 0, 1])
    for splits in (1, 2):
        given = {**run.arguments(), "tuning": kernels.Tuning(16, programs=5, splits=splits)}
        out = kernels.decode_mixed(run.x.q, run.paged, run.picked, slow, **given)
        assert bool((out[1] == 0).all())
        assert bool(out.isfinite().all())
