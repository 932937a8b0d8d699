"""`reread serve`: vLLM's server with the plug-in asked for."""

# No `from __future__ import annotations` here: typer reads the annotations of ServeOptions.
from dataclasses import dataclass
from typing import Annotated

import typer

from ..config import Config
from .options import config_of


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What the user asked for, as given."""

    model: Annotated[str, typer.Argument(help="Folder or hub id, as vLLM takes it.")]
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="VLLM_ARGUMENTS", help="Handed on to vllm serve as they are."),
    ] = None
    preset: Annotated[str, typer.Option(help="default, paper or dense.")] = "default"
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a value of the preset; repeatable."
        ),
    ] = None

    def config(self) -> Config:
        """The preset with the --set changes.

        Raises:
            ConfigError: an unknown preset or key, or a value that cannot be right.
        """
        return config_of(self.preset, self.settings)


def serve_command(options: ServeOptions) -> None:
    """Serve a model with vLLM's OpenAI server and slow-fast decoding.

    Prints the `vllm serve` command that it becomes."""
    from ..integrations.vllm.serve import serve

    serve(options.model, options.config(), options.arguments or ())
