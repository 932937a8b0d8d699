"""RULER's synthetic tasks (arXiv 2404.06654) at any length: texts and scores by lm-eval's own code.

lm-eval's generators write the texts and its `process_results` scores the answers: string_match_all,
the share of the expected strings that an answer holds (of the qa tasks: of the reference answers).
How much text fits is found here, for lm-eval's search takes coarse steps and never ends where
nothing fits: the longest prompt that with its chat template and its answer keeps within the length.

No data is needed for niah_single_1, niah_multikey_2, niah_multikey_3, vt, cwe and fwe. The others
look in the data folder (--data DIR), then on the hub:

    DIR/ruler/essays.jsonl    {"text": ...} an essay, as baber/paul_graham_essays; or .json,
                              .parquet, .csv
    DIR/nltk_data             NLTK's punkt_tab model, which splits essays into sentences:
                              DIR/nltk_data/tokenizers/punkt_tab/english/; unless NLTK finds its own
    DIR/ruler/squad.json      SQuAD's dev-v2.0.json
    DIR/ruler/hotpot.json     HotpotQA's hotpot_dev_distractor_v1.json
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import InputError
from .base import Answer, Case, Query
from .lm_common import encode, lm_eval_module, quiet_lm_eval, seeded, split, wrapped
from .lm_files import require_folder
from .ruler_texts import MAKERS, Maker, Place, Puzzle, Writer

PREFIX = "ruler_"
TASKS: tuple[str, ...] = tuple(PREFIX + name for name in MAKERS)
FILLED = 0.95  # of the room: below, a case looks for its own size


@dataclass(frozen=True, slots=True)
class RulerTask:
    """An `AnswerTask`: cases of one RULER task at one length."""

    name: str
    length: int
    cases: tuple[Case, ...] = field(repr=False)

    def score(self, query: Query, answer: Answer) -> float:
        """lm-eval's score of the task, 0 to 1."""
        utils = lm_eval_module("lm_eval.tasks.ruler.common_utils")
        part = MAKERS[query.kind].part
        process = utils.process_results_part if part else utils.process_results
        doc = {"outputs": list(query.expected), "max_length": self.length}
        return float(process(doc, [answer.text])[str(self.length)])


def make(
    tokenizer: Any, name: str, *, tokens: int, count: int, seed: int, data: Path | None
) -> RulerTask:
    """The task `name`, one of TASKS, with prompts that with their answers fill `tokens` as far as
    the task's units of text do. Case i is the same for every `count`; fewer than `count` cases
    only where a qa task has no more questions that fit.

    Raises:
        InputError: an unknown name, too few tokens for the task, or data that is neither in the
            folder nor to be had from the hub.
    """
    if name not in TASKS:
        raise InputError(f"task {name!r} is unknown: one of {', '.join(TASKS)}")
    require_folder(data)
    with quiet_lm_eval(), seeded(f"{name} {tokens} {seed}"):
        maker = MAKERS[name.removeprefix(PREFIX)]
        place = Place(name, data, tokens, lambda text: len(encode(tokenizer, text, False)))
        fitting = _Fitting(tokenizer, name, maker, maker.open(place), tokens, seed)
        cases = list(itertools.islice(fitting.cases(), count))
    if not cases and count:
        raise InputError(f"tokens={tokens} is too short for task {name!r}")
    return RulerTask(name, tokens, tuple(cases))


class _Fitting:
    """Finds how much text fits."""

    def __init__(
        self, tokenizer: Any, name: str, maker: Maker, writer: Writer, tokens: int, seed: int
    ) -> None:
        self.tokenizer = tokenizer
        self.name = name
        self.tokens = tokens
        self.maker = maker
        self.writer = writer
        self.room = tokens - maker.new_tokens
        self.seed = f"{name} {tokens} {seed}"

    def cases(self) -> Iterator[Case]:
        """Cases that fit, in order: without end, or all questions that a qa task has."""
        units: int | None = None
        limit = self.writer.limit
        for number in itertools.count() if limit is None else range(limit):
            case = None if units is None else self._shrunk(number, units)
            if case is None or self._loose(case, units):
                units = self._largest(number) or units
                case = None if units is None else self._shrunk(number, units)
            if case is not None:
                yield case
            elif limit is None:
                raise InputError(f"tokens={self.tokens} is too short for task {self.name!r}")

    def _loose(self, case: Case, units: int | None) -> bool:
        """Whether more units would fit: they are longer or shorter from case to case."""
        used = len(case.context) + len(case.queries[0].ids)
        return units != self.writer.most and used < FILLED * self.room

    def _prompt(self, number: int, units: int) -> tuple[Puzzle, str, bool, list[int]]:
        """The puzzle, its whole prompt as text, and that as ids."""
        with seeded(f"{self.seed} {number}"):
            puzzle = self.writer.write(units, number)
        text, special = wrapped(
            self.tokenizer, puzzle.text, puzzle.answer_start, self.maker.delimiter
        )
        return puzzle, text, special, encode(self.tokenizer, text, special)

    def _fits(self, number: int, units: int) -> bool:
        return len(self._prompt(number, units)[3]) <= self.room

    def _largest(self, number: int) -> int | None:
        """Units of the longest text that fits; None where the shortest does not."""
        low, most = self.writer.least, self.writer.most
        if not self._fits(number, low):
            return None
        high = low
        while high < most and self._fits(number, min(2 * high, most)):
            low = high = min(2 * high, most)
        high = min(2 * high, most)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(number, middle) else (low, middle)
        return low

    def _shrunk(self, number: int, units: int) -> Case | None:
        """A case of at most so many units: as many as fit."""
        while True:
            puzzle, text, special, ids = self._prompt(number, units)
            over = len(ids) - self.room
            if over <= 0:
                return self._case(puzzle, text, special, ids)
            if units == self.writer.least:
                return None
            fewer = max(1, math.ceil(over * units / len(ids)))
            units = max(self.writer.least, units - fewer)

    def _case(self, puzzle: Puzzle, text: str, special: bool, ids: list[int]) -> Case:
        at = text.find(puzzle.text)
        # a template may rewrite what it is given: then nothing tells where the question begins
        cut = len(text) if at < 0 else at + puzzle.question
        context, asked = split(self.tokenizer, text, ids, cut, special)
        query = Query(
            asked,
            self.maker.new_tokens,
            self.name.removeprefix(PREFIX),
            puzzle.expected,
            depth=puzzle.depth,
        )
        return Case(context, (query,))
