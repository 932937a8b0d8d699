"""What all tests share: a quiet, reproducible set-up and the place of the shared material."""

from __future__ import annotations

import os
from pathlib import Path

# Without a GPU the kernels run interpreted, which counts only if it is set before anything imports
# triton, as torch and transformers may in another test of the same process.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from hypothesis import settings

REPO = Path(__file__).resolve().parent.parent
SHARED = REPO.parent / "shared"

# derandomize: the same examples on every machine; HYPOTHESIS_PROFILE=search looks for new ones
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # the workers share the cores already


@pytest.fixture(scope="session")
def needle_dir() -> Path:
    """The retrieval checkpoint beside the repository; where it is missing, tests skip."""
    folder = SHARED / "models" / "needle-27m"
    if not (folder / "model.safetensors").is_file():
        pytest.skip(
            "needle-27m is not here: expected ../shared/models/needle-27m beside the repository"
        )
    return folder
