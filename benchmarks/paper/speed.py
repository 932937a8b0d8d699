"""Times of a published table, by `reread.bench`, on one GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reread import Config
from reread.bench import kernel, prefill
from reread.bench import table as decode
from reread.bench.arms import dense_arms
from reread.bench.caches import KernelShape
from reread.bench.prefill_arms import dense_arms as prefill_arms
from reread.bench.timing import require_cuda
from reread.bench.ttft import bench_shape
from reread.prefilling import SparsePrefill
from reread.shapes import Shape

from .asked import Asked, Measured
from .expected import Decode, Expected, Found, Kernel, Prefill, Table

Key = tuple[str, int, int]  # label, batch, context
OVERLAP, RUN = "rows", 1


def measure(table: Table, asked: Asked) -> Measured:
    """Time what the table asks for.

    Raises:
        UnsupportedError: no CUDA GPU. InputError: what does not fit it.
    """
    require_cuda()
    measured = Measured()
    rows = [row for row in table.rows if asked.label in ("", row.model) and not row.absent]

    def say(what: str) -> None:
        asked.report(what, 0, 1)

    work = table.work
    if isinstance(work, Decode):
        cells = _decode(work, asked, measured, say)
        measured.found = {row: of_cell(row, cells, work.slow_every[0]) for row in rows}
    elif isinstance(work, Kernel):
        shape = KernelShape(work.rows, work.length)
        measured.details.append(kernel.measure([shape], work.shares, progress=say))
        timed = measured.details[0]["records"]
        measured.found = {row: of_kernel(row, timed) for row in rows}
    elif isinstance(work, Prefill):
        records = _prefill(work, asked, measured, say)
        measured.found = {row: of_prefill(row, records) for row in rows}
    return measured


def _decode(
    work: Decode, asked: Asked, measured: Measured, say: Callable[[str], None]
) -> dict[Key, dict[str, Any]]:
    """Records of all cells."""
    found: dict[Key, dict[str, Any]] = {}
    for label, name in work.shapes.items():
        cells = work.cells[label][: asked.limit]
        if asked.label not in ("", label):
            continue
        result = decode.measure(
            Shape.named(name), cells, Config.preset("paper"), slow_every=work.slow_every,
            arms=dense_arms(), progress=say,
        )  # fmt: skip
        measured.details.append(result)
        found |= {(label, row["rows"], row["context"]): row for row in result["rows"]}
    return found


def of_cell(row: Expected, cells: dict[Key, dict[str, Any]], gap: float) -> Found:
    """From the record of a batch and context, at one slow step in `gap`."""
    cell = cells.get((row.model, row.spot.rows, row.spot.length))
    if cell is None:
        return Found(reason="left out by --limit")
    if "failed" in cell:
        return Found(reason=cell["failed"])
    if row.spot.figure == "dense":
        fastest = next(arm for arm in cell["dense"] if arm["arm"] == cell["fastest_dense"])
        return Found(float(fastest["tokens_per_s"]))
    arm = cell["slow_fast"][OVERLAP][f"1/{gap:g}"]
    return Found(float(arm["tokens_per_s" if row.spot.figure == "sparse" else "speedup"]))


def of_kernel(row: Expected, records: list[dict[str, Any]]) -> Found:
    """Of all keys: our dense kernel against the fastest one."""
    dense = [record for record in records if record["kernel"] == "dense"]
    if row.spot.share >= 1:
        ours = next(record for record in dense if record["arm"] == "reread")
        return Found(min(record["us"] for record in dense) / ours["us"])
    keys = round(row.spot.share * dense[0]["length"])
    for record in records:
        if record["kernel"] == "sparse" and (record["keys"], record["run"]) == (keys, RUN):
            return Found(float(record["speedup"]))
    return Found(reason=f"no record with {keys} keys")


def _prefill(
    work: Prefill, asked: Asked, measured: Measured, say: Callable[[str], None]
) -> dict[Key, dict[str, Any]]:
    """Records of all lengths."""
    found: dict[Key, dict[str, Any]] = {}
    config = SparsePrefill(chooser="indexer", k=work.k, b_sel=work.b_sel)
    for label, name in work.shapes.items():
        contexts = work.contexts[: asked.limit]
        plan = prefill.Plan(bench_shape(name), contexts, config, ("ttft",), tuple(prefill_arms()))
        result = prefill.measure(plan, progress=say)
        measured.details.append(result)
        found |= {(label, 1, record["context"]): record for record in result.get("ttft", [])}
    return found


def of_prefill(row: Expected, records: dict[Key, dict[str, Any]]) -> Found:
    """From the record of a length."""
    record = records.get((row.model, 1, row.spot.length))
    if record is None:
        return Found(reason="left out by --limit")
    if "speedup" not in record:
        return Found(reason=str(record.get("failed") or record["sparse"].get("failed")))
    return Found(float(record["speedup"]))
