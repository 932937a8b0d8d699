"""How long the parts of a sparse prefill take: events around the functions that it calls, for the
length of a `with` block."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..cuda import new_event
from .timing import Record

# part -> module, and the name in it; those of the kernels may be absent
PLACES = {
    "projections": ("reread.integrations.hf.indexed", "Reader.read"),
    "selection": ("reread.prefill", "indexer_topk"),
    "attention": ("reread.prefill", "prefill_sparse"),
    "index_scores": ("reread.ops.triton.index", "index_scores"),
    "top_k": ("reread.ops.triton.index", "block_topk"),
}


class Spans:
    """Times of calls, by part; on the CPU by the clock."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: dict[str, list[tuple[Any, Any]]] = {}

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose calls are timed as `part`."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self._mark()
            out = function(*args, **kwargs)
            self._marks.setdefault(part, []).append((begin, self._mark()))
            return out

        return timed

    def totals(self) -> Record:
        """Milliseconds of all calls of each part, as "<part>_ms", and "calls" of each."""
        if self._on_gpu:
            torch.cuda.synchronize()
        found: Record = {
            f"{part}_ms": sum(self._between(*pair) for pair in pairs)
            for part, pairs in self._marks.items()
        }
        return {**found, "calls": {part: len(pairs) for part, pairs in self._marks.items()}}

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = new_event(timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) if self._on_gpu else (end - begin) * 1e3)


@contextmanager
def watched(spans: Spans) -> Iterator[Spans]:
    """Inside it, calls of `PLACES` are timed; afterwards everything is as it was."""
    undo: list[tuple[Any, str, Any]] = []
    try:
        for part, (module, path) in PLACES.items():
            *outer, name = path.split(".")
            try:
                owner: Any = importlib.import_module(module)
                for step in outer:
                    owner = getattr(owner, step)
                original = getattr(owner, name)
            except (ImportError, AttributeError):
                continue
            undo.append((owner, name, original))
            setattr(owner, name, spans.around(part, original))
        yield spans
    finally:
        for owner, name, original in reversed(undo):
            setattr(owner, name, original)
