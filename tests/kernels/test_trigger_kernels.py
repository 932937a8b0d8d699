"""The triggers on the device against the Controller, over random texts of several requests that
come and go."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reread.config import Config, TriggerConfig
from reread.policy.controller import Controller
from reread.types import StepKind

pytest.importorskip("triton", reason="triton is not installed: its kernels cannot run here")

from reread.ops.triton import trigger

VOCABULARY = 40
KINDS = {0: StepKind.FAST, trigger.FULL: StepKind.FULL}


class Host:
    """One request as the Controller plans it."""

    def __init__(self, config: Config, ends: torch.Tensor | None, prompt: int) -> None:
        self.controller = Controller(config, ends, 1)
        self.config, self.length, self.steps = config, prompt, 0
        self.before: StepKind | None = None

    def plan(self, token: int) -> tuple[StepKind, str]:
        reasons = self.controller.reasons.copy()
        selected = self.before not in (None, StepKind.FULL)
        (kind,) = self.controller.plan([token], [self.length + 1], [selected])
        found = self.controller.reasons - reasons
        self.before, self.length, self.steps = kind, self.length + 1, self.steps + 1
        return kind, next(iter(found), "full" if kind is StepKind.FULL else "")


class Device:
    """All requests of a board of `rows`."""

    def __init__(self, config: Config, ends: torch.Tensor | None, rows: int, device: str) -> None:
        self.config, self.rows = config, rows
        self.ends = None if ends is None else ends.to(device)
        self.state = torch.full((len(trigger.STATE), rows + 1), 7, dtype=torch.int32)
        self.state = self.state.to(device)
        self.step = torch.full((len(trigger.STEP), rows), -9, dtype=torch.int32, device=device)
        self.codes = torch.full((rows,), -9, dtype=torch.int32, device=device)
        self.device = device

    def plan(self, info: list[list[int]], tokens: list[int]) -> None:
        columns = info + [[self.rows, 0, trigger.IDLE, 0, -1, 0]] * (self.rows - len(info))
        given = torch.tensor(columns, dtype=torch.int32, device=self.device).T.contiguous()
        ids = torch.tensor(tokens or [0], dtype=torch.int32, device=self.device)
        trigger.plan_steps(given, ids, self.ends, self.state, self.step, self.codes, self.config)

    def field(self, name: str) -> list[int]:
        return list(map(int, self.step[trigger.STEP.index(name)]))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    t_max=st.sampled_from([None, 1, 2, 5, 16]),
    t_min=st.sampled_from([1, 2, 3, 6]),
    boundary=st.booleans(),
    uncertainty=st.sampled_from([None, 1.0]),
    below=st.booleans(),
    mode=st.sampled_from(["slow-fast", "slow-fast", "slow-fast", "dense"]),
)
def test_the_device_decides_what_the_controller_decides(
    seed: int, t_max: int | None, t_min: int, boundary: bool, uncertainty: float | None,
    below: bool, mode: str,
) -> None:  # fmt: skip
    draw = random.Random(seed)
    triggers = TriggerConfig(boundary=boundary, t_max=t_max, t_min=t_min, uncertainty=uncertainty)
    config = Config(mode=mode, sink=2, recent=3, k=4, triggers=triggers, dense_below_budget=below)  # type: ignore[arg-type]  # one of the names
    ends = torch.tensor([draw.random() < 0.3 for _ in range(VOCABULARY)])
    where = "cuda" if torch.cuda.is_available() else "cpu"
    rows = 4
    device = Device(config, ends, rows, where)
    lanes: dict[int, Host] = {}
    windows: dict[int, int] = {}
    for _ in range(12):
        for lane in range(rows):
            if lane not in lanes and draw.random() < 0.5:
                lanes[lane] = Host(config, ends, draw.randrange(1, 14))
            elif lane in lanes and draw.random() < 0.1:
                del lanes[lane]
        order = [lane for lane in lanes if draw.random() < 0.8]
        draw.shuffle(order)
        tokens = [draw.randrange(VOCABULARY) for _ in order]
        info = [
            [lane, lanes[lane].length + 1, trigger.DECODE, int(lanes[lane].steps == 0), -1, at]
            for at, lane in enumerate(order)
        ]
        device.plan(info, tokens)
        for row, lane in enumerate(order):
            host = lanes[lane]
            kind, reason = host.plan(tokens[row])
            assert trigger.REASONS[int(device.codes[row])] == reason
            assert device.field("dense")[row] == int(kind is not StepKind.FAST)
            assert device.field("refresh")[row] == int(kind is StepKind.SLOW)
            assert device.field("fast")[row] == int(kind is StepKind.FAST)
            high = max(config.sink, host.length - config.recent)
            if kind is not StepKind.FAST:
                windows[lane] = min(high, host.length)
            got = tuple(
                device.field(n)[row] for n in ("starts", "lengths", "low", "high", "window")
            )
            assert got == (0, host.length, config.sink, high, windows[lane])
            uncertain = draw.random() < 0.3
            host.controller.observe_entropy([2.0 if uncertain else 0.5])
            if uncertainty is not None:
                device.state[trigger.STATE.index("uncertain"), lane] = int(uncertain)
        for row in range(len(order), rows):
            assert device.field("dense")[row] == device.field("lengths")[row] == 0
            assert device.field("fast")[row] == 1
            assert int(device.codes[row]) == -1


def test_steps_that_are_replayed_leave_what_they_left_the_first_time() -> None:
    """With codes given instead of tokens, one column a step: the same lane state, no end read."""
    draw = random.Random(3)
    config = Config(sink=2, recent=3, k=4, triggers=TriggerConfig(t_max=4, t_min=2))
    ends = torch.tensor([i % 5 == 0 for i in range(VOCABULARY)])
    where = "cuda" if torch.cuda.is_available() else "cpu"
    device = Device(config, ends, 1, where)
    codes = []
    for step in range(20):
        token = draw.randrange(VOCABULARY)
        device.plan([[0, 21 + step, trigger.DECODE, int(step == 0), -1, 0]], [token])
        codes.append(int(device.codes[0]))
    assert len(set(codes)) >= 4
    again = Device(config, ends, 1, where)
    info = torch.tensor(
        [[0, 21 + i, trigger.DECODE, int(i == 0), code, 10**6] for i, code in enumerate(codes)],
        dtype=torch.int32, device=where,
    ).T.contiguous()  # fmt: skip
    tokens = torch.zeros(1, dtype=torch.int32, device=where)
    for i, code in enumerate(codes):
        trigger.plan_steps(
            info, tokens, again.ends, again.state, again.step, again.codes, config, row=i
        )
        assert int(again.codes[0]) == code
    assert torch.equal(again.state[:, 0], device.state[:, 0])
    assert torch.equal(again.step, device.step)


def test_a_prompt_of_one_token_reads_everything_and_is_no_step() -> None:
    where = "cuda" if torch.cuda.is_available() else "cpu"
    device = Device(Config(), None, 2, where)
    before = device.state.clone()
    device.plan([[2, 5, trigger.PROMPT, 0, -1, 0]], [0])
    assert device.field("dense") == [1, 0]
    assert device.field("refresh") == [0, 0]
    assert device.field("fast") == [0, 1]
    assert device.field("lengths") == [5, 0]
    assert torch.equal(device.state, before)
