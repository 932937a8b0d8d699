"""Verification of several queries a row against its reference, and against one query at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reread import ops
from reread.config import SelectorConfig
from reread.policy import selector

from .cases import Case, Inputs
from .test_kernels import TOLERANCE, close, exact_view

pytest.importorskip("triton", reason="triton is not installed: its kernels cannot run here")

from reread.ops import triton as kernels


@dataclass(frozen=True)
class Queries:
    """A case of several queries a row.

    `tile`: the least padded size. `positions_first`: q is a view of a wider [B, T, 2H, D].
    """

    case: Case
    queries: int
    tile: int = 0
    positions_first: bool = False


class Run:
    """Everything that the kernels take, unused memory NaN."""

    def __init__(self, what: Queries, device: torch.device, seed: int = 0) -> None:
        case, t = what.case, what.queries
        self.x = x = Inputs(case, device, seed)
        rows, heads = x.q.shape[:2]
        self.q = x._rand(rows, heads, t, case.dim)
        if what.positions_first:
            wide = torch.full((rows, t, 2 * heads, case.dim), torch.nan, device=device)
            wide = wide.to(case.dtype)
            wide[:, :, :heads] = self.q.transpose(1, 2)
            self.q = wide[:, :, :heads].transpose(1, 2)
        self.tuning = kernels.VerifyTuning(case.block, programs=case.programs, tile=what.tile)
        self.work = kernels.Workspace(
            rows, heads, case.kv_heads, case.dim, x.k.shape[2], device, queries=t,
            programs=-(-case.programs // 2),
        )  # fmt: skip
        for scratch in (self.work.query_parts, self.work.query_sums, self.work.query_lse):
            scratch.fill_(torch.nan)
        self.kv = kernels.Cache(x.k, x.v, x.int32(x.starts), x.int32(x.lengths))
        self.allowed = x.int32(x.low), x.int32(x.high)
        self.out = torch.full(self.q.shape, torch.nan, dtype=case.dtype, device=device)

    def want(self) -> tuple[Tensor, Tensor]:
        """The reference in fp32."""
        x = self.x
        allowed = list(zip(x.low, x.high, strict=True))
        view = exact_view(x)
        out, mass = ops.reference.verify_dense(self.q.float(), view, scale=x.scale, allowed=allowed)
        assert mass is not None
        return out, mass

    def weights(self) -> Tensor:
        """Of a random number of accepted queries in each row, the others' 0."""
        w = torch.rand(
            self.q.shape[0], self.q.shape[2], generator=self.x.generator, device=self.x.device
        )
        w[:, 1:] *= (
            torch.rand(w[:, 1:].shape, generator=self.x.generator, device=self.x.device) > 0.4
        )
        return w / w.sum(1, keepdim=True)

    def dense(self, **more: Any) -> Tensor:
        return kernels.verify_dense(
            self.q, self.kv, scale=self.x.scale, work=self.work, out=self.out, tuning=self.tuning,
            **more,
        )  # fmt: skip

    def mass(self, weights: Tensor, **more: Any) -> Tensor:
        return kernels.verify_mass(
            self.q, self.kv, weights, self.allowed, scale=self.x.scale, work=self.work,
            tuning=replace(self.tuning, tile=0), **more,
        )  # fmt: skip


def mixed(mass: Tensor, weights: Tensor) -> Tensor:
    """The reference's mass per query [B, Hkv, T, L], weighted: [B, Hkv, L]."""
    return torch.einsum("bhtl,bt->bhl", mass.double(), weights.double())


def check(run: Run) -> None:
    """Output with and without evidence, and the evidence."""
    want, want_mass = run.want()
    tolerance = TOLERANCE[run.x.case.dtype]
    close(run.dense(), want, tolerance)
    run.out.fill_(torch.nan)
    close(run.dense(allowed=run.allowed), want, tolerance)
    weights = run.weights()
    run.work.mass.fill_(torch.nan)
    close(run.mass(weights), mixed(want_mass, weights), 1e-4)


