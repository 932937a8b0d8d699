"""Whole decode steps: the same compiled and captured model with dense attention of several kinds,
and with slow-fast decoding at the true rate of slow steps.

Weights, keys and the times at which rows are slow are random; what is timed does not depend on the
numbers. The context does not grow while an arm is timed, so every step of an arm reads equally
much.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..config import Config
from ..device import Arena
from ..errors import InputError
from ..integrations.hf.graph import StepGraphs, Weights, decoder_layers
from ..lanes import Overlap
from ..shapes import Shape
from ..types import StepKind
from .arms import DenseArena, DenseArm, NoAttention, ReferenceArena
from .checks import difference, require_close
from .exact import exact_arm
from .harness import Bench, timing
from .indexed import indexed_arm
from .model import random_caches, random_model
from .timing import Record, milliseconds, require_cuda

Progress = Callable[[str], None]
OVERLAPS: tuple[Overlap, ...] = ("rows", "none")
SEQUENCE = 160  # steps of a simulated text


def measure(
    shape: Shape,
    rows: int,
    context: int,
    config: Config,
    *,
    slow_every: Sequence[float],
    arms: Sequence[DenseArm],
    bandwidth: float,
    acceptance: Sequence[float] = (),
    progress: Progress = lambda _: None,
    model: Any = None,
    weights: Weights | None = None,
) -> Record:
    """All arms for one shape, batch and context.

    Args:
        slow_every: mean steps between slow ones of a row, one sequence each.
        bandwidth: bytes a second of a device copy.
        acceptance: of mode "exact": shares of drafted tokens that stand.
        model, weights: made before, for several contexts; None makes them.

    Returns:
        plain values: arms with milliseconds per step, roofline share and tokens per second; the
        preset's with speed-up over the fastest dense arm.

    Raises:
        UnsupportedError: no CUDA device. InputError: it does not fit.
    """
    device = require_cuda()
    if model is None:
        progress("building the model")
        model = random_model(shape, device, torch.bfloat16)
    if weights is None:
        weights = Weights(model, decoder_layers(model, shape.total_layers))
    bench = Bench(shape, rows, context, config, bandwidth, model, weights)
    progress("filling the caches")
    bench.states = random_caches(shape, rows, context, device, torch.bfloat16)
    record: Record = {
        "shape": shape.name, "rows": rows, "context": context, "slow_every": list(slow_every),
    }  # fmt: skip
    dense, logits = _dense_arms(bench, arms, progress)
    fastest = _fastest(dense)
    ours = _our_arms(bench, (slow_every, acceptance), logits, fastest, progress)
    record |= {
        "kv_bytes": rows * context * shape.kv_bytes_per_token(),
        "fastest_dense": fastest["arm"], "dense": dense, **ours,
    }  # fmt: skip
    bench.states.clear()
    gc.collect()
    torch.cuda.empty_cache()
    return record


def _fastest(dense: Sequence[Record]) -> Record:
    """Of the dense arms that ran; an InputError if none did."""
    runnable = [arm for arm in dense if "ms" in arm]
    if not runnable:
        reasons = "; ".join(f"{arm['arm']}: {arm['not_run']}" for arm in dense if "not_run" in arm)
        raise InputError(f"no dense arm ran, so there is nothing to compare with ({reasons})")
    return min(runnable, key=lambda arm: arm["ms"])


def _dense_arms(
    bench: Bench, arms: Sequence[DenseArm], progress: Progress
) -> tuple[list[Record], Tensor]:
    """Each dense arm, its logits checked against those of our own kernel."""
    kinds, ages = [StepKind.FULL] * bench.rows, [0] * bench.rows
    heads = bench.shape.heads
    progress("reread-dense: compiling, capturing")
    own = bench.graphs(DenseArena(bench.states, heads, None, bench.context))
    want = bench.step(own, kinds, ages).clone()
    records: list[Record] = []
    for arm in arms:
        progress(f"dense: {arm.name}")
        if arm.missing:
            records.append({"arm": arm.name, "not_run": arm.missing})
            continue
        graphs = bench.graphs(DenseArena(bench.states, heads, arm.attention, bench.context))
        try:
            error = difference(bench.step(graphs, kinds, ages), want)
        except RuntimeError as failed:
            why = (str(failed) or type(failed).__name__).splitlines()[0][:200]
            records.append({"arm": arm.name, "not_run": f"failed: {why}"})
            continue
        require_close(error, f"dense arm {arm.name}")
        timed = timing(bench, graphs, kinds)
        floor = bench.floor_ms(bench.context)
        records.append(
            {"arm": arm.name, **timed, "floor_ms": floor, "roofline": floor / timed["ms"],
             "tokens_per_s": bench.rows / timed["ms"] * 1e3, "error": error}
        )  # fmt: skip
    progress("without attention")
    bare = bench.graphs(NoAttention(bench.states, heads, Config.preset("dense")))
    timed = timing(bench, bare, kinds)
    records.append({"arm": "no attention", **{f"bare_{k}": v for k, v in timed.items()}})
    return records, want


def _our_arms(
    bench: Bench,
    rates: tuple[Sequence[float], Sequence[float]],
    dense_logits: Tensor,
    fastest: Record,
    progress: Progress,
) -> Record:
    """The preset, with everything that may overlap, and without, which must give the same; or an
    indexer at every step; or cycles of drafts. rates: mean gaps of slow steps, and acceptances."""
    slow_every, acceptance = rates
    if bench.config.mode == "exact":
        progress("exact: capturing")
        return {"exact": exact_arm(bench, fastest, list(acceptance))}
    if bench.config.mode == "indexed":
        progress("indexed: capturing")
        return {"indexed": indexed_arm(bench, fastest)}
    out: Record = {}
    logits: list[Tensor] = []
    for overlap in OVERLAPS:
        progress(f"slow-fast, overlap {overlap}: capturing")
        graphs = bench.graphs(Arena(bench.states, bench.shape.heads, bench.config, overlap=overlap))
        steps = _steps(bench, graphs)
        if logits:
            pairs = zip(steps, logits, strict=True)
            errors = {"against the first": max(difference(got, want) for got, want in pairs)}
            require_close(errors["against the first"], f"overlap {overlap}")
        else:
            logits = steps
            errors = check(bench, graphs, steps, dense_logits)
        arm = {**parts(bench, graphs), "errors": errors, "extra_bytes": graphs.arena.nbytes}
        for gap in slow_every:
            progress(f"slow-fast, overlap {overlap}: one slow step in {gap:g}")
            arm[f"1/{gap:g}"] = sequence(bench, graphs, gap, fastest)
        out[overlap] = arm
    return {"slow_fast": out}


def _steps(bench: Bench, graphs: StepGraphs) -> list[Tensor]:
    """Logits of a slow, a fast and a mixed step."""
    rows, ages = bench.rows, [0] * bench.rows
    out = [
        bench.step(graphs, [kind] * rows, ages).clone() for kind in (StepKind.SLOW, StepKind.FAST)
    ]
    kinds = [StepKind.SLOW if b % 2 else StepKind.FAST for b in range(rows)]
    return [*out, bench.step(graphs, kinds, ages).clone()]


def check(
    bench: Bench, graphs: StepGraphs, steps: Sequence[Tensor], dense_logits: Tensor
) -> Record:
    """Slow steps give dense's logits; a fast step gives those of the reference on the same
    selection; in a mixed step each row gives what its own kind gives."""
    slow, fast, mixed = steps
    want = torch.stack([(slow if b % 2 else fast)[b] for b in range(bench.rows)])
    errors = {
        "slow": difference(slow, dense_logits),
        "mixed": difference(mixed, want),
        "fast": difference(_reference_step(bench, graphs), _fast_again(bench, graphs)),
    }
    for kind, error in errors.items():
        require_close(error, f"{kind} step")
    return errors


def _fast_again(bench: Bench, graphs: StepGraphs) -> Tensor:
    """A fast step on what the latest mixed step selected."""
    return bench.step(graphs, [StepKind.FAST] * bench.rows, [0] * bench.rows).clone()


def _reference_step(bench: Bench, graphs: StepGraphs) -> Tensor:
    """The logits of a fast step whose attention is the reference's, not captured."""
    arena = ReferenceArena(bench.states, bench.shape.heads, bench.config)
    arena.inherit(graphs.arena)
    arena.rows_checked = tuple(sorted({0, bench.rows - 1}))
    arena.step.copy_(graphs.arena.step)
    plain = bench.graphs(arena, compiled=False)
    plain.captures = False
    return bench.step(plain, [StepKind.FAST] * bench.rows, [0] * bench.rows)


