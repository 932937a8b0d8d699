"""The four commands, each a few lines over the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from . import report
from .job import Job, Record, given_prompt, prepare
from .options import Options

if TYPE_CHECKING:
    from ..integrations.hf.load import Loaded

ONLY = "reread"  # the one arm of `generate`


def generate(options: Options) -> None:
    """Continue a prompt with slow-fast decoding; the text streams to standard output."""
    job = prepare(options, given_prompt(options))
    record = Record(job)
    try:
        _generate(job, record, options)
    except KeyboardInterrupt:
        if options.as_json:
            tokens = record.tokens.get(ONLY, [])
            text = record.texts().get(ONLY, "")
            report.print_json(
                {"interrupted": True, "text": text, "tokens": tokens, **record.origin()}
            )
        else:
            report.write_text("\n")
        raise


def _generate(job: Job, record: Record, options: Options) -> None:
    from ..evaluation.compare import run_arm

    # text that streams to a terminal is its own progress, and a bar would run into it
    with report.Reporter(
        job.console, decode=options.as_json or not report.stdout_is_terminal()
    ) as told:
        arm = run_arm(
            job.loaded,
            job.ids,
            job.config,
            max_new_tokens=options.max_new_tokens,
            progress=lambda phase, done, total: told("", phase, done, total),
            on_token=lambda token: record.add_token(ONLY, token),
            on_text=None if options.as_json else report.write_text,
            **job.sampling,
        )
    if options.as_json:
        answer = {"text": arm.text, "tokens": arm.tokens, "stats": arm.stats.to_dict()}
        report.print_json({**answer, **record.origin()})
        return
    report.write_text("\n")
    job.console.print(report.summary(arm.stats, len(arm.tokens)))
    for note in arm.stats.notes:
        job.console.print(f"note: {note}")


def compare(options: Options) -> None:
    """Answer a prompt with dense and with slow-fast decoding; show speed and agreement."""
    _compare(options, given_prompt(options))


def demo(options: Options) -> None:
    """Compare on a long text that comes with Python; --prompt asks another question about it."""
    from .demo import announcement, long_prompt

    report.make_console().print(announcement(options))
    _compare(options, lambda loaded: long_prompt(loaded, options))


def _compare(options: Options, prompt: str | Callable[[Loaded], str]) -> None:
    job = prepare(options, prompt)
    from ..evaluation.compare import compare as run

    record = Record(job)
    try:
        with report.Reporter(job.console) as told:
            result = run(
                job.loaded,
                job.ids,
                job.config,
                max_new_tokens=options.max_new_tokens,
                progress=told,
                on_token=record.add_token,
                on_arm=record.add_arm,
                **job.sampling,
            )
    except KeyboardInterrupt:
        _print_interrupted(record, options)
        raise
    if options.as_json:
        report.print_json(result.to_dict())
        return
    report.print_texts(result.text)
    job.console.print(report.comparison_table(result))
    for note in result.notes:
        job.console.print(f"note: {note}")


def _print_interrupted(record: Record, options: Options) -> None:
    speeds = {name: arm.stats.tokens_per_s for name, arm in record.arms.items()}
    if options.as_json:
        known = {"interrupted": True, "text": record.texts(), "tokens_per_s": speeds}
        report.print_json({**known, **record.origin()})
        return
    report.print_texts(record.texts())
    for name, arm in record.arms.items():
        record.job.console.print(f"{name}: {report.summary(arm.stats, len(arm.tokens))}")


def info(options: Options) -> None:
    """Show versions, device, the model's layers, KV memory and the configuration."""
    from .info import describe, show

    facts = describe(options)
    if options.as_json:
        report.print_json(facts)
    else:
        show(facts)
