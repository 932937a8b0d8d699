"""What runs beside what in a step whose rows choose again: streams, a ring of workspaces, events
(SFI, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch

from .cuda import new_event, new_stream

if TYPE_CHECKING:
    from torch import Tensor

    from .ops.triton import Cache, Chosen, Workspace

Overlap = Literal["none", "refresh", "rows"]
DEFAULT_OVERLAP: Overlap = "rows"
RING = 4


class Lanes:
    """The workspaces of one arena, and the streams on which they are used.

    Attributes:
        overlap: "refresh": the Selector of a layer runs under the next layers' attention; "rows":
            so do, besides, the slow and the fast rows of one layer; "none": one after the other.
        works: a ring of workspaces, so that attention may go on while a Selector still reads.
        fast_work: of fast rows that run beside slow ones.
    """

    def __init__(
        self,
        overlap: Overlap,
        device: torch.device,
        workspace: Callable[[bool], Workspace],
        *,
        ring: int = RING,
    ) -> None:
        """workspace: makes one, with or without what a Selector needs; ring: how many with."""
        self.overlap: Overlap = overlap if device.type == "cuda" else "none"
        self.works = [workspace(True) for _ in range(ring if self.overlap != "none" else 1)]
        self.fast_work = workspace(False) if self.overlap == "rows" else self.works[0]
        self._device = device
        if self.overlap != "none":
            self._refresh, self._dense = new_stream(device), new_stream(device)
        self.restart()

    @property
    def nbytes(self) -> int:
        """Bytes of all workspaces."""
        beside = [self.fast_work] if self.overlap == "rows" else []
        return sum(int(work.nbytes) for work in (*self.works, *beside))

    def restart(self) -> None:
        """The first layer of a step comes next."""
        self._turn, self._forked = 0, False
        self._done: list[torch.cuda.Event | None] = [None] * len(self.works)

    def clean(self) -> None:
        """A step failed on its way: leave no half-done counts to the next Selector."""
        for work in self.works:
            work.clean()

    def next(self) -> Workspace:
        """The workspace of the next layer, free once the Selector that last read it is done."""
        slot = self._turn % len(self.works)
        self._turn += 1
        event = self._done[slot]
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        return self.works[slot]

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is launched within it runs beside what is launched before `join`."""
        self._dense.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._dense):
            yield

    def join(self) -> None:
        """Wait for what ran `beside`."""
        torch.cuda.current_stream(self._device).wait_stream(self._dense)

    def attend(
        self,
        q: Tensor,
        kv: Cache,
        chosen: Chosen,
        kinds: tuple[Tensor, Tensor],
        allowed: tuple[Tensor, Tensor],
        *,
        scale: float,
        work: Workspace,
        out: Tensor,
    ) -> Tensor:
        """Each row its own kind: dense rows leave their evidence in `work`.

        Args:
            kinds: int32 [B] each, which rows are dense and which are fast; a row may be neither.
            The others as for `ops.triton.decode_mixed`.
        """
        from .ops import triton as kernels

        dense, fast = kinds
        if self.overlap != "rows":
            return kernels.decode_mixed(
                q, kv, chosen, dense, scale=scale, work=work, allowed=allowed, out=out
            )
        with self.beside():
            kernels.decode_dense(
                q, kv, scale=scale, work=work, active=dense, allowed=allowed, out=out
            )
        kernels.decode_sparse(q, kv, chosen, scale=scale, work=self.fast_work, active=fast, out=out)
        self.join()
        return out

    def later(self, choose: Callable[[], None]) -> None:
        """Run a Selector on the latest workspace: under the next layers, or at once."""
        if self.overlap == "none":
            choose()
            return
        self._refresh.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._refresh):
            choose()
            done = new_event()
            done.record()
        self._done[(self._turn - 1) % len(self.works)] = done
        self._forked = True

    def barrier(self) -> None:
        """The end of a step: every Selector is done before the next step reads what it chose."""
        if self._forked:
            torch.cuda.current_stream(self._device).wait_stream(self._refresh)
        self._forked = False
