"""GPUs, and what they make of a roofline: every constant that the planner's times rest on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from .checks import is_real, require, require_real
from .errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU.

    Attributes:
        name: as in `GPUS`.
        memory: bytes.
        bandwidth: bytes per second that a device copy reaches (read and write).
        flops: bfloat16 operations per second that a large matrix product reaches.

    Raises:
        ConfigError: a figure that is no number above 0, by name.
    """

    name: str
    memory: int
    bandwidth: float
    flops: float

    def __post_init__(self) -> None:
        for name in ("memory", "bandwidth", "flops"):
            value = getattr(self, name)
            require(is_real(value) and value > 0, f"gpu.{name}", value, "a number above 0")


# Measured on an H200: a device copy and a matrix product. The others: their data sheets' memory,
# bandwidth and dense bfloat16 rate, times what the H200 reached of its own (4.8 TB/s, 989 TFLOP/s).
_COPY, _MATMUL = 4.27e12, 740e12
_NOMINAL = {
    "h100": (80, 3.35e12, 989e12),  # SXM
    "a100": (80, 2.039e12, 312e12),  # SXM, 80 GB
    "b200": (180, 8.0e12, 2250e12),
    "rtx4090": (24, 1.008e12, 165e12),
    "l40s": (48, 0.864e12, 362e12),
    "mi300x": (192, 5.3e12, 1307e12),
}
GPUS: dict[str, Gpu] = {
    "h200": Gpu(name="h200", memory=139 << 30, bandwidth=_COPY, flops=_MATMUL),
    **{
        name: Gpu(
            name=name,
            memory=gigabytes * 10**9,
            bandwidth=bandwidth * _COPY / 4.8e12,
            flops=flops * _MATMUL / 989e12,
        )
        for name, (gigabytes, bandwidth, flops) in _NOMINAL.items()
    },
}


def gpu_of(name: str) -> Gpu:
    """The GPU of that name, letter case ignored.

    Raises:
        InputError: no such name.
    """
    if name.lower() not in GPUS:
        raise InputError(f"gpu {name!r} is unknown: one of {', '.join(GPUS)}")
    return GPUS[name.lower()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What hardware makes of the roofline. Shares are of the GPU's bandwidth or rate in `GPUS`.

    The first six are a least-squares fit to the relative errors of the dense, fast, slow and mean
    steps in the files that `source` names, rounded; tests/unit/test_plan_measured.py holds them to
    those files. The prefill's two are guesses, memory_share is a choice.

    Attributes:
        source: where the values come from, for whoever reads a plan.
        weight_efficiency: share of the bandwidth at which matrix products of few rows read their
            weights.
        attention_efficiency: the same of dense decode attention; above 1 where it reads faster
            than a copy reads and writes.
        gather_efficiency: the same of sparse decode attention.
        layer_us: microseconds per layer and step beside what is read: launches and latencies,
            those of attention too, which are alike in dense and sparse attention.
        refresh_layer_us: microseconds more per full-attention layer in a mixed step, where some
            row is slow and chooses anew.
        refresh_share: what choosing costs beside, as a share of the slow rows' dense attention;
            only what the other rows' attention does not hide.
        prefill_efficiency, prefill_attention_efficiency: shares of the matrix rate that the linear
            layers and causal attention reach in a prefill.
        memory_share: share of the memory that weights, keys and workspace may fill.

    Raises:
        ConfigError: a value that cannot be right, by name.
    """

    source: str = (
        "benchmarks/results/gpu_decode.json and benchmarks/results/gpu_decode_apart.json"
        " (decode steps of qwen3-0.6b and qwen3-4b, 1 to 16 rows, on one H200)"
    )
    weight_efficiency: float = 0.85
    attention_efficiency: float = 1.08
    gather_efficiency: float = 0.7
    layer_us: float = 33.0
    refresh_layer_us: float = 8.0
    refresh_share: float = 0.35
    prefill_efficiency: float = 0.8
    prefill_attention_efficiency: float = 0.8
    memory_share: float = 0.9

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value, name = getattr(self, f.name), f"calibration.{f.name}"
            if f.name.endswith(("_us", "refresh_share")):
                require_real(name, value, 0.0)
            elif f.name == "memory_share":
                require(is_real(value) and 0 < value <= 1, name, value, "above 0, at most 1")
            elif f.name != "source":
                require(is_real(value) and value > 0, name, value, "a number above 0")


CALIBRATION = Calibration()
