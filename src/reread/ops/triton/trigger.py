"""Slow or fast on the device, per row of a step: what `policy.controller` decides, without the host
knowing the tokens."""

from __future__ import annotations

import triton
from torch import Tensor

from ...config import Config
from ...types import FIELDS
from . import trigger_kernels

# rows of `info`, of `state`, and of the step tensor
INFO = ("lane", "length", "role", "first", "given", "at")
STATE = ("since_slow", "resting", "uncertain", "selected", "window")
STEP = (*FIELDS, "lane")
IDLE, PROMPT, DECODE = range(3)  # roles of a row
# why a step is what it is, by code: 0 is fast, the last one is full, the others are slow
REASONS = ("", "first", "no selection", "interval", "boundary", "uncertainty", "full")
FULL = len(REASONS) - 1


def plan_steps(
    info: Tensor,
    tokens: Tensor,
    ends: Tensor | None,
    state: Tensor,
    step: Tensor,
    codes: Tensor,
    config: Config,
    *,
    row: int = 0,
) -> None:
    """Decide the kind of each row's step, note it in its lane, and write what the kernels read.

    Args:
        info: int32 [len(INFO), B], contiguous. Per row its lane; its keys, the current token
            included; its role; whether this is the first decode step behind a prompt (what the
            lane remembers is forgotten then); a code that is given (a step that is replayed), or
            -1; and where its token stands in `tokens`. A PROMPT row reads everything and is no
            decode step; an IDLE one, whose length is 0 and whose lane has empty lists, is fast
            over nothing.
        tokens: int32, read at "at".
        ends: bool [vocabulary], as the Controller's boundary.
        state: int32 [len(STATE), lanes], read and written.
        step: int32 [len(STEP), B] with a last stride of 1, written; of a row that is a PROMPT or
            IDLE no field but its kind, length and lane means anything.
        codes: int32 [B], written: the row's reason, -1 where it is no decode step.
        config: of mode "slow-fast" or "dense", with `triggers.first_step`.
        row: where `info` has a column per step instead of per row, the column of this step; step
            and codes are then one column of wider ones, B = 1.
    """
    triggers = config.triggers
    rows = codes.shape[0]
    assert info.is_contiguous()
    assert step.stride(1) == 1
    assert step.shape[1] == rows
    assert rows in (1, info.shape[1])
    trigger_kernels.plan_kernel[(1,)](
        info, tokens, codes if ends is None else ends, state, step, codes, info.shape[1],
        step.stride(0), state.shape[1], row, config.sink, config.recent, config.budget,
        triggers.t_max or 0, triggers.t_min, rows,
        BPAD=max(2, triton.next_power_of_2(rows)), DENSE=config.mode == "dense",
        BELOW=config.dense_below_budget, BOUNDARY=triggers.boundary and ends is not None,
        num_warps=1,
    )  # fmt: skip
