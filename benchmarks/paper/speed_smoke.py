"""Smoke runs of the tables that time: the same methods on a CPU, on a stand-in."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from reread.evaluation.suite.request import Request
from reread.evaluation.suite.run import evaluate
from reread.ops import reference
from reread.types import KVView, Selection

from . import smoke
from .asked import Asked, Measured
from .expected import Expected, Found, Kernel, Prefill, Spot, Table

NEEDS_GPU = "needs a GPU"
LENGTH, KEYS, HEADS, KV_HEADS, DIM, SINK, RECENT = 1024, 128, 8, 2, 64, 4, 16
REPEATS = 9
METHODS = {"throughput": ("dense", "paper"), "ttft": ("dense", "prefill:prefill.k=2048")}


def measure(table: Table, asked: Asked) -> Measured:
    """The published rows as not run, and one of the stand-in."""
    measured = Measured()
    measured.found = {
        row: Found(reason=NEEDS_GPU)
        for row in table.rows
        if asked.label in ("", row.model) and not row.absent
    }
    if isinstance(table.work, Kernel):
        row, value = _kernel(), _kernel_speedup()
        measured.details.append({"length": LENGTH, "keys": KEYS, "heads": HEADS, "dim": DIM})
    else:
        row, value = _whole(table, asked, measured)
    measured.extra.append((row, Found(value)))
    return measured


def _row(name: str) -> Expected:
    return Expected(model="stand-in", name=name, spot=Spot(figure="speedup"), unit="x")


def _kernel() -> Expected:
    return _row(f"CPU, reference: dense / sparse at {LENGTH} keys, {KEYS / LENGTH:.1%} read")


def _kernel_speedup() -> float:
    """Time of the reference's dense attention over that of its sparse one; outputs are compared
    with all keys chosen first."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = draw(1, HEADS, DIM), draw(1, KV_HEADS, LENGTH, DIM), draw(1, KV_HEADS, LENGTH, DIM)
    kv, window = KVView(k, v, (0,), (LENGTH,)), LENGTH - RECENT
    scale = DIM**-0.5

    def sparse(chosen: int) -> torch.Tensor:
        at = torch.linspace(SINK, window - 1, chosen).round().to(torch.int32)
        selection = Selection(
            at.expand(1, KV_HEADS, -1).contiguous(),
            torch.full((1, KV_HEADS), chosen, dtype=torch.int32),
        )
        return reference.decode_sparse(q, kv, selection, [window], sink=SINK, scale=scale)

    dense = reference.decode_dense(q, kv, scale=scale)[0]
    torch.testing.assert_close(sparse(window - SINK), dense)
    few = KEYS - SINK - RECENT
    return _seconds(lambda: reference.decode_dense(q, kv, scale=scale)) / _seconds(
        lambda: sparse(few)
    )


def _seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return median(times)


def _whole(table: Table, asked: Asked, measured: Measured) -> tuple[Expected, float]:
    """Dense against sparse on the same prompt, through `reread eval`'s timing."""
    assert asked.model is not None
    first = isinstance(table.work, Prefill)
    dense, ours = (smoke.shrunk(m) for m in METHODS["ttft" if first else "throughput"])
    request = Request(
        model=asked.model, tasks=(smoke.question_task(asked.model),), lengths=(smoke.LONGEST,),
        methods=f"{dense},{ours}", out=asked.out / "smoke", limit=asked.limit or 1, speed="on",
        indexer=asked.indexer if first else None, device="cpu",
    )  # fmt: skip
    folder = evaluate(request, asked.report)
    measured.details.append({**folder.run, "speed": folder.speeds()})
    lines = {line["method"]: line for line in folder.speeds()}
    figure = "ttft_s" if first else "ms_per_token"
    what = "time to the first token" if first else "time a token"
    row = _row(f"CPU, {what}: dense / {ours} at {smoke.LONGEST} tokens")
    return row, lines[dense][figure] / lines[ours][figure]
