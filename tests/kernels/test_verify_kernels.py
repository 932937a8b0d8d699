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

from .cases import Case, Inputs
from .test_kernels import PAPER, TOLERANCE, close, exact_view

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
    """Everything that the kernels take, unused memory NaN; `asked` is any query of each row, and J
    ends before what that query does not see."""

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
        work = self.work
        for scratch in (work.query_parts, work.query_sums, work.logits, work.lse):
            scratch.fill_(torch.nan)
        self.kv = kernels.Cache(x.k, x.v, x.int32(x.starts), x.int32(x.lengths))
        self.ask(torch.randint(t, (rows,), generator=x.generator, device=device))
        self.out = torch.full(self.q.shape, torch.nan, dtype=case.dtype, device=device)

    def want(self) -> tuple[Tensor, Tensor]:
        """The reference in fp32."""
        x = self.x
        allowed = list(zip(x.low, x.high, strict=True))
        view = exact_view(x)
        out, mass = ops.reference.verify_dense(self.q.float(), view, scale=x.scale, allowed=allowed)
        assert mass is not None
        return out, mass

    def ask(self, asked: Tensor) -> None:
        """Which query of each row leaves evidence, [B]."""
        x = self.x
        self.asked = asked.to(torch.int32)
        low, high = x.int32(x.low), x.int32(x.high)
        self.ends = self.kv.lengths - self.q.shape[2] + 1 + self.asked
        self.allowed = low, torch.minimum(high, torch.maximum(self.ends, low))

    def of_asked(self, values: Tensor, dim: int) -> Tensor:
        """Each row's asked query of [B, ..., T, ...], T being `dim`."""
        rows = zip(values, self.asked.tolist(), strict=True)
        return torch.stack([row.select(dim - 1, t) for row, t in rows])

    def dense(self, **more: Any) -> Tensor:
        return kernels.verify_dense(
            self.q, self.kv, scale=self.x.scale, work=self.work, out=self.out, tuning=self.tuning,
            **more,
        )  # fmt: skip

    def with_evidence(self, **more: Any) -> Tensor:
        return self.dense(allowed=self.allowed, asked=self.asked, **more)

    def mass(self, active: Tensor | None = None) -> Tensor:
        """The evidence that the last call left: [B, Hkv, L]."""
        return kernels.evidence(
            self.kv, work=self.work, allowed=self.allowed, active=active, heads=self.q.shape[1]
        )

    def refreshed(self, config: SelectorConfig, norms: Tensor, on: Tensor) -> tuple[Tensor, Tensor]:
        """What the Selector makes of it, -7 where it left a row alone."""
        indices, counts = (torch.full_like(x, -7) for x in self.x.selection())
        kernels.refresh(
            self.kv, config, heads=self.q.shape[1], work=self.work, allowed=self.allowed,
            active=on, indices=indices, counts=counts, norms=norms,
        )  # fmt: skip
        return indices, counts


def check(run: Run) -> None:
    """Output with and without evidence, and the evidence."""
    want, want_mass = run.want()
    tolerance = TOLERANCE[run.x.case.dtype]
    close(run.dense(), want, tolerance)
    assert bool(run.work.logits.isnan().all())
    run.out.fill_(torch.nan)
    close(run.with_evidence(), want, tolerance)
    close(run.mass(), run.of_asked(want_mass, 2), 1e-4)


def check_rows(run: Run) -> None:
    """Rows that are off are left alone, in the output and in the evidence."""
    on = run.x.int32([int(b % 3 != 1) for b in range(run.q.shape[0])])
    rows = on.bool()
    want, want_mass = run.want()
    out = run.with_evidence(active=on)
    close(out[rows], want[rows], TOLERANCE[run.x.case.dtype])
    assert bool(out[~rows].isnan().all())
    assert bool(run.work.logits[~rows].isnan().all())
    assert bool(run.work.lse[~rows].isnan().all())
    run.work.mass.fill_(7.0)
    mass = run.mass(on)
    close(mass[rows], run.of_asked(want_mass, 2)[rows], 1e-4)
    assert bool((mass[~rows] == 7.0).all())


