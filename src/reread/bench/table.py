"""Several batches and contexts of one shape in one run, with where the figures come from."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..config import Config
from ..errors import InputError, RereadError
from ..integrations.hf.graph import Weights, decoder_layers
from ..shapes import Shape
from . import decode
from .arms import DenseArm
from .model import random_model
from .timing import Record, copy_bandwidth, origin, require_cuda

COMPARED = (
    "Milliseconds of a whole decode step, from token ids to logits, of one transformers model with "
    "random weights in bfloat16 and caches of random keys: layers compiled, one CUDA graph a step, "
    "only attention differs. dense: each implementation of attention that is there; the speed-up "
    "is over the fastest. slow_fast: rows become slow independently at the given mean gap; fast "
    "steps, steps with slow rows and the Selector are all in the time. floor_ms: weights and the "
    "keys that are read, over the device's copy bandwidth; roofline: floor over time. The overlaps "
    "differ in what of a step with slow rows runs side by side: fast and slow rows and the "
    "Selector (rows), the Selector under the next layers' attention (refresh), nothing (none). "
    "exact: whole cycles of drafting and verifying, what the host reads included, at the given "
    "acceptance."
)


def measure(
    shape: Shape,
    cells: Sequence[tuple[int, int]],
    config: Config,
    *,
    slow_every: Sequence[float],
    arms: Sequence[DenseArm],
    acceptance: Sequence[float] = (),
    commit: str = "",
    progress: Callable[[str], None] = lambda _: None,
    on_row: Callable[[Record], None] = lambda _: None,
) -> dict[str, Any]:
    """Time every cell; one that does not fit says so and the others go on.

    Args:
        cells: rows and context of each. slow_every: mean steps between slow ones of a row.
        arms: of dense attention; at least one has to run.
        acceptance: of mode "exact": shares of drafted tokens that stand, as measured elsewhere.
        on_row: told each cell's row as it is done.

    Returns:
        plain values for JSON: what is compared, versions, device, commit, config, a row per cell.

    Raises:
        UnsupportedError: no CUDA device. InputError: a context that leaves nothing to select.
    """
    device = require_cuda()
    check(cells, arms, config)
    bandwidth = copy_bandwidth()
    progress(f"{shape.name}: building the model")
    model = random_model(shape, device, torch.bfloat16)
    weights = Weights(model, decoder_layers(model, shape.total_layers))
    found: list[Record] = []
    for rows, context in cells:

        def tell(what: str, at: str = f"{shape.name} {rows} x {context}") -> None:
            progress(f"{at}: {what}")

        try:
            found.append(
                decode.measure(
                    shape, rows, context, config, slow_every=slow_every, arms=arms,
                    acceptance=acceptance,
                    bandwidth=bandwidth, progress=tell, model=model, weights=weights,
                )
            )  # fmt: skip
        except (RereadError, torch.OutOfMemoryError) as error:
            cell = {"shape": shape.name, "rows": rows, "context": context}
            found.append({**cell, "failed": str(error)})
            _free()
        on_row(found[-1])
    told = {"compared": COMPARED, **origin(bandwidth, commit), "config": _described(shape, config)}
    return {**told, "rows": found}


def _described(shape: Shape, config: Config) -> dict[str, Any]:
    values = {key: value for key, value in dataclasses.asdict(shape).items() if key != "source"}
    return {**config.to_dict(), "shape": values}


def _free() -> None:
    """What a cell that failed left."""
    gc.collect()
    torch.cuda.empty_cache()


def check(cells: Sequence[tuple[int, int]], arms: Sequence[DenseArm], config: Config) -> None:
    """Refuse what could not be measured, before anything is built.

    Raises:
        InputError: names the batch, the context or the arms.
    """
    for rows, context in cells:
        if context <= config.budget:
            raise InputError(
                f"context {context} is within the budget of {config.budget} keys: nothing to select"
            )
        if rows < 1:
            raise InputError(f"batch {rows} is not possible: at least 1")
    if all(arm.missing for arm in arms):
        missing = "; ".join(f"{arm.name}: {arm.missing}" for arm in arms)
        raise InputError(f"no dense arm can run here ({missing}): add cudnn or reread-dense")
