"""Nothing wrong is timed: logits of two ways to compute the same step must agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from ..errors import InputError, NumericalError

TOLERANCE = 0.1  # relative error of logits: two dense kernels differ by 0.04 in a random bf16 model


class Named(Protocol):
    """An arm."""

    @property
    def name(self) -> str:
        """As printed, and as asked for."""


A = TypeVar("A", bound=Named)


def named(names: str, arms: Sequence[A]) -> list[A]:
    """The arms that a comma-separated list names; "all" of them.

    Raises:
        InputError: an unknown name.
    """
    known = {arm.name: arm for arm in arms}
    wanted = list(known) if names == "all" else [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in known:
            raise InputError(f"arm {name!r} is unknown: all, or some of {', '.join(known)}")
    return [known[name] for name in wanted]


def difference(got: Tensor, want: Tensor) -> float:
    """Relative error in the 2-norm, the worst row's; [B, V]."""
    got, want = got.float(), want.float()
    return float(((got - want).norm(dim=1) / want.norm(dim=1)).max())


def require_close(error: float, what: str) -> None:
    """Nothing wrong is timed."""
    if not error < TOLERANCE:
        raise NumericalError(f"{what}: logits differ by {error:.3g}, more than {TOLERANCE}")
