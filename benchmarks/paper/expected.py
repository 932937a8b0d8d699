"""What a published table says, as data, and when a measured value agrees with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from reread.errors import InputError

Sense = Literal["equal", "at least", "at most"]
WITHIN, OUTSIDE = "within tolerance", "outside tolerance"
SMOKE = "smoke: runs the same code on a stand-in; says nothing about the published value"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far a measured value may be from the published one.

    Attributes:
        amount: in the row's unit, above 0.
        why: the reason for so much.
    """

    amount: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Which value of a run a row is.

    Attributes:
        arm: name of a method in the table.
        against: an arm that it is compared with: score(arm) - score(against).
        part: of the samples: "all", a task or group by its prefix, or a field of the questions
            ("easy", "long", ...).
        length: tokens; 0: all lengths.
        figure: "score" (0 to 100); "sparsity" (percent of a prompt's pairs that are not read); of a
            speed table "speedup", "dense" or "sparse" (the latter two tokens a second).
        rows: batch of a speed table.
        share: of the keys, of the kernel table.
    """

    arm: str = ""
    against: str = ""
    part: str = "all"
    length: int = 0
    figure: str = "score"
    rows: int = 0
    share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One published value.

    Attributes:
        model: label of one of the table's models.
        name: what the row says.
        value: as published; None: nothing is published, the row shows ours.
        tolerance: None exactly where value is.
        sense: "at least": more is within tolerance too; "at most": less is.
        absent: why it can not be measured by this command; "" if it can.
    """

    model: str
    name: str
    spot: Spot
    value: float | None = None
    tolerance: Tolerance | None = None
    unit: str = "points"
    sense: Sense = "equal"
    absent: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """A measured value.

    Attributes:
        value: None where nothing was measured; then `reason` says why.
        reason: why a value that is there can not be judged; "" where it can.
    """

    value: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Tasks that one evaluation measures.

    Attributes:
        tasks: as `reread eval` names them. smoke: fewer of them.
        arms: names of the table's methods.
        limit: cases of each task and length that the verdict needs; all, where there are fewer.
        vision: a vision-language checkpoint is needed.
        fields: rows need fields of the questions, such as "difficulty".
        stops: answers end at strings, which needle-27m's tokenizer cannot spell.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    arms: tuple[str, ...]
    limit: int
    smoke: tuple[str, ...]
    vision: bool = False
    fields: bool = False
    stops: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """A table of scores.

    Attributes:
        arms: name -> method of `reread eval`.
        mean: over all samples, over tasks, or over families of tasks (longbench, ruler, ...).
    """

    arms: Mapping[str, str]
    runs: tuple[Run, ...]
    mean: Literal["samples", "tasks", "families"] = "tasks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Whole decode steps. shapes: label of a model -> shape of `reread.shapes`; cells: batch and
    context of each label; slow_every: mean steps between slow ones, the judged one first."""

    shapes: Mapping[str, str]
    cells: Mapping[str, tuple[tuple[int, int], ...]]
    slow_every: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Attention of one layer. rows, length: batch and keys."""

    rows: int
    length: int
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Time to the first token. shapes: label of a model -> shape of `reread bench prefill`."""

    shapes: Mapping[str, str]
    contexts: tuple[int, ...]
    k: int
    b_sel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A published table.

    Attributes:
        name: of the command. paper, section: where it stands.
        models: label -> id on the hub.
        hardware: what it wants.
        notes: what differs from the authors' set-up.
    """

    name: str
    paper: str
    section: str
    models: Mapping[str, str]
    hardware: str
    work: Quality | Decode | Kernel | Prefill
    rows: tuple[Expected, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def needs_gpu(self) -> bool:
        """Whether it times something."""
        return not isinstance(self.work, Quality)


def binomial(percent: float, questions: int, what: str = "") -> Tolerance:
    """Two standard errors of a share of right answers."""
    p = percent / 100
    amount = round(200 * math.sqrt(p * (1 - p) / questions), 2)
    return Tolerance(
        amount=amount,
        why=f"two binomial standard errors of {percent:g} % of {questions} questions"
        + (f"; {what}" if what else ""),
    )


def paired(questions: int, flips: float, what: str = "") -> Tolerance:
    """Two standard errors of a difference between two methods on the same questions, of which the
    share `flips` turns from right to wrong or back."""
    amount = round(200 * math.sqrt(flips / questions), 2)
    return Tolerance(
        amount=amount,
        why=f"two standard errors of a paired difference over {questions} questions of which "
        f"{flips:.0%} flip" + (f"; {what}" if what else ""),
    )


def relative(value: float, share: float, why: str) -> Tolerance:
    """A share of the published value."""
    return Tolerance(amount=round(value * share, 4), why=f"{share:.0%} of the value: {why}")


def agrees(expected: Expected, measured: float) -> bool:
    """Whether a measured value is within the tolerance of a published one."""
    assert expected.value is not None
    assert expected.tolerance is not None
    difference, room = measured - expected.value, expected.tolerance.amount
    if expected.sense == "at least":
        return difference >= -room
    if expected.sense == "at most":
        return difference <= room
    return abs(difference) <= room


def verdict(expected: Expected, found: Found, unjudged: str = "") -> str:
    """What the last column says.

    Args:
        unjudged: why this whole run judges nothing; "" if it does.
    """
    if expected.absent:
        return f"not run: {expected.absent}"
    if found.value is None:
        return f"not run: {found.reason}"
    if expected.value is None:
        return "nothing published"
    if unjudged or found.reason:
        return f"not judged: {unjudged or found.reason}"
    return WITHIN if agrees(expected, found.value) else OUTSIDE


def label_for(table: Table, model: str | None, wanted: str | None) -> str:
    """Which of the table's models `model` is, by its name, or as the user says.

    Raises:
        InputError: it is none of them, or nothing says which.
    """
    names = ", ".join(f"{label} ({hub})" for label, hub in table.models.items())
    if wanted is not None:
        if wanted not in table.models:
            raise InputError(f"--as {wanted!r} is no model of {table.name}: one of {names}")
        return wanted
    last = (model or "").rstrip("/").rsplit("/", 1)[-1].lower()
    for label, hub in table.models.items():
        if last == hub.rsplit("/", 1)[-1].lower():
            return label
    if len(table.models) == 1:
        return next(iter(table.models))
    raise InputError(
        f"--model {model!r} does not say which model of {table.name} it is: add --as LABEL, one "
        f"of {names}"
    )
