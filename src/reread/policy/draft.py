"""How many tokens a row drafts before dense attention verifies them."""

from __future__ import annotations

from dataclasses import dataclass

from ..drafting import DraftConfig, expected_tokens

PRIOR = 0.8  # share of drafted tokens that is taken for accepted before any has been verified
LOWEST, HIGHEST = 0.05, 0.98  # of that share: a row can always come back, and never drafts blindly
MEMORY = 0.9  # weight of what was known, for each token that is verified
TRIAL = 4  # tokens of a draft that finds out whether drafting pays
FIRST_WAIT, LONGEST_WAIT = 8, 128  # tokens from a trial that failed to the next one, doubling
GAIN = 1.02  # drafting has to promise at least this much


@dataclass(frozen=True, slots=True)
class Costs:
    """What passes cost, in units of a dense step of the same rows.

    Attributes:
        fast: a sparse step.
        query: what a verifying pass costs more for each drafted token.
        choose: what choosing the next draft's keys costs.
    """

    fast: float
    query: float
    choose: float = 0.0


def speedup(rate: float, drafted: int, costs: Costs) -> float:
    """Expected tokens by the cost of drafting and verifying them; 1 is dense decoding, which is
    what a verification without a draft is."""
    cost = 1.0 + drafted * (costs.fast + costs.query) + (costs.choose if drafted else 0.0)
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
        self._wait = 0  # of them before a trial

    def next(self, costs: Costs) -> int:
        """How many tokens to draft now."""
        if not self._config.adapt:
            return self._config.tokens
        found = best_length(self.rate, self._config.tokens, costs)
        if not found and self._idle >= self._wait and self.probes(costs):
            return min(TRIAL, self._config.tokens)
        return found

    def may_draft(self, costs: Costs) -> bool:
        """Whether the row may draft behind the next verification."""
        due = self._config.adapt and self._idle + 1 >= self._wait and self.probes(costs)
        return due or self.next(costs) > 0

    def probes(self, costs: Costs) -> bool:
        """Whether a row that does not draft may draft again at these costs: where even a perfect
        drafter would gain nothing, there is nothing to find out."""
        return best_length(HIGHEST, self._config.tokens, costs) > 0

    def observe(self, accepted: int, drafted: int) -> None:
        """A verification has taken `accepted` of `drafted` tokens; the first that it did not take
        counts as refused, those behind it tell nothing."""
        self._idle = 0 if drafted else self._idle + 1
        if drafted:
            # a trial that stands is followed by another at once, one that fails by longer waits
            stands = accepted == drafted
            self._wait = 0 if stands else min(LONGEST_WAIT, max(FIRST_WAIT, 2 * self._wait))
        for i in range(min(accepted + 1, drafted)):
            taken = 1.0 if i < accepted else 0.0
            rate = MEMORY * self.rate + (1.0 - MEMORY) * taken
            self.rate = min(HIGHEST, max(LOWEST, rate))
