"""Tables as plain values, and how numbers are written in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..intervals import ALL

MINUS = "\N{MINUS SIGN}"
SPACE = "\N{NO-BREAK SPACE}"
THIN = "\N{NARROW NO-BREAK SPACE}"
NOTHING = "\N{EN DASH}"
LONGEST_ERROR = 72  # characters of an error in a cell; the table of failures has all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell.

    Attributes:
        text, note: what it says, and a second line in small type.
        mark: "failed", "worse", "better", "weak" or "": a tint beside what the words say.
        sort: what its column is sorted by; None stands last.
        words: prose, to the left, instead of numbers to the right.
    """

    text: str
    note: str = ""
    mark: str = ""
    sort: float | None = None
    words: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row and its head, with a second line in small type."""

    head: str
    note: str = ""
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table.

    Attributes:
        name: for anchors; unique in a page.
        caption: what it shows.
        heads: of every column, the rows' heads included.
        groups: rows under a common head, which is "" where there is none.
        sortable: whether its columns have buttons that sort.
    """

    name: str
    caption: str
    heads: tuple[str, ...]
    groups: tuple[tuple[str, tuple[Row, ...]], ...]
    sortable: bool = False

    @property
    def size(self) -> int:
        """Number of rows."""
        return sum(len(rows) for _, rows in self.groups)

    def rows(self) -> Iterator[Row]:
        """All rows."""
        for _, rows in self.groups:
            yield from rows


def whole(number: float) -> str:
    """16384 as 16 384."""
    return f"{number:,.0f}".replace(",", THIN)


def points(share: float) -> str:
    """0.9821 as 98.2."""
    return f"{100 * share:.1f}"


def signed(share: float) -> str:
    """-0.0123 as -1.2, with a minus sign as wide as the plus sign."""
    text = f"{100 * share:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", MINUS)


def interval(low: float | None, high: float | None) -> str:
    """ "-3.1 to +0.4", which does not break; words where there is none."""
    if low is None or high is None:
        return "one pair, no interval"
    return SPACE.join((signed(low), "to", signed(high)))


def percent(share: float) -> str:
    """0.0312 as 3.1 %, with two digits where it is small."""
    return f"{100 * share:.2f}{THIN}%" if 0 < share < 0.01 else f"{100 * share:.1f}{THIN}%"


def counted(number: int, one: str, many: str | None = None) -> str:
    """ "1 sample", "2 samples"."""
    return f"{whole(number)} {one if number == 1 else many or one + 's'}"


def cut(text: str, most: int = LONGEST_ERROR) -> str:
    """A text on one line and with at most that many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"


def titled(task: str, kind: str) -> str:
    """Task and kind; the task alone where the kind says no more."""
    return task if kind in (task, ALL) else f"{task} \N{MIDDLE DOT} {kind}"
