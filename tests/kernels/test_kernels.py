"""Every kernel against its reference: one table of shapes, one of kernels. Small shapes run
interpreted on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from reread import ops
from reread.config import SelectorConfig, SoftNMS, Span
from reread.errors import UnsupportedError
from reread.policy import selector
from reread.types import KVView, Selection

from .cases import LARGE, SMALL, Case, Inputs

pytest.importorskip("triton", reason="triton is not installed: its kernels cannot run here")

from reread.ops import triton as kernels

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
PAPER = SelectorConfig(refine=SoftNMS(), lambda_clip=0.02, alpha_cross=0.35)
EXACT = {
    "span": SelectorConfig(),
    "soft-nms": SelectorConfig(refine=SoftNMS()),
    "none": SelectorConfig(refine=None),
    "ahead": SelectorConfig(refine=Span(back=0, ahead=28)),
}


def close(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Relative error in the 2-norm, in double precision; NaN fails."""
    got, want = got.double(), want.double()
    error = float((got - want).norm() / want.norm().clamp(min=1e-20))
    assert error < tolerance, f"relative error {error:.3g}"


def exact_view(x: Inputs) -> KVView:
    """The cache in fp32, so that the reference adds no rounding of its own."""
    return KVView(x.k.float(), x.v.float(), x.view.starts, x.view.lengths)


