"""One row of a batch that decodes exactly: its text, where it stands in the cache, its draft."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ....drafting import MAX_TOKENS
from ....errors import NumericalError
from ....policy.acceptance import greedy, likeliest, speculative
from ....policy.draft import DraftLength


@dataclass(slots=True, eq=False)
class Row:
    """See the module.

    Attributes:
        index: row of the cache.
        start: first cache column that is no padding.
        shift: columns of the prompt that are padding, before or between its tokens.
        length: cached columns, all verified; the newest token is not among them.
        count: tokens in the text, prompt and padding included.
        policy: how much it drafts.
        newest, fresh: the last token that was chosen; those that the text does not have yet.
        end: tokens of the text when a stopping criterion ended it; 0 before.
        done: whether it takes no more tokens.
        draft: tokens drafted since the latest verification, and for sampling their distributions.
        ends: whether the draft is complete.
        basis: whether something tells what a draft may read.
        chosen, age: whether something is chosen for drafts, and tokens since then.
        verified, drafted, accepted: passes that verified, and tokens of all drafts.
    """

    index: int
    start: int
    shift: int
    length: int
    count: int
    policy: DraftLength
    newest: int = 0
    fresh: list[int] = field(default_factory=list)
    end: int = 0
    done: bool = False
    draft: list[int] = field(default_factory=list)
    chances: list[Tensor] = field(default_factory=list)
    ends: bool = False
    basis: bool = True
    chosen: bool = False
    age: int = 0
    verified: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def keys(self) -> int:
        """Keys that dense decoding of the next token reads."""
        return self.length - self.shift + 1

    @property
    def position(self) -> int:
        """Of the newest token in the row's text."""
        return self.length - self.shift

    def drafts(self, token: float, chance: float, threshold: float) -> None:
        """One more token; threshold: see `DraftConfig.min_probability`.

        Raises:
            NumericalError: the step's logits were NaN.
        """
        require_number(self, chance)
        self.draft.append(int(token))
        self.ends = threshold > 0 and chance <= threshold

    def told(self, accepted: int, taken: int) -> None:
        """So many tokens of the draft stand; `taken` tokens went into the text, the verification's
        own among them: fewer where it ended, or where another row took fewer."""
        self.policy.observe(accepted, len(self.draft))
        self.verified += 1
        self.drafted += len(self.draft)
        self.accepted += min(accepted, taken - 1)


def require_number(row: Row, value: float) -> None:
    """Refuse a row whose logits gave NaN."""
    if math.isnan(value):
        raise NumericalError(
            f"the logits of row {row.index} contain NaN: check weights and dtype (float16 "
            "overflows)"
        )


def _require_numbers(rows: Sequence[Row], largest: Sequence[float]) -> None:
    """`require_number` of each row that is not done; largest: of its logits."""
    for row, value in zip(rows, largest, strict=True):
        require_number(row, 0.0 if row.done else value)


