"""`reread-lm-eval`: lm-eval's own command with reread among its models."""

from __future__ import annotations

import sys

from ..errors import RereadError
from .options import BAD_INPUT


def main() -> None:
    """Entry point of the console script; what cannot be right is one line and exit code 2."""
    try:
        from ..evaluation.lm_eval_model import main as run

        run()
    except RereadError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from error
