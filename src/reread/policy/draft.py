"""How many tokens a row drafts before dense attention verifies them."""

from __future__ import annotations

from dataclasses import dataclass

from ..drafting import DraftConfig, expected_tokens

PRIOR = 0.8  # share of drafted tokens that is taken for accepted before any has been verified
LOWEST, HIGHEST = 0.05, 0.98  # of that share: a row can always come back, and never drafts blindly
MEMORY = 0.9  # weight of what was known, for each token that is verified
PROBE = 32  # tokens without a draft after which a row tries one again
GAIN = 1.02  # drafting has to promise at least this much


@dataclass(frozen=True, slots=True)
class Costs:
    """What passes cost, in units of a dense step of the same rows.

    Attributes:
        fast: a sparse step.
        query: what a verifying pass costs more for each drafted token.
    """

    fast: float
    query: float


def speedup(rate: float, drafted: int, costs: Costs) -> float:
    """Expected tokens by the cost of drafting and verifying them; 1 is dense decoding."""
    cost = 1.0 + drafted * (costs.fast + costs.query)
    return expected_tokens(rate, drafted) / cost


def best_length(rate: float, longest: int, costs: Costs) -> int:
    """The number of drafted tokens, 0 to `longest`, with the largest expected speedup; 0 where none
    reaches GAIN. Ties go to the shorter draft."""
    found = max(range(longest + 1), key=lambda n: (speedup(rate, n, costs), -n))
    return found if speedup(rate, found, costs) >= GAIN else 0


class DraftLength:
    """One row's adaptation. Deterministic: it sees counts, never a clock.

    Attributes:
        rate: late share of verified draft tokens that were accepted.
    """

    def __init__(self, config: DraftConfig) -> None:
        self._config = config
        self.rate = PRIOR
        self._idle = 0  # tokens since the last draft

    def next(self, costs: Costs) -> int:
        """How many tokens to draft now."""
        if not self._config.adapt:
            return self._config.tokens
        found = best_length(self.rate, self._config.tokens, costs)
        # a short draft now and then finds out whether the text has become easier; where even a
        # perfect drafter would gain nothing, there is nothing to find out
        if not found and self.probes(costs) and self._idle >= PROBE:
            return min(2, self._config.tokens)
        return found

    def may_draft(self, costs: Costs) -> bool:
        """Whether the row may draft behind the next verification."""
        due = self._config.adapt and self._idle + 1 >= PROBE and self.probes(costs)
        return due or self.next(costs) > 0

    def probes(self, costs: Costs) -> bool:
        """Whether a row that does not draft may draft again at these costs."""
        return best_length(HIGHEST, self._config.tokens, costs) > 0

    def observe(self, accepted: int, drafted: int) -> None:
        """A verification has taken `accepted` of `drafted` tokens; the first that it did not take
        counts as refused, those behind it tell nothing."""
        self._idle = 0 if drafted else self._idle + 1
        for i in range(min(accepted + 1, drafted)):
            taken = 1.0 if i < accepted else 0.0
            rate = MEMORY * self.rate + (1.0 - MEMORY) * taken
            self.rate = min(HIGHEST, max(LOWEST, rate))