def check_repeats(run: Run) -> None:
    """Bit for bit the same twice."""
    first, mass = run.with_evidence().clone(), run.mass().clone()
    assert torch.equal(run.with_evidence(), first)
    assert torch.equal(run.mass(), mass)


def check_as_decode(run: Run) -> None:
    """What the asked query leaves is what `decode_dense` leaves of it, and the Selector makes the
    same of it. Rows that are off choose nothing."""
    x = run.x
    on = x.int32([int(b % 3 != 1) for b in range(run.q.shape[0])])
    kv = replace(run.kv, lengths=run.ends)
    some = on.bool() & (run.ends > kv.starts)
    norms = torch.linalg.vector_norm(x.k.float(), dim=-1)
    configs = (SelectorConfig(), PAPER)
    out = run.of_asked(run.with_evidence(active=on), 2)
    logits, lse = run.work.logits.clone(), run.work.lse.clone()
    ours = [run.refreshed(config, norms, on) for config in configs]
    run.work.logits.fill_(torch.nan)
    run.work.lse.fill_(torch.nan)
    q = run.of_asked(run.q, 2).contiguous()
    one = kernels.decode_dense(q, kv, scale=x.scale, work=run.work, active=on, allowed=run.allowed)
    theirs = [run.refreshed(config, norms, on) for config in configs]
    close(out[some], one[some], 2 * TOLERANCE[x.case.dtype])
    low, high = run.allowed
    # a row without J has no log-sum
    read = some & (high > low)
    close(lse[read], run.work.lse[read], 1e-5)
    assert torch.equal(logits.isnan(), run.work.logits.isnan()), "stored exactly on J"
    close(logits.nan_to_num(), run.work.logits.nan_to_num(), 1e-5)
    for (got, counts), (want, want_counts) in zip(ours, theirs, strict=True):
        assert torch.equal(got, want)
        assert torch.equal(counts, want_counts)
        assert bool((counts[~on.bool()] == -7).all())


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
    "as decode": check_as_decode,
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
    if kernel in ("all", "as decode") or name in ("ragged", "two passes, a tiny row")
]


@pytest.mark.parametrize(("name", "kernel"), PAIRS)
def test_small(name: str, kernel: str, device: torch.device) -> None:
    CHECKS[kernel](Run(SMALL[name], device))


def test_half_precision_and_larger_heads(device: torch.device) -> None:
    check(Run(Queries(Case("half", ODD[:2], group=4, kv_heads=1, dtype=HALF), 17), device))
    check(Run(Queries(Case("d 128", ODD[:2], group=3, dim=128), 5), device))


def drawn(data: st.DataObject, least: int, *, exact: bool) -> Run:
    """Ragged rows of at least `least` tokens, any number of queries and heads, any cut of the work.
    exact: fp32, where selections can be compared; of every 16 rows a pass."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    queries, group = data.draw(st.integers(1, 17)), data.draw(st.integers(1, 8))
    # interpreting is slow
    small = group * queries <= 32
    spans: Sequence[tuple[int, int]] = data.draw(
        st.lists(
            st.tuples(st.integers(0, 40), st.integers(least, 50)).map(lambda s: (s[0], sum(s))),
            min_size=1, max_size=3 if small else 2,
        )
    )  # fmt: skip
    case = Case(
        "random", spans, kv_heads=1 + small, group=group,
        sink=data.draw(st.integers(0, 4)), recent=data.draw(st.integers(1, 20)),
        programs=data.draw(st.integers(1, 9)),
        dtype=torch.float32 if small or exact else HALF,
    )  # fmt: skip
    return Run(Queries(case, queries), device, seed=data.draw(st.integers(0, 99)))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_shapes(data: st.DataObject) -> None:
    check(drawn(data, 1, exact=False))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_shapes_as_decode(data: st.DataObject) -> None:
    check_as_decode(drawn(data, 20, exact=True))


@pytest.mark.parametrize("t", range(6))
def test_each_query_of_several_passes(t: int, device: torch.device) -> None:
    """Groups of 4 in fp32: passes of 4 and 2 queries."""
    run = Run(Queries(Case("each", ((0, 40), (7, 60)), group=4, recent=6), 6), device)
    run.ask(torch.tensor([t, 5 - t], device=device))
    check_as_decode(run)


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
