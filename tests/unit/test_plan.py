"""The planner's figures by hand, how they move, and what it refuses."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.readme_parts import load
from reread import Config, TriggerConfig
from reread.errors import ConfigError, InputError
from reread.hardware import GPUS, Calibration
from reread.planner import (
    BOUNDARY_EVERY,
    DEFAULT_SLOW_EVERY,
    Plan,
    expected_slow_every,
    plan,
)
from reread.shapes import SHAPES, Shape

QWEN = Shape.named("qwen3-4b")
DEFAULT = Config.preset("default")
# round figures, so that a hand can follow and a new calibration changes no test
ROUND = Calibration(
    source="a test",
    weight_efficiency=0.8,
    attention_efficiency=1.0,
    gather_efficiency=0.5,
    layer_us=20,
    refresh_layer_us=25,
    refresh_share=0.5,
    prefill_efficiency=0.5,
    prefill_attention_efficiency=0.25,
    memory_share=0.5,
)
GPU = dataclasses.replace(GPUS["h200"], name="round", memory=10**11, bandwidth=1e12, flops=1e15)


def planned(context: int, batch: int = 16, **options: Any) -> Plan:
    return plan(QWEN, context, batch, "h200", DEFAULT, **options)


# -- figures by hand ---------------------------------------------------------------------------


def test_a_case_by_hand() -> None:
    found = plan(QWEN, 10_000, 2, GPU, DEFAULT, slow_every=5, calibration=ROUND)
    weights, keys = 8_044_544_000 / 0.8e12 * 1e3, 2 * 10_000 * 147_456 / 1e12 * 1e3
    dense, preset = found.dense, found.preset
    assert dense.weights_ms == preset.weights_ms == pytest.approx(weights)
    assert dense.keys_ms == pytest.approx(keys)
    assert dense.refresh_ms == 0
    assert dense.fixed_ms == preset.fixed_ms == pytest.approx(36 * 0.02)
    fast = 2 * 772 * 147_456 / 0.5e12 * 1e3
    assert preset.keys_ms == pytest.approx(0.8 * fast + 0.2 * keys)
    assert found.mixed_share == pytest.approx(1 - 0.8**2)
    assert preset.refresh_ms == pytest.approx(0.5 * 0.2 * keys + 0.36 * 36 * 0.025)
    assert found.speedup == dense.step_ms / preset.step_ms
    assert dense.step_ms == pytest.approx(weights + keys + 0.72)
    assert preset.tokens_per_s == pytest.approx(2e3 / preset.step_ms)
    assert (dense.limit, found.slow_every, found.shape, found.gpu) == (
        "weights",
        5,
        "qwen3-4b",
        "round",
    )


def test_memory_by_hand() -> None:
    found = plan(QWEN, 10_000, 2, GPU, DEFAULT, slow_every=5, calibration=ROUND)
    kv, weights = 1_474_560_000, 8_044_544_000
    # fp32 logits of 32 heads, scores and mass of 8 KV heads; int32 indices of 36 layers
    workspace = 4 * (32 + 3 * 8 + 8) * 10_000 + 36 * 4 * 8 * 512
    assert (found.kv_bytes_per_request, found.kv_bytes) == (kv, 2 * kv)
    assert (found.weight_bytes, found.workspace_bytes) == (weights, 2 * workspace)
    assert found.dense.residents == (50_000_000_000 - weights) // kv
    assert found.preset.residents == (50_000_000_000 - weights) // (kv + workspace)


def test_prefill_by_hand() -> None:
    found = plan(QWEN, 10_000, 2, GPU, DEFAULT, calibration=ROUND)
    linear = 2 * (QWEN.parameters - 151_936 * 2560) * 10_000 / 0.5e15
    assert found.ttft_s == pytest.approx(linear + 2 * 36 * 32 * 128 * 1e8 / 0.25e15)


def test_many_rows_are_bound_by_arithmetic() -> None:
    found = plan(QWEN, 1, 10_000, GPU, DEFAULT, calibration=ROUND)
    assert found.dense.weights_ms == pytest.approx(QWEN.flops_per_token * 1e4 / 0.5e15 * 1e3)


def test_a_mixture_reads_more_experts_with_more_rows() -> None:
    moe = Shape.named("qwen3-30b-a3b")
    ms = [plan(moe, 4096, b, GPU, DEFAULT, calibration=ROUND).dense.weights_ms for b in (1, 8, 64)]
    assert ms == pytest.approx([moe.active_weight_bytes(b) / 0.8e12 * 1e3 for b in (1, 8, 64)])
    assert ms == sorted(ms)
    assert ms[-1] > 5 * ms[0]


# -- how they move -----------------------------------------------------------------------------


@given(
    name=st.sampled_from(list(SHAPES)),
    gpu=st.sampled_from(list(GPUS)),
    batch=st.integers(1, 128),
    context=st.integers(DEFAULT.budget + 1, 500_000),
    slow_every=st.floats(1.5, 64),
)
def test_a_longer_context_gains_more_and_leaves_fewer_residents(
    name: str, gpu: str, batch: int, context: int, slow_every: float
) -> None:
    shape = Shape.named(name)
    short, long = (
        plan(shape, c, batch, gpu, DEFAULT, slow_every=slow_every) for c in (context, 2 * context)
    )
    rarer = plan(shape, context, batch, gpu, DEFAULT, slow_every=2 * slow_every)
    # below that, gathering nearly all keys is slower than reading all of them in order
    if short.speedup > 1:
        assert long.speedup > short.speedup
        assert rarer.speedup > short.speedup
    assert long.dense.residents <= short.dense.residents
    assert short.preset.residents <= short.dense.residents


@given(batch=st.integers(1, 64), slow_every=st.floats(2, 64))
def test_the_crossover_is_the_first_context_with_that_speedup(
    batch: int, slow_every: float
) -> None:
    found = planned(1, batch, slow_every=slow_every)
    for context, wanted in ((found.crossover, 1.0), (found.crossover_worthwhile, 1.1)):
        assert context is not None
        assert planned(context, batch, slow_every=slow_every).speedup >= wanted
        if context > DEFAULT.budget + 1:
            assert planned(context - 1, batch, slow_every=slow_every).speedup < wanted


def test_rows_that_are_always_slow_never_gain() -> None:
    found = planned(10**6, slow_every=1)
    assert found.speedup < 1
    assert (found.crossover, found.crossover_worthwhile) == (None, None)


def test_within_the_budget_every_step_is_dense() -> None:
    found = planned(DEFAULT.budget)
    assert found.preset == found.dense
    assert (found.slow_every, found.mixed_share, found.workspace_bytes) == (None, 0, 0)
    assert planned(DEFAULT.budget + 1).slow_every == DEFAULT_SLOW_EVERY
    forced = plan(QWEN, 700, 1, "h200", DEFAULT.updated({"dense_below_budget": False}))
    assert forced.speedup < 1
    # 700 keys are gathered, not the 772 of the budget
    more = plan(QWEN, 772, 1, "h200", DEFAULT.updated({"dense_below_budget": False}))
    assert forced.preset.keys_ms < more.preset.keys_ms


def test_the_dense_preset_is_dense() -> None:
    found = plan(QWEN, 32_768, 16, "h200", Config.preset("dense"))
    assert found.preset == found.dense
    assert (found.crossover, found.workspace_bytes) == (None, 0)
    with pytest.raises(ConfigError, match=r"slow_every=5.* mode='dense' has no triggers"):
        plan(QWEN, 32_768, 16, "h200", Config.preset("dense"), slow_every=5.0)


def test_weights_that_fill_the_memory_leave_no_request() -> None:
    found = plan(Shape.named("qwen3-30b-a3b"), 1000, 1, "rtx4090", DEFAULT)
    assert (found.dense.residents, found.preset.residents) == (0, 0)


# -- the rate of slow steps --------------------------------------------------------------------


def test_the_rates_are_those_of_the_result_file() -> None:
    rows = {row["variant"]: row for row in load("sentences")["rows"]}
    assert rows["default"]["triggers"] == DEFAULT.to_dict()["triggers"]
    assert round(rows["default"]["slow_every"], 2) == DEFAULT_SLOW_EVERY
    assert round(rows["boundary"]["slow_every"], 2) == BOUNDARY_EVERY
    alone = DEFAULT.updated({"t_max": None, "t_min": 1}).to_dict()
    assert rows["boundary"]["triggers"] == alone["triggers"]
    paper = Config.preset("paper").to_dict()
    assert rows["boundary, interval 64"]["triggers"] == paper["triggers"]


def test_the_rate_follows_the_triggers() -> None:
    rows = {row["variant"]: row for row in load("sentences")["rows"]}
    assert expected_slow_every(TriggerConfig()) == DEFAULT_SLOW_EVERY
    assert expected_slow_every(TriggerConfig(t_max=None, t_min=1)) == BOUNDARY_EVERY
    assert expected_slow_every(TriggerConfig(t_max=1)) == pytest.approx(1)
    assert expected_slow_every(TriggerConfig(t_max=3)) == pytest.approx(3, rel=0.01)
    for t_min, name in ((1, "boundary, interval 64"), (3, "boundary, interval 64, t_min 3")):
        assert expected_slow_every(TriggerConfig(t_max=64, t_min=t_min)) == pytest.approx(
            rows[name]["slow_every"], rel=0.02
        )
    assert expected_slow_every(TriggerConfig(t_min=1)) == pytest.approx(
        rows["default, t_min 1"]["slow_every"], rel=0.05
    )
    # the formula, where the default's own value does not stand in for it
    assert expected_slow_every(TriggerConfig(t_max=15)) == pytest.approx(DEFAULT_SLOW_EVERY, 0.06)
    assert expected_slow_every(TriggerConfig(boundary=False, t_max=8)) == 8
    never = TriggerConfig(boundary=False, t_max=None)
    assert expected_slow_every(never) == math.inf
    found = plan(QWEN, 32_768, 16, "h200", Config(triggers=never))
    assert (found.slow_every, found.mixed_share, found.preset.refresh_ms) == (None, 0, 0)
    entropy = TriggerConfig(uncertainty=4.0)
    with pytest.raises(ConfigError, match=r"triggers\.uncertainty=4\.0 .*--sentence"):
        expected_slow_every(entropy)
    given = plan(QWEN, 32_768, 16, "h200", Config(triggers=entropy), slow_every=4.0)
    assert given == planned(32_768, slow_every=4.0)


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 0}, "context=0 .* at least 1"),
        ({"context": 1.5}, "context=1.5"),
        ({"batch": 0}, "batch=0 .* at least 1"),
        ({"batch": True}, "batch=True"),
        ({"slow_every": 0.5}, "slow_every=0.5 .* at least 1"),
        ({"slow_every": math.nan}, "slow_every=nan"),
    ],
)
def test_what_cannot_be_right_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(**{"context": 32_768, **changes})


def test_an_unknown_gpu_is_refused() -> None:
    with pytest.raises(InputError, match="gpu 'tpu' is unknown: one of h200, h100"):
        plan(QWEN, 1, 1, "tpu", DEFAULT)
    assert plan(QWEN, 1, 1, "H200", DEFAULT).gpu == "h200"


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Calibration)][1:])
def test_a_calibration_that_cannot_be_right_is_refused(field: str) -> None:
    changes: dict[str, Any] = {field: -1.0}
    with pytest.raises(ConfigError, match=rf"calibration\.{field}=-1\.0"):
        Calibration(**changes)


def test_a_gpu_that_cannot_be_right_is_refused() -> None:
    for field in ("memory", "bandwidth", "flops"):
        changes: dict[str, Any] = {field: 0}
        with pytest.raises(ConfigError, match=rf"gpu\.{field}=0 .* above 0"):
            dataclasses.replace(GPU, **changes)


def test_other_gpus_reach_what_the_h200_reached_of_its_data_sheet() -> None:
    assert GPUS["h100"].bandwidth == pytest.approx(3.35e12 * 4.27 / 4.8)
    assert GPUS["h100"].flops == pytest.approx(GPUS["h200"].flops)
    assert {name: gpu.name for name, gpu in GPUS.items()} == {name: name for name in GPUS}


def test_exact_is_never_slower_than_dense_and_drafts_more_of_what_stands() -> None:
    exact = Config.preset("exact")
    for context in (500, 4096, 32_768, 131_072):
        plans = [plan(QWEN, context, 4, "h200", exact, acceptance=a) for a in (0.0, 0.5, 0.9, 0.97)]
        speedups = [found.speedup for found in plans]
        assert speedups == sorted(speedups)
        assert speedups[0] == 1.0
        assert [found.drafted for found in plans] == sorted(found.drafted for found in plans)
        assert plans[0].drafted == 0
    assert plans[-1].drafted == exact.draft.tokens
    assert plans[-1].slow_every is None
    assert 1.5 < plans[-1].speedup < plan(QWEN, 131_072, 4, "h200", DEFAULT).speedup


@pytest.mark.parametrize("value", [1.0, -0.1, float("nan"), True])
def test_an_acceptance_that_cannot_be(value: float) -> None:
    with pytest.raises(ConfigError, match="acceptance"):
        plan(QWEN, 4096, 1, "h200", Config.preset("exact"), acceptance=value)