def check_rows(run: Run) -> None:
    """Rows that are off are left alone; of the others some choose again."""
    rows = range(run.q.shape[0])
    on = run.x.int32([int(b % 3 != 1) for b in rows])
    again = run.x.int32([int(b % 3 == 0) for b in rows])
    want, want_mass = run.want()
    out = run.dense(active=on, allowed=run.allowed)
    close(out[on.bool()], want[on.bool()], TOLERANCE[run.x.case.dtype])
    assert bool(out[~on.bool()].isnan().all())
    run.work.mass.fill_(7.0)
    weights = run.weights()
    mass, rows_again = run.mass(weights, active=again), again.bool()
    close(mass[rows_again], mixed(want_mass, weights)[rows_again], 1e-4)
    assert bool((mass[~rows_again] == 7.0).all())


def check_repeats(run: Run) -> None:
    """Bit for bit the same twice."""
    first, weights = run.dense(allowed=run.allowed).clone(), run.weights()
    mass = run.mass(weights).clone()
    assert torch.equal(run.dense(allowed=run.allowed), first)
    assert torch.equal(run.mass(weights), mass)


def check_one_at_a_time(run: Run) -> None:
    """As many calls of `decode_dense` as there are queries, and the evidence of one query alone."""
    out = run.dense(allowed=run.allowed)
    for t in range(run.q.shape[2]):
        behind = run.q.shape[2] - 1 - t
        kv = replace(run.kv, lengths=run.kv.lengths - behind)
        low, high = run.allowed
        allowed = low, torch.minimum(high, torch.maximum(kv.lengths, low))
        q = run.q[:, :, t].contiguous()
        one = kernels.decode_dense(q, kv, scale=run.x.scale, work=run.work, allowed=allowed)
        some = (kv.lengths > kv.starts).nonzero()[:, 0]
        close(out[some, :, t], one[some], 2 * TOLERANCE[run.x.case.dtype])
        mass = kernels.evidence(kv, work=run.work, allowed=allowed, heads=q.shape[1]).clone()
        weights = torch.zeros(run.q.shape[0], run.q.shape[2], device=run.x.device)
        weights[:, t] = 1
        close(run.mass(weights)[some], mass[some], 1e-4)


def check_select(run: Run) -> None:
    """The Selector chooses from this evidence as from any other."""
    x, config = run.x, SelectorConfig()
    run.dense(allowed=run.allowed)
    mass = run.mass(run.weights())
    indices, counts = x.selection()
    kernels.select(mass, *run.allowed, config, work=run.work, indices=indices, counts=counts)
    for b in range(mass.shape[0]):
        span = slice(x.low[b], x.high[b])
        want, many = selector.select(mass[b, :, span], None, config, x.case.k, x.low[b])
        assert torch.equal(indices[b, :, : want.shape[1]], want)
        assert torch.equal(counts[b], many)


def check_public_op(run: Run) -> None:
    """`ops` on a KVView: the evidence of each query."""
    x, view = run.x, run.x.view
    allowed = list(zip(x.low, x.high, strict=True))
    want, want_mass = run.want()
    out, mass = ops.verify_dense(run.q, view, scale=x.scale, allowed=allowed, backend="triton")
    close(out, want, TOLERANCE[x.case.dtype])
    assert mass is not None
    close(mass, want_mass, 1e-4)


CHECKS: dict[str, Callable[[Run], None]] = {
    "all": check,
    "some rows": check_rows,
    "repeats": check_repeats,
    "one at a time": check_one_at_a_time,
    "select": check_select,
    "public op": check_public_op,
}
ODD = ((0, 75), (9, 50), (30, 43))
HALF = torch.float16
SMALL = {
    "ragged": Queries(Case("ragged", ODD), 5),
    "one query": Queries(Case("one query", ODD), 1),
    "rows shorter than a block": Queries(Case("short", ((0, 3), (6, 9), (2, 40))), 3),
    "a row shorter than its queries": Queries(Case("tiny", ((0, 30), (6, 9))), 5),
    "positions first": Queries(Case("positions first", ODD, dtype=HALF), 4, positions_first=True),
    "cache positions first": Queries(Case("transposed", ODD, heads_first=False), 3),
    "J behind the first queries": Queries(Case("overlap", ODD, recent=2, dtype=HALF), 9),
    "a padded tile": Queries(Case("padded", ODD[:2]), 3, tile=64),
    # fp32 takes 16 rows a pass; passes but the last end before the newest position
    "two passes": Queries(Case("two passes", ODD[:2]), 9),
    "two passes, a tiny row": Queries(Case("two passes", ((0, 40), (5, 6)), group=4), 6),
}


