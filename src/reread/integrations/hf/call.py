"""The forward pass that is running."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...attention import StepPlan
from ...drafting import verify_size
from .conversation import Conversation, first_positions, has_holes, queries_that_exist
from .device_step import DeviceStep
from .recorder import Recorder
from .runner import Runner


@dataclass(slots=True)
class Call:
    """Made before a forward pass, dropped behind it.

    Attributes:
        plan: of a decode step; None in a prefill.
        step: a decode step on the GPU, None elsewhere.
        exist: bool [B, T] of a prefill's queries, False for padding; None: no padding.
        starts: the first position of each row that is no padding; () in a dense prefill.
        intercepted: layers whose attention came through the interface.
    """

    conversation: Conversation
    plan: StepPlan | None
    step: DeviceStep | None = None
    exist: Tensor | None = None
    starts: tuple[int, ...] = ()
    intercepted: set[int] = field(default_factory=set)


def decode_call(
    conversation: Conversation,
    recorder: Recorder,
    runner: Runner | None,
    ids: Tensor | None,
    mask: Any,
) -> Call:
    """A decode step is about to run. ids: [B, 1], None if unknown; mask: attention_mask or None."""
    counted = recorder.begin_step(conversation.controller, len(conversation.controller.rows))
    if runner is not None:
        runner.prepare(conversation)
    plan = conversation.plan(ids, mask, counted)
    step = None if runner is None else runner.begin(conversation, plan)
    return Call(conversation, plan, step, starts=plan.starts)


def prompt_call(
    conversation: Conversation,
    recorder: Recorder,
    runner: Runner | None,
    new: int,
    mask: Any,
    needs: tuple[bool, bool],
) -> Call:
    """A prefill of `new` columns is about to run; needs: whether it is sparse, and whether an
    indexer reads along, which both have to know where rows begin."""
    rows, length = len(conversation.controller.rows), conversation.length + new
    known = recorder.prompt + recorder.wanted if recorder.wanted else 0
    config = conversation.controller.config
    # a pass that verifies writes behind the text's end
    spare = verify_size(1 + config.draft.tokens) if config.mode == "exact" else 0
    columns = max(known, length) + spare
    conversation.prepare_prefill(columns)
    if runner is not None:
        runner.prepare_prefill(conversation, columns, has_holes(mask, rows, length))
    starts = first_positions(mask, rows, length, holes=not needs[0]) if any(needs) else ()
    return Call(conversation, None, exist=queries_that_exist(mask, new), starts=starts)
