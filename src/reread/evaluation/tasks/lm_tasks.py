"""LongBench, LongBench v2, GPQA-diamond and MMLU: prompts and scores by lm-eval's task code.

    longbench, longbench_GROUP, longbench_TASK    generated answers; "score", LongBench's own metric
                                                  of each task (F1, ROUGE-L, ...)
    longbench2, longbench2_TASK                   four choices by log-likelihood; "acc"
    gpqa_diamond, gpqa_diamond_VARIANT            zeroshot, n_shot: four choices, "acc";
                                                  generative_n_shot, cot_zeroshot, cot_n_shot:
                                                  generated, "exact_match" of the last filter
    mmlu, mmlu_GROUP, mmlu_SUBJECT                four choices after five examples; "acc"

A choice of one token takes one decode step, which a preset with `triggers.first_step` makes slow:
there its score is that of dense decoding, and only a sparse prefill or a mode that chooses keys for
every step can change it.

The names are lm-eval's; gpqa_diamond is its gpqa_diamond_zeroshot. n_shot is five examples.

A prompt that with its answer exceeds the length loses its middle in LongBench and LongBench v2, as
LongBench does it: the first and the last half of the room are kept. Where that would cut into the
question or the examples (GPQA, MMLU) the sample is skipped; `LmTask.skipped` counts them.

Generated answers follow the tokenizer's chat template where there is one, but not in LongBench's
tasks with examples and with code (trec, triviaqa, samsum, lsht, lcc, repobench-p), as LongBench
does it. Choices are scored after plain text.

Data come from the folder --data DIR in the form of the hub's data sets, or from the hub
(Xnhyacinth/LongBench, recursal/longbench-v2, Idavidrein/gpqa, cais/mmlu):

    DIR/longbench/narrativeqa.jsonl              the subset's name; so do LongBench's own files
    DIR/longbench2/academic_single.jsonl
    DIR/gpqa/gpqa_diamond.csv
    DIR/mmlu/anatomy/test.parquet, dev.parquet   or test-00000-of-00001.parquet and so on

Each may be .jsonl, .json, .parquet or .csv, a file of all rows or a folder with a file for each
split; see `lm_files`.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import InputError
from .base import Answer, Case, Query
from .lm_common import drawing_afresh, lm_eval_module, quiet_lm_eval, seeded
from .lm_files import SHOWN, load_splits, require_folder
from .lm_prompts import Prompts

ALIASES = {"gpqa_diamond": "gpqa_diamond_zeroshot"}
SHOTS = 5  # of MMLU and of GPQA's n_shot: what their papers use


@dataclass(frozen=True, slots=True)
class Family:
    """Tasks that belong together.

    Attributes:
        folder: below lm-eval's tasks.
        data: below the data folder.
        cut: too long prompts lose their middle; False: they are skipped.
    """

    folder: str
    data: str
    cut: bool


FAMILIES = {
    "longbench": Family("longbench", "longbench", True),
    "longbench2": Family("longbench2", "longbench2", True),
    "gpqa_diamond": Family("gpqa", "gpqa", False),
    "mmlu": Family("mmlu/default", "mmlu", False),
}


def _family(name: str) -> Family | None:
    for prefix, family in FAMILIES.items():
        if name == prefix or name.startswith(f"{prefix}_"):
            return family
    return None


@functools.cache
def _manager(folder: str) -> Any:
    """lm-eval's task manager for one of its folders; all of them take it ten seconds."""
    tasks = lm_eval_module("lm_eval.tasks")
    root = Path(tasks.__file__).parent
    with quiet_lm_eval():
        return tasks.TaskManager(include_defaults=False, include_path=str(root / folder))


def is_task(name: str) -> bool:
    """Whether `name` is a task here, or a group of them.

    Raises:
        InputError: it looks like one, and lm-eval is not installed.
    """
    family = _family(name)
    return family is not None and ALIASES.get(name, name) in _manager(family.folder).task_index


def expand(name: str) -> tuple[str, ...]:
    """The tasks of a group, or the task alone.

    Raises:
        InputError: an unknown name.
    """
    family = _family(name)
    if family is None or not is_task(name):
        raise InputError(f"task {name!r} is unknown: one of {', '.join(FAMILIES)}, or of their own")
    return (name,) if name in ALIASES else tuple(dict.fromkeys(_members(name, family)))


def _members(name: str, family: Family) -> list[str]:
    entry = _manager(family.folder).task_index[name]
    if entry.kind.name == "GROUP":
        return [task for child in entry.cfg["task"] for task in _members(child, family)]
    return sorted(entry.tags) if entry.kind.name == "TAG" else [name]


