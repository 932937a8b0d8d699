"""Real text that every Python installation carries: prose, source code and tables."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import unicodedata
from collections.abc import Callable
from html.entities import html5
from http import HTTPStatus
from pathlib import Path

from ..errors import InputError

SOURCES = ("argparse", "inspect", "typing", "dataclasses", "tarfile")


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


KINDS: dict[str, Callable[[], str]] = {"prose": prose, "source": source, "tables": tables}


def digest(text: str) -> str:
    """Short SHA-256 of a text, so that a result says which one it was made from (it differs by
    Python version)."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _module_source(name: str) -> str:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise InputError(f"the source of the standard library's {name!r} is not installed")
    return Path(spec.origin).read_text(encoding="utf-8")
