"""What the GPU benchmarks share: timing in CUDA graphs, the bandwidth that floors are taken from,
and where a result comes from."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

from ..cuda import new_event, new_stream
from ..errors import UnsupportedError
from ..evaluation.provenance import provenance
from ..ops import resolve_backend

Record = dict[str, Any]
# several times the L2: a graph that reads this much finds nothing of its last replay there
COLD_BYTES = 256 << 20


def require_cuda() -> torch.device:
    """The GPU that benchmarks run on.

    Raises:
        UnsupportedError: there is none, or the kernels cannot run on it.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError("this benchmark needs a CUDA GPU, and PyTorch finds none here")
    device = torch.device("cuda")
    resolve_backend("triton", device)
    return device


def time_layers(step: Callable[[int], object], layers: int, repeats: int = 15) -> Record:
    """Microseconds a layer of one CUDA graph that runs `step` for each layer.

    Returns:
        "us", "p20" and "p80": median and percentiles of the replays.
    """
    with torch.cuda.stream(new_stream(torch.device("cuda"))):
        step(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            step(layer)
    for _ in range(2):
        graph.replay()
    times = sorted(milliseconds(graph.replay) * 1e3 / layers for _ in range(repeats))
    return {
        "us": statistics.median(times),
        "p20": times[len(times) // 5],
        "p80": times[-1 - len(times) // 5],
    }


def milliseconds(work: Callable[[], object]) -> float:
    """What the GPU takes for the work that the call enqueues."""
    begin, end = new_event(timing=True), new_event(timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


@functools.cache
def copy_bandwidth() -> float:
    """Bytes a second of a large device copy, read and write counted; the best of fifteen, once a
    process: one ceiling for all that it measures.

    Raises:
        UnsupportedError: no GPU.
    """
    device = require_cuda()
    size = min(4 << 30, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = min(milliseconds(lambda: target.copy_(source)) for _ in range(15))
    return 2 * size / (best * 1e-3)


def origin(bandwidth: float, commit: str = "") -> Record:
    """Versions, device and commit as of every result, and what matters to kernels besides.

    Args:
        bandwidth: from `copy_bandwidth`. commit: for a copy of the tree without its history.
    """
    known = provenance(require_cuda())
    known["versions"] |= {
        "triton": version("triton"),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]  # untyped in torch
    }
    return {**known, "commit": commit or known["commit"], "copy_bandwidth": bandwidth}


def version(package: str) -> str:
    """Of an installed package, or "not installed"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
