"""The options that commands on a model share, and how a command turns errors into exit codes."""

# No `from __future__ import annotations` here: typer reads the annotations of Options as objects.
import functools
import inspect
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from ..config import Config
from ..errors import ConfigError, InputError, RereadError
from ..shapes import SHAPES

BAD_INPUT = 2
INTERRUPTED = 130
STDIN = "-"
AnyOptions = TypeVar("AnyOptions")  # a command's own dataclass of options


@dataclass(frozen=True, kw_only=True)
class PresetOptions:
    """A configuration, as given."""

    preset: Annotated[str, typer.Option(help="default, paper, indexed, exact or dense.")] = (
        "default"
    )
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a value of the preset; repeatable."
        ),
    ] = None
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on standard output.")
    ] = False

    def config(self) -> Config:
        """The preset with the --set changes.

        Raises:
            ConfigError: an unknown preset or key, or a value that cannot be right.
        """
        return config_of(self.preset, self.settings)


@dataclass(frozen=True, kw_only=True)
class CellOptions:
    """A shape, and the contexts and batches to look at, as given."""

    shape: Annotated[
        str, typer.Option(help=f"{', '.join(SHAPES)}, or a folder with config.json.")
    ] = "qwen3-4b"
    context: Annotated[
        str, typer.Option(metavar="TOKENS", help="Keys of each row; several between commas.")
    ] = "8192,32768,131072"
    batch: Annotated[
        str, typer.Option(metavar="ROWS", help="Rows decoded together; several between commas.")
    ] = "16"

    def cells(self) -> list[tuple[int, int]]:
        """Rows and context of each, contexts in the outer loop.

        Raises:
            InputError: not whole numbers above 0; names the option.
        """
        return [
            (rows, context)
            for context in whole_numbers("--context", self.context)
            for rows in whole_numbers("--batch", self.batch)
        ]


@dataclass(frozen=True, kw_only=True)
class Options(PresetOptions):
    """What the user asked for, as given; each field is one option."""

    model: Annotated[
        str,
        typer.Option(help="Builtin name (smollm2), folder, GGUF file or hub id."),
    ] = "smollm2"
    prompt: Annotated[
        str | None,
        typer.Option(help="The prompt; with --prompt-file, what follows the file's text."),
    ] = None
    prompt_file: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="UTF-8 file with the prompt, - for standard input."),
    ] = None
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Wrap the prompt in the chat template, or take it as it is. "
            "Default: --chat where the tokenizer has a template.",
            show_default=False,
        ),
    ] = None
    max_new_tokens: Annotated[int, typer.Option(help="At most this many new tokens.")] = 128
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto"
    seed: Annotated[
        int | None,
        typer.Option(help="Sample, with this seed. Default: greedy decoding.", show_default=False),
    ] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the checkpoint.")
    ] = False

    def prompt_text(self) -> str | None:
        """The prompt, None where none was given.

        Raises:
            InputError: the file cannot be read as UTF-8 text.
        """
        if self.prompt_file is None:
            return self.prompt
        text = read_text(self.prompt_file)
        return text if self.prompt is None else f"{text}\n\n{self.prompt}"


def config_of(preset: str, settings: list[str] | None) -> Config:
    """A preset with --set changes.

    Raises:
        ConfigError: an unknown preset or key, or a value that cannot be right.
    """
    return Config.preset(preset).updated(dict(map(parse_setting, settings or [])))


def parse_setting(setting: str) -> tuple[str, Any]:
    """ "t_max=8" as ("t_max", 8): the value is JSON where it can be, else text.

    Raises:
        ConfigError: no "=" in it.
    """
    key, equals, value = setting.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {setting!r} is not KEY=VALUE, such as k=256 or t_max=8")
    try:
        return key.strip(), json.loads(value)
    except json.JSONDecodeError:
        return key.strip(), value.strip()


def read_text(path: str) -> str:
    """The text of a UTF-8 file, "-" for standard input; a byte order mark is left out.

    Raises:
        InputError: it cannot be read, or is not UTF-8 (names the byte's offset).
    """
    name = "standard input" if path == STDIN else path
    try:
        data = sys.stdin.buffer.read() if path == STDIN else Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"prompt file {name} cannot be read: {error.strerror}") from error
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise InputError(
            f"prompt file {name} is not UTF-8: byte 0x{data[error.start]:02x} at offset"
            f" {error.start}; save it as UTF-8"
        ) from error


def command(run: Callable[[AnyOptions], None], options: type[AnyOptions]) -> Callable[..., None]:
    """A typer command that ends with the right exit code.

    Args:
        run: what the command does.
        options: the dataclass whose fields are the command's options, each annotated for typer.
    """

    @functools.wraps(run)
    def wrapped(**values: Any) -> None:
        try:
            run(options(**values))
        except RereadError as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(BAD_INPUT) from error
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None

    signature = inspect.signature(options)
    wrapped.__signature__ = signature  # type: ignore[attr-defined]  # what typer reads
    wrapped.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
    return wrapped


def whole_numbers(option: str, text: str) -> list[int]:
    """ "8192,32768" as [8192, 32768].

    Raises:
        InputError: something between the commas is no whole number above 0; names the option.
    """
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not re.fullmatch("0*[1-9][0-9]{0,11}", part):
            want = "whole numbers of at least 1, such as 8192,32768"
            raise InputError(f"{option} {part!r} is not possible: {want}")
    return [int(part) for part in parts]
