"""Distillation of an indexer: the steps of its optimiser, their state, and how well it does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import InputError, NumericalError
from .loss import METRIC_EVERY, SUMS, LayerCall, best_factor, draw_queries, draw_stretch, layer_loss
from .model import Indexer
from .workers import Workers

BETAS = (0.9, 0.95)
CLIP = 1.0
WARM_UP = 0.05  # share of the steps
LONGEST_WARM_UP = 100
LAST_LR = 0.1  # share of the peak
CALIBRATION_QUERIES = 256
HISTORY = 200  # steps whose mean KL is kept
Metrics = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Context:
    """Token ids [T] that the teacher reads; half of the queries are drawn from `focus` on, where
    that is not 0."""

    ids: Tensor
    focus: int = 0


class Teaches(Protocol):
    """What shows the layers of the frozen model: `integrations.hf.teacher.Teacher`."""

    def read(self, ids: Tensor, on_layer: Callable[[LayerCall], None]) -> None:
        """Run the model over ids [T] and show each full-attention layer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How long and how fast to learn.

    Attributes:
        steps: of the optimiser; accumulate: contexts of each, per process; queries: of each
            context.
        lr: peak of the learning rate; seed: of the queries that are drawn.
        stretch: positions of a context are multiplied by up to so much, another factor for each, so
            that the indexer meets distances beyond the training context.
    """

    steps: int
    lr: float = 1e-3
    accumulate: int = 1
    queries: int = 1024
    seed: int = 0
    stretch: float = 1.0

    def lr_at(self, step: int) -> float:
        """Linear warm-up, then a cosine to a tenth of the peak."""
        warm = max(1, min(LONGEST_WARM_UP, math.ceil(WARM_UP * self.steps)))
        if step < warm:
            return self.lr * (step + 1) / warm
        done = (step - warm) / max(1, self.steps - 1 - warm)
        return self.lr * (LAST_LR + (1 - LAST_LR) * (1 + math.cos(math.pi * min(done, 1))) / 2)


@dataclass(slots=True)
class Progress:
    """Where a run is.

    Attributes:
        step: steps done; latest: metrics of the last one by layer; history: [step, mean KL] of up
            to 200 steps, evenly spaced.
    """

    step: int = 0
    latest: dict[int, Metrics] = field(default_factory=dict)
    history: list[list[float]] = field(default_factory=list)

    @property
    def kl(self) -> float:
        """Mean KL of the last step over the layers, NaN before the first."""
        return mean_of(self.latest, "kl") or math.nan


class Distiller:
    """An indexer that learns. Its weights are float32 on the device of the teacher."""

    def __init__(
        self, indexer: Indexer, schedule: Schedule, workers: Workers | None = None
    ) -> None:
        self.indexer = indexer
        self.schedule = schedule
        self.workers = workers or Workers()
        self.progress = Progress()
        self.updating = False  # while True, weights and moments do not belong together
        self._names = [name for name, _ in indexer.named_parameters()]
        self._optimizer = torch.optim.AdamW(
            indexer.parameters(), lr=schedule.lr, betas=BETAS, weight_decay=0.0
        )

    @property
    def done(self) -> bool:
        """Whether all steps are done."""
        return self.progress.step >= self.schedule.steps

    def numbers(self, step: int) -> list[int]:
        """Which training contexts this process reads in a step, counted over all processes."""
        own = self.schedule.accumulate
        first = (step * self.workers.count + self.workers.rank) * own
        return list(range(first, first + own))

    def calibrate(self, context: Context, teacher: Teaches) -> None:
        """Scale each layer's weights so that its scores are as wide as P wants them, before the
        first step."""
        positions = draw_queries(
            len(context.ids), CALIBRATION_QUERIES, context.focus, self.schedule.seed, 0
        )
        factors: dict[int, float] = {}

        def on_layer(call: LayerCall) -> None:
            factors[call.layer] = best_factor(self.indexer, call, positions)

        teacher.read(context.ids, on_layer)
        with torch.no_grad():
            for layer, factor in factors.items():
                for weight in self._of(layer):
                    weight.mul_(math.sqrt(factor))

    def step(self, contexts: Callable[[int], Context], teacher: Teaches) -> None:
        """One step of the optimiser.

        Args:
            contexts: training context by number.

        Raises:
            NumericalError: the teacher or the indexer no longer gives numbers; nothing was
                changed.
        """
        at, schedule = self.progress.step, self.schedule
        self._optimizer.zero_grad(set_to_none=True)
        sums: dict[int, Tensor] = {}
        for number in self.numbers(at):
            self._learn(contexts(number), number, teacher, sums)
        found = self._gather(sums, at)
        self.updating = True
        for layer in self.indexer.card.layers:
            nn.utils.clip_grad_norm_(self._of(layer), CLIP)
        for group in self._optimizer.param_groups:
            group["lr"] = schedule.lr_at(at)
        self._optimizer.step()
        self.progress.step, self.progress.latest = at + 1, found
        if at % max(1, schedule.steps // HISTORY) == 0 or self.done:
            self.progress.history.append([at + 1, self.progress.kl])
        self.updating = False

    def _learn(
        self, context: Context, number: int, teacher: Teaches, sums: dict[int, Tensor]
    ) -> None:
        schedule = self.schedule
        positions = draw_queries(
            len(context.ids), schedule.queries, context.focus, schedule.seed, number
        )
        weight = 1 / (len(positions) * schedule.accumulate)
        stretch = draw_stretch(schedule.stretch, schedule.seed, number)

        def on_layer(call: LayerCall) -> None:
            found = layer_loss(
                self.indexer, call, positions, weight=weight, every=METRIC_EVERY, stretch=stretch
            )
            sums[call.layer] = sums.get(call.layer, torch.zeros_like(found)) + found

        teacher.read(context.ids, on_layer)

    def _gather(self, sums: Mapping[int, Tensor], step: int) -> dict[int, Metrics]:
        """Metrics of all processes, whose gradients are averaged; checks that they are numbers."""
        every = torch.stack([sums[layer] for layer in self.indexer.card.layers])
        self.workers.average([every])
        found = metrics(self.indexer.card.layers, every, f"at step {step + 1}")
        self.workers.average([p.grad for p in self.indexer.parameters() if p.grad is not None])
        return found

    def _of(self, layer: int) -> list[Tensor]:
        parts = self.indexer.query[str(layer)], self.indexer.key[str(layer)]
        return [p for part in parts for p in part.parameters()]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and plain values from which `restore` continues exactly."""
        tensors: dict[str, Tensor] = {
            f"weight.{name}": p.detach() for name, p in self.indexer.named_parameters()
        }
        for i, values in self._optimizer.state_dict()["state"].items():
            for kind, value in values.items():
                tensors[f"{kind}.{self._names[i]}"] = value
        progress = self.progress
        latest = {str(layer): values for layer, values in progress.latest.items()}
        return tensors, {
            "step": progress.step, "latest": latest, "history": progress.history,
        }  # fmt: skip

    def restore(self, tensors: Mapping[str, Tensor], counters: Mapping[str, Any]) -> None:
        """Continue from a `state`.

        Raises:
            InputError: it belongs to another indexer.
        """
        parts: dict[str, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            kind, _, of = name.partition(".")
            parts.setdefault(kind, {})[of] = value
        try:
            self.indexer.load_state_dict(parts.pop("weight"))
            state = self._optimizer.state_dict()
            if counters["step"]:
                state["state"] = {
                    i: {kind: values[name] for kind, values in parts.items()}
                    for i, name in enumerate(self._names)
                }
            self._optimizer.load_state_dict(state)
            self.progress = Progress(
                counters["step"],
                {int(layer): values for layer, values in counters["latest"].items()},
                list(counters["history"]),
            )
        except (KeyError, RuntimeError, ValueError) as error:
            raise InputError(f"the checkpoint is of another indexer: {error}") from error


def metrics(layers: Sequence[int], sums: Tensor, when: str) -> dict[int, Metrics]:
    """Per layer: kl in nats, recall and mass at k; None where no query has more than k past tokens.

    Args:
        sums: [layers, 6], see `SUMS`.

    Raises:
        NumericalError: not all are finite; names the layer and `when`.
    """
    found: dict[int, Metrics] = {}
    for layer, row in zip(layers, sums.tolist(), strict=True):
        values = dict(zip(SUMS, row, strict=True))
        if not math.isfinite(values["teacher"]):
            raise NumericalError(
                f"the model's attention in layer {layer} is not a number {when}: try float32"
            )
        if not math.isfinite(values["kl"]):
            raise NumericalError(
                f"the KL of layer {layer} is not a number {when}, the model's attention is: its "
                "hidden states are not finite, or the learning rate is too high"
            )
        asked = values["asked"]
        found[layer] = {
            "kl": values["kl"] / values["queries"],
            "recall": values["recall"] / asked if asked else None,
            "mass": values["mass"] / asked if asked else None,
        }
    return found


def mean_of(found: Mapping[int, Metrics], name: str) -> float | None:
    """Mean of a metric over the layers that have it."""
    values = [value for layer in found.values() if (value := layer[name]) is not None]
    return sum(values) / len(values) if values else None


@torch.no_grad()
def assess(
    indexer: Indexer, teacher: Teaches, contexts: Sequence[Context], *, queries: int, seed: int = 0
) -> dict[int, Metrics]:
    """Metrics per layer over contexts that were not learnt from.

    Raises:
        NumericalError: see `metrics`.
    """
    sums: dict[int, Tensor] = {}
    for number, context in enumerate(contexts):
        positions = draw_queries(len(context.ids), queries, context.focus, seed, number)

        def on_layer(call: LayerCall, positions: list[int] = positions) -> None:
            found = layer_loss(indexer, call, positions, weight=None)
            sums[call.layer] = sums.get(call.layer, torch.zeros_like(found)) + found

        teacher.read(context.ids, on_layer)
    every = torch.stack([sums[layer] for layer in indexer.card.layers])
    return metrics(indexer.card.layers, every, "on the held-out contexts")
