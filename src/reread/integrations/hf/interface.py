"""Registering with transformers' attention interface, and unregistering: importing reread touches
nothing."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...errors import InputError, UnsupportedError

PREFIX = "reread_"


class Attends(Protocol):
    """What an attached model's attention is handed to: a `Session`."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]
    ) -> Tensor | None:
        """One layer's attention [B, T, H, Dv], or None where the model's own has to run."""
        ...


@dataclass(slots=True)
class _Claim:
    config: Any  # keeps the object, and with it its id, alive
    original: str | None
    name: str
    users: int


_CLAIMS: dict[int, _Claim] = {}
_USERS: Counter[str] = Counter()
# attention module -> the session that its model is attached to
SESSIONS: WeakKeyDictionary[nn.Module, Attends] = WeakKeyDictionary()


def require_free(model: nn.Module) -> None:
    """Refuse a model that is attached.

    Raises:
        InputError: it is.
    """
    if any(module in SESSIONS for module in model.modules()):
        raise InputError(f"{type(model).__name__} is attached already: leave that session first")


def register(original: str) -> str:
    """Make "reread_<original>" known to transformers; its masks are made as for `original`, the
    prefill runs on it.

    Returns:
        the name to put into the model's config. Call `unregister` with it once for every
        `register`.
    """
    name = PREFIX + original
    if not _USERS[name]:
        mask = ALL_MASK_ATTENTION_FUNCTIONS.get(original)
        if mask is None:
            raise UnsupportedError(
                f"attention implementation {original!r} has no mask function in transformers"
            )
        AttentionInterface.register(name, _attention_over(original))
        AttentionMaskInterface.register(name, mask)
    _USERS[name] += 1
    return name


def unregister(name: str) -> None:
    """Undo one `register`; the last one removes the name from transformers."""
    _USERS[name] -= 1
    if _USERS[name] <= 0:
        del _USERS[name]
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(name, None)


def claim(config: Any) -> None:
    """Put our name into a model's config; models may share one config object.

    Call `release` with it once for every `claim`.
    """
    held = _CLAIMS.get(id(config))
    if held is None:
        original = config._attn_implementation
        _CLAIMS[id(config)] = _Claim(config, original, register(original or "sdpa"), 1)
        config._attn_implementation_internal = _CLAIMS[id(config)].name
    else:
        held.users += 1


def release(config: Any) -> None:
    """Undo one `claim`; the last one restores the config."""
    held = _CLAIMS[id(config)]
    held.users -= 1
    if not held.users:
        del _CLAIMS[id(config)]
        config._attn_implementation_internal = held.original
        unregister(held.name)


def _attention_over(original: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def reread_attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        session = SESSIONS.get(module)
        out = (
            None
            if session is None
            else session.attend(
                module, query, key, value, {**kwargs, "attention_mask": attention_mask}
            )
        )
        if out is not None:
            return out, None
        result: tuple[Tensor, Tensor | None] = _original(module, original)(
            module, query, key, value, attention_mask, **kwargs
        )
        return result

    return reread_attention


def _original(module: nn.Module, name: str) -> Callable[..., Any]:
    # "eager" is not in the registry: each modeling file has its own
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    found = eager if name == "eager" else ALL_ATTENTION_FUNCTIONS.get(name)
    if found is None:
        raise UnsupportedError(
            f"{type(module).__name__} has no {name!r} attention: load the model with 'sdpa'"
        )
    function: Callable[..., Any] = found
    return function
