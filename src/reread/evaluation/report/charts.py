"""Charts as plotly.js reads them. Colours are names of CSS variables, which the page resolves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .cells import interval, percent, points, signed, whole
from .reading import finite
from .sums import Floor, Line, Summary
from .tables import keys_read, name_of

DASHES = ("solid", "dash", "dot", "dashdot")
COLOURS = 7  # besides that of the first method, which is dense as a rule
# marker names of plotly, and the same shapes for the legend, 12 units wide around 0
SHAPES = {
    "circle": "M-4.4 0a4.4 4.4 0 1 0 8.8 0a4.4 4.4 0 1 0-8.8 0z",
    "square": "M-4-4h8v8h-8z",
    "diamond": "M0-5.5L5.5 0L0 5.5L-5.5 0z",
    "triangle-up": "M0-5L5 4H-5z",
    "triangle-down": "M0 5L5-4H-5z",
    "cross": "M-1.7-5h3.4v3.3h3.3v3.4h-3.3v3.3h-3.4v-3.3h-3.3v-3.4h3.3z",
    "x": "M-5-2.6L-2.6-5L0-2.4L2.6-5L5-2.6L2.4 0L5 2.6L2.6 5L0 2.4L-2.6 5L-5 2.6L-2.4 0z",
    "bowtie": "M5 4V-4L-5 4V-4z",
    "hourglass": "M4 5H-4L4-5H-4z",
}
SYMBOLS = tuple(SHAPES)
PER_TOKEN, TTFT, KEYS = COSTS = "ms per token", "TTFT in ms", "keys read"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart.

    Attributes:
        name: for anchors; unique in a page.
        title: what it shows, above it and for screen readers.
        note: what a reader must know besides, such as which methods are not drawn.
        height: in CSS pixels.
        data, layout: as plotly.js takes them. `meta` of a trace is the number of its method.
        cells: of a heat map, what the page's script says about a cell, see `pictures`.
    """

    name: str
    title: str
    note: str = ""
    height: int = 320
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    cells: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Style:
    """How one method looks: shape and dash tell it apart without colour."""

    method: str
    number: int

    @property
    def colour(self) -> str:
        """A CSS variable."""
        return f"var(--s{1 + (self.number - 1) % COLOURS if self.number else 0})"

    @property
    def symbol(self) -> str:
        """Of plotly."""
        return SYMBOLS[self.number % len(SYMBOLS)]

    @property
    def size(self) -> int:
        """Of the symbol, in CSS pixels; triangles would look smaller than the others."""
        return 13 if "triangle" in self.symbol else 10

    @property
    def dash(self) -> str:
        """Of plotly."""
        return DASHES[(self.number + 2 * (self.number // COLOURS)) % len(DASHES)]

    @property
    def shape(self) -> str:
        """SVG path of the symbol."""
        return SHAPES[self.symbol]

    def trace(self, **values: Any) -> dict[str, Any]:
        """A scatter trace of this method."""
        return {
            "type": "scatter", "meta": self.number, "name": safe(self.method),
            "hovertemplate": "%{text}<extra></extra>",
            "marker": {"color": self.colour, "symbol": self.symbol, "size": self.size,
                       "line": {"color": "var(--paper)", "width": 1}},
            "line": {"color": self.colour, "dash": self.dash, "width": 2},
            **values,
        }  # fmt: skip


def safe(text: str) -> str:
    """Text that plotly shows as it is: it would take some tags in it for formatting and links."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def styles(methods: Sequence[str]) -> list[Style]:
    """One look per method."""
    return [Style(method, number) for number, method in enumerate(methods)]


def axis(title: str, **values: Any) -> dict[str, Any]:
    """An axis in the page's manner."""
    return {"title": {"text": title, "standoff": 8}, "automargin": True, **values}


def drawn(floors: Sequence[Floor]) -> tuple[list[Floor], list[str]]:
    """The floors whose means can be compared, and why the others are not: a mean over fewer kinds
    than others' says nothing beside theirs."""
    most = max((floor.kinds for floor in floors), default=0)
    kept, left = [], []
    for floor in floors:
        if floor.failed:
            left.append(f"{floor.method} (failed)")
        elif floor.mean is None or floor.kinds < most:
            left.append(f"{floor.method} ({floor.kinds} of {most} kinds measured)")
        else:
            kept.append(floor)
    return kept, left


def not_drawn(left: Sequence[str]) -> str:
    """ "Not drawn: ..." or ""."""
    return f"Not drawn: {'; '.join(left)}." if left else ""


def frontiers(
    summary: Summary, speed: Sequence[Mapping[str, Any]], looks: Sequence[Style]
) -> list[tuple[str, list[Chart]]]:
    """Mean score against cost, a chart for each kind of cost, under the length in words. Where
    a method's speed was not measured, there is one against the share of keys read, too."""
    timed = {(line["method"], line["length"]): line for line in speed}
    found: list[tuple[str, list[Chart]]] = []
    for length in sorted({floor.length for floor in summary.floors}):
        floors, left = drawn([floor for floor in summary.floors if floor.length == length])
        here = {f.method: timed.get((f.method, length), {}) for f in floors}
        costs = {
            PER_TOKEN: {m: t.get("ms_per_token") for m, t in here.items()},
            TTFT: {m: _thousand(t.get("ttft_s")) for m, t in here.items()},
        }
        measured = {name: c for name, c in costs.items() if any(map(finite, c.values()))}
        if not all(any(finite(c[method]) for c in costs.values()) for method in here):
            measured[KEYS] = {f.method: keys_read(summary, f.method, length) for f in floors}
        found.append((f"{whole(length)} tokens", []))
        for cost, values in measured.items():
            unknown = "keys read not noted" if cost == KEYS else "speed not measured"
            without = [f"{m} ({unknown})" for m, value in values.items() if not finite(value)]
            spots = [(f, values[f.method]) for f in floors if finite(values[f.method])]
            note = not_drawn([*left, *without])
            found[-1][1].append(_frontier(cost, length, spots, looks, note))
    return found


def _thousand(value: Any) -> float | None:
    return 1000.0 * value if finite(value) else None


def _frontier(
    cost: str, length: int, spots: Sequence[tuple[Floor, Any]], looks: Sequence[Style], note: str
) -> Chart:
    shares = cost == KEYS
    by_name = {look.method: look for look in looks}
    data = [_best(spots)]
    for floor, value in spots:
        mean = floor.mean or 0.0
        lowest = mean if floor.lowest is None else floor.lowest.score or 0.0
        spent = f"{percent(value)} of keys read" if shares else f"{cost} {value:.1f}"
        worst = (
            ""
            if floor.lowest is None
            else f"<br>floor {points(lowest)}, {safe(name_of(floor.lowest))}"
        )
        text = f"<b>{safe(floor.method)}</b><br>mean {points(mean)}, {safe(spent)}{worst}"
        data.append(
            by_name[floor.method].trace(
                mode="markers", x=[value], y=[100 * mean], text=[text],
                error_y={"type": "data", "symmetric": False, "array": [0], "width": 5,
                         "arrayminus": [max(0.0, 100 * (mean - lowest))], "thickness": 1.2},
            )
        )  # fmt: skip
    across = (
        axis("keys read", type="log", tickformat="~%", dtick="D2")
        if shares
        else axis(cost, rangemode="tozero")
    )
    return Chart(
        name=f"frontier-{length}-{COSTS.index(cost)}",
        title=f"Mean score against {cost}",
        note=note, data=data, layout={"xaxis": across, "yaxis": axis("")},
    )  # fmt: skip


def _best(spots: Sequence[tuple[Floor, Any]]) -> dict[str, Any]:
    """The frontier itself: the best score up to each cost, as steps."""
    best, line = -1.0, []
    for floor, value in sorted(spots, key=lambda spot: (spot[1], -(spot[0].mean or 0.0))):
        if (floor.mean or 0.0) > best:
            best = floor.mean or 0.0
            line.append((value, 100 * best))
    return {
        "type": "scatter", "mode": "lines", "name": "frontier", "hoverinfo": "skip",
        "x": [x for x, _ in line], "y": [y for _, y in line],
        "line": {"color": "var(--muted)", "width": 1.5, "dash": "dot", "shape": "hv"},
    }  # fmt: skip


def by_length(summary: Summary, looks: Sequence[Style]) -> list[Chart]:
    """Score of each task against length; nothing for a task with one length."""
    tasks: dict[str, set[int]] = {}
    for line in summary.lines:
        if line.task not in summary.fidelity:
            tasks.setdefault(line.task, set()).add(line.length)
    found: list[Chart] = []
    for task, lengths in tasks.items():
        if len(lengths) < 2:
            continue
        data, left = [], []
        for look in looks:
            lines = [summary.whole(task, length, look.method) for length in sorted(lengths)]
            good = [line for line in lines if line is not None and not line.failed]
            if any(line is not None and line.failed for line in lines):
                left.append(f"{look.method} (failed)")
            if good:
                data.append(_length_trace(look, good))
        across = axis("tokens", type="log", tickvals=sorted(lengths),
                      ticktext=[whole(length) for length in sorted(lengths)])  # fmt: skip
        # names of tasks are the user's: numbers make better anchors
        found.append(
            Chart(
                name=f"length-{len(found)}", title=task, height=260, data=data,
                note=not_drawn(left).replace("Not drawn", "Not drawn where it failed"),
                layout={"xaxis": across, "yaxis": axis("score", range=[-4, 104])},
            )
        )  # fmt: skip
    return found


def _length_trace(look: Style, lines: Sequence[Line]) -> dict[str, Any]:
    texts = []
    for line in lines:
        change = "" if line.difference is None else (
            f"<br>{signed(line.difference)} to dense ({interval(line.low, line.high)})"
        )  # fmt: skip
        head = f"<b>{safe(look.method)}</b><br>{points(line.score or 0.0)}"
        texts.append(f"{head} at {whole(line.length)} tokens{change}")
    return look.trace(
        mode="lines+markers", x=[line.length for line in lines], text=texts,
        y=[100 * (line.score or 0.0) for line in lines],
    )  # fmt: skip
