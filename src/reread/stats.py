"""What a generation did: counted where it ran, not where it was planned."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Drafts:
    """What mode "exact" drafted, over all rows.

    Attributes:
        verified: passes that verified a row.
        drafted, accepted: tokens that sparse steps proposed, and those of them that went into the
            text besides the one that every verification yields.
        lengths: how many drafts had so many tokens, by number of tokens.
        tokens: new tokens of all rows, each up to its end.
    """

    verified: int = 0
    drafted: int = 0
    accepted: int = 0
    lengths: dict[int, int] = field(default_factory=dict)
    tokens: int = 0

    @property
    def acceptance(self) -> float:
        """Share of drafted tokens that stand; 0 where none was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def accepted_per_verify(self) -> float:
        """Drafted tokens that stand, for each pass that verified a row; its own token comes on
        top."""
        return self.accepted / self.verified if self.verified else 0.0


@dataclass(slots=True)
class Stats:
    """One call of `generate`.

    Attributes:
        slow_steps, fast_steps, full_steps: decode steps per row by kind; full = dense because the
            budget covers the row (or mode="dense"). Steps after a row's end are not counted.
        keys_read_share: keys read by full-attention layers in decode / keys that dense decoding
            would have read.
        prefill_keys_share: keys read by full-attention layers in a sparse prefill / keys that dense
            attention would have read there; 1 where the prefill was dense.
        prefill_backend: the ops that read the prompt sparsely ("reference" or "triton"); "" where
            it was read densely.
        slow_reasons: how many slow steps each trigger caused, over all rows.
        decode_steps: forward passes after the prefill.
        drafts: of mode "exact", whose fast steps draft and whose slow steps verify; else None.
        new_tokens: tokens produced per row (padding after a row's end included).
        prefill_s: seconds until the first token was chosen.
        decode_s: seconds from there to the end.
        backend: the ops that ran ("reference" or "triton").
        runner: how decode steps ran: "graph, compiled layers", "graph" or "eager"; "" if there were
            none.
        sparse_layers: how many layers went through reread; total_layers: of how many.
        config: `Config.to_dict()`.
        notes: what the user should know, e.g. a trigger that could not work.
    """

    slow_steps: list[int] = field(default_factory=list)
    fast_steps: list[int] = field(default_factory=list)
    full_steps: list[int] = field(default_factory=list)
    keys_read_share: float = 1.0
    prefill_keys_share: float = 1.0
    prefill_backend: str = ""
    slow_reasons: dict[str, int] = field(default_factory=dict)
    decode_steps: int = 0
    new_tokens: int = 0
    drafts: Drafts | None = None
    prefill_s: float = 0.0
    decode_s: float = 0.0
    backend: str = ""
    runner: str = ""
    sparse_layers: int = 0
    total_layers: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Decode speed: tokens of all rows behind the first over decode_s; 0 if nothing was
        decoded."""
        rows = max(1, len(self.slow_steps))
        steps = self.decode_steps * rows if self.drafts is None else self.drafts.tokens - rows
        return steps / self.decode_s if self.decode_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, `tokens_per_s` included, for JSON."""
        return {**dataclasses.asdict(self), "tokens_per_s": self.tokens_per_s}
