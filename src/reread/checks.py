"""Checks of configuration values: a ConfigError names the value and what would be right."""

from __future__ import annotations

import math
from typing import TypeGuard

from .errors import ConfigError


def require(ok: bool, name: str, value: object, want: str) -> None:
    """Raise unless `ok`; `want` says what would be right."""
    if not ok:
        raise ConfigError(f"{name}={value!r} is not possible: {want}")


def is_int(value: object) -> TypeGuard[int]:
    """Whether it is an integer; bool is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_real(value: object) -> TypeGuard[float]:
    """Whether it is a finite number; bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def require_int(name: str, value: object, low: int) -> None:
    """An integer of at least `low`."""
    require(is_int(value) and value >= low, name, value, f"an integer of at least {low}")


def require_real(name: str, value: object, low: float, high: float = math.inf) -> None:
    """A finite number in [low, high]."""
    want = (
        f"a number of at least {low:g}"
        if high == math.inf
        else f"a number from {low:g} to {high:g}"
    )
    require(is_real(value) and low <= value <= high, name, value, want)


def require_bool(name: str, value: object) -> None:
    """True or False."""
    require(isinstance(value, bool), name, value, "true or false")
