"""The report: sums against hand values, what failed or is missing, broken folders, hostile text."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reread.cli.options import command
from reread.cli.report_page import ReportOptions, report_command
from reread.errors import InputError
from reread.evaluation.intervals import bootstrap
from reread.evaluation.report import summarise, write_report
from reread.evaluation.report.charts import drawn, frontiers, safe, styles
from reread.evaluation.report.gaps import decode_gaps
from reread.evaluation.report.page import render
from reread.evaluation.report.pictures import picture_chart, pictures
from reread.evaluation.report.reading import read_folder
from reread.evaluation.report.tables import floors_table, scores_table
from reread.evaluation.tasks.base import Sample
from tests.unit.report_folder import HOSTILE, METHODS, write_folder, write_lines

ROOT = Path(__file__).resolve().parents[2]
RUN: dict[str, Any] = {
    "config": {"model": "m"},
    "methods": {"dense": {}, "ours": {}, "snapkv": {"press": "SnapKVPress"}},
    "places": [{"task": "t", "length": 100, "samples": 4}],
}


def made(
    method: str,
    scores: list[float | None],
    kind: str = "a",
    figures: dict[str, float] | None = None,
) -> list[Sample]:
    return [
        Sample(
            task="t", length=100, method=method, number=number, kind=kind,
            query=ord(kind[0]), score=score, error=None if score is not None else "out of memory",
            figures=figures or {},
        )
        for number, score in enumerate(scores)
    ]  # fmt: skip


def test_means_differences_and_intervals_are_those_by_hand() -> None:
    samples = made("dense", [1.0, 1.0, 1.0, 0.0]) + made("ours", [1.0, 0.0, 0.5, 0.0])
    line = summarise(RUN, samples).spots()["t", 100, "a"]["ours"]
    assert (line.score, line.count, line.failed, line.pairs) == (0.375, 4, 0, 4)
    assert line.difference == -0.375
    assert (line.low, line.high) == bootstrap([0.0, -1.0, -0.5, 0.0])
    assert line.low is not None
    assert line.low < -0.375 < (line.high or 0.0) <= 0.0
    dense = summarise(RUN, samples).spots()["t", 100, "a"]["dense"]
    assert (dense.score, dense.difference, dense.dense_can) == (0.75, None, True)


def test_the_order_of_samples_changes_nothing_and_the_later_of_two_counts() -> None:
    samples = made("dense", [1.0, 0.3, 0.1, 0.7]) + made("ours", [0.9, 0.2, 0.4, 0.6])
    assert summarise(RUN, samples) == summarise(RUN, samples[::-1])
    again = made("ours", [0.0])
    line = summarise(RUN, samples + again).spots()["t", 100, "a"]["ours"]
    assert line.count == 4
    assert line.score == pytest.approx(0.3)


def test_differences_are_over_samples_that_both_have() -> None:
    samples = made("dense", [1.0, 1.0]) + made("ours", [0.0, 1.0, 1.0, 1.0])
    line = summarise(RUN, samples).spots()["t", 100, "a"]["ours"]
    assert (line.score, line.difference, line.pairs) == (0.75, -0.5, 2)
    alone = summarise(RUN, made("dense", [1.0]) + made("ours", [0.0])).spots()["t", 100, "a"]
    assert (alone["ours"].difference, alone["ours"].low) == (-1.0, None)


def test_a_floor_shows_the_kind_that_a_mean_hides() -> None:
    samples = made("dense", [1.0] * 4) + made("dense", [1.0] * 4, "b") + made("dense", [0.0], "c")
    samples += made("ours", [1.0] * 4) + made("ours", [0.25] * 4, "b") + made("ours", [0.0], "c")
    (_, floor) = summarise(RUN, samples).floors
    assert floor.mean == pytest.approx(1.25 / 3)
    assert floor.lowest is not None
    assert floor.largest_loss is not None
    # dense cannot do c: a zero there is no floor of ours
    assert (floor.lowest.kind, floor.lowest.score) == ("b", 0.25)
    assert (floor.largest_loss.kind, floor.largest_loss.difference) == ("b", -0.75)
    whole = summarise(RUN, samples).whole("t", 100, "ours")
    assert whole is not None
    assert whole.score == pytest.approx(5 / 9)


def test_what_failed_is_never_a_number() -> None:
    samples = made("dense", [1.0] * 4) + made("snapkv", [None] * 4) + made("ours", [1.0, None])
    summary = summarise(RUN, samples)
    spot = summary.spots()["t", 100, "a"]
    assert (spot["snapkv"].score, spot["snapkv"].failed) == (None, 4)
    assert spot["snapkv"].errors == ("out of memory",)
    (row,) = scores_table(summary, frozenset({"ours"})).rows()
    texts = dict(zip(summary.methods, (cell.text for cell in row.cells), strict=True))
    assert texts == {"dense": "100.0", "ours": "failed", "snapkv": "failed"}
    floors = {
        row.head: [cell.text for cell in row.cells] for row in floors_table(summary, []).rows()
    }
    assert floors["snapkv"][:3] == floors["ours"][:3] == ["failed"] * 3
    kept, left = drawn(summary.floors)
    assert [floor.method for floor in kept] == ["dense"]
    assert left == ["ours (failed)", "snapkv (failed)"]


def test_a_mean_over_fewer_kinds_is_not_drawn_beside_others() -> None:
    samples = made("dense", [1.0]) + made("dense", [1.0], "b") + made("ours", [1.0])
    kept, left = drawn(summarise(RUN, samples).floors)
    assert ([f.method for f in kept], left) == (["dense"], ["ours (1 of 2 kinds measured)"])


def test_missing_samples_are_counted_but_not_fidelity_of_baselines() -> None:
    run = {**RUN, "places": [*RUN["places"], {"task": "fidelity", "length": 100, "samples": 1}]}
    samples = made("dense", [1.0] * 4) + made("ours", [1.0] * 3)
    left = {(m.task, m.method): m.samples for m in summarise(run, samples).missing}
    assert left == {("t", "ours"): 1, ("t", "snapkv"): 4,
                    ("fidelity", "dense"): 1, ("fidelity", "ours"): 1}  # fmt: skip


def test_rows_are_worst_first_by_our_methods() -> None:
    samples = [s for kind in "abc" for s in made("dense", [1.0] * 4, kind)]
    samples += (
        made("ours", [1.0] * 4, "a") + made("ours", [0.0] * 4, "b") + made("ours", [0.5] * 4, "c")
    )
    samples += made("snapkv", [0.0] * 4, "a")
    rows = scores_table(summarise(RUN, samples), frozenset({"ours"})).rows()
    assert [row.head[-1] for row in rows] == ["b", "c", "a"]


def test_gaps_of_decoding_pair_an_indexer_with_the_oracle_of_its_name() -> None:
    samples = made("dense", [1.0] * 4) + made("oracle", [1.0, 1.0, 1.0, 0.0])
    samples += made("indexer", [1.0, 1.0, 0.0, 0.0]) + made("indexer@3%", [0.0] * 4)
    found = decode_gaps(samples, summarise({"methods": {}}, samples))
    assert [(gap["gap"], gap["of"], gap["value"]) for gap in found] == [
        ("oracle gap", ["dense", "oracle"], 0.25),
        ("indexer gap", ["oracle", "indexer"], 0.25),
    ]


def test_without_speed_the_cost_is_the_share_of_keys() -> None:
    samples = made("dense", [1.0], figures={"keys_read_share": 1.0})
    samples += made("ours", [0.5], figures={"keys_read_share": 0.03})
    summary = summarise(RUN, samples)
    looks = styles(summary.methods)
    ((_, (chart,)),) = frontiers(summary, [], looks)
    assert [(t["x"], t["y"]) for t in chart.data[1:]] == [([1.0], [100.0]), ([0.03], [50.0])]
    timed = [
        {"method": m, "length": 100, "ms_per_token": 5.0, "ttft_s": 0.1} for m in ("dense", "ours")
    ]
    ((_, charts),) = frontiers(summary, timed, looks)
    assert [chart.title.rpartition(" against ")[2] for chart in charts] == [
        "ms per token",
        "TTFT in ms",
    ]
    assert charts[1].data[1]["x"] == [100.0]


def page_of(folder: Path) -> str:
    """The page without plotly.js, which is long and no text of ours."""
    held = read_folder(folder)
    return render(held, summarise(held.run, held.samples), "")


def test_plotly_accepts_every_chart(tmp_path: Path) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects", reason="plotly is not installed")
    for chart in embedded(page_of(write_folder(tmp_path / "run", cases=4)), "charts"):
        coloured = json.loads(re.sub(r"var\(--[a-z0-9-]+\)", "#123456", json.dumps(chart)))
        graph_objects.Figure(data=coloured["data"], layout=coloured["layout"])


def test_no_two_of_forty_methods_look_the_same() -> None:
    looks = styles([f"m{i}" for i in range(40)])
    assert len({(look.colour, look.symbol) for look in looks}) == 40


class Page(HTMLParser):
    """What a page holds: its text, and scripts apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] not in (["script"], ["style"]):
            self.words.append(data)


