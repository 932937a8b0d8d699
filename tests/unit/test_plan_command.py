"""`reread plan`: its table, its JSON, and bad input."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from reread import Config
from reread.cli import app
from reread.cli.plan import NOT_MEASURED
from reread.hardware import CALIBRATION
from reread.planner import Plan, plan
from reread.shapes import Shape


def planned(context: int, slow_every: float | None = None) -> Plan:
    """What the command's default options mean."""
    shape, config = Shape.named("qwen3-4b"), Config.preset("default")
    return plan(shape, context, 16, "h200", config, slow_every=slow_every)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "80"})


def test_json_holds_one_plan_for_each_context_and_batch() -> None:
    given = ["--context", "8192, 32768", "--batch", "1,16", "--gpu", "a100", "--preset", "paper"]
    result = run(*given, "--shape", "qwen3-0.6b", "--set", "k=1024", "--json")
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    cases = [(p["context"], p["batch"]) for p in value["plans"]]
    assert cases == [(8192, 1), (8192, 16), (32_768, 1), (32_768, 16)]
    config = Config.preset("paper").updated({"k": 1024})
    expected = plan(Shape.named("qwen3-0.6b"), 32_768, 16, "a100", config).to_dict()
    assert value["plans"][-1] == expected
    assert expected["dense"]["step_ms"] / expected["preset"]["step_ms"] == expected["speedup"]
    assert value["config"] == config.to_dict()
    assert value["gpu"]["name"] == "a100"
    assert value["calibration"] == dataclasses.asdict(CALIBRATION)
    calibrated = f"a roofline model, not a measurement; calibrated with {CALIBRATION.source}; "
    assert value["note"] == calibrated + f"never measured: {NOT_MEASURED}"
    assert {"versions", "commit"} <= value.keys()


def test_the_table_says_that_it_is_a_model_and_what_fits() -> None:
    result = run("--context", "8192,131072")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert f"a roofline model, not a measurement. Calibrated with: {CALIBRATION.source}." in text
    assert "Never measured: TTFT, GPUs other than the H200, " in text
    short, long = planned(8192), planned(131_072)
    assert f"8192 dense {short.dense.step_ms:.1f} {short.dense.tokens_per_s:.0f} 1.00x" in text
    assert f"x 16 default {long.preset.step_ms:.1f} {long.preset.tokens_per_s:.0f}" in text
    assert f"{long.preset.residents} of 16 requests of 131072 tokens fit" in text
    assert "requests of 8192 tokens" not in text
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_sentence_sets_the_rate_of_slow_steps() -> None:
    result = run("--context", "32768", "--sentence", "24", "--json")
    assert json.loads(result.stdout)["plans"] == [planned(32_768, slow_every=24.0).to_dict()]
    assert "a row is slow every 24.00 tokens" in " ".join(run("--sentence", "24").stdout.split())
    assert "no step is slow" in run("--preset", "dense").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "8K"], "--context '8K' is not possible: whole numbers"),
        (["--context", "8192,,1"], "--context '' is not possible"),
        (["--batch", "0"], "--batch '0' is not possible"),
        (["--batch", "9" * 5000], "--batch '999"),
        (["--gpu", "tpu"], "gpu 'tpu' is unknown"),
        (["--shape", "gpt"], "shape 'gpt' is unknown"),
        (["--preset", "fast"], "preset 'fast' is unknown"),
        (["--set", "k=0"], "k=0 is not possible"),
        (["--sentence", "0"], "slow_every=0.0 is not possible"),
        (["--preset", "dense", "--sentence", "9"], "slow_every=9.0 is not possible"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert re.fullmatch(r"error: [^\n]*\n", result.stderr)


def test_the_table_is_made_without_torch() -> None:
    code = (
        "import sys; from reread.cli import app; app(['plan'], standalone_mode=False);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)
