"""reread: long-context language models, fast without making them worse.

Importing this changes nothing anywhere; `attach` and `generate` load transformers when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .config import Config, DraftConfig, SelectorConfig, SoftNMS, Span, SparsePrefill, TriggerConfig
from .errors import ConfigError, InputError, NumericalError, RereadError, UnsupportedError
from .stats import Stats

if TYPE_CHECKING:
    from .generation import Output, generate
    from .integrations.hf.attach import attach
    from .integrations.hf.session import Session

__version__ = "0.1.0"
__all__ = [
    "Config",
    "ConfigError",
    "DraftConfig",
    "InputError",
    "NumericalError",
    "Output",
    "RereadError",
    "SelectorConfig",
    "Session",
    "SoftNMS",
    "Span",
    "SparsePrefill",
    "Stats",
    "TriggerConfig",
    "UnsupportedError",
    "attach",
    "generate",
]

_LAZY = {
    "Output": "generation",
    "Session": "integrations.hf.session",
    "attach": "integrations.hf.attach",
    "generate": "generation",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'reread' has no attribute {name!r}")
    value = getattr(import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value
