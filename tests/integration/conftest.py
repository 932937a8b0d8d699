"""Integration tests run models. They share the tiny models, which must come back unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from . import tiny


@pytest.fixture(autouse=True, scope="session")
def _quiet_transformers() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Every test is also a test that reread undoes itself."""
    before = sorted(ALL_ATTENTION_FUNCTIONS), sorted(ALL_MASK_ATTENTION_FUNCTIONS)
    torch.manual_seed(0)
    yield
    assert (sorted(ALL_ATTENTION_FUNCTIONS), sorted(ALL_MASK_ATTENTION_FUNCTIONS)) == before


@pytest.fixture
def llama() -> object:
    return tiny.model("llama")