# interpreting is slow: every case where cases differ, the rest where there is one pass and two
PAIRS = [
    (name, kernel)
    for name in SMALL
    for kernel in CHECKS
    if kernel in ("all", "some rows") or name in ("ragged", "two passes, a tiny row")
]


@pytest.mark.parametrize(("name", "kernel"), PAIRS)
def test_small(name: str, kernel: str, device: torch.device) -> None:
    CHECKS[kernel](Run(SMALL[name], device))


def test_half_precision_and_larger_heads(device: torch.device) -> None:
    check(Run(Queries(Case("half", ODD[:2], group=4, kv_heads=1, dtype=HALF), 17), device))
    check(Run(Queries(Case("d 128", ODD[:2], group=3, dim=128), 5), device))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_shapes(data: st.DataObject) -> None:
    """Ragged rows, any number of queries and heads, any cut of the work."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    queries, group = data.draw(st.integers(1, 17)), data.draw(st.integers(1, 8))
    # interpreting is slow, and fp32 makes a pass of every 16 rows
    small = group * queries <= 32
    spans: Sequence[tuple[int, int]] = data.draw(
        st.lists(
            st.tuples(st.integers(0, 40), st.integers(1, 50)).map(lambda s: (s[0], sum(s))),
            min_size=1, max_size=3 if small else 2,
        )
    )  # fmt: skip
    case = Case(
        "random", spans, kv_heads=1 + small, group=group,
        sink=data.draw(st.integers(0, 4)), recent=data.draw(st.integers(1, 20)),
        programs=data.draw(st.integers(1, 9)),
        dtype=torch.float32 if small else HALF,
    )  # fmt: skip
    check(Run(Queries(case, queries), device, seed=data.draw(st.integers(0, 99))))


_BF16: dict[str, Any] = {
    "dtype": torch.bfloat16, "dim": 128, "group": 4, "kv_heads": 8, "block": 0, "programs": 0,
    "recent": 256, "k": 512,
}  # fmt: skip
RAGGED = ((0, 131072), (5, 131071), (0, 70001), (131000, 131072))
LARGE = [
    *(Queries(Case(f"4 x 128K, T {t}", RAGGED, **_BF16), t) for t in (1, 3, 9, 17)),
    Queries(Case("tile 64", ((0, 9001), (77, 300)), **_BF16), 3, tile=64),
    Queries(Case("g 8", ((0, 9001), (77, 300)), **{**_BF16, "group": 8, "kv_heads": 2}), 17),
    Queries(Case("d 64", ((0, 9001), (77, 300)), **{**_BF16, "dim": 64}), 9, positions_first=True),
    Queries(Case("d 256", ((0, 9001), (77, 300)), **{**_BF16, "dim": 256}), 9),
    Queries(Case("d 256 wide", ((0, 9001), (77, 300)), **{**_BF16, "dim": 256}), 17),
    Queries(Case("fp32", ((0, 9001), (77, 300)), **{**_BF16, "dtype": torch.float32}), 9),
    Queries(Case("64-bit", tuple((0, 65536) for _ in range(33)), **_BF16), 5),
]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["all", "some rows", "repeats"])
@pytest.mark.parametrize("what", LARGE, ids=lambda what: what.case.name)
def test_real_shapes(what: Queries, kernel: str, device: torch.device) -> None:
    CHECKS[kernel](Run(what, device))
