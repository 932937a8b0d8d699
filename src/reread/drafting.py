"""How much is drafted before it is verified, in mode "exact"."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import require, require_bool, require_int, require_real

MAX_TOKENS = 16  # drafted before one verification: the kernels check up to 17 positions at once
# tokens of a row in a captured pass that verifies; shorter drafts are padded
SIZES = (1, 3, 5, 9, 17)


def verify_size(tokens: int) -> int:
    """The captured size that holds so many tokens, at most 17."""
    return next(size for size in SIZES if size >= tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """Speculative decoding with sparse steps as the drafter (Leviathan et al., 2023).

    Attributes:
        tokens: [gamma] at most so many are drafted before dense attention verifies them, 1 to 16.
        adapt: choose each row's number of tokens, 0 included, from what was accepted lately and
            from what a sparse step saves at the row's length; False: always `tokens`.
        min_probability: a draft ends behind a token whose distribution has no probability above
            this; 0 never ends one. It looks at the distribution, not at the token drawn from it:
            otherwise sampling would no longer follow dense's distribution.
    """

    tokens: int = 8
    adapt: bool = True
    min_probability: float = 0.3

    def __post_init__(self) -> None:
        require_int("draft.tokens", self.tokens, 1)
        fits = self.tokens <= MAX_TOKENS
        require(fits, "draft.tokens", self.tokens, f"at most {MAX_TOKENS}")
        require_bool("draft.adapt", self.adapt)
        require_real("draft.min_probability", self.min_probability, 0.0, 1.0)


def expected_tokens(rate: float, drafted: int) -> float:
    """Tokens that one verification yields: (1 - rate^(drafted + 1)) / (1 - rate), the longest
    agreeing prefix and the verifier's own next token (Leviathan et al., 2023, equation 1).

    Args:
        rate: probability that a drafted token is accepted, below 1.
    """
    return (1.0 - rate ** (drafted + 1)) / (1.0 - rate)
