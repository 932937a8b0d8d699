"""The `reread` command: generate, compare, demo, info, plan, bench, distill, eval, report,
serve.

Text goes to stdout, everything else to stderr. Exit codes: 0, 2 for bad input, 130 for interrupt.
torch and transformers are imported only once a command runs.
"""

from __future__ import annotations

import typer

from . import commands
from .bench import DecodeOptions, KernelOptions, decode_command, kernel_command
from .bench_prefill import PrefillOptions, prefill_command
from .distill import DistillOptions, distill_command
from .eval_run import RunByDefault, RunOptions, run_command
from .evaluate import GapsOptions, MassOptions, gaps_command, mass_command
from .options import Options, command
from .plan import PlanOptions, plan_command
from .report_page import ReportOptions, report_command
from .serve import ServeOptions, serve_command

app = typer.Typer(
    name="reread",
    help="Long-context language models, fast without making them worse.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for run in (commands.generate, commands.compare, commands.demo, commands.info):
    app.command()(command(run, Options))
app.command("plan")(command(plan_command, PlanOptions))
app.command("distill")(command(distill_command, DistillOptions))
bench = typer.Typer(
    help="Time kernels, whole decode steps or prefills on this GPU.", no_args_is_help=True
)
bench.command("decode")(command(decode_command, DecodeOptions))
bench.command("kernel")(command(kernel_command, KernelOptions))
bench.command("prefill")(command(prefill_command, PrefillOptions))
app.add_typer(bench, name="bench")
evaluate = typer.Typer(
    cls=RunByDefault,
    help="Compare methods on tasks (reread eval --model ..., options: reread eval run --help), or "
    "measure what sparse prefill costs.",
    no_args_is_help=True,
)
evaluate.command("run")(command(run_command, RunOptions))
evaluate.command("gaps")(command(gaps_command, GapsOptions))
evaluate.command("mass")(command(mass_command, MassOptions))
app.add_typer(evaluate, name="eval")
app.command("report")(command(report_command, ReportOptions))
# what is no option of ours is vLLM's
app.command("serve", context_settings={"ignore_unknown_options": True})(
    command(serve_command, ServeOptions)
)


def main() -> None:
    """Entry point of the console script."""
    app()
