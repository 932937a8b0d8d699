"""From options to something that can run, and what a run has produced so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..config import Config
from ..errors import InputError
from .options import Options
from .report import busy, make_console

if TYPE_CHECKING:
    from torch import Tensor

    from ..evaluation.compare import Arm
    from ..integrations.hf.load import Loaded


@dataclass(frozen=True, slots=True)
class Job:
    """A loaded model, an encoded prompt [1, T] and how to decode.

    Attributes:
        sampling: arguments of transformers' `generate`.
    """

    loaded: Loaded
    ids: Tensor
    config: Config
    sampling: dict[str, Any]
    console: Console


def given_prompt(options: Options) -> str:
    """The prompt from the options.

    Raises:
        InputError: there is none, or it is empty.
    """
    prompt = options.prompt_text()
    if prompt is None:
        raise InputError("no prompt: give --prompt or --prompt-file")
    if not prompt.strip():
        raise InputError("the prompt is empty: give some text")
    return prompt


def prepare(options: Options, prompt: str | Callable[[Loaded], str]) -> Job:
    """Check the configuration, load the model, encode the prompt.

    Args:
        prompt: the text, or what makes it once the tokenizer is there.

    Raises:
        ConfigError, InputError: the first thing that cannot be right, before anything long happens.
    """
    config = options.config()
    if options.max_new_tokens < 1:
        raise InputError(f"--max-new-tokens {options.max_new_tokens} is not possible: at least 1")
    loaded = load_model(options, console := make_console())
    from ..integrations.hf.prompt import check_length, encode

    ids = encode(loaded, prompt if isinstance(prompt, str) else prompt(loaded), options.chat)
    check_length(loaded, ids.shape[1], options.max_new_tokens)
    return Job(loaded, ids, config, _sampling(options), console)


def load_model(options: Options, console: Console) -> Loaded:
    """The model that --model, --dtype and --device name.

    Raises:
        InputError: it cannot be loaded.
    """
    with busy(console, f"loading {options.model}"):
        from ..integrations.hf.load import load

        return load(
            options.model,
            dtype=options.dtype,
            device=options.device,
            trust_remote_code=options.trust_remote_code,
        )


def _sampling(options: Options) -> dict[str, Any]:
    if options.seed is None:
        return {"do_sample": False}
    import torch

    torch.manual_seed(options.seed)
    return {"do_sample": True}


@dataclass(slots=True)
class Record:
    """What a run has produced so far, by arm: an interrupt must not lose it."""

    job: Job
    tokens: dict[str, list[int]] = field(default_factory=dict)
    arms: dict[str, Arm] = field(default_factory=dict)

    def add_token(self, arm: str, token: int) -> None:
        """One new token of an arm."""
        self.tokens.setdefault(arm, []).append(token)

    def add_arm(self, name: str, arm: Arm) -> None:
        """A finished arm."""
        self.arms[name] = arm

    def texts(self) -> dict[str, str]:
        """The text of each arm so far."""
        from ..integrations.hf.prompt import decode

        return {name: decode(self.job.loaded, ids) for name, ids in self.tokens.items()}

    def origin(self) -> dict[str, Any]:
        """What both finished and interrupted results carry."""
        from ..evaluation.provenance import provenance

        return {
            "model": self.job.loaded.name,
            "prompt_tokens": self.job.ids.shape[1],
            "config": self.job.config.to_dict(),
            **provenance(self.job.loaded.model.device),
        }
