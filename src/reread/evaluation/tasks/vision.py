"""Documents and videos, for vision-language checkpoints: what reread makes sparse is the language
model's attention over the tokens of pages or frames; the vision tower runs as it is.

Every question is a prompt of its own by the processor's chat template, images first. A video goes
in as frames, which every processor of several images takes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoModelForImageTextToText, AutoProcessor

from ...errors import InputError, UnsupportedError
from ...integrations.hf.attach import attach
from ...integrations.hf.load import (
    LOADING_ERRORS,
    Loaded,
    locate,
    quiet,
    quiet_loading,
    resolve_device,
    resolve_dtype,
)
from ...integrations.hf.prompt import decode
from ..methods import Method
from .answering import figures_of
from .base import Case, Query, Sample
from .vision_data import Asked, documents, load_images, videos
from .vision_scores import document_score, letter_of

DOCUMENTS, VIDEOS = "mmlongbench_doc", "videomme"
TASKS = (DOCUMENTS, VIDEOS)
NEW_TOKENS = {DOCUMENTS: 64, VIDEOS: 8}
ASK_DOCUMENT = (
    "The images are the pages of a document, in order. Answer the question from the document "
    "alone, with nothing but a short answer: a few words, a number, or a list such as "
    "['first', 'second']. If the document does not say, answer: Not answerable\n"
    "Question: {question}"
)
# the wording of Video-MME's own evaluation without subtitles
ASK_VIDEO = (
    "Select the best answer to the following multiple-choice question based on the video. Respond "
    "with only the letter (A, B, C, or D) of the correct option.\n{question}\n{options}\n"
    "The best answer is:"
)


@dataclass(frozen=True, slots=True)
class VisionTask:
    """A `Task`: one case for each question that fits `length` tokens with its answer.

    Attributes:
        tokens: of each question's prompt, those of its images included.
        skipped: what did not fit, by reason, as a run's description lists it.
    """

    name: str
    length: int
    processor: Any
    asked: tuple[Asked, ...]
    tokens: tuple[int, ...]
    skipped: list[dict[str, Any]] = field(default_factory=list)

    @property
    def numbers(self) -> int:
        return len(self.asked)

    @property
    def queries(self) -> Sequence[int]:
        return [1] * len(self.asked)

    def measure(self, number: int, methods: Sequence[Method], loaded: Loaded) -> Iterator[Sample]:
        """See `Task`. A method that the model does not support gives a sample with the error."""
        asked = self.asked[number]
        inputs = encode(self.processor, self.name, asked)
        inputs = inputs.to(loaded.model.device, dtype=loaded.model.dtype)
        for method in methods:
            began = time.perf_counter()
            known: dict[str, Any]
            try:
                known = self._answer(asked, inputs, method, loaded)
            except UnsupportedError as error:
                known = {"score": None, "error": str(error)}
            yield Sample(
                task=self.name, length=self.length, method=method.name, number=number,
                kind=asked.kind, expected=(asked.expected,),
                seconds=time.perf_counter() - began, **known,
            )  # fmt: skip

    def _answer(self, asked: Asked, inputs: Any, method: Method, loaded: Loaded) -> dict[str, Any]:
        """One greedy answer and what it cost."""
        config, ids = method.at(self.length), inputs["input_ids"]
        with attach(loaded.model, config, tokenizer=loaded.tokenizer) as session, quiet():
            out = loaded.model.generate(
                **inputs, max_new_tokens=NEW_TOKENS[self.name], do_sample=False
            )
        said = decode(loaded, out[0, ids.shape[1] :].tolist())
        row = tuple(ids[0].tolist())
        # figures are by length alone: the prompt in two parts, as where questions share a text
        parts = Case(row[:-1], ()), Query(row[-1:], NEW_TOKENS[self.name], asked.kind)
        stats = session.stats
        return {
            "score": score(asked, said),
            "answer": said,
            "figures": {
                **figures_of(stats, config, *parts),
                "slow_steps": float(sum(stats.slow_steps)),
                "prompt_tokens": float(len(row)),
            },
            "extra": {"path": f"{stats.backend}, {stats.runner}"},
        }


def make(
    processor: Any, name: str, *, tokens: int, count: int, seed: int, data: Path | None
) -> VisionTask:
    """`count` questions, drawn with `seed`; those whose prompt and answer take more than `tokens`
    tokens are skipped and counted.

    Args:
        processor: of the checkpoint, from `load_processor`.
        data: folder of the data set, or of several, each in a folder of its task's name.

    Raises:
        InputError: an unknown task; data that is missing, broken or cannot be right; a processor
            without a chat template.
    """
    if name not in TASKS:
        raise InputError(f"task {name!r} is unknown: one of {', '.join(TASKS)}")
    if data is None:
        raise InputError(f"task {name!r} needs a local copy of its data: give its folder")
    folder = data / name if (data / name).is_dir() else data
    found = documents(folder) if name == DOCUMENTS else videos(folder)
    chosen = random.Random(f"{name} {seed}").sample(found, min(count, len(found)))
    lengths = [encode(processor, name, asked)["input_ids"].shape[1] for asked in chosen]
    room = tokens - NEW_TOKENS[name]
    fits = [(asked, n) for asked, n in zip(chosen, lengths, strict=True) if n <= room]
    skipped = []
    if len(fits) < len(chosen):
        longest = max(lengths) + NEW_TOKENS[name]
        reason = f"prompt and answer take more than {tokens} tokens, up to {longest}"
        left = len(chosen) - len(fits)
        skipped.append({"task": name, "length": tokens, "reason": reason, "samples": left})
    return VisionTask(
        name, tokens, processor, tuple(a for a, _ in fits), tuple(n for _, n in fits), skipped
    )


def encode(processor: Any, name: str, asked: Asked) -> Any:
    """The inputs of `generate` for one question, a row of tokens and the images.

    Raises:
        InputError: images that cannot be read, or a processor without a chat template.
    """
    if not getattr(processor, "chat_template", None):
        raise InputError(f"{type(processor).__name__} has no chat template: use a chat checkpoint")
    text = ASK_DOCUMENT if name == DOCUMENTS else ASK_VIDEO
    text = text.format(question=asked.question, options="\n".join(asked.options))
    content = [{"type": "image", "image": image} for image in load_images(asked)]
    turns = [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]
    with quiet():
        return processor.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )


def score(asked: Asked, said: str) -> float:
    """0 (wrong) to 1 (right)."""
    if asked.options:
        return float(letter_of(said, asked.options) == asked.expected)
    return document_score(asked.form, asked.expected, said)


def load_vision(model: str, *, dtype: str = "auto", device: str = "auto") -> Loaded:
    """Load a vision-language checkpoint; its tokenizer is the processor's.

    Args:
        model, dtype, device: as for `load`.

    Raises:
        InputError: as for `load`, and where the checkpoint sees no images.
    """
    where, wanted = resolve_device(device), resolve_dtype(dtype)
    tokenizer = load_processor(model).tokenizer
    try:
        with quiet_loading():
            loaded: Any = AutoModelForImageTextToText.from_pretrained(
                _path(model), dtype=wanted, use_safetensors=True, trust_remote_code=False
            )
            loaded.to(where)
    except LOADING_ERRORS as error:
        raise _refusal(model, error) from error
    return Loaded(loaded.eval(), tokenizer, model)


def load_processor(model: str) -> Any:
    """The checkpoint's processor alone: what turns images and text into the model's inputs.

    Raises:
        InputError: the model is not there or has none, or a library that it needs is missing.
    """
    path = _path(model)
    try:
        with quiet_loading():
            found: Any = AutoProcessor.from_pretrained(path, trust_remote_code=False)
    except LOADING_ERRORS as error:
        raise _refusal(model, error) from error
    if not hasattr(found, "image_processor"):
        raise InputError(f"model {model!r} takes no images: a vision-language checkpoint is needed")
    return found


def _path(model: str) -> str:
    source = locate(model)
    if source.gguf:
        raise InputError(f"model {model!r} is a GGUF file, which holds no vision tower")
    return source.path


def _refusal(model: str, error: Exception) -> InputError:
    reason = " ".join(str(error).split())[:300]
    return InputError(f"vision-language model {model!r} cannot be loaded: {reason}")
