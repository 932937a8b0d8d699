"""The kernel benchmark: what it refuses, and that its arms compute what they say. Nothing is timed
here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from reread.bench import caches, kernel
from reread.bench.caches import Bench, KernelShape
from reread.bench.rivals import RIVALS, paged
from reread.bench.timing import copy_bandwidth
from reread.errors import InputError, NumericalError, UnsupportedError

pytest.importorskip("triton", reason="triton is not installed: its kernels cannot run here")


@pytest.mark.parametrize("call", [copy_bandwidth, lambda: kernel.measure([KernelShape(1, 2048)])])
def test_without_a_gpu_it_says_what_it_needs(
    call: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="needs a CUDA GPU"):
        call()


@pytest.mark.parametrize(
    ("shapes", "shares", "message"),
    [
        ([], [0.5], "no shape"),
        ([KernelShape(1, 2048)], [1.0], "share 1.0"),
        ([KernelShape(1, 1000)], [0.5], "1000 tokens"),
        ([KernelShape(1, 2048)], [0.001], "of which 2 are read"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    shapes: list[KernelShape], shares: list[float], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        kernel.check(shapes, shares)


def test_every_arm_is_checked_and_recorded(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the interpreter has no bfloat16
    monkeypatch.setattr(caches, "DTYPE", torch.float32)

    def once(step: Callable[[int], object], layers: int, repeats: int = 1) -> dict[str, float]:
        step(layers - 1)
        return {"us": 2.0, "p20": 1.0, "p80": 3.0}

    monkeypatch.setattr(kernel, "time_layers", once)
    shape = KernelShape(2, 1600, heads=4, kv_heads=2, dim=64)
    pool = torch.randn(2 * shape.layer_bytes // 4, device=device)
    absent: dict[str, str] = {}
    told: list[str] = []
    records = kernel.measure_shape(Bench(pool, shape, 1e12), [0.05], absent, told.append)
    kinds = [(r["kernel"], r["arm"]) for r in records]
    assert kinds[0] == ("dense", "reread")
    assert [x for x in kinds if x[0] != "dense"] == [
        ("sparse", "gather"), ("sparse", "gather"), ("mixed", "one launch"),
        ("mixed", "one launch, evidence"), ("refresh", "attention, Selector"),
    ]  # fmt: skip
    assert records[0]["floor_us"] == pytest.approx(2 * 1600 * 2 * 64 * 2 * 4 / 1e12 * 1e6)
    assert next(r for r in records if r["kernel"] == "sparse")["speedup"] == 1.0
    for rival in RIVALS:
        assert ("dense", rival) in kinds or any(name.startswith(rival) for name in absent)
    assert told[0] == "2 x 1600: checking"


def test_a_wrong_output_is_an_error_not_a_record() -> None:
    with pytest.raises(NumericalError, match="arm: relative error"):
        kernel.close(torch.ones(3), torch.tensor([1.0, 1.0, 1.1]), "arm")
    with pytest.raises(NumericalError):
        kernel.close(torch.full((3,), torch.nan), torch.ones(3), "arm")


def test_paged_puts_pages_in_order() -> None:
    rows, heads, pages, dim = 2, 3, 2, 4
    x: Any = torch.randn(rows, heads, pages * 16, dim)
    memory = x.flatten().view(rows * pages, heads, 16, dim)
    ordered = paged(x)
    for b, h, p in ((0, 0, 0), (0, 2, 1), (1, 1, 0)):
        assert torch.equal(ordered[b, h, 16 * p : 16 * p + 16], memory[b * pages + p, h])
