"""From which position on a chunk of a prompt is faster sparse than dense, in one layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from ..prefilling import SparsePrefill
from ..shapes import Shape
from .prefill_arms import close, dense_arms, exact, reason, timed
from .prefill_checks import Row
from .timing import Record

CHUNK = 2048  # queries
LENGTHS = (2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768)
COMPARED = (
    f"the last {CHUNK} queries of a row of so many keys. lower_right: PyTorch's attention with its "
    "lower-right causal bias. difference: the fastest whole-prompt dense arm of the row less that "
    f"of the row without its last {CHUNK} tokens, what such a kernel would take for the chunk. "
    "own: our sparse kernel reading everything. sparse: nothing dense, index and top-k in the "
    "time. Positions are the smallest from which sparse is faster at every longer length."
)


def measure(
    shape: Shape,
    config: SparsePrefill,
    device: torch.device,
    *,
    backend: str = "triton",
    progress: Callable[[str], None] = lambda _: None,
) -> Record:
    """A record for each of `LENGTHS`, and the crossover against dense, and against our own kernel.

    An arm that fails at a length is left out there, with the reason.
    """
    rows = []
    for length in LENGTHS:
        progress(f"crossover, {length} keys")
        rows.append(at_length(shape, config, length, device, backend))
    return {
        "chunk": CHUNK,
        "rows": rows,
        "position": position(rows, ("lower_right", "difference")),
        "position_against_own": position(rows, ("own",)),
    }


def at_length(
    shape: Shape, config: SparsePrefill, length: int, device: torch.device, backend: str
) -> Record:
    """Milliseconds of each way to attend from the last chunk of `length` keys."""
    row = Row.random(shape, length, device, queries=min(CHUNK, length), backend=backend)
    every, none = replace(config, dense_below=length), replace(config, dense_below=0)
    arms: dict[str, Callable[[], float]] = {
        "lower_right": lambda: _checked(lower_right(row), row),
        "difference": lambda: difference(shape, length, device),
        "own": lambda: _checked(lambda: row.attend(every), row),
        "sparse": lambda: float(timed(lambda: row.attend(none))["ms"]),
    }
    found: Record = {"length": length, "failed": {}}
    for name, arm in arms.items():
        try:
            found[name] = arm()
        except Exception as error:  # one arm's failure is its result
            found["failed"][name] = reason(error)
    return found


def _checked(run: Callable[[], Tensor], row: Row) -> float:
    """Milliseconds of a dense way, whose last query is right."""
    last = row.length - 1
    first = row.length - row.q.shape[1]
    q = row.q.new_zeros(row.q.shape[0], row.length, row.q.shape[2])
    q[:, first:] = row.q
    want = exact(q, row.k, row.v, [first, last], row.scale)
    close(run()[:, [0, -1]], want, "a chunk")
    return float(timed(run)["ms"])


def lower_right(row: Row) -> Callable[[], Tensor]:
    """PyTorch's attention of a chunk, without a mask in memory."""
    bias = causal_lower_right(row.q.shape[1], row.length)

    def run() -> Tensor:
        return scaled_dot_product_attention(
            row.q[None], row.k[None], row.v[None], attn_mask=bias, scale=row.scale,
            enable_gqa=row.q.shape[0] != row.k.shape[0],
        )[0]  # fmt: skip

    return run


def difference(shape: Shape, length: int, device: torch.device) -> float:
    """What the fastest whole-prompt arm adds for the last chunk."""
    row = Row.random(shape, length, device)
    shorter = row.first(length - CHUNK) if length > CHUNK else None
    found = []
    for arm in dense_arms():
        if arm.make is None:
            continue
        try:
            whole, before = (
                0.0 if r is None else float(timed(arm.make(r.q, r.k, r.v, r.scale))["ms"])
                for r in (row, shorter)
            )
        except Exception:  # an arm that does not run is not the fastest; the layer part says why
            continue
        found.append((whole, whole - before))
    if not found:
        raise RuntimeError("no dense arm ran")
    return min(found)[1]


def position(rows: Sequence[Record], against: Sequence[str]) -> int | None:
    """The smallest length from which on "sparse" is faster than the fastest of `against`; None
    where it is not faster even at the longest."""
    best = None
    for row in sorted(rows, key=lambda row: int(row["length"]), reverse=True):
        others = [row[name] for name in against if name in row]
        if "sparse" not in row or not others or row["sparse"] >= min(others):
            break
        best = int(row["length"])
    return best
