"""What a model read, step by step, and what it missed: the support-stability picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..intervals import DENSE
from ..tasks.base import Sample
from .cells import Cell, Row, Table, percent, whole
from .charts import Chart, axis, safe
from .reading import finite

MOST = 4  # pictures in a page
LEAST = -4.0  # log10 of the mass at the dark end of the scale
MISSED = 0.02  # of a step's mass in one cell of unread keys: enough for a cross
SHORTEST, TALLEST = 7, 18  # pixels of a step
AROUND = 110  # pixels of scale and axes
TICKS = 4
EVERYTHING = ("slow", "full")  # kinds of steps that read every key


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A sample's picture, its parts of one length each.

    Attributes:
        mass: attention mass by step and bin of positions; None where it was not noted.
        kept: share of the bin's keys that the step read, like mass; None where not noted.
        kinds, ends, missed, tokens: by step; "" , False, None, "" where not noted.
        starts: first position of each bin.
    """

    sample: Sample
    mass: list[list[float | None]]
    kept: list[list[float | None]]
    kinds: list[str]
    ends: list[bool]
    missed: list[float | None]
    tokens: list[str]
    starts: list[int]
    where: str

    @property
    def title(self) -> str:
        """Which sample it is."""
        s = self.sample
        named = f"{s.method} on {s.task} {s.kind}"
        return f"{named}, {whole(s.length)} tokens, sample {s.number}{self.where}"


def pictures(samples: Sequence[Sample]) -> tuple[list[Picture], int]:
    """The pictures to show, and how many there are: of each method the first, then further ones;
    those of dense last, since it misses nothing."""
    unique = {sample.key: sample for sample in samples}.values()
    found = [p for p in map(_picture, unique) if p is not None]
    seen: dict[str, int] = {}
    ranked = []
    for number, picture in enumerate(found):
        place = picture.sample.method
        seen[place] = seen.get(place, -1) + 1
        ranked.append((picture.sample.method == DENSE, seen[place], number, picture))
    ranked.sort(key=lambda entry: entry[:3])
    return [picture for *_, picture in ranked[:MOST]], len(found)


