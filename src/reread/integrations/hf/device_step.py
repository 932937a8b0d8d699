"""One decode step of one conversation on the GPU."""

from __future__ import annotations

from dataclasses import dataclass

from ...attention import Meter, StepPlan
from ...device import Arena
from ...steps import RowStep, StepShape
from .conversation import Conversation


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """One decode step of all rows, uploaded and ready to run."""

    conversation: Conversation
    arena: Arena
    plan: StepPlan
    rows: list[RowStep]

    @property
    def shape(self) -> StepShape:
        """Which kernels it needs."""
        return StepShape.of(self.plan.kinds)

    def finish(self, meter: Meter) -> None:
        """All layers have run."""
        self.arena.lanes.barrier()
        self.arena.finish(self.plan, self.rows, self.conversation.states, meter)
