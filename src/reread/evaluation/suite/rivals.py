"""The samples of kvpress's methods, from a process of their own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ...integrations.hf.load import Loaded
from ...integrations.hf.prompt import decode
from ...integrations.hf.recorder import end_tokens
from ..baselines.export import export_model
from ..baselines.run import BaselineAnswer, Job, answers, check_environment, find_python
from ..methods import Method
from ..stopping import cut
from ..tasks.answering import failed_sample, sample_of
from ..tasks.base import Answer, AnswerTask, Sample

EXPORTED = "model"  # in the result folder: a checkpoint that kvpress's transformers can read


def environment() -> tuple[Path, dict[str, str]]:
    """The Python of the baselines' environment and its versions, before anything else is done.

    Raises:
        InputError: it is missing or does not work.
    """
    python = find_python()
    return python, check_environment(python)


def measure(
    out: Path, task: AnswerTask, missing: Mapping[int, Sequence[Method]], loaded: Loaded,
    python: Path,
) -> Iterator[Sample]:  # fmt: skip
    """All samples of a task that baselines lack, as they come; where one fails, its error."""
    ends = tuple(sorted(end_tokens(loaded.model, {})))
    waiting: dict[str, tuple[Method, int, int]] = {}
    jobs = []
    for number, methods in missing.items():
        case = task.cases[number]
        for index, query in enumerate(case.queries):
            for method in methods:
                if method.press is None or method.share is None:
                    continue
                name = f"{number} {index} {method.name}"
                waiting[name] = method, number, index
                jobs.append(
                    Job(
                        id=name, press=method.press, kept=method.share,
                        ids=(*case.context, *query.ids), new_tokens=query.new_tokens, eos=ends,
                        choices=query.choices,
                    )
                )  # fmt: skip
    if not jobs:
        return
    model = export_model(loaded, out / EXPORTED)
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory() as work:
        for answer in answers(jobs, model, dtype, str(loaded.model.device), python, Path(work)):
            yield _sample(task, loaded, answer, *waiting[answer.id])


def _sample(
    task: AnswerTask, loaded: Loaded, found: BaselineAnswer, method: Method, number: int, index: int
) -> Sample:
    if found.error is not None:
        known = {"error": found.error, "seconds": found.seconds}
        return failed_sample(task, method.name, number, index, **known)
    query = task.cases[number].queries[index]
    text = cut(decode(loaded, list(found.tokens)), query.until)
    answer = Answer(found.tokens, text, found.logprobs)
    shares = {"kept_share": found.kept_share, "kv_bytes_share": found.kv_bytes_share}
    return sample_of(
        task, method.name, number, index, answer,
        figures={name: value for name, value in shares.items() if value is not None},
        extra={"path": found.path}, seconds=found.seconds,
    )  # fmt: skip
