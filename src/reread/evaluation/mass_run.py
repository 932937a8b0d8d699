"""A whole mass profile: model, text, figures and where they come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError
from ..integrations.hf.cache import sparse_layers
from ..integrations.hf.load import load, load_config, load_tokenizer, resolve_device, resolve_dtype
from ..integrations.hf.prompt import token_ids
from .gaps.tasks import check_tasks, make_task
from .mass import SHORTEST, MassProfile, check_plot, draw, mass_profile
from .provenance import provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class MassRequest:
    """What `reread eval mass` is asked for; see its options.

    Attributes:
        text: to read; None: a text of the one task in `tasks`.
    """

    model: str
    text: str | None
    tasks: tuple[str, ...]
    length: int
    ks: tuple[int, ...]
    queries: int = 256
    seed: int = 0
    plot: Path | None = None
    dtype: str = "auto"
    device: str = "auto"

    def check(self) -> None:
        """Refuse what cannot be right before anything is loaded.

        Raises:
            InputError: names the option.
        """
        if self.text is None:
            check_tasks(self.tasks)
            if len(self.tasks) > 1:
                raise InputError(f"tasks={', '.join(self.tasks)}: one task at a time")
        if self.length < SHORTEST:
            raise InputError(f"length={self.length} is not possible: at least {SHORTEST}")
        if self.queries < 1:
            raise InputError(f"queries={self.queries} is not possible: at least 1")
        if self.seed < 0:
            raise InputError(f"seed={self.seed} is not possible: at least 0")
        resolve_dtype(self.dtype)
        resolve_device(self.device)
        if self.plot is not None:
            check_plot(self.plot)


def measure_mass(
    request: MassRequest, report: Callable[[str, int, int], None]
) -> tuple[MassProfile, dict[str, Any]]:
    """The profile, and the same with its origin as plain values.

    Args:
        report: called with the layer, layers done and layers in all.

    Raises:
        InputError, UnsupportedError: what cannot be right, before work starts.
    """
    request.check()
    text = load_config(request.model).get_text_config(decoder=True)
    positions, layers = getattr(text, "max_position_embeddings", None), len(sparse_layers(text))
    ids = _ids(request)
    if positions is not None and len(ids) > positions:
        raise InputError(f"length={len(ids)} is not possible: the model has {positions} positions")
    if len(ids) < SHORTEST:
        raise InputError(f"the text has {len(ids)} tokens: at least {SHORTEST} are needed")
    loaded = load(request.model, dtype=request.dtype, device=request.device)
    done = 0

    def tick(layer: int) -> None:
        nonlocal done
        done += 1
        report(f"layer {layer}", done, layers)

    row = torch.tensor(ids, device=loaded.model.device)
    profile = mass_profile(loaded.model, row, request.ks, queries=request.queries, tick=tick)
    name = Path(request.model).name
    if request.plot is not None:
        draw(profile, request.plot, name)
    source = "prompt file" if request.text is not None else request.tasks[0]
    origin = {"model": name, "text": source, "seed": request.seed}
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    known = {**origin, "dtype": dtype, **provenance(loaded.model.device)}
    return profile, {**profile.to_dict(), **known}


def _ids(request: MassRequest) -> list[int]:
    """At most `length` token ids."""
    tokenizer = load_tokenizer(request.model)
    if request.text is not None:
        return token_ids(tokenizer, request.model, request.text, chat=False)[: request.length]
    task = make_task(tokenizer, request.tasks[0], tokens=request.length, count=1, seed=request.seed)
    return list(task.sample())
