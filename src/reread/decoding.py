"""When a decode step is slow, and how it chooses: two frozen dataclasses beside that of the
prefill."""

from __future__ import annotations

from dataclasses import dataclass, field

from .checks import is_real, require, require_bool, require_int, require_real
from .refinements import Refinement, SoftNMS, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerConfig:
    """When the next decode step of a row is slow. Any of the triggers suffices.

    Attributes:
        boundary: the previous token ends a sentence or a line (token ids taken from the
            tokenizer's vocabulary).
        t_max: at the latest every `t_max` steps; 1 makes every step slow, None switches the
            interval off.
        t_min: boundary and uncertainty make a step slow only `t_min` steps after the last slow
            one, an answer's first step aside; 1 makes every one of them count. Ends of lines and
            sentences often come in pairs.
        uncertainty: entropy of the previous step's output distribution above this many nats; None
            switches it off.
        first_step: the first decode step after a prefill is slow; otherwise it uses what the
            prefill's last `selector.tail_queries` queries chose. Queries of a prefix that was
            cached outside reread are not known; fewer remain as evidence then.
    """

    boundary: bool = True
    t_max: int | None = 16
    t_min: int = 3
    uncertainty: float | None = None
    first_step: bool = True

    def __post_init__(self) -> None:
        require_bool("triggers.boundary", self.boundary)
        require_bool("triggers.first_step", self.first_step)
        if self.t_max is not None:
            require_int("triggers.t_max", self.t_max, 1)
        require_int("triggers.t_min", self.t_min, 1)
        if self.uncertainty is not None:
            require_real("triggers.uncertainty", self.uncertainty, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorConfig:
    """Constants of the Selector (SFI equations; spec letters in brackets).

    Attributes:
        tail_queries: [W] prefill queries that serve as evidence for the first selection.
        alpha: [alpha] exponent of the evidence's power mean.
        lambda_clip: [lambda_clip] largest weight of the prior; 0 switches the prior off.
        gamma: [gamma] exponent of the key-norm prior.
        beta, p, eta: [beta, p, eta] the position prior exp(-beta u^p) (1 - u + eps)^eta.
        refine: SoftNMS, Span, or None.
        alpha_cross: [alpha_cross] strength of cross-head exclusivity; 0 switches it off.
        temperature: [T] of the softmax over KV heads in cross-head exclusivity.
        eps: [eps].
    """

    tail_queries: int = 16
    alpha: float = 0.5
    lambda_clip: float = 0.0
    gamma: float = 0.5
    beta: float = 1.0
    p: float = 1.0
    eta: float = 2.0
    refine: Refinement | None = field(default_factory=Span)
    alpha_cross: float = 0.0
    temperature: float = 1.0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        require_int("selector.tail_queries", self.tail_queries, 1)
        require_real("selector.lambda_clip", self.lambda_clip, 0.0, 1.0)
        for name in ("gamma", "beta", "p", "eta", "alpha_cross"):
            require_real(f"selector.{name}", getattr(self, name), 0.0)
        for name in ("alpha", "temperature", "eps"):
            value = getattr(self, name)
            require(is_real(value) and value > 0, f"selector.{name}", value, "a number above 0")
        ok = self.refine is None or isinstance(self.refine, SoftNMS | Span)
        require(ok, "selector.refine", self.refine, "SoftNMS(...), Span(...) or None")
