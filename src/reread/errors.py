"""What reread raises. Every message names the offending value and what would be right."""

from __future__ import annotations


class RereadError(Exception):
    """Base of all errors that reread raises on purpose."""


class ConfigError(RereadError, ValueError):
    """A configuration value or key that cannot be right."""


class InputError(RereadError, ValueError):
    """A prompt, mask, cache or file that cannot be worked with."""


class UnsupportedError(RereadError, NotImplementedError):
    """A model, cache or decoding mode that reread does not handle; raised before the first
    token."""


class NumericalError(RereadError, ArithmeticError):
    """NaN where numbers must be: raised instead of continuing with an arbitrary token."""
