"""What a person sees on stderr: progress, tables, a line of summary; and JSON on stdout."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed
from rich.table import Table

if TYPE_CHECKING:
    from ..evaluation.compare import Comparison
    from ..stats import Stats

LINE_EVERY_S = 10.0  # without a terminal, progress is a line this often


def make_console() -> Console:
    """A console on stderr as it is now: loading replaces `sys.stderr` for a while. What it prints
    may be text of others, so that brackets mean nothing."""
    return Console(file=sys.stderr, highlight=False, markup=False)


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on stdout."""
    write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def write_text(text: str) -> None:
    """Text on stdout at once; characters that its encoding lacks become "?"."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()


def print_texts(texts: Mapping[str, str]) -> None:
    """The text of each arm on stdout, under its name."""
    for arm, text in texts.items():
        write_text(f"[{arm}]\n{text.strip()}\n\n")


def stdout_is_terminal() -> bool:
    """Whether a person watches standard output."""
    return sys.stdout.isatty()


@contextmanager
def busy(console: Console, what: str) -> Iterator[None]:
    """A spinner while something without progress happens; a line where stderr is no terminal."""
    if not console.is_terminal:
        console.print(f"{what} ...")
        yield
        return
    with console.status(what):
        yield


class Reporter:
    """Progress by arm and phase: bars on a terminal, else a line every ten seconds and at each end.

    Args:
        decode: whether to show the decode phase; off where the streamed text is the progress.
    """

    def __init__(self, console: Console, *, decode: bool = True) -> None:
        self._console = console
        self._decode = decode
        self._tasks: dict[str, TaskID] = {}
        self._bars = (
            Progress(
                TextColumn("{task.description:<16}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("tokens"),
                Elapsed(),
                console=console,
                transient=True,
            )
            if console.is_terminal
            else None
        )
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, arm: str, phase: str, done: int, total: int) -> None:
        """Tell `done` of `total` tokens of one arm's phase."""
        if phase == "decode" and not self._decode:
            return
        label = f"{arm} {phase}".strip()
        if self._bars is None:
            now = time.monotonic()
            if done >= total or now - self._last_line >= LINE_EVERY_S:
                self._last_line = now
                self._console.print(f"{label}: {done}/{total} tokens")
            return
        if label not in self._tasks:
            self._end_tasks()
            self._tasks[label] = self._bars.add_task(label, total=total)
        self._bars.update(self._tasks[label], completed=done, total=total)
        if done >= total and not self._decode:
            # the text that follows must find the terminal free
            self._bars.stop()

    def _end_tasks(self) -> None:
        """An answer may end early; then its bar is full too, and its clock stands still."""
        assert self._bars is not None
        for task in self._bars.tasks:
            self._bars.update(task.id, total=task.completed)


def summary(stats: Stats, tokens: int) -> str:
    """One line about one answer."""
    kinds = {"slow": stats.slow_steps, "fast": stats.fast_steps, "dense": stats.full_steps}
    steps = ", ".join(f"{sum(counts)} {kind}" for kind, counts in kinds.items() if sum(counts))
    ran = "" if stats.backend == "reference" else f" on {stats.backend} ({stats.runner})"
    return (
        f"{tokens} tokens at {stats.tokens_per_s:.1f} tokens/s ({steps or 'no'} steps){ran},"
        f" {stats.keys_read_share:.0%} of the keys read, prefill {stats.prefill_s:.1f} s"
    )


def comparison_table(result: Comparison) -> Table:
    """The two arms side by side."""
    dense, ours = (result.tokens_per_s[arm] for arm in ("dense", "reread"))
    speedup = "-" if result.speedup is None else f"{result.speedup:.2f}x"
    differs = "none" if result.first_difference is None else f"at token {result.first_difference}"
    table = Table(title=f"{result.model}, prompt of {result.prompt_tokens} tokens")
    table.add_column("")
    table.add_column("dense", justify="right")
    table.add_column("reread", justify="right")
    new = {arm: str(len(tokens)) for arm, tokens in result.tokens.items()}
    steps = len(result.tokens["dense"]) - 1
    rows = [
        ("tokens/s", f"{dense:.1f}", f"{ours:.1f}"),
        ("speed-up", "1.00x", speedup),
        ("new tokens", new["dense"], new["reread"]),
        ("slow steps", "-", str(result.slow_steps)),
        ("fast steps", "-", str(result.fast_steps)),
        ("dense steps", str(max(steps, 0)), str(result.full_steps)),
        ("keys read", "100%", f"{result.keys_read_share:.0%}"),
        ("equal tokens", "-", f"{result.token_agreement:.0%}"),
        ("first difference", "-", differs),
    ]
    for row in rows:
        table.add_row(*row)
    return table
