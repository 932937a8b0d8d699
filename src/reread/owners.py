"""Whose memory an arena works on."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from .layer import LayerState


class Owners:
    """The caches of one conversation, and how often their memory had become another when they were
    noted."""

    def __init__(self, states: Mapping[int, LayerState]) -> None:
        self._owners = [weakref.ref(state) for state in states.values()]
        self._moves = [state.kv.moves for state in states.values()]

    @property
    def gone(self) -> bool:
        """Whether none of them is left."""
        return all(owner() is None for owner in self._owners)

    def some_of(self, states: Mapping[int, LayerState]) -> bool:
        """Whether one of `states` is among them."""
        own = [owner() for owner in self._owners]
        return any(state is mine for state in states.values() for mine in own)

    def unmoved(self, states: Mapping[int, LayerState]) -> bool:
        """Whether `states` are they, in the same memory."""
        owners = zip(states.values(), self._owners, self._moves, strict=True)
        return len(states) == len(self._owners) and all(
            state is owner() and state.kv.moves == moves for state, owner, moves in owners
        )
