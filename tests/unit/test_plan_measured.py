"""The planner against the measured steps: every cell and every rate of slow steps."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.readme_parts import load
from reread import Config
from reread.hardware import CALIBRATION
from reread.planner import plan
from reread.shapes import Shape

# a cell in both counts in the later one, which is the newer run
FILES = ("gpu_decode", "gpu_decode_apart")
DEFAULT = Config.preset("default")
WITHIN = 0.2
NEVER = 1e9  # a gap in which no step is slow


def cells() -> dict[tuple[str, int, int], dict[str, Any]]:
    """The rows by shape, batch and context."""
    return {
        (row["shape"], row["rows"], row["context"]): row
        for file in FILES
        for row in load(file)["decode"]["rows"]
    }


CELLS = cells()


def measured(row: dict[str, Any]) -> tuple[float, dict[float, tuple[float, float]]]:
    """Milliseconds of the fastest dense step; milliseconds and speed-up of the preset's mean step
    by mean gap, the all-fast and the all-slow step among them."""
    arms = row["slow_fast"]
    arm = arms["rows" if "rows" in arms else "refresh"]
    (dense,) = [one["ms"] for one in row["dense"] if one["arm"] == row["fastest_dense"]]
    steps = {gap: arm[f"1/{gap:g}"] for gap in row["slow_every"]}
    found = {gap: (step["ms"], step["speedup"]) for gap, step in steps.items()}
    for gap, kind in ((NEVER, "fast"), (1.0, "slow")):
        found[gap] = arm[kind]["ms"], dense / arm[kind]["ms"]
    return dense, found


@pytest.mark.parametrize(("shape", "batch", "context"), CELLS, ids=lambda value: str(value))
def test_the_plan_agrees_with_every_measured_step(shape: str, batch: int, context: int) -> None:
    dense, steps = measured(CELLS[shape, batch, context])
    wrong = []
    for gap, (ms, speedup) in steps.items():
        found = plan(Shape.named(shape), context, batch, "h200", DEFAULT, slow_every=gap)
        figures = {
            "dense ms": (found.dense.step_ms, dense),
            "preset ms": (found.preset.step_ms, ms),
            "speed-up": (found.speedup, speedup),
        }
        for name, (planned, want) in figures.items():
            if not abs(planned / want - 1) <= WITHIN:
                wrong.append(
                    f"{shape} {batch} x {context}, one slow step in {gap:g}: {name} planned"
                    f" {planned:.3f}, measured {want:.3f} ({planned / want - 1:+.1%})"
                )
    assert not wrong, "\n".join(wrong)


def test_the_crossover_is_where_the_measured_speedup_is_close_to_one() -> None:
    found = plan(Shape.named("qwen3-4b"), 2048, 4, "h200", DEFAULT)
    # 1.00 times as fast at 2048 keys, 1.17 times at 8192
    rates = [CELLS["qwen3-4b", 4, n]["slow_fast"]["refresh"]["1/6.8"] for n in (2048, 8192)]
    assert rates[0]["speedup"] < 1.1 < rates[1]["speedup"]
    assert found.crossover is not None
    assert found.crossover_worthwhile is not None
    assert 1024 <= found.crossover <= 4096
    assert 2048 < found.crossover_worthwhile < 8192


def test_the_source_names_what_was_measured() -> None:
    for file in FILES:
        assert f"benchmarks/results/{file}.json" in CALIBRATION.source
        result = load(file)
        assert result["device"]["name"] == "NVIDIA H200"
        config = result["config"]
        assert config["sink"] + config["recent"] + config["k"] == DEFAULT.budget
    shapes, batches, _ = (set(values) for values in zip(*CELLS, strict=True))
    assert f"{' and '.join(sorted(shapes))}, {min(batches)} to {max(batches)} rows" in (
        CALIBRATION.source
    )
