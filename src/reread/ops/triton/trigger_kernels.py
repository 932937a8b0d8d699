# mypy: ignore-errors
"""The Controller's decision for every row of a step, on the device; see `policy.controller`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def own_code(
    length, token_ends, since, resting, uncertain, selected, first, budget, t_max, t_min,
    DENSE: tl.constexpr, BELOW: tl.constexpr, BOUNDARY: tl.constexpr,
):  # fmt: skip
    """Why the triggers make a step slow, as a code; 0 where none does. Later lines win."""
    code = tl.where(uncertain != 0, 5, 0)
    if BOUNDARY:
        code = tl.where(token_ends != 0, 4, code)
    code = tl.where((resting != 0) & (since + 1 < t_min), 0, code)
    code = tl.where((t_max > 0) & (since + 1 >= t_max), 3, code)
    code = tl.where(selected == 0, 2, code)
    code = tl.where(first != 0, 1, code)
    if BELOW:
        code = tl.where(length <= budget, 6, code)
    if DENSE:
        code = tl.zeros_like(code) + 6
    return code


@triton.jit
def plan_kernel(
    info, tokens, ends, state, step, codes, apart, across, lanes, column, sink, recent, budget,
    t_max, t_min, rows,
    BPAD: tl.constexpr, DENSE: tl.constexpr, BELOW: tl.constexpr, BOUNDARY: tl.constexpr,
):  # fmt: skip
    """One program for all rows. Rows of `info` are `apart` apart, those of `step` `across`, those
    of `state` `lanes`; what they are: see `trigger.plan_steps`."""
    b = tl.arange(0, BPAD)
    real = b < rows
    info += column
    lane = tl.load(info + b, mask=real, other=0)
    length = tl.load(info + apart + b, mask=real, other=0)
    role = tl.load(info + 2 * apart + b, mask=real, other=0)
    first = tl.load(info + 3 * apart + b, mask=real, other=0)
    given = tl.load(info + 4 * apart + b, mask=real, other=0)
    at = tl.load(info + 5 * apart + b, mask=real, other=0)
    decode = real & (role == 2)
    ask = decode & (given < 0)
    token_ends = tl.zeros_like(lane)
    if BOUNDARY:
        token = tl.load(tokens + at, mask=ask, other=0)
        token_ends = tl.load(ends + token, mask=ask, other=0).to(tl.int32)
    mine = state + lane
    known = decode & (first == 0)
    since = tl.load(mine, mask=known, other=0)
    resting = tl.load(mine + lanes, mask=known, other=0)
    uncertain = tl.load(mine + 2 * lanes, mask=known, other=0)
    selected = tl.load(mine + 3 * lanes, mask=known, other=0)
    window = tl.load(mine + 4 * lanes, mask=known, other=0)
    code = own_code(
        length, token_ends, since, resting, uncertain, selected, first, budget, t_max, t_min,
        DENSE, BELOW, BOUNDARY,
    )  # fmt: skip
    code = tl.where(given < 0, code, given)
    fast, full = decode & (code == 0), decode & (code == 6)
    slow = decode & (code != 0) & (code != 6)
    low = tl.zeros_like(length) + sink
    high = tl.maximum(low, length - recent)
    window = tl.where(fast, window, tl.minimum(high, length))
    tl.store(mine, tl.where(fast, since + 1, tl.where(slow, 0, since)), mask=decode)
    tl.store(mine + lanes, tl.where(slow, (code != 1).to(tl.int32), resting), mask=decode)
    tl.store(mine + 2 * lanes, tl.where(first != 0, 0, uncertain), mask=decode)
    tl.store(mine + 3 * lanes, tl.where(slow, 1, tl.where(full, 0, selected)), mask=decode)
    tl.store(mine + 4 * lanes, window, mask=decode)
    dense = real & ((role == 1) | slow | full)
    zero = tl.zeros_like(length)
    # in the order of FIELDS, lanes behind them
    tl.store(step + b, zero, mask=real)
    tl.store(step + across + b, length, mask=real)
    tl.store(step + 2 * across + b, low, mask=real)
    tl.store(step + 3 * across + b, high, mask=real)
    tl.store(step + 4 * across + b, window, mask=real)
    tl.store(step + 5 * across + b, dense.to(tl.int32), mask=real)
    tl.store(step + 6 * across + b, slow.to(tl.int32), mask=real)
    # a row that is padding is fast over nothing, so that its output is written
    tl.store(step + 7 * across + b, (fast | (role == 0)).to(tl.int32), mask=real)
    tl.store(step + 8 * across + b, zero, mask=real)
    tl.store(step + 9 * across + b, lane, mask=real)
    tl.store(codes + b, tl.where(decode, code, -1), mask=real)
