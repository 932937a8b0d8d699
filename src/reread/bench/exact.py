"""Whole cycles of mode "exact": fast steps that draft, the dense pass that verifies them, what the
host reads from the device in between. How many drafted tokens stand is given, since random weights
cannot say."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ..cuda import Told, upload
from ..device import Arena
from ..drafting import SIZES, expected_tokens, verify_size
from ..integrations.hf.exact.loop import REUSE
from ..integrations.hf.graph import StepGraphs
from ..policy.acceptance import likeliest
from ..steps import RowStep, StepShape
from ..types import StepKind
from .checks import difference, require_close
from .harness import GROUP, REPEATS, Bench, timing
from .timing import Record, milliseconds

CLAIM = "random weights: the share of drafted tokens that stand is given, not measured here"
CYCLES = 8  # that are timed together


def exact_arm(bench: Bench, fastest: Record, acceptance: list[float]) -> Record:
    """Milliseconds of a fast step, of each pass that verifies, and of whole cycles; for each
    acceptance the draft length with the best speed-up over `fastest`, the fastest dense arm."""
    graphs = bench.graphs(Arena(bench.states, bench.shape.heads, bench.config))
    longest = verify_size(1 + bench.config.draft.tokens)
    sizes = [n for n in SIZES if 1 < n <= longest]
    fast = timing(bench, graphs, [StepKind.FAST] * bench.rows)
    out: Record = {"fast": fast, "verify": {}, "cycles": {}, "kept_cycles": {}, "claim": CLAIM}
    out["error"] = max(_checked(bench, graphs, size) for size in sizes)
    floor = bench.floor_ms(bench.context)
    for size in sizes:
        ms, kept = (_replayed(graphs, size, shape) for shape in (StepShape.SLOW, StepShape.DENSE))
        out["verify"][str(size)] = {
            "ms": ms, "kept_ms": kept, "floor_ms": floor, "roofline": floor / kept,
        }  # fmt: skip
        for name, chooses in (("cycles", True), ("kept_cycles", False)):
            cycles = functools.partial(_cycles, bench, graphs, size, chooses)
            out[name][str(size - 1)] = milliseconds(cycles) / CYCLES
    for rate in acceptance:
        out[f"at {rate:g}"] = _at(bench, out, rate, fastest["ms"])
    out["extra_bytes"] = graphs.arena.nbytes
    return out


def _at(bench: Bench, found: Record, rate: float, dense_ms: float) -> Record:
    """The best draft length where so large a share of drafted tokens stands."""
    per_token = {}
    for n, ms in found["cycles"].items():
        tokens = expected_tokens(rate, int(n))
        # a choice serves drafts until it would be older than the loop allows
        served = max(1, math.ceil((REUSE - int(n)) / tokens))
        mean = (ms + (served - 1) * found["kept_cycles"][n]) / served
        per_token[int(n)] = mean / tokens
    best = min(per_token, key=lambda n: per_token[n])
    floor = best * bench.floor_ms(bench.config.budget) + bench.floor_ms(bench.context)
    ms = per_token[best]
    return {
        "drafted": best, "ms": ms, "speedup": dense_ms / ms, "tokens_per_s": bench.rows / ms * 1e3,
        "roofline": floor / expected_tokens(rate, best) / ms,
        "speedup_by_drafted": {str(n): dense_ms / each for n, each in per_token.items()},
    }  # fmt: skip


def _cycles(bench: Bench, graphs: StepGraphs, size: int, chooses: bool) -> None:
    """Some cycles as the loop runs them: what a step chooses goes into the next one on the device,
    and the host reads it one step later. chooses: whether the verification leaves another choice.
    """
    device = graphs.arena.device
    for _ in range(CYCLES):
        told = Told()
        ids = upload([[7 + row] for row in range(bench.rows)], device)
        places = upload([[bench.context - size]] * bench.rows, device)
        for age in range(size - 1):
            graphs.arena.tell(_fast(bench, age))
            output = graphs.run(StepShape.FAST, ids, places, bench.context)
            tokens, sure = likeliest(output.logits[:, -1])
            told.put(torch.stack([tokens.double(), sure.double()]))
            ids, places = tokens[:, None], places + 1
            if age:
                told.get(age - 1)
        told.get(size - 2)
        _verify(bench, graphs, size, chooses).argmax(dim=-1).tolist()


def _fast(bench: Bench, age: int) -> list[RowStep]:
    """A draft's step so many tokens behind the choice, of every row."""
    config, end = bench.config, bench.context
    count, window = min(config.k, end), end - config.recent - age
    row = RowStep(0, end, config.sink, config.sink, window, count, StepKind.FAST)
    return [row] * bench.rows


def _verify(bench: Bench, graphs: StepGraphs, size: int, chooses: bool = True) -> Tensor:
    """Logits [B, T, V] of the newest `size` positions of every row; chooses: all rows, or none."""
    first = bench.context - size
    shape = StepShape.SLOW if chooses else StepShape.DENSE
    graphs.arena.tell(
        [
            RowStep.verifying(0, first, size, bench.config, refresh=chooses, idle=False)
            for _ in range(bench.rows)
        ]
    )
    device = graphs.arena.device
    ids = torch.arange(bench.rows * size, device=device).view(bench.rows, size) + 7
    positions = torch.arange(first, bench.context, device=device).expand(bench.rows, -1)
    logits: Tensor = graphs.run(shape, ids, positions, bench.context).logits
    return logits


def _checked(bench: Bench, graphs: StepGraphs, size: int) -> float:
    """A dense step over what the pass has written gives the pass's last logits."""
    got = _verify(bench, graphs, size)[:, -1].clone()
    ids = torch.arange(bench.rows * size, device=got.device).view(bench.rows, size)[:, -1:] + 7
    arena = graphs.arena
    arena.begin(bench.plan([StepKind.FULL] * bench.rows), bench.states)
    want = graphs.run(StepShape.DENSE, ids, None, bench.context).logits[:, -1]
    error = difference(got, want)
    require_close(error, f"a verification of {size} tokens")
    return error


def _replayed(graphs: StepGraphs, size: int, shape: StepShape) -> float:
    def group() -> None:
        for _ in range(GROUP):
            graphs.replay(shape, size)

    group()
    return sorted(milliseconds(group) / GROUP for _ in range(REPEATS))[REPEATS // 2]
