"""Streams, events, pinned memory, free memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .errors import InputError

STAGING = 8  # steps that the host may run ahead of the device


def new_event(*, timing: bool = False) -> torch.cuda.Event:
    """An event; with `timing` it can tell how long something took."""
    return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]  # untyped in torch


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of the device's lowest priority, which is also the default's."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch


class Staging:
    """Host to device without waiting: a ring of pinned buffers, each reused once its copy is
    done."""

    def __init__(self, target: Tensor) -> None:
        self._target = target
        pinned = target.is_cuda
        self._ring = [
            torch.zeros(target.shape, dtype=target.dtype, pin_memory=pinned)
            for _ in range(STAGING if pinned else 1)
        ]
        self._copied: list[torch.cuda.Event | None] = [None] * len(self._ring)
        self._next = 0

    def upload(self, rows: list[tuple[int, ...]]) -> None:
        """Copy the rows' values, [B] tuples in the order of FIELDS."""
        slot = self._next
        self._next = (slot + 1) % len(self._ring)
        event = self._copied[slot]
        if event is not None:
            event.synchronize()
        self._ring[slot].copy_(torch.tensor(list(zip(*rows, strict=True)), dtype=torch.int32))
        self._target.copy_(self._ring[slot], non_blocking=True)
        if self._target.is_cuda:
            copied = self._copied[slot] = new_event()
            copied.record()


def upload(values: list[list[int]], device: torch.device) -> Tensor:
    """An int64 tensor on the device; the host does not wait for it."""
    held = torch.tensor(values)
    held = held.pin_memory() if device.type == "cuda" else held
    return held.to(device, non_blocking=True)


class Telling:
    """A tensor on its way from the device to the host, which need not wait for it."""

    def __init__(self, values: Tensor) -> None:
        """values: of any shape; they may change afterwards."""
        self._done: torch.cuda.Event | None = None
        if not values.is_cuda:
            self._held = values.clone()
            return
        self._held = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._held.copy_(values, non_blocking=True)
        self._done = new_event()
        self._done.record()

    @property
    def there(self) -> bool:
        """Whether `get` need not wait."""
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]  # untyped in torch

    def get(self) -> Any:
        """The values as lists; waits for them alone."""
        if self._done is not None:
            self._done.synchronize()
        return self._held.tolist()


class Told:
    """Device to host, read later: what each of some steps tells, so that the host may run ahead."""

    def __init__(self) -> None:
        self._held: list[Telling] = []

    def put(self, values: Tensor) -> None:
        """Values of the next step, of any shape; they may change afterwards."""
        self._held.append(Telling(values))

    def get(self, step: int) -> Any:
        """What step `step` told, as lists; waits for that step and no other."""
        return self._held[step].get()


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated, PyTorch's own reserve included."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def check_memory(
    device: torch.device, per_position: int, rows: int, positions: int, held: int = 0
) -> None:
    """Refuse, before anything is lost, a conversation whose keys and values do not fit.

    Args:
        per_position: bytes of one position in all rows, scratch included.
        held: positions that there is memory for already.

    Raises:
        InputError: says what would fit.
    """
    if device.type != "cuda" or positions <= held:
        return
    free, wanted = free_memory(device), per_position * (positions - held)
    if wanted <= free:
        return
    fits = held + free // per_position
    raise InputError(
        f"{rows} rows of {positions} positions need {wanted / 2**30:.1f} GiB for keys and values, "
        f"{free / 2**30:.1f} GiB are free: about {fits} positions would fit with {rows} rows, or "
        f"{rows * fits // positions} rows with {positions} positions"
    )
