"""Times the attention and Selector kernels on one GPU against the strongest dense decode attention
found there.

Every arm runs as one CUDA graph over many layers' caches; a time is that graph's median over its
layers. Of each shape every arm is checked against fp32 attention before any is timed. `floor_us` is
bytes that must be read over the copy bandwidth measured in the same run; `roofline` is floor over
time, and above 1 where reading alone is faster than copying.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..config import SelectorConfig
from ..errors import InputError, NumericalError
from ..policy import selector
from .caches import DTYPE, SINK, Bench, KernelShape, make_pool, recent_of
from .rivals import RIVALS, Step, paged
from .timing import Record, copy_bandwidth, origin, require_cuda, time_layers, version

SHARES = (0.016, 0.063, 0.125, 0.25, 0.5)
RUNS = (1, 32)  # lengths of the runs of neighbours that a selection consists of
MIXED_KEYS = 772  # of a fast row: as many as sink, K = 512 and 256 recent ones
REFRESH_K = (512, 2048)
TOLERANCE = 1e-2  # of bfloat16 outputs, relative in the 2-norm
Timers = list[Callable[[], Record]]
Progress = Callable[[str], None]
COMPARED = (
    "dense: one new token per row over all keys, by whoever is installed. "
    "sparse: over sink, recent and selected positions, gathered from the full cache; speedup is "
    "over the fastest dense arm of its shape. "
    "mixed: one row of all dense, one launch, without and with its evidence. "
    "refresh: dense attention that leaves evidence, and the Selector; share_of_dense is what that "
    "takes beyond our dense attention, over the fastest dense arm."
)


def measure(
    shapes: Sequence[KernelShape],
    shares: Sequence[float] = SHARES,
    *,
    progress: Progress = lambda _: None,
    commit: str = "",
) -> dict[str, Any]:
    """Time all arms on all shapes.

    Args:
        shapes: at least one. shares: of the keys that sparse attention reads, in (0, 1).
        progress: told what comes next. commit: for a copy of the tree without its history.

    Returns:
        Plain values for JSON: what is compared, versions, device, commit, config, arms that are
        not there and why, and a record per arm and shape.

    Raises:
        UnsupportedError: no CUDA GPU, or a shape beyond the kernels. InputError: a share or shape
        that cannot be measured. NumericalError: an arm's output is wrong.
    """
    require_cuda()
    check(shapes, shares)
    progress("copy bandwidth")
    bandwidth = copy_bandwidth()
    pool = make_pool(list(shapes))
    records: list[Record] = []
    absent: dict[str, str] = {}
    for shape in shapes:
        bench = Bench(pool, shape, bandwidth)
        records += measure_shape(bench, shares, absent, progress)
    return {
        "compared": COMPARED, **origin(bandwidth, commit), "config": config(),
        "absent": absent, "records": records,
    }  # fmt: skip


def measure_shape(
    bench: Bench, shares: Sequence[float], absent: dict[str, str], progress: Progress
) -> list[Record]:
    """The records of one shape."""
    where = f"{bench.rows} x {bench.length}"
    progress(f"{where}: checking")
    dense = dense_arms(bench, absent)
    others = [*sparse_arms(bench, shares), *mixed_arms(bench), *refresh_arms(bench)]
    progress(f"{where}: timing {len(dense) + len(others)} arms")
    timed = [timer() for timer in dense]
    fastest = min(timed, key=lambda record: float(record["us"]))
    return timed + [compared(timer(), fastest) for timer in others]


def check(shapes: Sequence[KernelShape], shares: Sequence[float]) -> None:
    """Refuse what cannot be measured.

    Raises:
        InputError: names the value and what would be right.
    """
    if not shapes:
        raise InputError("no shape to measure: at least one")
    for share in shares:
        if not 0 < share < 1:
            raise InputError(f"share {share} of the keys is not possible: above 0, below 1")
    shortest = min(shape.length for shape in shapes)
    fewest = min((round(share * shortest) for share in shares), default=64)
    if shortest < 1024 or fewest < 16:
        raise InputError(
            f"{shortest} tokens, of which {fewest} are read, are too few to time: "
            "at least 1024 and 16"
        )


def config() -> Record:
    """What is the same in all records."""
    from ..ops.triton import decode

    kinds = {"dense": decode.DENSE, "sparse": decode.SPARSE, "mixed": decode.MIXED}
    return {
        "dtype": str(DTYPE).removeprefix("torch."),
        "sink": SINK,
        "selector": dataclasses.asdict(SelectorConfig()),
        "tuning": {name: dataclasses.asdict(tuning) for name, tuning in kinds.items()},
        "rivals": {name: version(name) for name in ("flashinfer-python", "flash-attn-3")},
    }


def close(got: Tensor, want: Tensor, what: str) -> float:
    """Relative error in the 2-norm.

    Raises:
        NumericalError: it is larger than `TOLERANCE`.
    """
    error = float((got.double() - want.double()).norm() / want.double().norm())
    if not error < TOLERANCE:
        raise NumericalError(f"{what}: relative error {error:.3g}, should be below {TOLERANCE}")
    return error


def compared(record: Record, fastest: Record) -> Record:
    """Ratios to the fastest dense arm of the same shape."""
    best = {"fastest_dense": fastest["arm"]}
    if record["kernel"] == "sparse":
        return {**record, **best, "speedup": fastest["us"] / record["us"]}
    if record["kernel"] == "refresh":
        return {**record, **best, "share_of_dense": record["refresh_us"] / fastest["us"]}
    return record


def dense_arms(bench: Bench, absent: dict[str, str]) -> Timers:
    """Ours and the rivals, checked; rivals that are not there are noted in `absent`."""
    cache, layers = bench.caches[0], bench.layers_for(bench.length)
    want = bench.want(cache.k, cache.v)
    steps: dict[str, Step] = {"reread": bench.dense}
    errors = {"reread": close(bench.dense(0), want, "reread")}
    for name, make in RIVALS.items():
        try:
            step = make(bench)
            got = step(0)
        except ImportError as error:
            absent[name] = f"not installed: {error}"
            continue
        except Exception as error:  # a rival may not cover the shape; the result says so
            absent[f"{name}, {bench.rows} x {bench.length}"] = str(error)[:200]
            continue
        in_pages = name == "flashinfer"
        target = bench.want(paged(cache.k), paged(cache.v)) if in_pages else want
        steps[name], errors[name] = step, close(got, target, name)

    def timer(name: str) -> Record:
        timed = time_layers(steps[name], layers)
        return bench.record(
            bench.length, timed, kernel="dense", arm=name, layers=layers, error=errors[name]
        )

    return [partial(timer, name) for name in steps]


def sparse_arms(bench: Bench, shares: Sequence[float]) -> Timers:
    """Gathering from the full cache, single positions and runs of 32."""

    def arm(keys: int, run: int) -> Callable[[], Record]:
        cache, first = bench.caches[0], bench.choice(keys, run)
        error = close(bench.sparse(0, first), bench.want(cache.k, cache.v, first), "sparse")

        def timer() -> Record:
            layers = bench.layers_for(keys)
            choices = [bench.choice(keys, run) for _ in range(layers)]
            timed = time_layers(lambda i: bench.sparse(i, choices[i]), layers)
            return bench.record(
                keys, timed, kernel="sparse", arm="gather", run=run, recent=recent_of(keys),
                layers=layers, error=error,
            )  # fmt: skip

        return timer

    return [arm(round(share * bench.length), run) for share in shares for run in RUNS]


def mixed_arms(bench: Bench) -> Timers:
    """One slow row among all, in one launch."""
    if bench.rows == 1 or bench.length < 2 * MIXED_KEYS:
        return []
    slow = bench.int32(0)
    slow[bench.rows // 2] = 1
    recent = recent_of(MIXED_KEYS)
    allowed = (bench.starts + SINK, bench.lengths - recent)
    cache, first = bench.caches[0], bench.choice(MIXED_KEYS)
    dense, sparse = bench.want(cache.k, cache.v), bench.want(cache.k, cache.v, first)
    want = torch.where(slow.bool()[:, None, None], dense, sparse)
    read = MIXED_KEYS + (bench.length - MIXED_KEYS) / bench.rows

    def arm(name: str, more: dict[str, Any]) -> Callable[[], Record]:
        error = close(bench.mixed(0, first, slow, **more), want, name)

        def timer() -> Record:
            layers = bench.layers_for(MIXED_KEYS)
            choices = [bench.choice(MIXED_KEYS) for _ in range(layers)]
            fast = time_layers(lambda i: bench.sparse(i, choices[i]), layers)["us"]
            timed = time_layers(lambda i: bench.mixed(i, choices[i], slow, **more), layers)
            return bench.record(
                read, timed, kernel="mixed", arm=name, all_fast_us=fast, layers=layers, error=error
            )

        return timer

    return [arm("one launch", {}), arm("one launch, evidence", {"allowed": allowed})]


class Refresh:
    """What a slow step costs beyond dense attention: evidence and Selector."""

    def __init__(self, bench: Bench, k: int) -> None:
        self.bench, self.k = bench, k
        self.allowed = (bench.starts + SINK, bench.lengths - 256)
        shape = (bench.rows, bench.shape.kv_heads, k)
        self.indices = torch.empty(shape, dtype=torch.int32, device=bench.device)
        self.counts = torch.empty(shape[:2], dtype=torch.int32, device=bench.device)

    def attend(self, layer: int) -> Tensor:
        """Dense attention that leaves its evidence."""
        return self.bench.dense(layer, allowed=self.allowed)

    def choose(self, layer: int) -> None:
        """From the evidence to the positions."""
        b = self.bench
        b.kernels.refresh(
            b.caches[layer], SelectorConfig(), heads=b.shape.heads, work=b.work,
            allowed=self.allowed, active=b.work.always[: b.rows],
            indices=self.indices, counts=self.counts,
        )  # fmt: skip

    def whole(self, layer: int) -> None:
        """A slow layer."""
        self.attend(layer)
        self.choose(layer)

    def check(self) -> None:
        """The positions are the reference's."""
        b, low = self.bench, SINK
        self.whole(0)
        mass = b.kernels.evidence(
            b.caches[0], work=b.work, allowed=self.allowed, heads=b.shape.heads
        )
        for row in range(b.rows):
            span = mass[row, :, low : b.length - 256]
            want, _ = selector.select(span, None, SelectorConfig(), self.k, low)
            if not torch.equal(self.indices[row], want):
                raise NumericalError(f"refresh: row {row} has other positions than the reference")

    def timer(self) -> Record:
        """Each part, and all of it."""
        bench, layers = self.bench, min(len(self.bench.caches), 4)
        plain = time_layers(bench.dense, layers)["us"]
        evidence = time_layers(self.attend, layers)["us"]
        alone = time_layers(self.choose, layers)["us"]
        whole = time_layers(self.whole, layers)
        return bench.record(
            bench.length, whole, kernel="refresh", arm="attention, Selector", k=self.k,
            layers=layers, dense_us=plain, with_evidence_us=evidence, selector_us=alone,
            refresh_us=whole["us"] - plain,
        )  # fmt: skip


def refresh_arms(bench: Bench) -> Timers:
    """One per K that leaves something out."""
    arms = [Refresh(bench, k) for k in REFRESH_K if k < bench.length - SINK - 256]
    for arm in arms:
        arm.check()
    return [arm.timer for arm in arms]