class Chooser:
    """How one call of `generate` chooses tokens: its logits processors, greedy or sampling."""

    def __init__(self, processors: Any, sample: bool, texts: Tensor) -> None:
        """texts: int64 [B, columns], written by the loop."""
        self._processors, self._sample, self._texts = processors, sample, texts
        self._drafted = texts.new_zeros(texts.shape[0], MAX_TOKENS)

    def _scores(self, logits: Tensor, row: Row, behind: Tensor | Sequence[int]) -> Tensor:
        """logits fp32 [V] as dense decoding of this row's text and `behind` would see them."""
        if not self.reads:
            return logits
        text = self._texts[row.index, : row.count]
        if len(behind):
            more = behind if isinstance(behind, Tensor) else text.new_tensor(behind)
            text = torch.cat([text, more])
        # the whole batch, this row's text in each place: a processor may know rows by their index
        rows = self._texts.shape[0]
        scores: Tensor = self._processors(text.expand(rows, -1), logits.repeat(rows, 1))
        return scores[row.index]

    @property
    def reads(self) -> bool:
        """Whether it reads the rows' texts."""
        return len(self._processors) > 0

    @property
    def plain(self) -> bool:
        """Whether tokens are the largest logits, so that all rows are looked at together."""
        return not self._sample and not self.reads

    def draft(self, logits: Tensor, rows: Sequence[Row], t: int) -> Tensor:
        """Token t of each row's draft, and how probable its likeliest token was; nothing is read
        from the device. For sampling the distribution is noted in the row.

        Args:
            logits: [N, V] of a sparse step.

        Returns:
            fp64 [2, N]: tokens, probabilities (NaN where a logit is).
        """
        if self.plain:
            return torch.stack([x.double() for x in likeliest(logits)])
        found = [self._draft(own, row, t) for row, own in zip(rows, logits, strict=True)]
        return torch.stack(found, dim=1)

    def _draft(self, logits: Tensor, row: Row, t: int) -> Tensor:
        scores = self._scores(logits.float(), row, self._drafted[row.index, :t])
        token, sure = likeliest(scores)
        if self._sample:
            chances = torch.softmax(scores, dim=-1)
            # NaN, which the caller refuses when it reads it, must not stop the device here
            token = torch.multinomial(torch.nan_to_num(chances, nan=1.0), 1)[0]
            row.chances.append(chances)
        self._drafted[row.index, t] = token
        return torch.stack([token.double(), sure.double()])

    def verify(self, logits: Tensor, rows: Sequence[Row]) -> list[tuple[int, list[int]]]:
        """Of each row, how many drafted tokens stand, and the tokens that follow its newest: those,
        and dense decoding's own next one.

        Args:
            logits: [N, T, V] of the newest token and the drafted ones; T may be larger.
        """
        if not self.plain:
            if not any(row.draft for row in rows):
                return self._next(logits[:, 0].float(), rows)
            _require_numbers(rows, logits.amax(dim=-1).amax(dim=-1).tolist())
            return [self._verify(own, row) for own, row in zip(logits, rows, strict=True)]
        # one read for both; argmax as dense decoding takes it, ties included
        best, largest = logits.argmax(dim=-1), logits.amax(dim=-1).amax(dim=-1, keepdim=True)
        told = torch.stack([largest.double().expand_as(best), best.double()])
        found = []
        for row, values, tokens in zip(rows, *told.tolist(), strict=True):
            require_number(row, values[0] if not row.done else 0.0)
            n = next(
                (i for i, drafted in enumerate(row.draft) if tokens[i] != drafted), len(row.draft)
            )
            found.append((n, [int(token) for token in tokens[: n + 1]]))
        return found

    def _next(self, logits: Tensor, rows: Sequence[Row]) -> list[tuple[int, list[int]]]:
        """`verify` where nothing is drafted: one token of each row, all rows together and one read;
        logits: fp32 [N, V]."""
        scores, top = self._scores_of(logits, rows), logits.amax(dim=-1)
        if self._sample:
            chances = torch.softmax(scores, dim=-1)
            # a NaN is refused below, of the logits or of what processors made of them
            top = torch.maximum(top, chances.amax(dim=-1))
            tokens = torch.multinomial(torch.nan_to_num(chances, nan=1.0), 1)[:, 0]
        else:
            tokens = scores.argmax(dim=-1)
        largest, found = torch.stack([top.double(), tokens.double()]).tolist()
        _require_numbers(rows, largest)
        return [(0, [int(token)]) for token in found]

    def _scores_of(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """`_scores` of several rows [N, V]: one call of the processors for all rows whose texts are
        of one length, which see the batch as in dense decoding."""
        if not self.reads:
            return logits
        scores, batch = torch.empty_like(logits), self._texts.shape[0]
        for count in sorted({row.count for row in rows}):
            here = [i for i, row in enumerate(rows) if row.count == count]
            places = [rows[i].index for i in here]
            if places == list(range(batch)):
                return torch.as_tensor(self._processors(self._texts[:, :count], logits.clone()))
            whole = logits.new_zeros(batch, logits.shape[1])
            whole[places] = logits[here]
            scores[here] = self._processors(self._texts[:, :count], whole)[places]
        return scores

    def _verify(self, logits: Tensor, row: Row) -> tuple[int, list[int]]:
        """One row; logits: [T, V]."""
        found: list[int] = []
        for t in range(len(row.draft) + 1):
            drafted = row.draft[t] if t < len(row.draft) else None
            scores = self._scores(logits[t].float(), row, found)
            if self._sample:
                chances = row.chances[t] if drafted is not None else None
                stands, token = speculative(scores, drafted, chances)
            else:
                stands, token = greedy(scores, drafted)
            found.append(token)
            if not stands:
                break
        return len(found) - 1, found
