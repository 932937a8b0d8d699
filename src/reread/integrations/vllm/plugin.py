"""The entry point of vLLM's general plug-ins. It only makes vLLM ask: an engine whose additional
config has no "reread" is built exactly as without it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from ...config import Config
from ...errors import UnsupportedError
from .compat import READ_ALONG, RUNNER_VARIABLE, check_installed, split_at
from .metrics import expose
from .options import (
    ASYNC_SCHEDULER,
    KEY,
    MAX_SEQS,
    SCHEDULER,
    WORKERS,
    asked_for,
    check_config,
    check_engine,
    check_platform,
    parse,
)

_MARK = "_reread_asks"
_SET: set[str] = set()  # environment variables that we set


def register() -> None:
    """Called by vLLM in each of its processes, as often as it likes."""
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if not hasattr(original, _MARK):
        # vLLM offers no hook of its own between the arguments and the worker class
        EngineArgs.create_engine_config = _asking(original)


def _asking(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not asked_for(self.additional_config):
            _undo()
            return original(self, *args, **kwargs)
        platform = check_installed()
        config = parse(self.additional_config[KEY])
        check_config(config)
        check_platform(config, platform)
        prepare(self, platform)
        vllm_config = original(self, *args, **kwargs)
        check_engine(vllm_config, config, platform)
        if config.prefill is not None:
            split_at(vllm_config, READ_ALONG)
        _note(config)
        expose()
        return vllm_config

    setattr(create_engine_config, _MARK, True)
    return create_engine_config


def prepare(arguments: Any, platform: str) -> None:
    """Set what the plug-in needs of vLLM's engine arguments.

    Args:
        platform: "cpu" or "cuda".

    Raises:
        UnsupportedError: the user set one of them to something else.
    """
    if platform == "cpu" and arguments.async_scheduling:
        raise UnsupportedError(
            "async_scheduling=True is not supported with reread on a CPU: leave it unset"
        )
    if arguments.async_scheduling is None:
        # which scheduler is ours to say, so vLLM cannot decide it later
        waits = arguments.distributed_executor_backend == "ray"
        arguments.async_scheduling = platform == "cuda" and not waits
    if platform == "cuda":
        _prepare_gpu(arguments)
    scheduler = ASYNC_SCHEDULER if arguments.async_scheduling else SCHEDULER
    wanted = {"worker_cls": ("auto", WORKERS[platform]), "scheduler_cls": (None, scheduler)}
    for name, (default, ours) in wanted.items():
        if getattr(arguments, name) not in (default, ours):
            raise UnsupportedError(
                f"{name}={getattr(arguments, name)!r} is not supported with reread, which sets its "
                f"own: leave it at {default!r}"
            )
        setattr(arguments, name, ours)
    if os.environ.get(RUNNER_VARIABLE, "0") != "0":
        raise UnsupportedError(
            f"{RUNNER_VARIABLE}={os.environ[RUNNER_VARIABLE]} is not supported with reread: 0"
        )
    if RUNNER_VARIABLE not in os.environ:
        # by the environment, because vLLM's other processes read it there too
        os.environ[RUNNER_VARIABLE] = "0"
        _SET.add(RUNNER_VARIABLE)


def _prepare_gpu(arguments: Any) -> None:
    if arguments.max_num_seqs is None:
        arguments.max_num_seqs = MAX_SEQS
    if arguments.attention_backend is None and arguments.attention_config.backend is None:
        # ours takes this one's place; vLLM says why where a model cannot have it
        arguments.attention_backend = "FLASH_ATTN"


def _undo() -> None:
    """An engine that does not ask gets the environment that the user gave."""
    for name in _SET:
        os.environ.pop(name, None)
    _SET.clear()


def _note(config: Config) -> None:
    from vllm.logger import init_logger

    # below vLLM's own name, so that its logging configuration applies
    init_logger("vllm.reread").info(
        "reread: mode %s, sink %d, recent %d, k %d", config.mode, config.sink, config.recent,
        config.k,
    )  # fmt: skip
