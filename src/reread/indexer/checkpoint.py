"""Files that a kill or a full disk cannot leave half written, and the state of a distillation."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import InputError

CHECKPOINT = "checkpoint.safetensors"
RECORD = "record.json"
COUNTERS = "counters"  # metadata key of the counters, as JSON


def replace_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a file beside `path`, then put it in the place of `path` in one step.

    Raises:
        InputError: it cannot be written; what was at `path` is untouched.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        safe = "the older one is whole" if path.is_file() else "there was none before"
        raise InputError(f"{path} cannot be written ({reason}); {safe}") from error
    finally:
        _remove(temporary)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Save tensors as safetensors.

    Raises:
        InputError: see `replace_whole`.
    """
    held = {name: value.detach().contiguous() for name, value in tensors.items()}
    replace_whole(path, lambda to: save_file(held, to, metadata=dict(metadata)))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Save plain values as JSON.

    Raises:
        InputError: see `replace_whole`.
    """
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def write(to: Path) -> None:
        to.write_text(text, encoding="utf-8")

    replace_whole(path, write)


def read_json(path: Path) -> dict[str, Any] | None:
    """Plain values from JSON, None where there is no such file.

    Raises:
        InputError: it cannot be read.
    """
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON ({error}): remove it") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no JSON object: remove it")
    return found


def save_checkpoint(
    folder: Path, tensors: Mapping[str, Tensor], counters: Mapping[str, Any]
) -> None:
    """Write a distillation's state; one file, so that its parts always belong together.

    Args:
        counters: plain values.

    Raises:
        InputError: see `replace_whole`.
    """
    write_tensors(folder / CHECKPOINT, tensors, {COUNTERS: json.dumps(counters)})


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Tensors on the CPU and counters of the checkpoint in a folder, None where there is none.

    Raises:
        InputError: it cannot be read.
    """
    path = folder / CHECKPOINT
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            counters = json.loads((file.metadata() or {})[COUNTERS])
            return {name: file.get_tensor(name) for name in file.keys()}, counters  # noqa: SIM118  # no dict
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}): remove it to start anew") from error


def remove_checkpoint(folder: Path) -> None:
    """Remove the checkpoint once its results are saved."""
    _remove(folder / CHECKPOINT)


def check_writable(folder: Path) -> None:
    """Write a file into a folder, made if it is missing, and remove it.

    Raises:
        InputError: that is not possible.
    """
    probe = folder / ".probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"reread")
        probe.unlink()
    except OSError as error:
        raise InputError(f"folder {folder} cannot be written ({error.strerror})") from error


def check_same(folder: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse to continue a run with other settings.

    Raises:
        InputError: names what differs.
    """
    differing = [
        f"{name}={saved.get(name)!r} there, {wanted.get(name)!r} now"
        for name in sorted({*saved, *wanted})
        if saved.get(name) != wanted.get(name)
    ]
    if differing:
        raise InputError(
            f"{folder} holds a run with other settings ({'; '.join(differing)}): give the same "
            "settings, or another folder"
        )


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # what cannot be removed does no harm
