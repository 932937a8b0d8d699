"""Counts of the plug-in beside vLLM's own metrics: each worker process writes its numbers into a
small file, the process that serves /metrics reads them."""

from __future__ import annotations

import atexit
import dataclasses
import mmap
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...prefill import PrefillMeter
from ...types import StepKind
from .requests import Registry

if TYPE_CHECKING:
    from .lanes import LaneRegistry

PROMPT_SHARE = "prompt_keys_read_share"
FOLDER_VARIABLE = "REREAD_VLLM_COUNTS"
_FOLDERS: list[Path] = []  # of the engines that this process started


@dataclass(frozen=True, slots=True)
class Counts:
    """What one worker process did so far.

    Attributes:
        slow_steps, fast_steps, full_steps: decode steps of requests, by kind.
        keys_read, keys_cached: keys that decode steps read, and that dense steps would have read.
        refreshes, refresh_seconds: how often one layer of one request chose again, and the time.
        state_bytes: what is remembered of the requests that run.
        prompt_keys_read, prompt_keys_cached: with a sparse prefill, keys that prompts' queries
            read, and that dense attention would have read.
    """

    slow_steps: float = 0.0
    fast_steps: float = 0.0
    full_steps: float = 0.0
    keys_read: float = 0.0
    keys_cached: float = 0.0
    refreshes: float = 0.0
    refresh_seconds: float = 0.0
    state_bytes: float = 0.0
    prompt_keys_read: float = 0.0
    prompt_keys_cached: float = 0.0

    @classmethod
    def of(cls, registry: Registry | LaneRegistry, layers: int) -> Counts:
        """layers: how many are sparse."""
        meter = registry.meter
        steps = {kind: meter.runs[0][kind] / max(1, layers) for kind in StepKind}
        prompts = PrefillMeter() if registry.reader is None else registry.reader.meter
        return cls(
            slow_steps=steps[StepKind.SLOW],
            fast_steps=steps[StepKind.FAST],
            full_steps=steps[StepKind.FULL],
            keys_read=meter.keys_read,
            keys_cached=meter.keys_cached,
            refreshes=registry.refreshes,
            refresh_seconds=registry.refresh_s,
            state_bytes=registry.nbytes,
            prompt_keys_read=prompts.read / 2,  # a meter counts twice
            prompt_keys_cached=prompts.cached / 2,
        )

    @property
    def keys_read_share(self) -> float:
        """Keys read / keys that dense decoding would have read; 1 before the first decode step."""
        return self.keys_read / self.keys_cached if self.keys_cached else 1.0

    @property
    def prompt_keys_read_share(self) -> float:
        """The same of prompts; 1 where they are read densely."""
        return self.prompt_keys_read / self.prompt_keys_cached if self.prompt_keys_cached else 1.0

    def to_dict(self) -> dict[str, float]:
        """All of them by name, the shares included."""
        shares = {name: getattr(self, name) for name in ("keys_read_share", PROMPT_SHARE)}
        return {**dataclasses.asdict(self), **shares}


_FORM = struct.Struct(f"={len(dataclasses.fields(Counts))}d")


class Page:
    """Where one worker process writes its counts; nowhere if nobody reads them."""

    def __init__(self, path: Path | None) -> None:
        self._map: mmap.mmap | None = None
        if path is not None:
            path.write_bytes(bytes(_FORM.size))
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), _FORM.size)

    @classmethod
    def of(cls, replica: int, rank: int) -> Page:
        """The page of a process, by its data-parallel replica and its rank in it."""
        folder = os.environ.get(FOLDER_VARIABLE)
        path = Path(folder) / f"{replica}-{rank}" if folder else None
        return cls(path if path is not None and path.parent.is_dir() else None)

    def write(self, counts: Counts) -> None:
        if self._map is not None:
            _FORM.pack_into(self._map, 0, *dataclasses.astuple(counts))


def read(folders: list[Path]) -> Counts:
    """The sum over engines. Processes of one replica run the same steps, so these are taken from
    its first; bytes and refreshes are summed over all."""
    total = dict.fromkeys((f.name for f in dataclasses.fields(Counts)), 0.0)
    for path in (path for folder in folders for path in sorted(folder.glob("*-*"))):
        data = path.read_bytes()
        if len(data) != _FORM.size:
            continue
        first = path.name.endswith("-0")
        for name, value in zip(total, _FORM.unpack(data), strict=True):
            if first or name == "state_bytes":
                total[name] += value
    return Counts(**total)


def expose() -> None:
    """Before an engine starts: give its workers a folder for their counts, and this process's
    /metrics what they write there."""
    given = os.environ.get(FOLDER_VARIABLE)
    if given and Path(given) not in _FOLDERS and Path(given).is_dir():
        folder = Path(given)  # another process of the same server made it
    else:
        folder = Path(tempfile.mkdtemp(prefix="reread-vllm-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ[FOLDER_VARIABLE] = str(folder)
    if not _FOLDERS:
        from prometheus_client import REGISTRY

        REGISTRY.register(Collector())
    _FOLDERS.append(folder)


class Collector:
    """Of prometheus_client's kind."""

    def collect(self) -> Iterator[Any]:
        """What /metrics shows."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            SummaryMetricFamily,
        )

        counts = read(_FOLDERS)
        for kind in ("slow", "fast", "full"):
            steps = getattr(counts, f"{kind}_steps")
            text = f"Decode steps of requests that were {kind}."
            yield CounterMetricFamily(f"reread_{kind}_steps", text, value=steps)
        yield GaugeMetricFamily(
            "reread_keys_read_share",
            "Keys that decode steps read, as a share of those that dense decoding would have read.",
            value=counts.keys_read_share,
        )
        yield GaugeMetricFamily(
            f"reread_{PROMPT_SHARE}",
            "The same of the queries of prompts; 1 without a sparse prefill.",
            value=counts.prompt_keys_read_share,
        )
        yield SummaryMetricFamily(
            "reread_refresh_seconds",
            "Time in which one layer of one request chose its keys again.",
            count_value=int(counts.refreshes),
            sum_value=counts.refresh_seconds,
        )
        yield GaugeMetricFamily(
            "reread_state_bytes",
            "What is remembered of the requests that run.",
            value=counts.state_bytes,
        )
