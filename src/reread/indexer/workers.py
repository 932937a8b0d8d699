"""Several processes that distil together: each reads other contexts, gradients are averaged."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError

WORLD = "WORLD_SIZE"  # set by `accelerate launch` and torchrun


class Workers:
    """This process among `count`; it is number `rank`."""

    rank = 0
    count = 1

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its mean over the processes."""

    def wait(self) -> None:
        """Until every process is here."""


class _Accelerated(Workers):
    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.rank = accelerator.process_index
        self.count = accelerator.num_processes

    def average(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.copy_(self._accelerator.reduce(tensor, reduction="mean"))

    def wait(self) -> None:
        self._accelerator.wait_for_everyone()


def find_workers(device: str = "auto") -> Workers:
    """The processes that this one was launched with; it alone where it was not.

    Raises:
        InputError: launched as one of several, but accelerate is not installed.
    """
    count = int(os.environ.get(WORLD, "1") or 1)
    if count <= 1:
        return Workers()
    try:
        accelerate = importlib.import_module("accelerate")
    except ImportError as error:
        raise InputError(
            f"{WORLD}={count}, but accelerate is not installed: pip install accelerate, or start "
            "one process"
        ) from error
    cpu = device == "cpu" or not torch.cuda.is_available()
    return _Accelerated(accelerate.Accelerator(cpu=cpu))
