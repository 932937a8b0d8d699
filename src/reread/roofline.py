"""The time of a decode step from what it reads: the model behind `planner`, which says what it
assumes."""

from __future__ import annotations

import bisect
import dataclasses
from dataclasses import dataclass
from typing import Any

from .config import Config
from .drafting import expected_tokens
from .hardware import Calibration, Gpu
from .shapes import Shape

MAX_CONTEXT = 1 << 27  # where the search for a crossover ends
INT, FP32 = 4, 4  # bytes of an index and of a logit
Parts = tuple[float, float, float, float]  # ms: weights, keys, refresh, fixed


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


@dataclass(frozen=True, slots=True)
class Model:
    """One shape, batch, GPU and config at any context.

    Attributes:
        slow: share of a row's steps that are slow.
        acceptance: share of drafted tokens that stand, in mode "exact".
    """

    shape: Shape
    batch: int
    gpu: Gpu
    config: Config
    slow: float
    acceptance: float
    calibration: Calibration

    @property
    def mixed(self) -> float:
        """Share of the steps in which at least one row is slow, rows being independent."""
        return float(1 - (1 - self.slow) ** self.batch)

    def sparse(self, context: int) -> bool:
        """Whether the preset's steps are sparse there."""
        below = self.config.dense_below_budget and context <= self.config.budget
        return self.config.mode in ("slow-fast", "exact") and not below

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
        if self.config.mode == "exact":
            return self._cycle(context, self.drafted(context))
        cal, layers = self.calibration, self.shape.layers
        fast = self._keys_ms(min(context, self.config.budget), cal.gather_efficiency)
        slow = self.slow * dense_keys
        refresh = cal.refresh_share * slow + self.mixed * cal.refresh_layer_us * layers / 1e3
        return weights, (1 - self.slow) * fast + slow, refresh, fixed

    def drafted(self, context: int) -> int:
        """How many drafted tokens are best in mode "exact"."""
        if self.config.mode != "exact" or not self.sparse(context):
            return 0
        lengths = range(self.config.draft.tokens + 1)
        return min(lengths, key=lambda n: sum(self._cycle(context, n)))

    def _cycle(self, context: int, drafted: int) -> Parts:
        """Parts of a token: fast steps draft, a dense one verifies and every row chooses anew."""
        weights, dense_keys, _, fixed = self.dense_step(context)
        if not drafted:
            return weights, dense_keys, 0.0, fixed
        cal = self.calibration
        fast = self._keys_ms(min(context, self.config.budget), cal.gather_efficiency)
        refresh = cal.refresh_share * dense_keys + cal.refresh_layer_us * self.shape.layers / 1e3
        parts = (drafted + 1) * weights, drafted * fast + dense_keys, refresh, (drafted + 1) * fixed
        tokens = expected_tokens(self.acceptance, drafted)
        found = [part / tokens for part in parts]
        return found[0], found[1], found[2], found[3]

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
