"""Nothing wrong is timed: logits of two ways to compute the same step must agree."""

from __future__ import annotations

from torch import Tensor

from ..errors import NumericalError

TOLERANCE = 0.1  # relative error of logits: two dense kernels differ by 0.04 in a random bf16 model


def difference(got: Tensor, want: Tensor) -> float:
    """Relative error in the 2-norm, the worst row's; [B, V]."""
    got, want = got.float(), want.float()
    return float(((got - want).norm(dim=1) / want.norm(dim=1)).max())


def require_close(error: float, what: str) -> None:
    """Nothing wrong is timed."""
    if not error < TOLERANCE:
        raise NumericalError(f"{what}: logits differ by {error:.3g}, more than {TOLERANCE}")
