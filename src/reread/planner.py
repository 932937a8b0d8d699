"""How fast would a decode step be, dense and slow-fast? A roofline model; needs no GPU, no torch.

A step is the sum of what it reads (weights, keys) at the bandwidth that reading reaches, of a fixed
time a layer, and of the slow rows' choosing. Its constants: GPUs and efficiencies in `hardware.py`,
the rate of slow steps in `DEFAULT_SLOW_EVERY`. The model assumes that a decode step is one CUDA
graph, all rows have the same context, and layers without full attention cost their weights and the
fixed time. On the H200 it is within 20 % of every measured step and speed-up; TTFT, other GPUs,
mixtures of experts and larger batches than those of `CALIBRATION.source` are not measured.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from .checks import require, require_int, require_real
from .config import Config, TriggerConfig
from .errors import ConfigError
from .hardware import CALIBRATION, Calibration, Gpu, gpu_of
from .roofline import Arm, Model
from .shapes import Shape

# benchmarks/results/sentences.json: mean tokens between slow steps on real text, of the default
# preset's triggers (sentence and line ends, every 3 at the earliest and 16 at the latest), and of
# every boundary alone
DEFAULT_SLOW_EVERY = 8.67
BOUNDARY_EVERY = 7.22
ACCEPTANCE = 0.85  # benchmarks/results/exact_evidence.json: .80 to .99 on sampled text
WORTHWHILE = 1.1  # the speed-up of `Plan.crossover_worthwhile`


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the model expects of one shape, context, batch, GPU and configuration.

    Attributes:
        shape, gpu: their names.
        context, batch: keys of each row, and rows.
        slow_every: mean tokens between a row's slow steps; None where no step is sparse.
        drafted: tokens that mode "exact" drafts before a verification, as is best at the given
            acceptance; 0 in other modes.
        mixed_share: share of the steps in which at least one row is slow.
        dense, preset: the two arms.
        ttft_s: seconds until the first token of one prompt of this context, prefilled densely and
            alone on the GPU; not measured.
        crossover, crossover_worthwhile: the smallest context above the budget from which the preset
            is at least as fast as dense, and at least 1.1 times as fast; None where there is none.
        kv_bytes_per_request, kv_bytes: keys and values of one row, and of the batch.
        weight_bytes: of the whole model.
        workspace_bytes: what the preset needs beside, for the batch; 0 where no step is sparse.
    """

    shape: str
    gpu: str
    context: int
    batch: int
    slow_every: float | None
    drafted: int
    mixed_share: float
    dense: Arm
    preset: Arm
    ttft_s: float
    crossover: int | None
    crossover_worthwhile: int | None
    kv_bytes_per_request: int
    kv_bytes: int
    weight_bytes: int
    workspace_bytes: int

    @property
    def speedup(self) -> float:
        """Milliseconds of a dense step over those of a step of the preset."""
        return self.dense.step_ms / self.preset.step_ms

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dicts, for JSON."""
        arms = {"dense": self.dense.to_dict(), "preset": self.preset.to_dict()}
        return {**dataclasses.asdict(self), **arms, "speedup": self.speedup}


def expected_slow_every(triggers: TriggerConfig) -> float:
    """Mean tokens between slow steps on real text, infinity where only the first step is slow.

    The default's is measured. Other intervals: boundaries are taken to come at random, m tokens
    apart on average, so that with r = t_min - 1 the gap is r + E[min(G, t_max - r)] = r + m (1 -
    (1 - 1/m)^(t_max - r)), within 4 % of what the Controller does on real text.

    Raises:
        ConfigError: the uncertainty trigger is on; its rate depends on the model.
    """
    if triggers.uncertainty is not None:
        raise ConfigError(
            f"triggers.uncertainty={triggers.uncertainty!r} makes steps slow at a rate that depends"
            " on the model: give the mean tokens between slow steps (--sentence)"
        )
    if not triggers.boundary:
        return math.inf if triggers.t_max is None else float(triggers.t_max)
    default, rest = TriggerConfig(), triggers.t_min - 1
    if triggers.t_max is None:
        return rest + BOUNDARY_EVERY
    if (triggers.t_min, triggers.t_max) == (default.t_min, default.t_max):
        return DEFAULT_SLOW_EVERY
    open_for = max(0, triggers.t_max - rest)
    waited = BOUNDARY_EVERY * (1 - (1 - 1 / BOUNDARY_EVERY) ** open_for)
    return float(min(rest, triggers.t_max) + waited)


def plan(
    shape: Shape,
    context: int,
    batch: int,
    gpu: str | Gpu,
    config: Config,
    *,
    slow_every: float | None = None,
    acceptance: float = ACCEPTANCE,
    calibration: Calibration = CALIBRATION,
) -> Plan:
    """What the model expects.

    Args:
        context: keys of each row, at least 1.
        batch: rows, at least 1.
        gpu: a name in `GPUS`, or a GPU of one's own.
        slow_every: mean tokens between a row's slow steps, at least 1; None: what real text gives
            with the configuration's triggers.
        acceptance: share of drafted tokens that stand in mode "exact", below 1.

    Raises:
        ConfigError: a context, batch or slow_every that cannot be right, or one that is not known.
        InputError: an unknown GPU.
    """
    require_int("context", context, 1)
    require_int("batch", batch, 1)
    gpu = gpu_of(gpu) if isinstance(gpu, str) else gpu
    slow_every = _slow_every(config, slow_every)
    require_real("acceptance", acceptance, 0.0, 0.999)
    model = Model(shape, batch, gpu, config, 1 / slow_every, acceptance, calibration)
    sparse, kv = model.sparse(context), shape.kv_bytes_per_token() * context
    workspace = model.workspace(context) if sparse else 0
    return Plan(
        shape=shape.name,
        gpu=gpu.name,
        context=context,
        batch=batch,
        slow_every=slow_every if sparse and slow_every < math.inf else None,
        drafted=model.drafted(context),
        mixed_share=model.mixed if sparse else 0.0,
        dense=model.arm(model.dense_step(context), kv),
        preset=model.arm(model.preset_step(context), kv + workspace),
        ttft_s=model.prefill_s(context),
        crossover=model.crossover(1.0),
        crossover_worthwhile=model.crossover(WORTHWHILE),
        kv_bytes_per_request=kv,
        kv_bytes=kv * batch,
        weight_bytes=shape.weight_bytes,
        workspace_bytes=workspace * batch,
    )


def _slow_every(config: Config, given: float | None) -> float:
    if config.mode in ("dense", "exact"):
        require(
            given is None, "slow_every", given, f"None, as mode={config.mode!r} has no triggers"
        )
        return math.inf
    if given is None:
        return expected_slow_every(config.triggers)
    require_real("slow_every", given, 1.0)
    return given
