"""What every table of differences shares: names, the floor of dense, and intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DENSE = "dense"  # the method that others are compared with
ALL = "all"  # all kinds of question together
DENSE_FLOOR = 0.5  # below it, dense attention cannot do the task
RESAMPLES = 2000
DRAWS = 1 << 20  # at a time


def bootstrap(differences: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean, by resampling cases; the same for the same values."""
    values = np.asarray(differences, dtype=np.float64)
    rng = np.random.default_rng(0)
    count, each = len(values), max(1, DRAWS // len(values))
    sizes = [min(each, RESAMPLES - first) for first in range(0, RESAMPLES, each)]
    means = np.concatenate(
        [values[rng.integers(0, count, (size, count))].mean(axis=1) for size in sizes]
    )
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
