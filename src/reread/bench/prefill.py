"""Times a sparse prefill on one GPU against the fastest dense one found there: attention of one
layer, where sparse chunks begin to be faster, and the time to a prompt's first token.

Every arm is checked before it is timed; one that fails says so, and the others go on. Results are
handed over after each length, so that an interrupted run keeps what it has.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InputError
from ..ops import MAX_LENGTH
from ..prefill import PrefillMeter, resolved
from ..prefilling import SparsePrefill
from ..shapes import Shape
from . import crossover, ttft
from .prefill_arms import (
    PrefillArm,
    causal_pairs,
    matmul_ceiling,
    measure_dense,
    reason,
    timed,
)
from .prefill_checks import WIDTH, Row, check_sparse
from .spans import Spans, watched
from .timing import Record, copy_bandwidth, milliseconds, origin, require_cuda

PARTS = ("layer", "crossover", "ttft")
LABEL = "random weights and a random-init indexer: runtime headroom, quality not claimed"
COMPARED = (
    f"{LABEL}. One row, bfloat16. "
    "layer: causal attention of one layer over the whole prompt at once. dense: each "
    "implementation that is there, its operations over the matmul rate measured in the same run. "
    "sparse: index scores of random index queries and keys, top-k and attention, all in the time; "
    "parts come from a call with events around each. floor_ms: the operations that the choice "
    "leaves, and the index scores, at the matmul rate, or the bytes that must be moved once at the "
    "copy bandwidth, whichever takes longer; gather_ms: the bytes of all blocks' keys and values "
    "at the copy bandwidth, as if none were found in the L2 cache. "
    f"crossover: {crossover.COMPARED} ttft: {ttft.COMPARED}"
)
Progress = Callable[[str], None]
Keep = Callable[[Record], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        contexts: tokens of the prompt, for the parts "layer" and "ttft".
        config: chooser "indexer", with k.
        parts: some of `PARTS`. arms: dense ones of the parts "layer" and "crossover".
        chunk: tokens of a forward in ttft's sparse arm; 0: all at once.
    """

    shape: Shape
    contexts: tuple[int, ...]
    config: SparsePrefill
    parts: tuple[str, ...]
    arms: tuple[PrefillArm, ...]
    chunk: int = 0

    def check(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            InputError: names the value and what would be right.
        """
        for part in self.parts:
            if part not in PARTS:
                raise InputError(f"part {part!r} is unknown: some of {', '.join(PARTS)}")
        least = (self.config.k or 0) + self.config.sink + self.config.local + self.config.b_sel
        for context in self.contexts:
            if context > MAX_LENGTH:
                raise InputError(
                    f"context {context} is not possible: the kernels cover {MAX_LENGTH} tokens"
                )
            if context <= least:
                raise InputError(
                    f"context {context} leaves nothing out with k={self.config.k}: "
                    f"more than {least} tokens"
                )


def measure(
    plan: Plan,
    *,
    commit: str = "",
    progress: Progress = lambda _: None,
    keep: Keep = lambda _: None,
) -> dict[str, Any]:
    """Measure all parts of a plan.

    Args:
        commit: for a copy of the tree without its history.
        keep: told all that is there after each length.

    Returns:
        plain values for JSON: what is compared, versions, device, commit, config, a list of records
        for each part.

    Raises:
        InputError: see `Plan.check`. UnsupportedError: no CUDA GPU.
    """
    plan.check()
    device = require_cuda()
    progress("copy bandwidth and matmul rate")
    bandwidth, ceiling = copy_bandwidth(), matmul_ceiling(device)
    result: dict[str, Any] = {
        "compared": COMPARED, **origin(bandwidth, commit), "matmul_tflops": ceiling / 1e12,
        "config": described(plan),
    }  # fmt: skip

    def add(part: str, record: Record) -> None:
        result.setdefault(part, []).append(record)
        keep(result)

    for context in plan.contexts if "layer" in plan.parts else ():
        progress(f"layer, {context} tokens")
        add("layer", layer(plan, context, device, bandwidth=bandwidth, ceiling=ceiling))
    if "crossover" in plan.parts:
        progress("crossover")
        result["crossover"] = guarded(
            lambda: crossover.measure(plan.shape, plan.config, device, progress=progress)
        )
        keep(result)
    if "ttft" in plan.parts:
        ttft.measure(
            plan.shape, plan.contexts, plan.config, device,
            chunk=plan.chunk, progress=progress, on_row=lambda row: add("ttft", row),
        )  # fmt: skip
    return result


def described(plan: Plan) -> Record:
    """What is the same in all records."""
    shape = {k: v for k, v in dataclasses.asdict(plan.shape).items() if k != "source"}
    return {
        "shape": shape,
        "prefill": dataclasses.asdict(resolved(plan.config, "triton")),
        "index_width": WIDTH,
        "chunk": plan.chunk,
    }


def guarded(work: Callable[[], Record]) -> Record:
    """What it gives, or why it failed; memory is given back either way."""
    try:
        return work()
    except Exception as error:  # the other parts go on, and the record says why
        return {"failed": reason(error)}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def layer(
    plan: Plan, context: int, device: torch.device, *, bandwidth: float, ceiling: float,
    backend: str = "triton",
) -> Record:  # fmt: skip
    """The record of one length: dense arms, then ours."""
    found: Record = {"shape": plan.shape.name, "context": context}
    try:
        row = Row.random(plan.shape, context, device, backend=backend)
    except RuntimeError as error:
        return {**found, "failed": reason(error)}
    dense = [measure_dense(arm, row.q, row.k, row.v, row.scale, ceiling) for arm in plan.arms]
    found["dense"] = dense
    config = resolved(plan.config, row.backend)
    ours = guarded(lambda: sparse(row, config, bandwidth=bandwidth, ceiling=ceiling))
    return found | {"sparse": ours} | compared(dense, ours)


def sparse(row: Row, config: SparsePrefill, *, bandwidth: float, ceiling: float) -> Record:
    """Our prefill of one layer: checked, timed, and by its parts."""
    checked = check_sparse(row, config)
    whole = timed(lambda: row.attend(config))
    peak = peak_bytes(lambda: row.attend(config), row.q.device)
    spans, meter = Spans(row.q.device), PrefillMeter()
    with watched(spans):
        total = milliseconds(lambda: row.attend(config, meter))
    parts = spans.totals() | {"total_ms": total}
    work = needed(row, meter, config, bandwidth, ceiling)
    rate = work["attention_flops"] / (parts["attention_ms"] * 1e-3)
    return {
        **whole, "check": checked, "parts": parts, **work, "peak_bytes": peak,
        "attention_tflops": rate / 1e12, "attention_share_of_matmul": rate / ceiling,
        "share_of_floor": work["floor_ms"] / whole["ms"], "share_read": meter.share,
    }  # fmt: skip


def peak_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """Device memory that `work` needs at most, beyond what was allocated before, its result
    included; None where it is not counted."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    return torch.cuda.max_memory_allocated(device) - before


def needed(
    row: Row, meter: PrefillMeter, config: SparsePrefill, bandwidth: float, ceiling: float
) -> Record:
    """The least that the chosen reads take, in milliseconds, at the device's own rates."""
    heads, _, dim = row.q.shape
    attention = 4 * heads * dim * (meter.read / 2)  # the meter counts each pair twice
    index = 2 * row.iq.shape[2] * causal_pairs(row.length)
    size = row.q.element_size()
    moved = size * (2 * row.q.numel() + row.k.numel() + row.v.numel())
    scored = size * (row.iq.numel() + row.ik.numel())
    # every block gathers its keys once for all heads of a KV head
    gathered = size * 2 * row.k.shape[0] * dim * meter.read / 2 / config.b_sel
    attention_ms = max(attention / ceiling, moved / bandwidth) * 1e3
    index_ms = max(index / ceiling, scored / bandwidth) * 1e3
    return {
        "attention_flops": attention, "index_flops": index,
        "attention_floor_ms": attention_ms, "index_floor_ms": index_ms,
        "floor_ms": attention_ms + index_ms, "gather_ms": gathered / bandwidth * 1e3,
    }  # fmt: skip


def compared(dense: Sequence[Record], ours: Record) -> Record:
    """The fastest dense arm, and how much faster ours is; {} where none ran."""
    ran = [arm for arm in dense if "ms" in arm]
    if not ran:
        return {}
    fastest = min(ran, key=lambda arm: float(arm["ms"]))
    out: Record = {"fastest_dense": fastest["arm"]}
    return out | ({"speedup": fastest["ms"] / ours["ms"]} if "ms" in ours else {})