def parts(bench: Bench, graphs: StepGraphs) -> Record:
    """Milliseconds of an all-fast step, of one with a single slow row, of an all-slow one."""
    rows = bench.rows
    fast = [StepKind.FAST] * rows
    one = [StepKind.SLOW, *fast[1:]]
    out: Record = {}
    for name, kinds in (("fast", fast), ("one_slow_row", one), ("slow", [StepKind.SLOW] * rows)):
        out[name] = timing(bench, graphs, kinds)
    keys = bench.config.budget
    out["fast"]["floor_ms"] = floor = bench.floor_ms(keys)
    out["fast"]["roofline"] = floor / out["fast"]["ms"]
    extra = out["one_slow_row"]["ms"] - out["fast"]["ms"]
    size = (bench.context - keys) * bench.shape.kv_bytes_per_token()
    out["one_slow_row"]["share_of_bandwidth"] = size / (extra * 1e-3) / bench.bandwidth
    return out


def sequence(bench: Bench, graphs: StepGraphs, gap: float, fastest: Record) -> Record:
    """Rows become slow independently, on average every `gap` steps; mean milliseconds a step."""
    steps = slow_steps(bench.rows, gap, SEQUENCE)
    ages = [0] * bench.rows

    def run() -> None:
        for slow in steps:
            kinds = [StepKind.SLOW if b in slow else StepKind.FAST for b in range(bench.rows)]
            bench.step(graphs, kinds, ages)
            ages[:] = [0 if b in slow else age + 1 for b, age in enumerate(ages)]

    ms = milliseconds(run) / len(steps)
    rate = sum(map(len, steps)) / (len(steps) * bench.rows)
    keys = bench.config.budget + rate * (bench.context - bench.config.budget)
    floor = bench.floor_ms(keys)
    return {
        "ms": ms, "speedup": fastest["ms"] / ms, "slow_rate": rate,
        "mixed_steps": sum(1 for s in steps if s) / len(steps), "floor_ms": floor,
        "roofline": floor / ms, "tokens_per_s": bench.rows / ms * 1e3,
        "keys_read_share": keys / bench.context,
    }  # fmt: skip


def slow_steps(rows: int, gap: float, steps: int) -> list[set[int]]:
    """Which rows are slow in each step: independent draws of a fixed seed, with exactly the share
    1 / gap of all rows and steps."""
    draw = random.Random(0)
    out: list[set[int]] = [set() for _ in range(steps)]
    every = [(step, row) for step in range(steps) for row in range(rows)]
    for step, row in draw.sample(every, math.ceil(len(every) / gap)):
        out[step].add(row)
    return out
