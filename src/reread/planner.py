"""How fast would a decode step be, dense and slow-fast? A roofline model; needs no GPU, no torch.

A step is the sum of what it reads (weights, keys) at the bandwidth that reading reaches, of a fixed
time a layer, and of the slow rows' choosing. Its constants: GPUs and efficiencies in `hardware.py`,
the rate of slow steps in `DEFAULT_SLOW_EVERY`. The model assumes that a decode step is one CUDA
graph, all rows have the same context, and layers without full attention cost their weights and the
fixed time. On the H200 it is within 20 % of every measured step and speed-up; TTFT, other GPUs,
mixtures of experts and larger batches than those of `CALIBRATION.source` are not measured.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from .checks import require, require_int, require_real
from .config import Config, TriggerConfig
from .errors import ConfigError
from .hardware import CALIBRATION, Calibration, Gpu, gpu_of
from .shapes import Shape

# benchmarks/results/sentences.json: mean tokens between slow steps on real text, of the default
# preset's triggers (sentence and line ends, every 3 at the earliest and 16 at the latest), and of
# every boundary alone
DEFAULT_SLOW_EVERY = 8.67
BOUNDARY_EVERY = 7.22
WORTHWHILE = 1.1  # the speed-up of `Plan.crossover_worthwhile`
MAX_CONTEXT = 1 << 27  # where the search for a crossover ends
INT, FP32 = 4, 4  # bytes of an index and of a logit


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way of decoding.

    Attributes:
        weights_ms, keys_ms, refresh_ms, fixed_ms: expected milliseconds of a step by cause; refresh
            is the slow rows' choosing.
        tokens_per_s: of the whole batch.
        residents: requests of this context that fit in the memory beside the weights.
    """

    weights_ms: float
    keys_ms: float
    refresh_ms: float
    fixed_ms: float
    tokens_per_s: float
    residents: int

    @property
    def step_ms(self) -> float:
        """Expected milliseconds of a step."""
        return self.weights_ms + self.keys_ms + self.refresh_ms + self.fixed_ms

    @property
    def limit(self) -> str:
        """The largest part of the step: "weights", "keys", "refresh" or "fixed"."""
        parts = ("weights", "keys", "refresh", "fixed")
        return max(parts, key=lambda part: float(getattr(self, f"{part}_ms")))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**dataclasses.asdict(self), "step_ms": self.step_ms, "limit": self.limit}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the model expects of one shape, context, batch, GPU and configuration.

    Attributes:
        shape, gpu: their names.
        context, batch: keys of each row, and rows.
        slow_every: mean tokens between a row's slow steps; None where no step is sparse.
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
    calibration: Calibration = CALIBRATION,
) -> Plan:
    """What the model expects.

    Args:
        context: keys of each row, at least 1.
        batch: rows, at least 1.
        gpu: a name in `GPUS`, or a GPU of one's own.
        slow_every: mean tokens between a row's slow steps, at least 1; None: what real text gives
            with the configuration's triggers.

    Raises:
        ConfigError: a context, batch or slow_every that cannot be right, or one that is not known.
        InputError: an unknown GPU.
    """
    require_int("context", context, 1)
    require_int("batch", batch, 1)
    gpu = gpu_of(gpu) if isinstance(gpu, str) else gpu
    slow_every = _slow_every(config, slow_every)
    model = _Model(shape, batch, gpu, config, 1 / slow_every, calibration)
    sparse, kv = model.sparse(context), shape.kv_bytes_per_token() * context
    workspace = model.workspace(context) if sparse else 0
    return Plan(
        shape=shape.name,
        gpu=gpu.name,
        context=context,
        batch=batch,
        slow_every=slow_every if sparse and slow_every < math.inf else None,
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
    if config.mode == "dense":
        require(given is None, "slow_every", given, "None, as mode='dense' has no slow steps")
        return math.inf
    if given is None:
        return expected_slow_every(config.triggers)
    require_real("slow_every", given, 1.0)
    return given


Parts = tuple[float, float, float, float]  # ms: weights, keys, refresh, fixed


@dataclass(frozen=True, slots=True)
class _Model:
    """`plan` at any context; `slow` is the share of a row's steps that are slow."""

    shape: Shape
    batch: int
    gpu: Gpu
    config: Config
    slow: float
    calibration: Calibration

    @property
    def mixed(self) -> float:
        """Share of the steps in which at least one row is slow, rows being independent."""
        return float(1 - (1 - self.slow) ** self.batch)

    def sparse(self, context: int) -> bool:
        """Whether the preset's steps are sparse there."""
        below = self.config.dense_below_budget and context <= self.config.budget
        return self.config.mode == "slow-fast" and not below

    def dense_step(self, context: int) -> Parts:
        """Reads all weights (or computes longer than that), all keys."""
        cal, shape, gpu = self.calibration, self.shape, self.gpu
        read = shape.active_weight_bytes(self.batch) / (gpu.bandwidth * cal.weight_efficiency)
        compute = shape.flops_per_token * self.batch / (gpu.flops * cal.prefill_efficiency)
        keys = self._keys_ms(context, cal.attention_efficiency)
        return max(read, compute) * 1e3, keys, 0.0, cal.layer_us * shape.total_layers / 1e3

    def preset_step(self, context: int) -> Parts:
        """Fast rows read the budget, slow rows everything, and they choose anew."""
        weights, dense_keys, _, fixed = self.dense_step(context)
        if not self.sparse(context):
            return weights, dense_keys, 0.0, fixed
        cal, layers = self.calibration, self.shape.layers
        fast = self._keys_ms(min(context, self.config.budget), cal.gather_efficiency)
        slow = self.slow * dense_keys
        refresh = cal.refresh_share * slow + self.mixed * cal.refresh_layer_us * layers / 1e3
        return weights, (1 - self.slow) * fast + slow, refresh, fixed

    def _keys_ms(self, keys: int, efficiency: float) -> float:
        total = self.batch * keys * self.shape.kv_bytes_per_token()
        return total / (self.gpu.bandwidth * efficiency) * 1e3

    def prefill_s(self, context: int) -> float:
        """Linear layers over all tokens (the output matrix meets the last one only), and causal
        attention: 2 H D L^2 operations a layer."""
        cal, shape = self.calibration, self.shape
        attention = 2 * shape.layers * shape.heads * shape.head_dim * context**2
        blocks = shape.flops_per_token - 2 * shape.embedding_parameters
        linear = blocks * context / cal.prefill_efficiency
        return (linear + attention / cal.prefill_attention_efficiency) / self.gpu.flops

    def workspace(self, context: int) -> int:
        """Bytes beside the cache for one row: fp32 logits [H, L], three scores and the mass
        [Hkv, L], which the layers share, and indices [Hkv, K] of each layer."""
        shape = self.shape
        shared = (shape.heads + 4 * shape.kv_heads) * context * FP32
        return shared + shape.layers * shape.kv_heads * self.config.k * INT

    def arm(self, parts: Parts, request: int) -> Arm:
        """An arm from its step and the bytes of one request."""
        weights, keys, refresh, fixed = parts
        free = self.gpu.memory * self.calibration.memory_share - self.shape.weight_bytes
        return Arm(
            weights_ms=weights,
            keys_ms=keys,
            refresh_ms=refresh,
            fixed_ms=fixed,
            tokens_per_s=self.batch / sum(parts) * 1e3,
            residents=max(0, int(free // request)),
        )

    def crossover(self, speedup: float) -> int | None:
        """The smallest sparse context with that speed-up, which only grows with the context (both
        steps are linear in it, and the preset's starts higher)."""
        if self.config.mode == "dense":
            return None
        low = self.config.budget + 1 if self.config.dense_below_budget else 1

        def reached(context: int) -> bool:
            dense, preset = self.dense_step(context), self.preset_step(context)
            return sum(dense) >= speedup * sum(preset)

        if low > MAX_CONTEXT or not reached(MAX_CONTEXT):
            return None
        return bisect.bisect_left(range(MAX_CONTEXT), True, lo=low, key=reached)
