"""Where a result comes from: versions, device and commit. Every saved result carries them."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("reread", "torch", "transformers")
CPUINFO = Path("/proc/cpuinfo")


def provenance(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Versions, device and commit of this run, as plain values for JSON."""
    return {"versions": versions(), "device": describe_device(device), "commit": commit()}


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a result."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def describe_device(device: torch.device | str) -> dict[str, Any]:
    """What computes: kind ("cpu", "cuda", ...), name, and threads or GPU memory in bytes."""
    device = torch.device(device)
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return {"kind": "cuda", "name": found.name, "memory": found.total_memory}
    if device.type == "cpu":
        return {
            "kind": "cpu",
            "name": _cpu_name(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        }
    return {"kind": device.type, "name": str(device)}


def _cpu_name() -> str:
    if CPUINFO.is_file():
        for line in CPUINFO.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "Hardware"):
                return value.strip()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit that this package runs from, "-dirty" after local changes; None outside git."""
    here = Path(__file__)
    # a wheel installed inside somebody else's repository must not report that repository's commit
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    return _git(here.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
