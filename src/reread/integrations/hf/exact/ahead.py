"""Drafting on a device without waiting for it: each token goes from one step into the next there,
and the host reads it one step later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ....cuda import Told, upload
from ....verifying import Pass
from .rows import Chooser, Row


class Steps(Protocol):
    """What drafts of the whole batch: see `DevicePasses`."""

    @property
    def rows(self) -> Sequence[Row]:
        """Of the whole batch."""
        ...

    def run_all(
        self,
        rows: Sequence[Row],
        first: Sequence[int],
        ids: Tensor,
        positions: Tensor,
        *,
        verify: bool,
    ) -> tuple[Tensor, Pass]:
        """One step of the rows, not waited for."""
        ...


class Ahead:
    """One draft of some rows."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._asked: list[list[Row]] = []

    def begin(self, newest: dict[Row, int], chooser: Chooser, device: torch.device) -> None:
        """newest: the token behind which each row drafts."""
        rows = self._steps.rows
        self._chooser, self._told = chooser, Told()
        self._ids = upload([[newest.get(row, 0)] for row in rows], device)
        self._places = upload([[row.length - row.shift] for row in rows], device)

    @torch.no_grad()
    def step(self, rows: Sequence[Row], t: int) -> dict[Row, int]:
        """Draft token t of these rows. Returns the keys that each of them reads."""
        first = [row.length + t for row in rows]
        logits, step = self._steps.run_all(rows, first, self._ids, self._places, verify=False)
        # to pick some rows by their numbers would be an upload to wait for
        asked = list(self._steps.rows if self._chooser.plain else rows)
        own = [logits[row.index, 0] for row in asked]
        told = self._chooser.draft(torch.stack(own), asked, t)
        self._told.put(told)
        self._asked.append(asked)
        tokens = told[0].long()
        if len(asked) == len(self._ids):
            self._ids = tokens[:, None]
        else:
            self._ids = self._ids.clone()
            for i, row in enumerate(asked):
                self._ids[row.index, 0] = tokens[i]
        self._places = self._places + 1
        return {row: step.read[i] for i, row in enumerate(rows)}

    def told(self, t: int, rows: Sequence[Row]) -> dict[Row, tuple[float, float]]:
        """Token t of these rows, and how probable its likeliest was; waits for that step alone."""
        tokens, chances = self._told.get(t)
        found = zip(self._asked[t], tokens, chances, strict=True)
        return {row: (token, chance) for row, token, chance in found if row in rows}
