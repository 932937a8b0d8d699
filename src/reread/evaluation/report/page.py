"""The page: what the folder holds, put into the template with all that it needs to stand alone."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import InputError
from ..intervals import DENSE

if TYPE_CHECKING:
    from .reading import Folder
    from .sums import Summary

TEMPLATE = "page.html"


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the report of a result folder as one HTML file that needs nothing else.

    Args:
        folder: written by `reread eval`; a part of a run is enough.
        out: file to write; None: report.html in the folder.

    Returns:
        The file.

    Raises:
        InputError: plotly is not there, the folder or a file in it cannot be read, or the report
            cannot be written.
    """
    from .reading import read_folder
    from .sums import summarise

    script = _plotly()
    held = read_folder(folder)
    text = render(held, summarise(held.run, held.samples), script)
    target = folder / "report.html" if out is None else out
    partial = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # half a character, as JSON may hold, is no text
        partial.write_text(text, encoding="utf-8", errors="replace")
        partial.replace(target)
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):  # what cannot be removed was never made
            partial.unlink(missing_ok=True)
    return target


def _plotly() -> str:
    """plotly.js as plotly's package ships it."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]  # it has none
    except ImportError as error:
        raise InputError("a report needs plotly: pip install 'reread[report]'") from error
    return str(get_plotlyjs())


def render(held: Folder, summary: Summary, script: str) -> str:
    """The page's text.

    Args:
        script: plotly.js.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise InputError("a report needs Jinja2: pip install 'reread[report]'") from error

    environment = Environment(
        loader=PackageLoader("reread.evaluation", "report"),
        autoescape=True,  # answers, errors and names are text of others
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    content = _content(held, summary)
    # our own files and plotly's, which are no text to escape
    parts = {name: Markup(_part(f"page.{name}")) for name in ("css", "js")}
    return environment.get_template(TEMPLATE).render(script=Markup(script), **parts, **content)


def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _content(held: Folder, summary: Summary) -> dict[str, Any]:
    """What the template shows."""
    content = _said(held, summary) | _measured(held, summary) | _gaps(held, summary)
    content |= _pictures(held)
    shown = [chart for _, here in content["frontiers"] for chart in here]
    shown += [*content["by_length"], *content["by_depth"]]
    shown += [chart for chart, _ in content["pictures"]]
    content["charts"] = [plain(dataclasses.asdict(chart)) for chart in shown]
    content["contents"] = list(_contents(content))
    return content


def _said(held: Folder, summary: Summary) -> dict[str, Any]:
    """What was run, with what, and what is lacking."""
    from . import facts

    run = held.run
    return {
        "model": str(run["config"].get("model", "an unnamed model")),
        "lead": facts.lead(held, summary),
        "facts": facts.headline(held, summary),
        "partial": sum(missing.samples for missing in summary.missing),
        "missing": facts.missing_table(summary),
        "failures": facts.failures_table(held.samples),
        "skipped": facts.skipped_table(run["skipped"]),
        "speed": facts.speed_table(held.speed),
        "baselines": [name for name, method in run["methods"].items() if method.get("press")],
        "notes": [*held.notes, *map(str, run["notes"])],
        "settings": facts.differing_settings(run["methods"]),
        "methods": {name: json.dumps(m, indent=1) for name, m in run["methods"].items()},
        "versions": [(str(k), str(v)) for k, v in run["versions"].items()],
        "config": [(str(k), str(v)) for k, v in run["config"].items()],
        "device": [(str(k), str(v)) for k, v in run["device"].items()],
        "commit": run["commit"],
    }


def _measured(held: Folder, summary: Summary) -> dict[str, Any]:
    """Tables and charts of what was measured."""
    from . import charts, depth, tables

    ours = frozenset(
        name for name, method in held.run["methods"].items()
        if not method.get("press") and name != DENSE
    )  # fmt: skip
    looks = charts.styles(summary.methods)
    depths = list(depth.depths(held.samples, summary))
    return {
        "floors": tables.floors_table(summary, held.speed),
        "kinds": tables.scores_table(summary, ours),
        "tasks": tables.scores_table(summary, ours, whole_tasks=True),
        "fidelity": tables.fidelity_table(summary),
        "looks": looks,
        "frontiers": charts.frontiers(summary, held.speed, looks),
        "by_length": charts.by_length(summary, looks),
        "by_depth": depth.by_depth(depths, looks),
        "depths": depth.depths_table(depths),
        "sums": plain(sums(held, summary, depths)),
    }


def _gaps(held: Folder, summary: Summary) -> dict[str, Any]:
    """The gaps of decoding, and those of a result of `reread eval gaps` beside it."""
    from . import gaps

    found = gaps.decode_gaps(held.samples, summary)
    given = {"gaps": [], "notes": []} if held.gaps is None else held.gaps
    return {
        "decode_gaps": gaps.gap_tables("decode-gap", "decoding", found),
        "oracle_missing": gaps.oracle_missing(summary.methods),
        "prefill_gaps": gaps.gap_tables("prefill-gap", "sparse prefill", given["gaps"]),
        "gap_notes": [str(note) for note in given.get("notes") or []],
    }


def _contents(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Anchors and titles of the sections that have something to show."""
    if content["floors"].size:
        yield "s-floors", "Mean and floor"
    if content["failures"].size or content["skipped"].size or content["partial"]:
        yield "s-failed", "Failed, skipped, missing"
    if content["frontiers"]:
        yield "s-frontier", "Quality against cost"
    if content["kinds"].size:
        yield "s-kinds", "Every kind of question"
    if content["fidelity"].size:
        yield "s-fidelity", "Fidelity on text"
    if content["decode_gaps"] or content["prefill_gaps"]:
        yield "s-gaps", "Gaps"
    if content["by_length"] or content["by_depth"]:
        yield "s-depth", "Length and depth"
    if content["pictures"]:
        yield "s-pictures", "What the model read"
    yield "s-unequal", "What is not equal"
    yield "s-config", "Configuration"


def _pictures(held: Folder) -> dict[str, Any]:
    from . import pictures

    shown, there = pictures.pictures(held.samples)
    return {
        "pictures": [
            (pictures.picture_chart(i, picture), pictures.steps_table(i, picture))
            for i, picture in enumerate(shown)
        ],
        "pictures_there": there,
        "crossed": f"{100 * pictures.MISSED:g}",
    }


def sums(held: Folder, summary: Summary, depths: list[Any]) -> dict[str, Any]:
    """The report's numbers, unrounded."""
    return {
        "run": held.run,
        "lines": [dataclasses.asdict(line) for line in summary.lines],
        "floors": [dataclasses.asdict(floor) for floor in summary.floors],
        "missing": [dataclasses.asdict(missing) for missing in summary.missing],
        "depths": [dataclasses.asdict(line) for line in depths],
        "speed": list(held.speed),
        "gaps": None if held.gaps is None else held.gaps["gaps"],
    }


def plain(value: Any) -> Any:
    """The same without NaN and infinities, which JSON of browsers does not know."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
