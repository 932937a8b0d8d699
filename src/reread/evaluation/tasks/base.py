"""What tasks are made of, and what a measured sample holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...integrations.hf.load import Loaded
from ..methods import Method


@dataclass(frozen=True, slots=True)
class Query:
    """One question about a case's context, and what a right answer is.

    Attributes:
        ids: token ids that follow the context; at least one.
        new_tokens: tokens of a greedy answer; 0 for a multiple choice.
        kind: the row of a table it counts in, such as "chain" of needle.
        expected: what a right answer says, for people to read and for scorers.
        depth: where in the context the answer stands, 0 (begin) to 1 (end); None: nowhere alone.
        until: strings that end an answer; they are cut off.
        choices: token ids of each continuation of a multiple choice; () for a greedy answer.
        data: what the task's scorer needs besides.
    """

    ids: tuple[int, ...]
    new_tokens: int
    kind: str
    expected: tuple[str, ...] = ()
    depth: float | None = None
    until: tuple[str, ...] = ()
    choices: tuple[tuple[int, ...], ...] = ()
    data: Any = None


@dataclass(frozen=True, slots=True)
class Case:
    """A text, read once, and the questions about it, each asked by itself."""

    context: tuple[int, ...]
    queries: tuple[Query, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a method said.

    Attributes:
        tokens, text: the greedy answer, up to the first of `until`.
        logprobs: of a multiple choice, the sum of log-probabilities of each continuation (nats).
    """

    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One line of results.

    Attributes:
        task, length, method, number, query: which sample; `query` counts within case `number`.
        kind, depth, expected: as in `Query`.
        score: 0 to 1; None where the method failed, see `error`.
        figures: numbers beside the score, such as keys_read_share; means of them are reported.
        extra: what only the report looks at.
        seconds: how long it took; no part of any table that has to come out the same again.
    """

    task: str
    length: int
    method: str
    number: int
    kind: str
    score: float | None
    query: int = 0
    depth: float | None = None
    expected: tuple[str, ...] = ()
    answer: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, int, str, int, int]:
        """Which sample it is."""
        return self.task, self.length, self.method, self.number, self.query

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Sample:
        """Inverse of `to_dict`; raises TypeError for other values."""
        return cls(**{**values, "expected": tuple(values.get("expected", ()))})


class Task(Protocol):
    """A task at one length. The same name, length, limit and seed make the same samples."""

    @property
    def name(self) -> str: ...
    @property
    def length(self) -> int: ...
    @property
    def numbers(self) -> int:
        """How many cases there are; `measure` takes 0 to numbers - 1."""
        ...

    @property
    def queries(self) -> Sequence[int]:
        """Samples of each case."""
        ...

    def measure(self, number: int, methods: Sequence[Method], loaded: Loaded) -> Iterator[Sample]:
        """Samples of one case, method by method, all of a method's before the next method's."""
        ...


class AnswerTask(Protocol):
    """Questions with answers. `answering.Answering` makes a `Task` of it."""

    @property
    def name(self) -> str: ...
    @property
    def length(self) -> int: ...
    @property
    def cases(self) -> Sequence[Case]: ...

    def score(self, query: Query, answer: Answer) -> float:
        """0 (wrong) to 1 (right)."""
        ...