def embedded(text: str, name: str) -> Any:
    found = re.search(f'<script type="application/json" id="{name}">(.*?)</script>', text, re.S)
    assert found is not None
    return json.loads(found[1])


def test_a_page_stands_alone_and_text_of_others_stays_text(tmp_path: Path) -> None:
    calm = page_of(write_folder(tmp_path / "calm", cases=3))
    hostile = page_of(write_folder(tmp_path / "hostile", cases=3, hostile=True))
    page = Page(hostile)
    assert page.tags.count("script") == Page(calm).tags.count("script") == 4
    assert "img" not in page.tags
    assert page.handlers == []
    assert {a for a in page.addresses if not a.startswith("#")} == {"data:,"}
    assert HOSTILE in "".join(page.words)
    assert embedded(hostile, "sums")["run"]["config"]["model"] == HOSTILE
    for chart in embedded(hostile, "charts"):
        assert "<img" not in json.dumps(chart["data"])
    assert "default-src 'none'" in hostile
    assert safe("<b>&") == "&lt;b&gt;&amp;"


def test_methods_with_hostile_names_stay_text(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({**RUN, "methods": {"dense": {}, HOSTILE: {}}}))
    samples = (
        made("dense", [1.0] * 4) + made(HOSTILE, [0.5] * 4) + made(HOSTILE, [None], HOSTILE[0])
    )
    write_lines(folder / "samples.jsonl", [sample.to_dict() for sample in samples])
    page = Page(page_of(folder))
    assert "img" not in page.tags
    assert page.tags.count("script") == 4