class Run:
    """One case on one device, with everything that the kernels take."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.x = x = Inputs(case, device)
        rows, heads = x.q.shape[:2]
        tuning: dict[str, Any] = {"programs": case.programs, "splits": case.splits}
        if case.block:
            tuning["block"] = case.block
        self.tuning = kernels.Tuning(**tuning)
        slots = max(case.programs, 64) if case.programs else 0
        self.work = kernels.Workspace(
            rows, heads, case.kv_heads, case.dim, x.k.shape[2], device, programs=slots
        )
        for scratch in (self.work.parts, self.work.sums, self.work.logits, self.work.scores):
            scratch.fill_(torch.nan)
        self.kv = kernels.Cache(x.k, x.v, x.int32(x.starts), x.int32(x.lengths))
        self.allowed = x.int32(x.low), x.int32(x.high)
        self.indices, self.counts = x.selection()
        self.chosen = kernels.Chosen(self.indices, self.counts, x.int32(x.window), case.sink)
        self.out = torch.full_like(x.q, torch.nan)

    def want_dense(self) -> tuple[Tensor, Tensor]:
        x = self.x
        allowed = list(zip(x.low, x.high, strict=True))
        out, mass = ops.reference.decode_dense(
            x.q.float(), exact_view(x), scale=x.scale, allowed=allowed
        )
        assert mass is not None
        return out, mass

    def want_sparse(self) -> Tensor:
        x = self.x
        return ops.reference.decode_sparse(
            x.q.float(), exact_view(x), Selection(self.indices, self.counts), x.window,
            sink=x.case.sink, scale=x.scale,
        )  # fmt: skip

    def common(self) -> dict[str, Any]:
        return {"scale": self.x.scale, "work": self.work, "out": self.out, "tuning": self.tuning}


def mass_of(run: Run, active: Tensor | None = None) -> Tensor:
    """The evidence that the last attention call left."""
    return kernels.evidence(
        run.kv, work=run.work, allowed=run.allowed, active=active, heads=run.x.q.shape[1]
    )


def check_dense(run: Run) -> None:
    out = kernels.decode_dense(run.x.q, run.kv, allowed=run.allowed, **run.common())
    want, want_mass = run.want_dense()
    tolerance = TOLERANCE[run.x.case.dtype]
    close(out, want, tolerance)
    # logits are exact products of the inputs in fp32, so evidence does not feel the inputs'
    # precision
    close(mass_of(run), want_mass, 1e-4)
    close(kernels.decode_dense(run.x.q, run.kv, **run.common()), want, tolerance)


def check_dense_rows(run: Run) -> None:
    """Rows that are off are left alone, in the output and in the evidence."""
    on = run.x.int32([int(b % 3 == 1) for b in range(run.x.q.shape[0])])
    run.work.mass.fill_(7.0)
    out = kernels.decode_dense(run.x.q, run.kv, active=on, allowed=run.allowed, **run.common())
    mass = mass_of(run, on)
    want, want_mass = run.want_dense()
    rows = on.bool()
    assert bool(out[~rows].isnan().all())
    assert bool((mass[~rows] == 7.0).all())
    if bool(rows.any()):
        close(out[rows], want[rows], TOLERANCE[run.x.case.dtype])
        close(mass[rows], want_mass[rows], 1e-4)


def check_sparse(run: Run) -> None:
    out = kernels.decode_sparse(run.x.q, run.kv, run.chosen, **run.common())
    close(out, run.want_sparse(), TOLERANCE[run.x.case.dtype])


def check_sparse_new(run: Run) -> None:
    """The newest position comes with the call, and stands in the cache afterwards."""
    x = run.x
    rows, last = torch.arange(x.q.shape[0]), torch.tensor(x.lengths) - 1
    want, before = run.want_sparse(), (x.k.clone(), x.v.clone())
    # as slices of a wider tensor, which a stacked projection gives
    wide = torch.cat([x.k[rows, :, last], x.v[rows, :, last]], dim=-1)
    x.k[rows, :, last], x.v[rows, :, last] = 0, 0
    new = wide[..., : x.case.dim], wide[..., x.case.dim :]
    for _ in range(2):  # the second call finds what the first one left in the workspace
        out = kernels.decode_sparse(x.q, run.kv, run.chosen, new=new, **run.common())
        close(out, want, TOLERANCE[x.case.dtype])
    assert torch.equal(x.k.nan_to_num(9.0), before[0].nan_to_num(9.0))
    assert torch.equal(x.v.nan_to_num(9.0), before[1].nan_to_num(9.0))


def check_append(run: Run) -> None:
    x = run.x
    rows, last = torch.arange(x.q.shape[0]), torch.tensor(x.lengths) - 1
    k, v = x.k[rows, :, last].contiguous(), x.v[rows, :, last].contiguous()
    before = x.k.clone(), x.v.clone()
    norms = torch.full(x.k.shape[:3], -1.0, device=x.device)
    x.k[rows, :, last], x.v[rows, :, last] = 0, 0
    kernels.append(k, v, run.kv, norms=norms)
    assert torch.equal(x.k.nan_to_num(9.0), before[0].nan_to_num(9.0))
    assert torch.equal(x.v.nan_to_num(9.0), before[1].nan_to_num(9.0))
    close(norms[rows, :, last], torch.linalg.vector_norm(k.float(), dim=-1), 1e-6)
    assert int((norms != -1.0).sum()) == k.shape[0] * k.shape[1]


def check_mixed(run: Run) -> None:
    slow = run.x.int32([int(b % 3 != 1) for b in range(run.x.q.shape[0])])
    run.work.mass.fill_(7.0)
    out = kernels.decode_mixed(
        run.x.q, run.kv, run.chosen, slow, allowed=run.allowed, **run.common()
    )
    mass = mass_of(run, slow)
    dense, want_mass = run.want_dense()
    rows = slow.bool()
    want = torch.where(rows[:, None, None], dense, run.want_sparse())
    close(out, want, TOLERANCE[run.x.case.dtype])
    assert bool((mass[~rows] == 7.0).all())
    close(mass[rows], want_mass[rows], 1e-4)


def check_refresh(run: Run) -> None:
    """What `select` makes of `evidence`, for those of the slow rows that choose again; nothing else
    moves."""
    x, rows = run.x, range(run.x.q.shape[0])
    norms = torch.linalg.vector_norm(x.k.float(), dim=-1)
    slow = x.int32([int(b % 3 != 1) for b in rows])
    on = x.int32([int(b % 3 == 0) for b in rows])
    kernels.decode_mixed(x.q, run.kv, run.chosen, slow, allowed=run.allowed, **run.common())
    mass = mass_of(run, slow).clone()
    for config in (EXACT["span"], PAPER):
        want, counts = torch.full_like(run.indices, -7), torch.full_like(run.counts, -7)
        got, got_counts = want.clone(), counts.clone()
        kernels.select(
            mass, *run.allowed, config, work=run.work, indices=want, counts=counts,
            active=on, norms=norms,
        )  # fmt: skip
        kernels.refresh(
            run.kv, config, heads=x.q.shape[1], work=run.work, allowed=run.allowed, active=on,
            indices=got, counts=got_counts, norms=norms,
        )  # fmt: skip
        assert torch.equal(got, want), config
        assert torch.equal(got_counts, counts)
        assert bool((counts[~on.bool()] == -7).all())
        assert bool((counts[on.bool()] >= 0).all())


def select_all(run: Run, mass: Tensor, config: SelectorConfig, norms: Tensor) -> None:
    kernels.select(
        mass,
        *run.allowed,
        config,
        work=run.work,
        indices=run.indices,
        counts=run.counts,
        norms=norms,
    )


def check_select(run: Run) -> None:
    """Exactly the reference's positions, ties and zeros included, twice in a row from the same
    workspace."""
    x = run.x
    norms = torch.linalg.vector_norm(x.k.float(), dim=-1)
    # interpreting is slow: a small case takes one of the configs, a real shape all of them
    turn = len(x.case.name) % len(EXACT)
    configs = list(EXACT.values())
    for config in configs if x.device.type == "cuda" else configs[turn : turn + 1]:
        for tied in (False, True):
            mass = x.mass(tied=tied)
            select_all(run, mass, config, norms)
            for b in range(x.q.shape[0]):
                span = slice(x.low[b], x.high[b])
                want, counts = selector.select(mass[b, :, span], None, config, x.case.k, x.low[b])
                assert torch.equal(run.indices[b, :, : want.shape[1]], want), (config, tied, b)
                assert torch.equal(run.counts[b], counts)
                assert bool((run.indices[b, :, want.shape[1] :] == -1).all())


def check_select_paper(run: Run) -> None:
    """With prior and cross-head term sums run in another order: the scores of what differs are
    equal up to that."""
    x, mass = run.x, run.x.mass()
    norms = torch.linalg.vector_norm(x.k.float(), dim=-1)
    select_all(run, mass, PAPER, norms)
    for b in range(x.q.shape[0]):
        span = slice(x.low[b], x.high[b])
        if x.high[b] == x.low[b]:
            continue
        z = selector.scores(mass[b, :, span], norms[b, :, span], PAPER)
        want, counts = selector.top_k(z, x.case.k)
        assert torch.equal(run.counts[b], counts)
        got = run.indices[b, :, : want.shape[1]] - x.low[b]
        assert bool((got.diff() > 0).all())
        ours = z.gather(1, got.long()).sort().values
        torch.testing.assert_close(
            ours, z.gather(1, want.long()).sort().values, rtol=1e-4, atol=1e-4
        )


def check_select_rows(run: Run) -> None:
    """Rows that are off keep their selection."""
    on = run.x.int32([int(b % 3 == 1) for b in range(run.x.q.shape[0])])
    before, counts = run.indices.clone(), run.counts.clone()
    kernels.select(
        run.x.mass(), *run.allowed, EXACT["span"], work=run.work, indices=run.indices,
        counts=run.counts, active=on,
    )  # fmt: skip
    off = ~on.bool()
    assert torch.equal(run.indices[off], before[off])
    assert torch.equal(run.counts[off], counts[off])


def check_public_ops(run: Run) -> None:
    """`ops` on a KVView: the kernels where they are asked for, with the reference's signature."""
    x = run.x
    view = KVView(x.k, x.v, x.view.starts, x.view.lengths)
    allowed = list(zip(x.low, x.high, strict=True))
    want, want_mass = run.want_dense()
    out, mass = ops.decode_dense(x.q, view, scale=x.scale, allowed=allowed, backend="triton")
    close(out, want, TOLERANCE[x.case.dtype])
    assert mass is not None
    close(mass, want_mass, 1e-4)
    selection = Selection(run.indices, run.counts)
    got = ops.decode_sparse(
        x.q, view, selection, x.window, sink=x.case.sink, scale=x.scale, backend="triton"
    )
    close(got, run.want_sparse(), TOLERANCE[x.case.dtype])


