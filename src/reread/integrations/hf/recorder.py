"""Counts and clocks of one generation; the observer that tells prefill from decode."""

from __future__ import annotations

import inspect
import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from ...attention import Meter
from ...config import Config
from ...policy.controller import Controller
from ...prefill import PrefillMeter
from ...stats import Drafts, Stats
from ...types import StepKind
from .arguments import put

REFERENCE_PREFILL = (
    "the sparse prefill ran on the reference path: it shows what a budget costs and saves no time"
)


class Recorder:
    """One `generate` call or `decoding()` block.

    Attributes:
        decoding: whether a token has been chosen, so that the next forward is a decode step.
        prompt, wanted: tokens of the prompt and new tokens asked for; 0 where unknown.
    """

    def __init__(self, prompt: int, wanted: int, ends: frozenset[int]) -> None:
        self.prompt = prompt
        self.wanted = wanted
        self.decoding = False
        self.meter = Meter.of(0)
        self.prefill = PrefillMeter()
        self.steps = 0
        self.new_tokens = 0
        self.drafts: Drafts | None = None
        self._ends = ends
        self._finished: list[bool] = []
        self._controllers: dict[int, tuple[Controller, Counter[str]]] = {}
        self._began = time.perf_counter()
        self._first_token: float | None = None

    def start_decoding(self) -> None:
        """The prefill is over."""
        self.decoding = True
        self._first_token = time.perf_counter()

    def token(self, tokens: Tensor) -> None:
        """A token was chosen for every row: tokens [B]."""
        if not self.decoding:
            self.start_decoding()
            self._finished = [False] * tokens.shape[0]
            self.meter = Meter.of(tokens.shape[0])
        self.new_tokens += 1
        if self._ends:
            self._finished = [
                done or token in self._ends
                for done, token in zip(self._finished, tokens.tolist(), strict=True)
            ]

    def begin_step(self, controller: Controller, rows: int) -> tuple[bool, ...]:
        """A decode step of `rows` rows is about to run: which of them count."""
        # a loop of one's own may go on with more rows, or with another conversation
        self.meter.widen(rows)
        self._controllers.setdefault(id(controller), (controller, controller.reasons.copy()))
        done = [*self._finished, *[False] * (rows - len(self._finished))]
        return tuple(not finished for finished in done[:rows])

    def full_step(self, rows: int, new: int) -> None:
        """A forward of a model without sparse layers; it is a decode step if decoding began."""
        if not self.decoding or new != 1:
            return
        if not self.meter.runs:
            self.meter = Meter.of(rows)
        self.steps += 1
        finished = self._finished or [False] * rows
        for row, done in enumerate(finished):
            if not done:
                self.meter.add(row, StepKind.FULL, 1, 1)

    def drafted(self, meter: Meter, steps: int, drafts: Drafts, new_tokens: int) -> None:
        """An exact generation has ended, after so many forward passes."""
        self.meter, self.steps, self.drafts = meter, steps, drafts
        self.new_tokens = new_tokens

    @property
    def told(self) -> list[str]:
        """What the user should know of the prefill."""
        return [REFERENCE_PREFILL] if self.prefill.backend == "reference" else []

    def stats(
        self, config: Config, ran: tuple[str, str], layers: int, total: int, notes: list[str]
    ) -> Stats:
        """What has been counted since the recorder was made. ran: backend and runner."""
        ended = time.perf_counter()
        first = ended if self._first_token is None else self._first_token
        steps = {k: [runs[k] // max(1, layers) for runs in self.meter.runs] for k in StepKind}
        reasons: Counter[str] = Counter()
        for controller, before in self._controllers.values():
            reasons += controller.reasons - before
        meter = self.meter
        return Stats(
            slow_steps=steps[StepKind.SLOW],
            fast_steps=steps[StepKind.FAST],
            full_steps=steps[StepKind.FULL],
            keys_read_share=meter.keys_read / meter.keys_cached if meter.keys_cached else 1.0,
            prefill_keys_share=self.prefill.share,
            prefill_backend=self.prefill.backend,
            slow_reasons=dict(reasons),
            decode_steps=self.steps,
            new_tokens=self.new_tokens,
            drafts=self.drafts,
            prefill_s=first - self._began,
            decode_s=ended - first,
            backend=ran[0],
            runner=ran[1] if self.steps else "",
            sparse_layers=layers,
            total_layers=total,
            config=config.to_dict(),
            notes=notes,
        )


class Observer(StoppingCriteria):
    """Never stops anything: tells `on_token` each row's newest token [B].

    transformers calls stopping criteria once after every chosen token, in every decoding loop: that
    is what a decode step means. A forward of one token is no sign of it (a prompt may have one).
    """

    def __init__(self, on_token: Any) -> None:
        self._on_token = on_token

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self._on_token(input_ids[:, -1])
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def end_tokens(model: Any, given: dict[str, Any]) -> frozenset[int]:
    """Token ids after which a row is over; padding is no sign, a model may write that token."""
    value = given.get("eos_token_id")
    for config in (given.get("generation_config"), model.generation_config):
        value = getattr(config, "eos_token_id", None) if value is None else value
    if isinstance(value, Tensor):
        value = value.flatten().tolist()
    return frozenset([value] if isinstance(value, int) else value or [])


def observe(bound: inspect.BoundArguments, given: dict[str, Any], on_token: Any) -> None:
    """Put an `Observer` before the stopping criteria of a call of `generate`."""
    stopping = [Observer(on_token), *(given.get("stopping_criteria") or [])]
    put(bound, "stopping_criteria", StoppingCriteriaList(stopping))


def recorder_of(model: Any, ids: Tensor | None, given: dict[str, Any]) -> Recorder:
    """Of a call of `generate` with the prompt `ids` [B, T]; given: its arguments by name."""
    prompt = 0 if ids is None else ids.shape[1]
    return Recorder(prompt, given.get("max_new_tokens") or 0, end_tokens(model, given))