def test_a_partial_run_says_so(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run", cases=3)
    assert "partial" not in "".join(Page(page_of(folder)).words)
    lines = (folder / "samples.jsonl").read_text().splitlines(keepends=True)
    (folder / "samples.jsonl").write_text("".join(lines[:-20]) + lines[-20][:25])
    words = "".join(Page(page_of(folder)).words)
    assert "This report is partial. 20 samples" in words.replace("\n", " ")
    assert "The last line of samples.jsonl ends early" in words


def test_a_run_without_samples_gives_a_report(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    words = "".join(Page(page_of(tmp_path)).words)
    assert "Nothing was measured yet" in words
    assert "12 samples are still to be measured" in words


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.json", "{", "run.json is no JSON"),
        ("run.json", '{"methods": []}', "'methods' is no JSON object"),
        ("run.json", '{"places": [{"task": "t"}]}', "an entry of 'places' has no 'length'"),
        ("samples.jsonl", "{}\n", "samples.jsonl, line 1 has no 'task'"),
        ("samples.jsonl", "{\n{}", "samples.jsonl, line 1 is no JSON"),
        ("samples.jsonl", "[]\n", "samples.jsonl, line 1 holds no JSON object"),
        ("speed.jsonl", '{"method": "dense"}\n', "speed.jsonl, line 1 has no 'length'"),
        ("gaps.json", "{}", "no list of gaps"),
    ],
)
def test_broken_folders_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=re.escape(message)):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score": "high"}, "'score' is 'high'"),
        ({"score": 2.0}, "not between 0 and 1"),
        ({"length": "4096"}, "'length' is '4096'"),
        ({"speed": 1}, "no sample of `reread eval`"),
    ],
)
def test_broken_samples_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    good = made("dense", [1.0])[0].to_dict()
    write_lines(tmp_path / "samples.jsonl", [good, {**good, **change}])
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        read_folder(tmp_path)
    assert "line 2" in str(caught.value)