@dataclass(frozen=True, slots=True)
class LmTask:
    """An `AnswerTask` of lm-eval.

    Attributes:
        metric: what `score` is, by lm-eval's name.
        skipped: samples left out because their prompts are longer than `length`.
        truncated: samples whose prompts lost their middle.
    """

    name: str
    length: int
    cases: tuple[Case, ...] = field(repr=False)
    task: Any = field(repr=False)
    metric: str
    skipped: int = 0
    truncated: int = 0

    def score(self, query: Query, answer: Answer) -> float:
        """The task's metric, 0 to 1."""
        doc = self.task.task_docs[query.data]
        with quiet_lm_eval():
            if query.choices:
                # whether a choice is also the greedy answer is no part of the metrics here
                given = [(logprob, False) for logprob in answer.logprobs]
                result = self.task.process_results(doc, given)
            else:
                result = self.task.process_results(doc, [_filtered(self.task, doc, answer.text)])
        return min(1.0, max(0.0, float(result[self.metric])))


def _filtered(task: Any, doc: Any, text: str) -> Any:
    """What lm-eval's last filter makes of an answer."""
    instance = task.construct_requests(doc, "")
    instance.resps = [text]
    for each in task._filters:  # lm-eval applies them in an evaluation of its own only
        each.apply([instance])
    return list(instance.filtered_resps.values())[-1]


def make(
    tokenizer: Any, name: str, *, tokens: int, count: int, seed: int, data: Path | None,
    new_tokens: int | None = None,
) -> LmTask:  # fmt: skip
    """The task `name` with at most `count` samples, drawn by `seed`; sample i is the same for every
    `count`.

    Args:
        tokens: prompt and answer have at most so many.
        new_tokens: of a generated answer; None: as the task says.

    Raises:
        InputError: an unknown task or a group, data that are missing or do not fit the task, or no
            sample that is short enough.
    """
    family = _family(name)
    if family is None or expand(name) != (name,):
        raise InputError(
            f"task {name!r} is unknown or a group: `expand` gives the tasks of a group"
        )
    require_folder(data)
    with quiet_lm_eval(), seeded(f"{name} {seed}"):
        task = _load(name, family, data)
        task.set_fewshot_seed(seed)
        prompts = Prompts(tokenizer, task, _shots(name), tokens, family.cut, new_tokens)
        total = len(task.task_docs)
        order = random.sample(range(total), total)
        cases = _cases(prompts, name, order, count)
    if not cases and count:
        raise InputError(
            f"task {name!r}: each of its {total} prompts is longer than {tokens} tokens"
        )
    return LmTask(
        name, tokens, tuple(cases), task, prompts.metric, prompts.skipped, prompts.truncated
    )


def _cases(prompts: Prompts, name: str, order: Sequence[int], count: int) -> list[Case]:
    cases: list[Case] = []
    for number in order:
        if len(cases) == count:
            break
        try:
            case = prompts.case(name, number)
        except InputError:
            raise
        except Exception as error:  # whatever a template of lm-eval does with a row like that
            raise _unfit(name, error, f"row {number}") from error
        cases += [] if case is None else [case]
    return cases


def _shots(name: str) -> int:
    return SHOTS if name.startswith("mmlu") or name.endswith("n_shot") else 0


def _load(name: str, family: Family, data: Path | None) -> Any:
    """lm-eval's task over the data set."""
    own = ALIASES.get(name, name)
    manager = _manager(family.folder)
    config = manager.task_index[own].cfg
    fewshot = (config.get("fewshot_config") or {}).get("split") or config.get("fewshot_split")
    evaluated = config.get("test_split") or config.get("validation_split")
    splits = list(dict.fromkeys(filter(None, (evaluated, fewshot, config.get("training_split")))))
    subset = config.get("dataset_name") or own
    names = [f"{family.data}/{subset}", subset]
    sets = load_splits(name, data, names, splits, (config["dataset_path"], subset))
    group = {"group": "reread", "task": [{"task": own, "custom_dataset": lambda **_: sets}]}
    try:
        with _no_cache():
            task = manager.load(group)["tasks"][own]
            # GPQA's variants with examples mix their choices by a generator of their own
            known = getattr(task.config.process_docs, "__globals__", {})
            mixer = next((one for one in known.values() if isinstance(one, random.Random)), None)
            if mixer is None:
                return task
            with drawing_afresh(mixer):
                return manager.load(group)["tasks"][own]
    except ImportError as error:
        needed = "needs packages that are not installed: pip install 'lm_eval[longbench]'"
        raise InputError(f"task {name!r} {needed}") from error
    except Exception as error:  # whatever a template of lm-eval does with other rows
        raise _unfit(name, error, f"the first row of {config['dataset_path']}, {subset}") from error


@contextmanager
def _no_cache() -> Iterator[None]:
    """`datasets` without its cache on disk, which would keep the order of choices that another seed
    has drawn, and without progress bars."""
    datasets = lm_eval_module("datasets")
    caching, bars = datasets.is_caching_enabled(), not datasets.are_progress_bars_disabled()
    datasets.disable_caching()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if caching:
            datasets.enable_caching()
        if bars:
            datasets.enable_progress_bars()


def _unfit(name: str, error: Exception, where: str) -> InputError:
    reason = f"{type(error).__name__}: {str(error)[:SHOWN]}"
    return InputError(f"task {name!r}: the data do not fit it, {where}: {reason}")
