"""The cycle of mode "exact": draft with sparse steps, verify with one dense pass, take what stands.

Rows advance each on their own, at columns of their own. Where layers keep caches of their own kind
(sliding windows, recurrent states), which know one column for all rows, rows advance together, by
as many tokens as the row that takes the fewest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ....config import Config
from ....cuda import upload
from ....stats import Drafts
from ....types import StepKind
from .drafter import Drafter
from .ending import Ending
from .passes import Passes
from .rows import Chooser, Row
from .snapshot import Snapshot

FILL = 16  # columns that are filled at once behind rows that ended early
REUSE = 16  # tokens for which drafts go on with what was chosen


class Loop:
    """One call of `generate`.

    Attributes:
        rows: in the order of the batch.
        prompt: tokens of the prompt, padding included.
        drafter: what drafts, and counts what ran.
        put: told of every verified token.
    """

    def __init__(
        self,
        config: Config,
        passes: Passes,
        rows: list[Row],
        texts: Tensor,
        chooser: Chooser,
        stopping: Any,
        pad: int,
    ) -> None:
        """texts: int64 [B, longest], filled with `pad` behind each row's `count`."""
        self._config, self._passes, self._texts = config, passes, texts
        self._chooser, self._pad = chooser, pad
        self._ending = Ending(stopping)
        # columns of the cache before the text begins: of a cache that was given, of embeddings
        self._offset = rows[0].length - rows[0].count
        self.rows, self.prompt = rows, rows[0].count
        self._written = [row.count for row in rows]
        self.drafter = Drafter(config, passes, rows, texts, chooser, pad)
        self.put: Callable[[int], object] = lambda token: None

    @property
    def drafts(self) -> Drafts:
        """What has been drafted."""
        return Drafts(
            verified=sum(row.verified for row in self.rows),
            drafted=sum(row.drafted for row in self.rows),
            accepted=sum(row.accepted for row in self.rows),
            lengths=dict(sorted(self.drafter.lengths.items())),
            tokens=sum((row.end or row.count) - self.prompt for row in self.rows),
        )

    @property
    def width(self) -> int:
        """Tokens of the batch, as dense decoding would end it: those of the row that ended last."""
        return max(row.end or row.count for row in self.rows)

    def active(self) -> list[Row]:
        """Rows that go on."""
        going = [row for row in self.rows if not row.done]
        if all(row.end for row in self.rows):
            return [row for row in going if row.count < self.width]
        return going

    def begin(self, logits: Tensor) -> None:
        """Choose every row's first token. logits: fp32 [B, V] of the prefill."""
        for row, (_, tokens) in zip(
            self.rows, self._chooser.verify(logits[:, None], self.rows), strict=True
        ):
            self.append(row, tokens[0])
        self._show(self.rows)

    def run(self, progress: Callable[[int], None]) -> None:
        """Until every row has ended; progress: told of the longest text's tokens."""
        while rows := self.active():
            before = Snapshot(self._passes.cache) if self._passes.together else None
            self.drafter.draft(rows)
            self._verify(rows, before)
            progress(self.width)

    def append(self, row: Row, token: int) -> None:
        """One verified token: into the text, to the streamer, past the stopping criteria."""
        self.extend(row, [token])

    def extend(self, row: Row, tokens: Sequence[int]) -> int:
        """Verified tokens, up to the one that ends the row. Returns how many were taken."""
        before, asked = row.count, len(self._ending.others) > 0
        for token in tokens:
            row.fresh.append(token)
            row.count, row.newest = row.count + 1, token
            self.put(token)
            # every criterion is asked for every token, as dense decoding does
            ends = self._ending.by_token(token, row.count)
            if asked:
                self._write(row)
                ends |= self._ending.by_text(self._texts[row.index, None, : row.count])
            full = row.count == self._texts.shape[1]
            if ends or full:
                row.end = row.end or row.count
                row.done = self._ending.hard or full
            if row.done:
                break
        return row.count - before

    def _write(self, *rows: Row) -> None:
        """Bring the rows' texts up to date, all in one transfer."""
        places: list[tuple[int, int, int]] = []
        for row in rows:
            at = self._written[row.index]
            places += [(row.index, at + i, token) for i, token in enumerate(row.fresh)]
            self._written[row.index] += len(row.fresh)
            row.fresh = []
        if places:
            columns = [list(values) for values in zip(*places, strict=True)]
            of, at_column, tokens = upload(columns, self._texts.device)
            self._texts[of, at_column] = tokens

    def _show(self, rows: Sequence[Row]) -> None:
        """Let whoever chooses tokens see the rows' texts."""
        if self._chooser.reads:
            self._write(*rows)

    # -- verifying

    def _verify(self, rows: Sequence[Row], before: Snapshot | None) -> None:
        fed = list(rows) if before is None else self.rows
        size = self._passes.size(1 + max(len(row.draft) for row in rows))
        tokens = [
            _padded([self.drafter.newest(row), *row.draft], size, self._pad if row.done else None)
            for row in fed
        ]
        first = [row.length for row in fed]
        evidence = self._evidence(rows)
        # rows that do not draft let go of what was chosen
        kept = frozenset(row.index for row in rows if row.draft and row.index not in evidence)
        if before is not None:
            self._back(before)
        logits, _ = self._passes.run(fed, tokens, first, verify=True, evidence=evidence, kept=kept)
        self.drafter.steps += 1
        going = [(i, row) for i, row in enumerate(fed) if row in rows]
        chosen = self._chooser.verify(logits, fed)
        found = {row.index: chosen[i] for i, row in going}
        keys = {row.index: row.keys for row in rows}
        taken = self._each(rows, found) if before is None else self._together(rows, found)
        if before is not None and self._passes.others and max(taken.values()) < size:
            # recurrent states have read tokens that do not stand
            self._back(before)
            n, everyone = max(taken.values()), frozenset(row.index for row in self.rows)
            self._passes.run(self.rows, [t[:n] for t in tokens], first, verify=True, kept=everyone)
            self.drafter.steps += 1
        for _, row in going:
            n = taken[row.index]
            dense = n * keys[row.index] + n * (n - 1) // 2
            read = keys[row.index] + len(row.draft)
            self.drafter.count(row, StepKind.SLOW, read, dense)
            row.told(found[row.index][0], n)
            row.chosen = row.basis = row.index in evidence or row.index in kept
            row.age = n if row.index in evidence else row.age + n
        self._passes.settle(self.rows, taken, kept)

    def _evidence(self, rows: Sequence[Row]) -> frozenset[int]:
        """Rows that choose again by this verification: those which may draft behind it and whose
        choice is missing or old. None where every draft chooses anew, by an indexer."""
        if self._config.indexed:
            return frozenset()
        drafting = [row for row in rows if self.drafter.may_draft(row)]
        due = [
            row for row in drafting
            if not (row.draft and row.chosen and row.age + len(row.draft) < REUSE)
        ]  # fmt: skip
        # where one pass serves all rows, evidence of one costs as much as that of all
        return frozenset(row.index for row in (drafting if due and self._passes.joint else due))

    def _each(self, rows: Sequence[Row], found: dict[int, tuple[int, list[int]]]) -> dict[int, int]:
        """Every row takes its own tokens, as far as its text goes. Returns how many, by row."""
        taken = {}
        for row in rows:
            taken[row.index] = self.extend(row, found[row.index][1])
            row.length += taken[row.index]
        self._show(rows)
        return taken

    def _together(
        self, rows: Sequence[Row], found: dict[int, tuple[int, list[int]]]
    ) -> dict[int, int]:
        """All rows take as many tokens as the one that takes the fewest, or until one ends: it goes
        on with padding, as in dense decoding, not with what it drafted."""
        least, kept = min(len(tokens) for _, tokens in found.values()), 0
        while kept < least and not any(row.done for row in rows):
            for row in rows:
                self.append(row, found[row.index][1][kept])
            kept += 1
        self._show(rows)
        for row in self.rows:
            row.length += kept
            row.count = row.length + 1 - self._offset
        return {row.index: kept for row in self.rows}

    def _back(self, before: Snapshot) -> None:
        before.restore()
        self._passes.crop(self.rows[0].length)

    # -- behind the end

    def close(self, *, fill: bool) -> Tensor:
        """The texts [B, width], and the cache as dense decoding leaves it: without the newest
        token.

        Args:
            fill: whether the cache goes on to be used, so that rows which ended early need the
                padding that dense decoding reads behind them.
        """
        self._write(*self.rows)
        end = self.width - 1 + self._offset
        for row in self.rows:
            row.length, row.done = min(row.length, end), False
        while fill and (short := [row for row in self.rows if row.length < end]):
            size = min(FILL, min(end - row.length for row in short))
            starts = [row.length - self._offset for row in short]
            tokens = [
                self._texts[row.index, at : at + size].tolist()
                for row, at in zip(short, starts, strict=True)
            ]
            self._passes.run(short, tokens, [row.length for row in short], verify=True)
            for row in short:
                row.length += size
        self._passes.crop(end)
        return self._texts[:, : self.width]


def _padded(tokens: list[int], size: int, pad: int | None) -> list[int]:
    return tokens + (tokens[-1:] if pad is None else [pad]) * (size - len(tokens))