def test_a_folder_without_run_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no run\.json"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    "given",
    [
        {"mass": [[0.5, 0.5]]},
        {"mass": [[0.5], [0.25, None]], "kept": [[1.0]], "kinds": ["slow"], "tokens": ["a"]},
        {"mass": [[0.0, 1.0]], "ends": [True], "missed": [None], "positions": [0], "kept": None},
    ],
)
def test_pictures_with_missing_parts_are_drawn(given: dict[str, Any]) -> None:
    sample = Sample(task="t", length=100, method="m", number=0, kind="k", score=1.0,
                    extra={"picture": given})  # fmt: skip
    (picture,), there = pictures([sample])
    chart = picture_chart(0, picture)
    assert there == 1
    assert len(chart.data[0]["z"]) == len(given["mass"])


@pytest.mark.parametrize("given", [None, "none", {}, {"mass": []}, {"mass": [[]]}, {"mass": 3}])
def test_no_picture_is_no_error(given: Any) -> None:
    sample = Sample(task="t", length=100, method="m", number=0, kind="k", score=1.0,
                    extra={"picture": given})  # fmt: skip
    assert pictures([sample]) == ([], 0)


def test_a_picture_marks_kept_runs_and_missed_mass() -> None:
    given = {
        "mass": [[0.5, 0.1, 0.4]],
        "kept": [[1.0, 1.0, 0.0]],
        "kinds": ["fast"],
        "ends": [True],
    }
    sample = Sample(task="t", length=100, method="m", number=0, kind="k", score=1.0,
                    extra={"picture": given})  # fmt: skip
    traces = {trace.get("name"): trace for trace in picture_chart(0, pictures([sample])[0][0]).data}
    assert traces["keys read"]["x"] == [-0.3, 1.3, None]
    assert (traces["missed"]["x"], traces["missed"]["y"]) == ([2], [0])
    assert traces["sentence end"]["y"] == [0]
    assert "slow step" not in traces


def test_the_command_writes_where_it_is_told(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="plotly is not installed")
    import typer

    app = typer.Typer()
    app.command()(command(report_command, ReportOptions))
    folder = write_folder(tmp_path / "run", cases=2)
    out = tmp_path / "deep/page.html"
    found = CliRunner().invoke(app, [str(folder), "--out", str(out), "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout) == {"report": str(out)}
    assert out.read_text().startswith("<!doctype html>")
    missing = CliRunner().invoke(app, [str(tmp_path / "nowhere")])
    assert missing.exit_code == 2
    assert "run.json" in missing.output


def test_without_plotly_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(InputError, match=r"pip install 'reread\[report\]'"):
        write_report(write_folder(tmp_path / "run", cases=1))


def test_templates_are_shipped() -> None:
    shipped = (ROOT / "pyproject.toml").read_text()
    for path in (ROOT / "src/reread/evaluation/report").glob("page.*"):
        assert path.suffix == ".py" or f"evaluation/report/*{path.suffix}" in shipped


def test_the_real_result_of_gaps_is_read(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    (tmp_path / "gaps.json").write_text((ROOT / "benchmarks/results/gaps_4k.json").read_text())
    gaps = read_folder(tmp_path).gaps
    assert gaps is not None
    assert {"oracle gap", "indexer gap", "realisation gap"} <= {gap["gap"] for gap in gaps["gaps"]}


def test_the_generator_covers_every_method() -> None:
    from tests.unit.report_folder import QUALITY

    assert set(METHODS.split(",")) == set(QUALITY)
