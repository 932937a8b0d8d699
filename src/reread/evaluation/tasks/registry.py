"""All tasks by name.

needle       code, note and chain in the words of needle-27m
needle_en    the same in English, for chat models
ruler_...    RULER's synthetic tasks through lm-eval; ruler: those that need no data
fidelity     how close to dense on real text, teacher-forced
longbench, longbench2, gpqa_diamond, mmlu and their parts, through lm-eval
mmlongbench_doc, videomme   for vision-language checkpoints
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from ...errors import InputError
from ...integrations.hf.load import Loaded, load, load_tokenizer
from . import english, fidelity_task, lm_tasks, needle_task, ruler_lm, vision
from .answering import Answering
from .base import Task

GENERATED = (needle_task.NAME, english.NAME)
FIDELITY = "fidelity"
RULER = "ruler"  # OFFLINE; the others need essays or questions
OFFLINE = tuple(
    f"ruler_{name}"
    for name in ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What tasks are made from, besides their name and length.

    Attributes:
        count: cases of each task and length.
        data: folder with local copies of data sets; None: from the hub.
        texts: name -> text, for fidelity; steps: of fidelity, teacher-forced.
        new_tokens: of lm-eval's generated answers; None: as each task says.
    """

    count: int
    seed: int
    data: Path | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    steps: int = 128
    new_tokens: int | None = None


def expand(names: Sequence[str]) -> tuple[str, ...]:
    """Names of single tasks, groups taken apart.

    Raises:
        InputError: an unknown task, or none.
    """
    found: list[str] = []
    for name in names:
        if name == RULER:
            found += OFFLINE
        elif name in (*GENERATED, FIDELITY, *ruler_lm.TASKS, *vision.TASKS):
            found.append(name)
        elif lm_tasks.is_task(name):
            found += lm_tasks.expand(name)
        else:
            raise InputError(f"task {name!r} is unknown: one of {', '.join(known())}")
    if not found:
        raise InputError(f"no task: give some of {', '.join(known())}")
    return tuple(dict.fromkeys(found))


def known() -> tuple[str, ...]:
    """Names that users may give, groups of many tasks by one name."""
    groups = ("longbench", "longbench2", "gpqa_diamond", "mmlu")
    return (*GENERATED, FIDELITY, RULER, *ruler_lm.TASKS, *groups, *vision.TASKS)


def has_length(name: str) -> bool:
    """Whether a task is written to a length; others are as long as their data, up to the longest
    length that is asked for."""
    return name in (*GENERATED, FIDELITY, *ruler_lm.TASKS)


def has_prompts(name: str) -> bool:
    """Whether a task has prompts of text alone, which speed is measured on."""
    return name != FIDELITY and name not in vision.TASKS


def needs_vision(names: Sequence[str]) -> bool:
    """Whether a vision-language checkpoint is needed."""
    return any(name in vision.TASKS for name in names)


def load_for(names: Sequence[str], model: str, *, dtype: str, device: str) -> Loaded:
    """The checkpoint, as its tasks need it. Of its own settings for answers only the special tokens
    stay: penalties and beams would be ours alone, baselines take the most likely token.

    Raises:
        InputError: see `load`.
    """
    make = vision.load_vision if needs_vision(names) else load
    loaded = make(model, dtype=dtype, device=device)
    own = loaded.model.generation_config
    loaded.model.generation_config = GenerationConfig(
        bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id
    )
    return loaded


def tokenizer_for(names: Sequence[str], model: str) -> Any:
    """What writes the samples: the tokenizer, or the processor of a vision-language checkpoint.

    Raises:
        InputError: the model has none, or is not there.
    """
    return vision.load_processor(model) if needs_vision(names) else load_tokenizer(model)


def make_task(tokenizer: Any, name: str, tokens: int, source: Source) -> Task:
    """A task's samples at one length.

    Args:
        tokenizer: see `tokenizer_for`.

    Raises:
        InputError: data that is missing, too few tokens, or a tokenizer that cannot write it.
    """
    how: dict[str, Any] = {"tokens": tokens, "count": source.count, "seed": source.seed}
    if name == FIDELITY:
        return fidelity_task.make_fidelity(tokenizer, **how, texts=source.texts, steps=source.steps)
    if name in vision.TASKS:
        return vision.make(tokenizer, name, **how, data=source.data)
    if name == needle_task.NAME:
        return Answering(needle_task.make(tokenizer, **how))
    if name == english.NAME:
        return Answering(english.make(tokenizer, **how))
    if name in ruler_lm.TASKS:
        return Answering(ruler_lm.make(tokenizer, name, **how, data=source.data))
    made = lm_tasks.make(tokenizer, name, **how, data=source.data, new_tokens=source.new_tokens)
    return Answering(made)
