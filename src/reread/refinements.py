"""How a Selector's scores are refined before top-K: frozen dataclasses, one per kind."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import require, require_int, require_real


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftNMS:
    """Refinement of the paper: a position is pulled down by the excess of its best neighbour.

    z <- z - alpha * max(0, localmax(z) - z), localmax over `neighbourhood` positions centred on it
    (SFI, step 6).
    """

    alpha: float = 0.5
    neighbourhood: int = 5

    def __post_init__(self) -> None:
        require_real("soft_nms.alpha", self.alpha, 0.0)
        require_int("soft_nms.neighbourhood", self.neighbourhood, 1)
        require(
            self.neighbourhood % 2 == 1,
            "soft_nms.neighbourhood",
            self.neighbourhood,
            "an odd number",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Refinement that keeps spans: each position's score spreads, by maximum, to its neighbours
    before top-K.

    `back` positions before it and `ahead` positions after it (in the text) take over its score.
    """

    back: int = 8
    ahead: int = 24

    def __post_init__(self) -> None:
        require_int("span.back", self.back, 0)
        require_int("span.ahead", self.ahead, 0)


Refinement = SoftNMS | Span
REFINEMENTS: dict[str, type[SoftNMS] | type[Span]] = {"soft_nms": SoftNMS, "span": Span}
