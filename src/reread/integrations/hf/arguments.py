"""Arguments of a call, wherever its signature takes them."""

from __future__ import annotations

import inspect
from typing import Any


def _catch_all(signature: inspect.Signature) -> str | None:
    """The name of the `**kwargs` parameter, if there is one."""
    kinds = ((p.name, p.kind) for p in signature.parameters.values())
    return next((name for name, kind in kinds if kind is inspect.Parameter.VAR_KEYWORD), None)


def flat(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Bound arguments with those of `**kwargs` beside the named ones."""
    named = dict(bound.arguments)
    rest = named.pop(_catch_all(bound.signature) or "", {})
    return {**named, **rest}


def put(bound: inspect.BoundArguments, name: str, value: Any) -> None:
    """Set one argument, wherever the signature takes it."""
    rest = _catch_all(bound.signature)
    if name in bound.signature.parameters or rest is None:
        bound.arguments[name] = value
    else:
        bound.arguments[rest] = {**bound.arguments.get(rest, {}), name: value}
