"""The drafts of mode "exact": how long they are, and the sparse steps that make them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ....attention import Meter
from ....config import Config
from ....policy.draft import HIGHEST, Costs, best_length
from ....types import StepKind
from .ahead import Ahead
from .passes import Passes
from .rows import Chooser, Row

# by kind of device, measured: what a drafted token adds to the pass that verifies it, of a dense
# step; what choosing costs, of reading all keys and values once; a byte of the weights, which few
# rows do not read at full speed, in bytes of keys
QUERY, CHOOSE, WEIGHT = {"cpu": 0.08}, {"cpu": 1.7}, {"cpu": 1.0}  # SmolLM2, 8192 tokens, 2 threads
# Qwen3 shapes on one H200: a GPU reads weights and keys once, whatever the number of queries
OTHER_QUERY, OTHER_CHOOSE, OTHER_WEIGHT = 0.01, 0.2, 1.6


class Drafter:
    """Drafts for one call of `generate`.

    Attributes:
        meter, steps, lengths: what ran: keys by kind, forward passes, drafts by their length.
    """

    def __init__(
        self, config: Config, passes: Passes, rows: list[Row], texts: Tensor, chooser: Chooser,
        pad: int,
    ) -> None:  # fmt: skip
        """rows: of the whole batch; texts: as the loop writes them."""
        self._config, self._passes, self._rows = config, passes, rows
        self._texts, self._chooser, self._pad = texts, chooser, pad
        self.meter = Meter.of(len(rows))
        self.steps = 0
        self.lengths: dict[int, int] = {}

    def _estimate(self, rows: Sequence[Row]) -> Costs:
        """By the bytes that a step of these rows reads."""
        key = self._passes.key_bytes
        dense = sum(row.keys for row in rows) * key
        fast = sum(min(row.keys, self._config.budget) for row in rows) * key
        fast += sum(row.keys for row in rows) * self._passes.index_bytes
        on = self._passes.on
        weights = self._passes.weight_bytes * WEIGHT.get(on, OTHER_WEIGHT)
        whole = weights + dense
        # what an indexer chooses is chosen by the sparse steps themselves
        each = 0.0 if self._config.indexed else CHOOSE.get(on, OTHER_CHOOSE)
        choose = each * dense / whole
        return Costs((weights + fast) / whole, QUERY.get(on, OTHER_QUERY), choose)

    def _length(self, row: Row) -> int:
        """How many tokens the row drafts now."""
        # an indexer needs nothing that a verification leaves
        knows = row.basis or self._config.indexed
        if not knows or not self._pays or not self._sparse(row):
            return 0
        room = self._texts.shape[1] - row.count - 1
        return max(0, min(row.policy.next(self._costs), room, self._unturned(row)))

    def may_draft(self, row: Row) -> bool:
        """Whether the row may draft behind the verification that follows this draft."""
        if not self._pays or not self._sparse(row):
            return False
        return bool(row.draft) or row.policy.may_draft(self._costs)

    def _unturned(self, row: Row) -> int:
        """Draft tokens that may share a pass with the row's newest token: a pass turns all its
        positions by the frequencies of the last."""
        passes = self._passes
        if row.position < passes.turn:
            return passes.turn - 1 - row.position
        return 0 if passes.drifts else self._config.draft.tokens

    def _sparse(self, row: Row) -> bool:
        """Whether a draft reads less than everything."""
        return not self._config.dense_below_budget or row.keys > self._config.budget

    def draft(self, rows: Sequence[Row]) -> None:
        """Draft for these rows, each into `draft`."""
        together, draft = self._passes.together, self._config.draft
        self._costs = self._estimate(rows)
        # no row's rate is above the highest
        self._pays = not draft.adapt or best_length(HIGHEST, draft.tokens, self._costs) > 0
        wanted = {row.index: self._length(row) for row in rows}
        if together:
            # rows that are done go along, and their positions turn everybody's, too
            least = min(*wanted.values(), *(self._unturned(row) for row in self._rows))
            wanted = dict.fromkeys(wanted, max(0, least))
        for row in self._rows:
            row.draft, row.chances, row.ends = [], [], False
        drafting = {row: n for row in rows if (n := wanted[row.index])}
        if (ahead := self._passes.ahead) is not None and drafting:
            self._ahead(ahead, drafting)
        else:
            self._by_turns(rows, wanted)
        for row in self._rows:
            if row.done and together:
                # what dense decoding feeds behind a row's end
                row.draft = [self._pad] * len(rows[0].draft)
        for row in rows:
            self.lengths[len(row.draft)] = self.lengths.get(len(row.draft), 0) + 1

    def _by_turns(self, rows: Sequence[Row], wanted: dict[int, int]) -> None:
        """Every token is looked at before the next one is drafted."""
        together, threshold = self._passes.together, self._config.draft.min_probability
        while going := [r for r in rows if len(r.draft) < wanted[r.index] and not r.ends]:
            if together and len(going) < len(rows):
                break
            fed = self._rows if together else going
            tokens = [[row.draft[-1] if row.draft else self.newest(row)] for row in fed]
            first = [row.length + len(row.draft) for row in fed]
            logits, step = self._passes.run(fed, tokens, first, verify=False)
            self.steps += 1
            told = self._chooser.draft(logits[:, 0], fed, len(fed[0].draft)).tolist()
            for i, (row, token, chance) in enumerate(zip(fed, *told, strict=True)):
                row.drafts(token, chance, threshold)
                if row in going:
                    self.count(row, StepKind.FAST, step.read[i], 0)

    def _ahead(self, ahead: Ahead, wanted: dict[Row, int]) -> None:
        """The next step begins before the host has seen what this one drafted, which is one step
        too many where all drafts end early."""
        threshold = self._config.draft.min_probability

        def look(t: int) -> None:
            rows = [row for row, n in wanted.items() if t < n and not row.ends]
            for row, (token, chance) in ahead.told(t, rows).items():
                row.drafts(token, chance, threshold)

        newest = {row: self.newest(row) for row in wanted}
        ahead.begin(newest, self._chooser, self._texts.device)
        t = 0
        while going := [row for row, n in wanted.items() if t < n and not row.ends]:
            for row, read in ahead.step(going, t).items():
                self.count(row, StepKind.FAST, read, 0)
            self.steps += 1
            if t:
                look(t - 1)
            t += 1
        if t:
            look(t - 1)
        for row in wanted:
            del row.chances[len(row.draft) :]

    def newest(self, row: Row) -> int:
        """The newest token of the row's text; of a row that is done, the padding that follows."""
        return self._pad if row.done and row.count > row.end else row.newest

    def count(self, row: Row, kind: StepKind, read: int, cached: int) -> None:
        self.meter.add(row.index, kind, read, cached, len(self._passes.states))
