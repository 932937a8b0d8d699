"""Contexts to distil on: the needle generator, a file, a folder, or a dataset of the hub."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..indexer.distill import Context
from .needle import (
    KINDS,
    NEEDLE_WORDS,
    RECORD_SHARE,
    SENTENCE,
    SHORTEST,
    Vocabulary,
    make_texts,
)

NEEDLE = "needle"
HELD_OUT = 4  # contexts that are kept back, at most
HELD_OUT_SHARE = 8  # and at most one of so many
APART = 1 << 40  # number of the first held-out needle text
QUESTION_WORDS = 41  # of one question and answer of each kind


@dataclass(frozen=True, slots=True)
class Corpus:
    """What is learnt from.

    Attributes:
        name: as given; digest: of the tokens, or of what generates them.
        training: a context by its number, from 0 on without end, the same each time.
        held_out: never among them.
        notes: what the user should know.
    """

    name: str
    digest: str
    training: Callable[[int], Context]
    held_out: tuple[Context, ...]
    notes: tuple[str, ...] = ()


def open_corpus(data: str, tokenizer: Any, *, context: int, tokens: int, seed: int) -> Corpus:
    """The contexts that `data` names, each of exactly `context` tokens.

    Args:
        data: "needle", a UTF-8 file (.jsonl: one object with "text" a line), a folder of them, or a
            dataset of the hub.
        tokens: how many are to be learnt from; no more are read than that needs.

    Raises:
        InputError: no such data, not readable, or too little of it.
    """
    if data == NEEDLE:
        return needle_corpus(tokenizer, context=context, seed=seed)
    documents, notes = _documents(data)
    wanted = tokens + HELD_OUT * context
    return cut(_encode(documents, tokenizer, wanted), data, context, tokens, seed, notes)


def needle_corpus(tokenizer: Any, *, context: int, seed: int, held_out: int = HELD_OUT) -> Corpus:
    """Texts of the needle checkpoint, each followed by every question that it has and its answer;
    half of the queries are drawn from these.

    Raises:
        InputError: another vocabulary, or a context that is too short.
    """
    ids: dict[str, int] = tokenizer.get_vocab()
    if missing := [word for word in NEEDLE_WORDS if word not in ids]:
        raise InputError(
            f"data 'needle' is for a checkpoint with needle-27m's vocabulary; this one has no "
            f"{missing[0]!r}: give a file or folder"
        )
    if context < SHORTEST:
        raise InputError(f"context={context} is too short for data 'needle': at least {SHORTEST}")
    vocabulary = Vocabulary.of(ids)
    make = functools.partial(_needle_context, ids, vocabulary, context, seed)
    kept = tuple(make(APART + number) for number in range(held_out))
    digest = _digest(f"needle {context} {seed}".encode())
    return Corpus(NEEDLE, digest, make, kept)


def _needle_context(
    ids: dict[str, int], vocabulary: Vocabulary, context: int, seed: int, number: int
) -> Context:
    tokens, questions = _needle_sizes(context)
    (text,) = make_texts(
        vocabulary, tokens=tokens, count=1, questions=questions, seed=(seed << 48) + number
    )
    asked = [question for kind in KINDS for question in text.questions[kind]]
    random.Random(f"{seed} {number}").shuffle(asked)
    words = text.words + [word for q in asked for word in (*q.words, *q.answer)]
    found = torch.tensor([ids[word] for word in words[:context]])
    return Context(found, focus=len(text.words))


@functools.lru_cache
def _needle_sizes(context: int) -> tuple[int, int]:
    """Tokens of the shortest text that fills a context with all of its questions, and how many of
    these a kind has."""
    for tokens in range(SHORTEST, context + 2 * SENTENCE, SENTENCE):
        sentences = tokens // SENTENCE - 1
        questions = round(RECORD_SHARE * sentences) // len(KINDS)
        if 1 + sentences * SENTENCE + questions * QUESTION_WORDS >= context:
            return tokens, questions
    raise AssertionError("a text alone fills the context")


def cut(
    ids: Tensor, name: str, context: int, tokens: int, seed: int, notes: Sequence[str] = ()
) -> Corpus:
    """A stream of token ids [N] as contexts; the last ones are held out.

    Raises:
        InputError: fewer tokens than one context to learn from and one to hold out.
    """
    whole = len(ids) // context
    if whole < 2:
        raise InputError(
            f"data {name!r} has {len(ids)} tokens: at least {2 * context} are needed for one "
            f"context of {context} to learn from and one to hold out; give more text or a smaller "
            "context"
        )
    kept = max(1, min(HELD_OUT, whole // HELD_OUT_SHARE))
    rows = ids[: whole * context].view(whole, context)
    learnt = whole - kept
    said = list(notes)
    if learnt * context < tokens:
        said.append(
            f"data {name!r} has {learnt * context} tokens to learn from, fewer than {tokens}: it "
            f"is repeated {tokens / (learnt * context):.1f} times, in a new order each time"
        )

    @functools.lru_cache(maxsize=2)
    def order(epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
        found: list[int] = torch.randperm(learnt, generator=generator).tolist()
        return found

    def training(number: int) -> Context:
        epoch, at = divmod(number, learnt)
        return Context(rows[order(epoch)[at]])

    held = tuple(Context(row) for row in rows[learnt:])
    return Corpus(name, _digest(rows.numpy().tobytes()), training, held, tuple(said))


def _encode(documents: Iterable[str], tokenizer: Any, wanted: int) -> Tensor:
    """Ids of as many documents as `wanted` tokens take, an end-of-text token after each."""
    pieces: list[Tensor] = []
    count = 0
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for document in documents:
        found = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        pieces.append(torch.tensor([*found, *end], dtype=torch.int64))
        count += len(pieces[-1])
        if count >= wanted:
            break
    return torch.cat(pieces)[:wanted] if pieces else torch.empty(0, dtype=torch.int64)


def _documents(data: str) -> tuple[Iterable[str], list[str]]:
    path = Path(data).expanduser()
    if path.is_file():
        text = _read(path)
        if text is None:
            raise InputError(f"data file {path} is not UTF-8: save it as UTF-8 text")
        return list(_split(path, text)), []
    if path.is_dir():
        return _folder(path)
    return _hub(data), []


def _folder(folder: Path) -> tuple[Iterable[str], list[str]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    texts = [(path, _read(path)) for path in files]
    found = [
        document for path, text in texts if text is not None for document in _split(path, text)
    ]
    skipped = sum(text is None for _, text in texts)
    if not found:
        raise InputError(f"folder {folder} has no UTF-8 text file: {len(files)} files looked at")
    return found, [f"{skipped} binary files of {len(files)} were skipped"] if skipped else []


def _read(path: Path) -> str | None:
    """The text of a file, None where it is none.

    Raises:
        InputError: it cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"data file {path} cannot be read: {error.strerror}") from error
    try:
        return None if b"\0" in data else data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError:
        return None


def _split(path: Path, text: str) -> Iterator[str]:
    """Documents of a file: the "text" of each line of a .jsonl, else all of it."""
    if path.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            found = None
        if not isinstance(found, str):
            raise InputError(f'{path}, line {number}: a JSON object with "text" is needed')
        yield found


def _hub(name: str) -> Iterator[str]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise InputError(
            f"data {name!r} is no file or folder here; for a dataset of the hub run pip install "
            "datasets, else give a file, a folder or 'needle'"
        ) from error
    try:
        rows = datasets.load_dataset(name, split="train", streaming=True)
    except Exception as error:  # datasets raises many kinds, each of which means the same here
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"dataset {name!r} cannot be loaded: {reason}") from error
    return _texts(name, rows)


def _texts(name: str, rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        if not isinstance(row.get("text"), str):
            raise InputError(f"dataset {name!r} has no column 'text': it has {', '.join(row)}")
        yield row["text"]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
