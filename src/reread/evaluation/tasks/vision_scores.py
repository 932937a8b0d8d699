"""How answers about documents and videos are scored.

The rules for documents follow the description of MMLongBench-Doc (arXiv 2407.01523, section 4.1 and
its appendix): one rule for each format of an answer. There a large model first extracts a short
answer from a long one; here the model is asked for the short answer itself, so that scores are
comparable with each other and not with published ones.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

FORMATS = ("Str", "Int", "Float", "List", "None")
LEAST = 0.5  # a similarity of texts up to it counts as none
TOLERANCE = 0.01  # of decimal numbers, relative
LETTERS = "ABCD"
# what is right only to the letter: an address, a name of a file, a page, a time, numbers of a
# telephone or a date
_EXACT = (
    r".*https?://.*",
    r"\S+@\S+\.\S+",
    r"\S+\.(py|ipynb)",
    r"page\b.*",
    r".*\b[ap]\.m\b.*",
    r"\+?\d+([\s-]\d+)*",
)


def document_score(form: str, expected: str, answer: str) -> float:
    """0 to 1 for an answer about a document.

    Args:
        form: one of FORMATS; "None": the document does not say, and `expected` says so.
    """
    said = _short(answer)
    if form == "Int":
        return _same_integer(expected, said)
    if form == "Float":
        return _same_number(expected, said)
    if form == "List":
        return _list_score(_items(expected), _items(said))
    return _text_score(_plain(expected), _plain(said))


def letter_of(answer: str, options: Sequence[str]) -> str:
    """The option that an answer names, "A" to "D"; "" if none.

    Args:
        options: such as "A. Black.", in their order.
    """
    said = answer.strip()
    # an "A" before a word is the article
    begins = re.match(rf"\W*([{LETTERS[1:]}](?![\w'])|A(?=\s*$|[.):,*\n]))", said)
    names = re.search(rf"(?i:\b(?:answer|option)\b(?:\s+is)?)\W*([{LETTERS}])\b", said)
    if found := begins or names:
        return found[1]
    bare = [re.sub(rf"^[{LETTERS}][.):]\s*", "", option) for option in options]
    same = [
        letter
        for letter, option in zip(LETTERS, bare, strict=False)
        if _words(option) and _words(option) == _words(said)
    ]
    return same[0] if len(same) == 1 else ""


def similarity(a: str, b: str) -> float:
    """1 - edit distance / length of the longer text; 0 up to LEAST (ANLS, arXiv 1905.13648)."""
    longer = max(len(a), len(b))
    value = 1.0 - distance(a, b) / longer if longer else 1.0
    return value if value > LEAST else 0.0


def distance(a: str, b: str) -> int:
    """Edits (insert, delete, replace) that make one text of the other (Levenshtein)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            best = min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
            diagonal, row[j] = row[j], best
    return row[-1]


def _short(answer: str) -> str:
    """The first line that says something, without "Answer:" before it."""
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    return re.sub(r"^(the )?answer( is)?\s*:?\s*", "", lines[0], flags=re.I) if lines else ""


def _plain(text: str) -> str:
    """Lower case, without remarks in parentheses, quotes, a full stop, currency and per cent."""
    text = re.sub(r"\s*\([^)]*\)", "", text.lower()).strip()
    return text.strip("\"'").rstrip(".").lstrip("$").rstrip("%").strip()


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _text_score(expected: str, said: str) -> float:
    if any(re.fullmatch(pattern, expected) for pattern in _EXACT):
        return float(expected == said)
    return similarity(expected, said)


def _number(text: str) -> float | None:
    try:
        return float(re.sub(r"(?<=\d),(?=\d{3})", "", _plain(text)))
    except ValueError:
        return None


def _same_integer(expected: str, said: str) -> float:
    a, b = _number(expected), _number(said)
    return float(a is not None and a == b)


def _same_number(expected: str, said: str) -> float:
    """A share may be given in per cent or as a fraction."""
    a, b = _number(expected), _number(said)
    if a is None or b is None:
        return 0.0
    return float(any(abs(b - a * by) <= TOLERANCE * abs(a * by) for by in (0.01, 1.0, 100.0)))


def _items(text: str) -> list[str]:
    """The elements of a list as it is written, plain and in order; else what commas separate."""
    text = text.strip()
    try:
        value = ast.literal_eval(text) if text.startswith("[") else None
    except (ValueError, SyntaxError):
        value = None
    found = value if isinstance(value, list) else re.split(r",|;|\band\b", text.strip("[]"))
    return sorted(item for item in (_plain(str(x).strip()) for x in found) if item)


def _list_score(expected: list[str], said: list[str]) -> float:
    """That of the worst pair; lists of different lengths have none."""
    if len(expected) != len(said):
        return 0.0
    return min((_element(a, b) for a, b in zip(expected, said, strict=True)), default=0.0)


def _element(expected: str, said: str) -> float:
    number = _number(expected)
    if number is not None:
        return float(number == _number(said))
    return _text_score(expected, said)
