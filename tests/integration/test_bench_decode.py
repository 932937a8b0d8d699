"""The benchmark of whole decode steps on the CPU: what it runs, checks and refuses. Its kernels are
interpreted, so its times mean nothing here."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from reread import Config, InputError, NumericalError, UnsupportedError
from reread.ops import reference
from reread.shapes import Shape
from reread.types import KVView

pytest.importorskip("triton", reason="triton is not installed: its kernels cannot run here")

from reread.bench import decode, harness, model, table, timing
from reread.bench.arms import DenseArm

SHAPE = Shape(
    name="tiny", layers=2, total_layers=2, hidden=64, heads=4, kv_heads=2, head_dim=64,
    intermediate=64, vocabulary=100, tied=True,
)  # fmt: skip
ROWS, CONTEXT = 2, 64
CONFIG = Config(k=16, recent=8)
BANDWIDTH = 1e9
OURS = DenseArm("reread-dense", None)


@pytest.fixture(autouse=True)
def timed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The CPU in the GPU's place, float32 in bfloat16's, which the interpreter lacks, and one
    repeat of everything; what was timed."""
    found: list[float] = []

    def milliseconds(work: Callable[[], object]) -> float:
        begun = time.perf_counter()
        work()
        found.append((time.perf_counter() - begun) * 1e3)
        return found[-1]

    def float32(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: make(*given[:-1], torch.float32)

    for module in (decode, table, timing):
        monkeypatch.setattr(module, "require_cuda", lambda: torch.device("cpu"))
    for module in (decode, harness):
        monkeypatch.setattr(module, "milliseconds", milliseconds)
    for module in (decode, table):
        monkeypatch.setattr(module, "random_model", float32(model.random_model))
    monkeypatch.setattr(decode, "random_caches", float32(model.random_caches))
    monkeypatch.setattr(table, "copy_bandwidth", lambda: BANDWIDTH)
    monkeypatch.setattr(harness, "REPEATS", 1)
    monkeypatch.setattr(harness, "GROUP", 1)
    monkeypatch.setattr(decode, "SEQUENCE", 3)
    return found


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Somebody else's dense attention."""
    view = KVView(k, v, (0,) * k.shape[0], (k.shape[2],) * k.shape[0])
    return reference.decode_dense(q, view, scale=scale)[0]


def unscaled(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return attention(q, k, v, 1.0)


def broken(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    raise RuntimeError("no kernel for this shape\nand much more about it")


def measure(*dense: DenseArm, **more: Any) -> dict[str, Any]:
    given = {"slow_every": [2.0], "arms": dense, "bandwidth": BANDWIDTH, **more}
    return decode.measure(SHAPE, ROWS, CONTEXT, CONFIG, **given)


@pytest.mark.slow
def test_a_record_of_everything(timed: list[float]) -> None:
    told: list[str] = []
    absent = DenseArm("absent", None, "absent is not installed")
    record = measure(
        OURS, DenseArm("other", attention), DenseArm("broken", broken), absent, progress=told.append
    )
    assert (record["shape"], record["rows"], record["context"]) == ("tiny", ROWS, CONTEXT)
    assert record["kv_bytes"] == ROWS * CONTEXT * SHAPE.kv_bytes_per_token()
    ours, other, *rest = record["dense"]
    assert [arm["arm"] for arm in (ours, other)] == ["reread-dense", "other"]
    assert record["fastest_dense"] == min((ours, other), key=lambda arm: arm["ms"])["arm"]
    assert max(ours["error"], other["error"]) < 1e-5
    assert ours["tokens_per_s"] == pytest.approx(ROWS / ours["ms"] * 1e3)
    read = SHAPE.active_weight_bytes(ROWS) + ROWS * CONTEXT * SHAPE.kv_bytes_per_token()
    assert ours["floor_ms"] == pytest.approx(read / BANDWIDTH * 1e3)
    assert rest[:2] == [
        {"arm": "broken", "not_run": "failed: no kernel for this shape"},
        {"arm": "absent", "not_run": "absent is not installed"},
    ]
    assert rest[2]["arm"] == "no attention"
    assert rest[2]["bare_ms"] < ours["ms"]
    assert list(record["slow_fast"]) == list(decode.OVERLAPS)
    best = min(arm["ms"] for arm in (ours, other))
    for arm in record["slow_fast"].values():
        assert max(arm["errors"].values()) < 1e-5
        assert arm["fast"]["roofline"] == pytest.approx(arm["fast"]["floor_ms"] / arm["fast"]["ms"])
        gap = arm["1/2"]
        assert gap["slow_rate"] == 0.5
        assert gap["speedup"] == pytest.approx(best / gap["ms"])
        assert gap["keys_read_share"] == pytest.approx((CONFIG.budget + CONTEXT) / 2 / CONTEXT)
    assert record["slow_fast"]["rows"]["errors"].keys() == {"slow", "fast", "mixed"}
    assert len(timed) == 3 + len(decode.OVERLAPS) * (3 + 1)
    assert "dense: other" in told


def test_wrong_attention_is_an_error_before_anything_is_timed(timed: list[float]) -> None:
    with pytest.raises(NumericalError, match="dense arm wrong: logits differ by 0"):
        measure(DenseArm("wrong", unscaled), OURS)
    assert timed == []


def test_wrong_sparse_attention_is_an_error_before_it_is_timed(
    timed: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "decode_sparse", lambda q, *_, **__: torch.zeros_like(q[0]))
    with pytest.raises(NumericalError, match="fast step: logits differ"):
        measure(OURS)
    assert len(timed) == 2  # ours, and no attention


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("gap", [1.0, 2.0, 6.8, 20.0])
def test_slow_steps_have_exactly_their_share(rows: int, gap: float) -> None:
    found = decode.slow_steps(rows, gap, 160)
    assert len(found) == 160
    assert set().union(*found) <= set(range(rows))
    assert sum(map(len, found)) == math.ceil(160 * rows / gap)
    assert found == decode.slow_steps(rows, gap, 160)


def test_rows_are_slow_independently() -> None:
    """Of 16 rows at 1/9 each, 1 - (8/9)^16 of the steps have a slow one; a row has bursts."""
    found = decode.slow_steps(16, 9.0, 10_000)
    mixed = sum(map(bool, found)) / len(found)
    assert mixed == pytest.approx(1 - (8 / 9) ** 16, abs=0.02)
    own = [0 in step for step in found]
    again = sum(a and b for a, b in itertools.pairwise(own)) / sum(own)
    assert again == pytest.approx(1 / 9, abs=0.04)


FAILURES = {
    (1, 64): InputError("1 rows of 64 positions need 9 GiB"),
    (2, 64): UnsupportedError("a head dimension of 7"),
    (3, 64): torch.OutOfMemoryError("out of memory"),
}


def test_a_cell_that_fails_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[object] = []

    def cell(shape: Shape, rows: int, context: int, config: Config, **more: Any) -> dict[str, Any]:
        models.append(more["model"])
        more["progress"]("here")
        if error := FAILURES.get((rows, context)):
            raise error
        return {"shape": shape.name, "rows": rows, "context": context, "done": True}

    monkeypatch.setattr(decode, "measure", cell)
    told: list[dict[str, Any]] = []
    said: list[str] = []
    result = table.measure(
        SHAPE, [*FAILURES, (2, 128)], CONFIG,
        slow_every=[6.8], arms=[OURS], commit="abc", progress=said.append, on_row=told.append,
    )  # fmt: skip
    assert told == result["rows"]
    assert [row.get("failed") for row in told] == [*map(str, FAILURES.values()), None]
    assert [(row["rows"], row["context"]) for row in told] == [*FAILURES, (2, 128)]
    assert told[-1]["done"]
    assert all(built is models[0] for built in models)
    assert said[0] == "tiny: building the model"
    assert said[-1] == "tiny 2 x 128: here"
    assert (result["commit"], result["copy_bandwidth"]) == ("abc", BANDWIDTH)
    assert {"versions", "device", "compared"} <= result.keys()
    assert result["config"]["k"] == 16
    assert result["config"]["shape"]["layers"] == 2


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ((2, 28), "context 28 is within the budget of 28 keys"),
        ((0, 64), "batch 0 is not possible"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_built(
    cell: tuple[int, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object) -> None:
        pytest.fail("a model was built")

    monkeypatch.setattr(table, "random_model", build)
    with pytest.raises(InputError, match=message):
        table.measure(SHAPE, [(2, 64), cell], CONFIG, slow_every=[6.8], arms=[OURS])


def test_an_indexer_at_every_step_is_an_arm() -> None:
    config = Config.preset("indexed").updated({"k": 16, "recent": 8})
    row = decode.measure(
        SHAPE, ROWS, CONTEXT, config, slow_every=(), arms=[OURS], bandwidth=BANDWIDTH
    )
    arm = row["indexed"]
    assert arm["agreement"] >= 0.99
    assert arm["error"] < 1e-3
    assert arm["speedup"] == pytest.approx(row["dense"][0]["ms"] / arm["ms"])
    assert "quality not claimed" in arm["claim"]