def _picture(sample: Sample) -> Picture | None:
    """None where the sample has none, or one without mass."""
    given = sample.extra.get("picture")
    if not isinstance(given, Mapping):
        return None
    mass = _grid(given.get("mass"))
    steps, bins = len(mass), max((len(row) for row in mass), default=0)
    if not steps or not bins:
        return None
    starts = _list(given.get("positions"), bins, None)
    where = [f"{name} {given[name]}" for name in ("layer", "head") if finite(given.get(name))]
    return Picture(
        sample=sample,
        mass=_shaped(mass, steps, bins),
        kept=_shaped(_grid(given.get("kept")), steps, bins),
        kinds=[str(kind) for kind in _list(given.get("kinds"), steps, "")],
        ends=[end is True for end in _list(given.get("ends"), steps, False)],
        missed=[v if finite(v) else None for v in _list(given.get("missed"), steps, None)],
        tokens=[str(token) for token in _list(given.get("tokens"), steps, "")],
        starts=[int(v) if finite(v) else i * sample.length // bins for i, v in enumerate(starts)],
        where=", ".join(["", *where]),
    )


def _list(value: Any, length: int, missing: Any) -> list[Any]:
    found = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    return (found + [missing] * length)[:length]


def _grid(value: Any) -> list[list[Any]]:
    return [_list(row, len(row) if isinstance(row, list) else 0, None) for row in value or ()
            ] if isinstance(value, list) else []  # fmt: skip


def _shaped(grid: Sequence[Sequence[Any]], steps: int, bins: int) -> list[list[float | None]]:
    rows = _list(grid, steps, [])
    return [[v if finite(v) else None for v in _list(row, bins, None)] for row in rows]


def picture_chart(number: int, picture: Picture) -> Chart:
    """Heat map of steps × bins; kept keys, missed mass, slow steps and sentence ends as marks."""
    steps = len(picture.mass)
    row = max(SHORTEST, min(TALLEST, 900 // steps))
    data = [_heat(picture), *_kept_lines(picture), _crosses(picture), *_gutter(picture)]
    if any(value is not None for value in picture.missed):
        data.append(_missed_bars(picture))
    return Chart(
        name=f"picture-{number}", title=picture.title, height=AROUND + row * steps,
        note="Down: steps, named by the token that each reads in. Across: positions of keys; "
        "blank cells are not there yet.",
        data=data, layout=_layout(picture, labels=row >= 11), cells=_cells(picture),
    )  # fmt: skip


def _heat(picture: Picture) -> dict[str, Any]:
    # no mass at all: the keys are not written yet, and the cell stays blank
    values = [[math.log10(max(v, 10**LEAST)) if v else None for v in row] for row in picture.mass]
    marks = range(int(LEAST), 1, 2)
    return {
        "type": "heatmap", "z": [[None if v is None else round(v, 3) for v in r] for r in values],
        "zmin": LEAST, "zmax": 0, "colorscale": "Cividis", "hoverongaps": False,
        "hovertemplate": "%{text}<extra></extra>", "xgap": 0, "ygap": 1,
        "colorbar": {"orientation": "h", "thickness": 10, "len": 0.72, "x": 0, "xanchor": "left",
                     "y": 1.0, "yanchor": "bottom", "outlinewidth": 0,
                     "ypad": 4, "tickangle": 0, "tickvals": list(marks),
                     "ticktext": [f"{100 * 10.0**mark:g} %" for mark in marks],
                     "title": {"text": "attention mass", "side": "top"}},
    }  # fmt: skip


def _cells(picture: Picture) -> dict[str, Any]:
    """What page.js makes the text of each cell from; as texts here it would be megabytes."""
    percents = [[None if v is None else round(100 * v) for v in row] for row in picture.kept]
    steps = zip(picture.tokens, picture.kinds, strict=True)
    return {
        "steps": [f"{safe(token)} {safe(kind)}".strip() for token, kind in steps],
        "starts": [whole(start) for start in picture.starts],
        "kept": percents,
    }


def _hover(picture: Picture, step: int, at: int) -> str:
    mass, kept = picture.mass[step][at], picture.kept[step][at]
    found = [f"<b>step {step}</b> {safe(picture.tokens[step])} {safe(picture.kinds[step])}".strip()]
    found.append(f"keys from {whole(picture.starts[at])}")
    found += [f"mass {percent(mass)}"] if mass is not None else []
    found += [f"{percent(kept)} of the keys read"] if kept is not None else []
    return "<br>".join(found)


def _kept_lines(picture: Picture) -> list[dict[str, Any]]:
    """A line through every run of cells whose keys were read; dark around light, so that it shows
    on every colour of the scale. On a step that reads everything a line would say nothing."""
    xs: list[float | None] = []
    ys: list[float | None] = []
    for step, row in enumerate(picture.kept):
        read = [bool(share) for share in row]
        if all(read) or picture.kinds[step] in EVERYTHING:
            continue
        for at, here in enumerate(read):
            if here and not (at and read[at - 1]):
                xs.append(at - 0.3)
                ys.append(step)
            if here and not (at + 1 < len(read) and read[at + 1]):
                xs += [at + 0.3, None]
                ys += [step, None]
    halves = ("#000", 4.0), ("#fff", 1.8)
    return [
        {"type": "scatter", "mode": "lines", "x": xs, "y": ys, "hoverinfo": "skip",
         "name": "keys read", "line": {"color": colour, "width": width}}
        for colour, width in halves
    ]  # fmt: skip


def unread(picture: Picture, step: int, at: int) -> float:
    """Mass of a cell on keys that the step did not read."""
    mass, kept = picture.mass[step][at], picture.kept[step][at]
    return 0.0 if mass is None or kept is None else mass * (1 - kept)


def _crosses(picture: Picture) -> dict[str, Any]:
    cells = [
        (step, at, unread(picture, step, at))
        for step, row in enumerate(picture.mass)
        for at in range(len(row))
        if unread(picture, step, at) >= MISSED
    ]
    return {
        "type": "scatter", "mode": "markers", "name": "missed",
        "x": [at for _, at, _ in cells], "y": [step for step, _, _ in cells],
        "text": [f"<b>missed {percent(lost)}</b><br>{_hover(picture, step, at)}"
                 for step, at, lost in cells],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"symbol": "x", "size": 7, "color": "#fff",
                   "line": {"color": "#000", "width": 1}},
    }  # fmt: skip


def _gutter(picture: Picture) -> list[dict[str, Any]]:
    """Slow steps and sentence ends beside the map, one column each."""
    slow = [step for step, kind in enumerate(picture.kinds) if kind == "slow"]
    full = [step for step, kind in enumerate(picture.kinds) if kind == "full"]
    ends = [step for step, end in enumerate(picture.ends) if end]
    columns = [
        ("slow step", 0, slow, "square", "var(--ink)"),
        ("dense step", 0, full, "square-open", "var(--ink)"),
        ("sentence end", 1, ends, "triangle-left", "var(--mark)"),
    ]
    return [
        {"type": "scatter", "mode": "markers", "xaxis": "x2", "x": [column] * len(steps),
         "y": steps, "name": name, "hovertemplate": "%{text}<extra></extra>",
         "text": [f"<b>step {step}</b> {safe(picture.tokens[step])}<br>{name}" for step in steps],
         "marker": {"symbol": symbol, "size": 8, "color": colour,
                    "line": {"width": 1.5, "color": colour}}}
        for name, column, steps, symbol, colour in columns if steps
    ]  # fmt: skip


def _missed_bars(picture: Picture) -> dict[str, Any]:
    known = [(step, v) for step, v in enumerate(picture.missed) if v is not None]
    return {
        "type": "bar", "orientation": "h", "xaxis": "x3", "name": "mass missed",
        "x": [100 * v for _, v in known], "y": [step for step, _ in known],
        "text": [f"<b>step {step}</b><br>missed {percent(v)} of its mass" for step, v in known],
        "hovertemplate": "%{text}<extra></extra>", "textposition": "none",
        "marker": {"color": "var(--s2)"},
    }  # fmt: skip


def _layout(picture: Picture, *, labels: bool) -> dict[str, Any]:
    steps, bins = len(picture.mass), len(picture.starts)
    ticks = sorted({i * bins // TICKS for i in range(TICKS)})
    down: dict[str, Any] = axis("", range=[steps - 0.5, -0.5], zeroline=False, showgrid=False)
    if labels and any(picture.tokens):
        texts = [f"{safe(_visible(token))} {step}" for step, token in enumerate(picture.tokens)]
        down |= {"tickvals": list(range(steps)), "ticktext": texts, "tickfont": {"size": 10}}
    else:
        down["title"] = {"text": "step", "standoff": 4}
    return {
        "yaxis": down, "bargap": 0.25,
        "xaxis": axis("", domain=[0, 0.72], tickvals=ticks, showgrid=False,
                      ticktext=[whole(picture.starts[at]) for at in ticks], zeroline=False,
                      range=[-0.5, bins - 0.5]),
        "xaxis2": axis("", domain=[0.735, 0.86], tickvals=[0, 1], ticktext=["slow", "end"],
                       tickangle=-90, range=[-0.9, 1.9], tickfont={"size": 10},
                       showgrid=False, zeroline=False),
        "xaxis3": axis("", domain=[0.88, 1], rangemode="tozero", nticks=3,
                       ticksuffix="%", tickangle=-90),
    }  # fmt: skip


def _visible(token: str) -> str:
    """A token as an axis label: short, and a line break can be seen."""
    text = token.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}").strip()
    return text if len(text) <= 10 else text[:9] + "\N{HORIZONTAL ELLIPSIS}"


def steps_table(number: int, picture: Picture) -> Table:
    """The picture in words: a row per step."""
    rows = []
    for step, token in enumerate(picture.tokens):
        row, lost = picture.mass[step], picture.missed[step]
        most = max(range(len(row)), key=lambda at: row[at] or 0.0)
        worst = max(range(len(row)), key=lambda at: unread(picture, step, at))
        missing = unread(picture, step, worst)
        kind = picture.kinds[step] + (", ends a sentence" if picture.ends[step] else "")
        rows.append(
            Row(
                head=f"{step} {_visible(token)}",
                cells=(
                    Cell(text=kind, words=True),
                    Cell(text=f"{whole(picture.starts[most])} ({percent(row[most] or 0.0)})"),
                    Cell(
                        text=f"{whole(picture.starts[worst])} ({percent(missing)})"
                        if missing
                        else "nothing"
                    ),
                    Cell(text="not noted" if lost is None else percent(lost)),
                ),
            )
        )
    heads = ("step", "what kind", "most mass, from key", "most missed, from key", "missed in all")
    return Table(
        name=f"steps-{number}", caption=picture.title, heads=heads, groups=(("", tuple(rows)),)
    )
