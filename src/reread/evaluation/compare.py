"""One prompt, answered by dense and by slow-fast decoding: what both cost and where they differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import Config
from ..errors import InputError
from ..generation import generate
from ..integrations.hf.load import Loaded, quiet
from ..integrations.hf.prompt import TokenStream, check_length, decode
from ..stats import Stats
from .provenance import provenance

ARMS = ("dense", "reread")
PREFILL_CHUNK = 512  # tokens between two reports of progress in the prefill
WARM_UP_TOKENS = 4

# (arm, phase "prefill" | "decode", tokens done, tokens total)
ArmProgress = Callable[[str, str, int, int], None]
# (arm, new token id)
ArmToken = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class Arm:
    """One answer: its new token ids, their text, and what they cost."""

    tokens: list[int]
    text: str
    stats: Stats


@dataclass(frozen=True, slots=True)
class Comparison:
    """Dense decoding beside reread's, for one prompt.

    Attributes:
        tokens_per_s, text, tokens: by arm, "dense" and "reread".
        speedup: tokens_per_s of reread / of dense; None if an arm decoded nothing.
        token_agreement: equal tokens position by position / tokens of the longer answer.
        first_difference: index of the first new token that differs; None where there is none.
        keys_read_share: keys read by reread's decode steps / keys that dense steps would have read.
        slow_steps, fast_steps, full_steps: of reread's arm.
        prefill_s: seconds of reread's prefill, which runs as the model's own.
        prompt_tokens: length of the prompt.
        model, config, versions, device, commit: where the result comes from.
    """

    tokens_per_s: dict[str, float]
    text: dict[str, str]
    tokens: dict[str, list[int]]
    speedup: float | None
    token_agreement: float
    first_difference: int | None
    keys_read_share: float
    slow_steps: int
    fast_steps: int
    full_steps: int
    prefill_s: float
    prompt_tokens: int
    model: str
    config: dict[str, Any]
    versions: dict[str, str]
    device: dict[str, Any]
    commit: str | None
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)


def compare(
    loaded: Loaded,
    input_ids: Tensor,
    config: Config,
    *,
    max_new_tokens: int,
    progress: ArmProgress | None = None,
    on_token: ArmToken | None = None,
    on_arm: Callable[[str, Arm], None] | None = None,
    **options: Any,
) -> Comparison:
    """Generate with dense attention and with `config`; both use the same preallocated cache.

    Args:
        input_ids: int64 [1, T].
        max_new_tokens: at most this many new tokens per arm.
        progress, on_token, on_arm: told of tokens done, of each new token, of each finished arm.
        options: further arguments of transformers' `generate`, for both arms; greedy without any.

    Raises:
        InputError: more than one row, or a prompt that does not fit the model.
        ConfigError, UnsupportedError, NumericalError: as `reread.generate`.
    """
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise InputError(f"input_ids has shape {tuple(input_ids.shape)}: compare takes one row")
    check_length(loaded, input_ids.shape[1], max_new_tokens)
    dense = Config.preset("dense").updated({"backend": config.backend})
    _warm_up(loaded, input_ids, dense)
    arms: dict[str, Arm] = {}
    for name, arm_config in zip(ARMS, (dense, config), strict=True):
        # where they sample, both arms draw the same random numbers
        with torch.random.fork_rng():
            arms[name] = run_arm(
                loaded,
                input_ids,
                arm_config,
                max_new_tokens=max_new_tokens,
                progress=_named(progress, name),
                on_token=_named(on_token, name),
                **options,
            )
        if on_arm is not None:
            on_arm(name, arms[name])
    return _combine(loaded, input_ids.shape[1], arms, config)


def _named(told: Callable[..., None] | None, arm: str) -> Callable[..., None] | None:
    return None if told is None else lambda *values: told(arm, *values)


def _warm_up(loaded: Loaded, input_ids: Tensor, config: Config) -> None:
    """A process's first passes are slow; they must not count against the arm that goes first."""
    run_arm(loaded, input_ids[:, :WARM_UP_TOKENS], config, max_new_tokens=WARM_UP_TOKENS)


def run_arm(
    loaded: Loaded,
    input_ids: Tensor,
    config: Config,
    *,
    max_new_tokens: int,
    progress: Callable[[str, int, int], None] | None = None,
    on_token: Callable[[int], None] | None = None,
    on_text: Callable[[str], None] | None = None,
    **options: Any,
) -> Arm:
    """Generate one answer for one row, greedily unless `options` say otherwise.

    Raises:
        InputError, ConfigError, UnsupportedError, NumericalError: as `reread.generate`.
    """
    stream = TokenStream(loaded.tokenizer, on_text=on_text, on_token=on_token)
    try:
        with quiet():
            output = generate(
                loaded.model,
                input_ids,
                torch.ones_like(input_ids),
                config=config,
                max_new_tokens=max_new_tokens,
                tokenizer=loaded.tokenizer,
                prefill_chunk=PREFILL_CHUNK,
                progress=progress,
                streamer=stream,
                **{"do_sample": False, **options},
            )
    except KeyboardInterrupt:
        stream.end()
        raise
    return Arm(stream.ids, decode(loaded, stream.ids), output.stats)


def _combine(loaded: Loaded, prompt: int, arms: dict[str, Arm], config: Config) -> Comparison:
    dense, ours = (arms[name] for name in ARMS)
    speeds = {name: arm.stats.tokens_per_s for name, arm in arms.items()}
    return Comparison(
        tokens_per_s=speeds,
        text={name: arm.text for name, arm in arms.items()},
        tokens={name: arm.tokens for name, arm in arms.items()},
        speedup=speeds["reread"] / speeds["dense"] if all(speeds.values()) else None,
        token_agreement=token_agreement(dense.tokens, ours.tokens),
        first_difference=first_difference(dense.tokens, ours.tokens),
        keys_read_share=ours.stats.keys_read_share,
        slow_steps=sum(ours.stats.slow_steps),
        fast_steps=sum(ours.stats.fast_steps),
        full_steps=sum(ours.stats.full_steps),
        prefill_s=ours.stats.prefill_s,
        prompt_tokens=prompt,
        model=loaded.name,
        config=config.to_dict(),
        notes=list(ours.stats.notes),
        **provenance(loaded.model.device),
    )


def token_agreement(a: Sequence[int], b: Sequence[int]) -> float:
    """Equal tokens position by position / length of the longer; 1 for two empty sequences."""
    longer = max(len(a), len(b))
    return sum(x == y for x, y in zip(a, b, strict=False)) / longer if longer else 1.0


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first position where they differ, or where one of them ends; None if equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))
