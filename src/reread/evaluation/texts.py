"""Text that every Python installation carries or can make: prose, source code and tables; and text
without sentence marks."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import random
import sys
import unicodedata
from collections.abc import Callable
from html.entities import html5
from http import HTTPStatus
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..policy.trigger import LINE_ENDS, SENTENCE_ENDS

SOURCES = ("argparse", "inspect", "typing", "dataclasses", "tarfile")
DNA_LETTERS = 200_000


def prose() -> str:
    """The Python language reference, as `help()` knows it (several 100,000 characters of
    documentation)."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def source() -> str:
    """Source code of standard-library modules."""
    return "\n\n".join(map(_module_source, SOURCES))


def tables() -> str:
    """Three real tables: HTTP status codes, Unicode characters with name and category, HTML
    entities."""
    rows = [f"{int(s)} | {s.phrase} | {s.description}" for s in HTTPStatus]
    for code in [
        *range(0xA1, 0x250),
        *range(0x370, 0x400),
        *range(0x400, 0x530),
        *range(0x2190, 0x2300),
    ]:
        name = unicodedata.name(chr(code), "")
        if name:
            rows.append(f"U+{code:04X} | {name} | {unicodedata.category(chr(code))} | {code}")
    rows += [
        f"&{name} | {'+'.join(f'U+{ord(c):04X}' for c in value)}"
        for name, value in sorted(html5.items())
    ]
    return "\n".join(rows)


def training() -> str:
    """Source code with its documentation, of the standard library's modules but those of `source`:
    what an indexer may learn from that is measured on the others."""
    names = sorted(
        set(sys.stdlib_module_names) - set(SOURCES) - {"pydoc_data", "this", "antigravity"}
    )
    found = []
    for name in names:
        spec = None if name.startswith("_") else importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            found.append(Path(spec.origin).read_text(encoding="utf-8"))
    return "\n\n".join(found)


def minified() -> str:
    """Code without sentence marks: the syntax trees of what `source` holds as one line of JSON,
    docstrings left out, and every sentence mark in what remains."""
    trees = [_plain(ast.parse(_module_source(name))) for name in SOURCES]
    line = json.dumps(trees, separators=(",", ":"), ensure_ascii=False)
    return line.translate(dict.fromkeys(map(ord, SENTENCE_ENDS + LINE_ENDS)))


def _plain(node: Any) -> Any:
    """A syntax tree as nested lists: name of the node, then its fields."""
    if isinstance(node, list):
        return [_plain(item) for item in node if not _is_docstring(item)]
    if not isinstance(node, ast.AST):
        return node if isinstance(node, bool | int | float | str | None) else repr(node)
    fields = [_plain(value) for name, value in ast.iter_fields(node) if name not in ("ctx", "kind")]
    return [type(node).__name__, *(value for value in fields if value not in (None, []))]


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def dna() -> str:
    """Made up: one line of A, C, G and T, a third of it copies of earlier stretches in which one
    letter of twenty is changed."""
    rng, line = random.Random(0), ""
    while len(line) < DNA_LETTERS:
        length = rng.randrange(50, 400)
        if len(line) > length and rng.random() < 1 / 3:
            start = rng.randrange(len(line) - length)
            copied = line[start : start + length]
            line += "".join(rng.choice("ACGT") if rng.random() < 1 / 20 else c for c in copied)
        else:
            line += "".join(rng.choices("ACGT", k=length))
    return line[:DNA_LETTERS]


def csv() -> str:
    """A real table, the Unicode characters below U+3100 with their properties, as comma-separated
    lines. No sentence marks, but a line's end is a boundary too."""
    rows = []
    for code in range(0xA1, 0x3100):
        char = chr(code)
        if name := unicodedata.name(char, ""):
            kind, side = unicodedata.category(char), unicodedata.bidirectional(char)
            width = unicodedata.east_asian_width(char)
            rows.append(f"{code:04X},{name},{kind},{unicodedata.combining(char)},{side},{width}")
    return "\n".join(rows)


KINDS: dict[str, Callable[[], str]] = {"prose": prose, "source": source, "tables": tables}
# in none of them a full stop, question mark or the like; `csv` has lines
UNMARKED: dict[str, Callable[[], str]] = {"minified": minified, "dna": dna, "csv": csv}


def digest(text: str) -> str:
    """Short SHA-256 of a text, so that a result says which one it was made from (it differs by
    Python version)."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _module_source(name: str) -> str:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise InputError(f"the source of the standard library's {name!r} is not installed")
    return Path(spec.origin).read_text(encoding="utf-8")