KERNELS: dict[str, Callable[[Run], None]] = {
    "decode_dense": check_dense,
    "decode_dense, some rows": check_dense_rows,
    "decode_sparse": check_sparse,
    "decode_sparse, new": check_sparse_new,
    "decode_mixed": check_mixed,
    "append": check_append,
    "public ops": check_public_ops,
    "refresh": check_refresh,
    "select": check_select,
    "select, paper": check_select_paper,
    "select, some rows": check_select_rows,
}


def table(cases: Sequence[Case]) -> list[ParameterSet]:
    """Every kernel on every shape; the Selector where a case differs in what it sees."""
    return [
        pytest.param(case, kernel, id=f"{kernel} | {case.name}")
        for case in cases
        for kernel in KERNELS
        if case.selects or not kernel.startswith(("select", "refresh"))
    ]


@pytest.mark.parametrize(("case", "kernel"), table(SMALL))
def test_small(case: Case, kernel: str, device: torch.device) -> None:
    KERNELS[kernel](Run(case, device))


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "kernel"), table(LARGE))
def test_real_shapes(case: Case, kernel: str, device: torch.device) -> None:
    KERNELS[kernel](Run(case, device))


def test_shapes_beyond_the_kernels_are_refused_by_name() -> None:
    q = torch.zeros(1, 4, 96)
    with pytest.raises(UnsupportedError, match="head dim 96"):
        kernels.decode_dense(
            q,
            kernels.Cache(torch.zeros(1, 2, 8, 96), q, q, q),
            scale=1.0,
            work=kernels.Workspace(1, 4, 2, 64, 8, torch.device("cpu")),
        )
    assert kernels.unsupported(torch.zeros(1, 34, 64), torch.zeros(1, 2, 8, 64)) is not None
    assert kernels.unsupported(torch.zeros(65, 2, 64), torch.zeros(65, 2, 8, 64)) is not None
    assert kernels.unsupported(torch.zeros(1, 2, 64), torch.zeros(1, 2, 8, 64)) is None
