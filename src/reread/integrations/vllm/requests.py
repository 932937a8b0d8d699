"""What a worker remembers of each request, and the plan of each forward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...attention import Meter
from ...compact import CompactKV
from ...config import Config
from ...layer import LayerState
from ...policy.controller import Controller
from ...policy.trigger import entropy
from ...types import StepKind
from .compat import BatchRow
from .prompts import PromptReader


@dataclass(slots=True, eq=False)
class Request:
    """One request while it runs.

    Attributes:
        prompt: tokens of its prompt.
        controller: decides slow or fast; it survives a preemption.
        kinds: of its decode steps so far, from the first one on. After a preemption the tokens
            behind the prompt are computed again in the same way.
        layers: what its sparse layers hold; lost with its pages.
    """

    prompt: int
    controller: Controller
    kinds: list[StepKind] = field(default_factory=list)
    layers: dict[str, LayerState] = field(default_factory=dict)

    def layer(self, name: str) -> LayerState:
        """The state of the layer `name`."""
        state = self.layers.get(name)
        if state is None:
            state = self.layers[name] = LayerState(chosen=[None])
        return state

    @property
    def nbytes(self) -> int:
        """Bytes of its compact copies, what they select, and the tails of its prompt."""
        total = 0
        for state in self.layers.values():
            compact = state.chosen[0]
            if isinstance(compact, CompactKV):
                total += compact.nbytes + compact.selected.nbytes
            total += 0 if state.tail is None else state.tail.nbytes
        return total


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One request's part of a forward pass, for all layers.

    Attributes:
        first: its first token among the pass's.
        cached: positions computed before.
        prompt: how many of its new tokens are prompt; they come first.
        kinds: of the others, one decode step each.
        replayed: how many of these ran before a preemption and do not count again.
    """

    request: Request
    first: int
    cached: int
    prompt: int
    kinds: tuple[StepKind, ...]
    replayed: int

    @property
    def new(self) -> int:
        """Tokens of this pass."""
        return self.prompt + len(self.kinds)


class Registry:
    """All requests of one worker process.

    Args:
        config: the plug-in's.
        boundary: bool [vocabulary], None where no tokenizer is known.

    Attributes:
        meter: counts what ran, rows x layers by kind.
        pending: yields the rows of the pass that is about to run; None once planned, and
            outside of passes that serve requests.
        plans: of the pass that is running.
        refreshes, refresh_s: how often a row's layer chose again, and the seconds it took.
        reader: of prompts that are read sparsely; the worker sets it. None: they are not.
    """

    def __init__(self, config: Config, boundary: Tensor | None) -> None:
        self.config = config
        self.boundary = boundary
        self.requests: dict[str, Request] = {}
        self.meter = Meter.of(1)
        self.pending: Callable[[], Iterable[BatchRow]] | None = None
        self.plans: tuple[RowPlan, ...] = ()
        self.refreshes = 0
        self.refresh_s = 0.0
        self.reader: PromptReader | None = None
        self._reasons: Counter[str] = Counter()

    @property
    def keeps_tail(self) -> bool:
        """Whether the first decode step reads what the prompt's last queries choose."""
        return self.config.mode == "slow-fast" and not self.config.triggers.first_step

    def drop(self, ended: Iterable[str], lost: Iterable[str]) -> None:
        """Requests that ended are forgotten; of those that lost their pages only what their
        decode steps were stays."""
        for name in ended:
            request = self.requests.pop(name, None)
            if request is not None:
                self._reasons += request.controller.reasons
        for name in lost:
            if name in self.requests:
                self.requests[name].layers.clear()

    def plan(self) -> None:
        """Decide, before layer 0, how each new token of the pass reads its cache; once a pass."""
        if self.pending is None:
            return
        rows, self.pending = self.pending(), None
        plans, first = [], 0
        for row in rows:
            plans.append(self._plan(row, first))
            first += row.new
        self.plans = tuple(plans)

    def _plan(self, row: BatchRow, first: int) -> RowPlan:
        request = self.requests.get(row.name)
        if request is None or request.prompt != row.prompt:
            controller = Controller(self.config, self.boundary, 1)
            request = self.requests[row.name] = Request(row.prompt, controller)
        end = row.cached + row.new
        begin = min(max(row.cached, row.prompt), end)
        assert row.cached <= row.prompt or request.layers or self.config.mode == "dense", (
            "a request resumes behind its prompt: its generated pages must not be cached"
        )
        known, kinds = request.kinds, []
        replayed = max(0, min(end - row.prompt, len(known)) - (begin - row.prompt))
        for position in range(begin, end):
            step = position - row.prompt
            if step == len(known):
                known.append(self._decide(request, int(row.tokens[position]), position + 1))
            kinds.append(known[step])
        return RowPlan(request, first, row.cached, begin - row.cached, tuple(kinds), replayed)

    def _decide(self, request: Request, token: int, keys: int) -> StepKind:
        # a step that read everything without choosing leaves nothing to read sparsely
        kinds = request.kinds
        can_select = kinds[-1] is not StepKind.FULL if kinds else self.keeps_tail
        return request.controller.plan([token], [keys], [can_select])[0]

    def positions(self) -> Tensor:
        """Of the pass's tokens in their rows: int64 [tokens]."""
        spans = [torch.arange(p.cached, p.cached + p.new) for p in self.plans]
        return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)

    def observe(self, logits: Tensor | None) -> None:
        """Tell the outputs of the pass that ran, [rows, vocabulary]: the uncertainty trigger."""
        if self.config.triggers.uncertainty is None or logits is None:
            return
        for plan, row in zip(self.plans, logits, strict=True):
            request = plan.request
            # inside a prompt or a replay the next token is known already
            if plan.cached + plan.new == request.prompt + len(request.kinds):
                request.controller.observe_entropy(entropy(row[None]).tolist())

    @property
    def reasons(self) -> Counter[str]:
        """How many slow steps each trigger caused, over all requests so far."""
        total = self._reasons.copy()
        for request in self.requests.values():
            total += request.controller.reasons
        return total

    @property
    def nbytes(self) -> int:
        """Bytes of all requests' state."""
        return sum(request.nbytes for request in self.requests.values())
