"""The published tables as data, their verdicts, and one smoke run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper import quality, show, smoke, speed
from benchmarks.paper.__main__ import main
from benchmarks.paper.asked import Asked, Measured
from benchmarks.paper.expected import (
    OUTSIDE,
    WITHIN,
    Expected,
    Found,
    Quality,
    Run,
    Spot,
    Table,
    Tolerance,
    binomial,
    label_for,
    paired,
    verdict,
)
from benchmarks.paper.tables import TABLES, named
from reread import InputError
from reread.evaluation.methods import parse_methods
from reread.evaluation.tasks.base import Sample
from reread.shapes import Shape
from tests.conftest import SHARED
from tests.unit import needle_checkpoint

PUBLISHED = SHARED / "docs" / "published.md"
ROW = Expected(
    model="m", name="r", spot=Spot(arm="a"), value=40.0,
    tolerance=Tolerance(amount=2.0, why="a reason"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv(smoke.MODEL, raising=False)


def numbers_of_tables(text: str) -> Iterator[float]:
    """All numbers in cells of a document's tables, but for the names of models and contexts."""
    for line in text.splitlines():
        if line.startswith("|") and not line.startswith(("|---", "| model", "| method")):
            for cell in line.strip("|").split("|")[1:]:
                yield from (float(number) for number in re.findall(r"\d+(?:\.\d+)?", cell))


def test_every_number_of_the_published_tables_is_there() -> None:
    if not PUBLISHED.is_file():
        pytest.skip("the published numbers are not here: expected ../shared/docs/published.md")
    rows = [row for table in TABLES.values() for row in table.rows]
    known = {row.value for row in rows} | {round(100 * row.spot.share, 1) for row in rows}
    found = set(numbers_of_tables(PUBLISHED.read_text(encoding="utf-8")))
    assert len(found) == 80
    assert found <= known, sorted(found - known)


def test_every_number_of_longbench_v2_stands_in_its_own_row() -> None:
    if not PUBLISHED.is_file():
        pytest.skip("the published numbers are not here: expected ../shared/docs/published.md")
    text = PUBLISHED.read_text(encoding="utf-8").split("baselines at 50 % kept:")[1]
    values = {
        row.name: row.value for row in named("sfi-longbench-v2").rows if row.model == "4B"
    }  # fmt: skip
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    parts = [cell.strip() for cell in lines[0][1:]]
    for name, *cells in lines[2:12]:
        for part, cell in zip(parts, cells, strict=True):
            assert values[f"{name.strip()}, {part}"] == float(cell)
    assert lines[11][0].strip() == "PyramidKV"


def test_numbers_that_stand_in_sentences_are_there() -> None:
    values = {name: {row.value for row in table.rows} for name, table in TABLES.items()}
    assert {41.40, 43.19, 46.91, 48.13, 54.52, 54.56} <= values["sfi-longbench-v1"]
    assert {34.2, 34.8, 34.3, 46.0, 47.6, 52.4} <= values["sfi-longbench-v2"]
    assert {46.10, 45.79, 46.77, 46.52} <= values["sfi-ablation"]
    assert {759.0, 65.0, 1400.0, 935.0} <= values["sfi-throughput"]
    assert {1.71, 1.93, 3.44} <= values["osp-ttft"]
    assert {0.48, 87.9, 96.0} <= values["osp-budget"]
    assert {2.04, 1.13} <= values["osp-distilled"]
    assert {90.8, 90.2, 0.6, 5.0} <= values["osp-ruler-32k"]


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_tables_are_consistent(table: Any) -> None:
    assert len({(row.model, row.name) for row in table.rows}) == len(table.rows)
    assert {row.model for row in table.rows} == set(table.models)
    assert table.notes
    for row in table.rows:
        assert (row.value is None) == (row.tolerance is None), row.name
        if row.tolerance is not None:
            assert row.tolerance.amount > 0
            assert len(row.tolerance.why) > 20
    if isinstance(table.work, Quality):
        arms = table.work.arms
        parse_methods(",".join(arms.values()), "folder")
        assert all(set(run.arms) <= set(arms) for run in table.work.runs)
        assert all({row.spot.arm, row.spot.against or row.spot.arm} <= set(arms)
                   for row in table.rows)  # fmt: skip
        parse_methods(",".join(map(smoke.shrunk, arms.values())), "folder")


def test_shapes_and_cells_of_the_throughput_are_those_of_its_rows() -> None:
    table = named("sfi-throughput")
    for row in table.rows:
        if not row.absent:
            assert Shape.named(table.work.shapes[row.model])  # type: ignore[union-attr]  # a Decode
            cells = table.work.cells[row.model]  # type: ignore[union-attr]  # a Decode
            assert (row.spot.rows, row.spot.length) in cells


def test_the_cell_that_cannot_have_been_resident() -> None:
    cache = 16 * 131_072 * Shape.named("qwen3-4b").kv_bytes_per_token()
    assert round(cache / 1e9) == 309
    assert any("309 GB" in note for note in named("sfi-throughput").notes)


def test_verdicts_by_hand() -> None:
    assert verdict(ROW, Found(42.0)) == WITHIN
    assert verdict(ROW, Found(42.1)) == OUTSIDE
    assert verdict(ROW, Found(37.9)) == OUTSIDE
    assert verdict(replace(ROW, sense="at least"), Found(60.0)) == WITHIN
    assert verdict(replace(ROW, sense="at least"), Found(37.9)) == OUTSIDE
    assert verdict(replace(ROW, sense="at most"), Found(0.0)) == WITHIN
    assert verdict(replace(ROW, sense="at most"), Found(42.1)) == OUTSIDE
    assert verdict(ROW, Found(60.0), "smoke") == "not judged: smoke"
    assert verdict(ROW, Found(60.0, "few cases")) == "not judged: few cases"
    assert verdict(ROW, Found(reason="no GPU")) == "not run: no GPU"
    assert verdict(replace(ROW, absent="an NPU"), Found(40.0)) == "not run: an NPU"
    assert verdict(replace(ROW, value=None, tolerance=None), Found(1.0)) == "nothing published"


def test_tolerances_by_hand() -> None:
    assert binomial(50.0, 400).amount == 5.0  # 2 sqrt(.25 / 400) = 5 %
    assert paired(400, 0.04).amount == 2.0


def sample(task: str, method: str, number: int, score: float | None, **figures: float) -> Any:
    made = Sample(
        task=task, length=64, method=method, number=number, kind=task, score=score,
        figures=figures, error=None if score is not None else "broke",
    )  # fmt: skip
    return quality.Entry(made, method, 4096, frozenset({"easy"} if number else {"hard"}))


def row(**spot: Any) -> Expected:
    return replace(ROW, spot=Spot(**spot))


def test_means_over_samples_tasks_and_families() -> None:
    entries = [
        sample("ruler_vt", "a", 0, 1.0), sample("ruler_vt", "a", 1, 0.0),
        sample("ruler_cwe", "a", 0, 1.0), sample("longbench2_x", "a", 0, 0.0),
    ]  # fmt: skip
    assert quality.average(entries, "samples") == 0.5
    assert quality.average(entries, "tasks") == 0.5  # 0.5, 1 and 0
    assert quality.average(entries, "families") == 0.375  # 0.75 and 0
    found = quality.value_of(row(arm="a", part="easy"), entries, "samples", {})
    assert found == Found(0.0)
    assert quality.value_of(row(arm="a", part="ruler"), entries, "tasks", {}) == Found(75.0)
    assert quality.value_of(row(arm="a", length=8192), entries, "tasks", {}).value is None


def test_differences_are_over_the_samples_that_both_have() -> None:
    entries = [
        sample("t", "a", 0, 1.0, fast_steps=3, fast_keys_share=0.1), sample("t", "a", 1, 1.0),
        sample("t", "b", 0, 0.5, fast_steps=0),
    ]  # fmt: skip
    assert quality.value_of(row(arm="a", against="b"), entries, "samples", {}).value == 50.0
    failed = [*entries, sample("t", "b", 1, None)]
    found = quality.value_of(row(arm="a", against="b"), failed, "samples", {})
    assert found.value is None
    assert "broke" in found.reason
    gone = quality.value_of(row(arm="c"), entries, "samples", {"c": "no kvpress"})
    assert gone == Found(reason="no kvpress")


def test_what_is_dense_by_construction_is_not_judged() -> None:
    slow = [sample("t", "a", 0, 1.0, fast_steps=0, fast_keys_share=0.5)]
    assert "no fast step" in quality.value_of(row(arm="a"), slow, "samples", {}).reason
    whole = [sample("t", "a", 0, 1.0, prefill_keys_share=1.0)]
    assert "within the budget" in quality.value_of(row(arm="a"), whole, "samples", {}).reason
    half = [sample("t", "a", 0, 1.0, prefill_keys_share=0.25)]
    assert quality.value_of(row(arm="a"), half, "samples", {}) == Found(100.0)
    sparsity = quality.value_of(row(arm="a", figure="sparsity"), half, "samples", {})
    assert sparsity == Found(75.0)


def test_values_of_the_benchmarks_records() -> None:
    arm = {"speedup": 2.0, "tokens_per_s": 90.0}
    cell = {
        "rows": 16, "context": 8192, "fastest_dense": "x", "slow_fast": {"rows": {"1/20": arm}},
        "dense": [{"arm": "y", "not_run": "z"}, {"arm": "x", "tokens_per_s": 45.0}],
    }  # fmt: skip
    cells = {("m", 16, 8192): cell, ("m", 16, 9000): {"failed": "too large"}}
    values = [
        speed.of_cell(row(rows=16, length=8192, figure=figure), cells, 20.0).value
        for figure in ("speedup", "dense", "sparse")
    ]
    assert values == [2.0, 45.0, 90.0]
    assert speed.of_cell(row(rows=16, length=9000), cells, 20.0) == Found(reason="too large")
    assert speed.of_cell(row(rows=1, length=9000), cells, 20.0).value is None
    records = [
        {"kernel": "dense", "arm": "reread", "us": 50.0, "length": 1000},
        {"kernel": "dense", "arm": "cudnn", "us": 40.0, "length": 1000},
        {"kernel": "sparse", "keys": 16, "run": 32, "speedup": 9.0},
        {"kernel": "sparse", "keys": 16, "run": 1, "speedup": 8.0},
    ]
    assert speed.of_kernel(row(share=0.016), records) == Found(8.0)
    assert speed.of_kernel(row(share=1.0), records) == Found(0.8)
    ran = {("m", 1, 9): {"speedup": 1.5}, ("m", 1, 10): {"sparse": {"failed": "broke"}}}
    assert speed.of_prefill(row(length=9), ran) == Found(1.5)
    assert speed.of_prefill(row(length=10), ran) == Found(reason="broke")


def test_a_limit_below_what_the_tolerance_is_for_judges_nothing(tmp_path: Path) -> None:
    work = named("osp-shared").work
    few = Asked(label="Qwen3-8B", model="m", out=tmp_path, limit=5)
    assert isinstance(work, Quality)
    assert "--limit 5" in quality.judgeable(Found(3.0), work, few).reason
    assert quality.judgeable(Found(3.0), work, replace(few, limit=100)) == Found(3.0)


def test_a_row_outside_its_tolerance_counts(tmp_path: Path) -> None:
    table = named("osp-budget")
    asked = Asked(label="Qwen3.5-9B", model="m", out=tmp_path)
    measured = Measured(found={row: Found(0.0) for row in table.rows})
    judged = show.lines(table, asked, measured)
    assert show.outside(judged) == 2  # the two sparsities; a loss of 0 is within
    assert show.outside(show.lines(table, replace(asked, smoke=True), measured)) == 0


def test_labels() -> None:
    table = named("sfi-longbench-v2")
    assert label_for(table, "Qwen/qwen3-4b-instruct-2507", None) == "4B"
    assert label_for(table, "/data/Qwen3-235B-A22B-Instruct-2507/", None) == "235B-A22B"
    assert label_for(table, "/data/mine", "4B") == "4B"
    assert label_for(named("sfi-ablation"), "/data/mine", None) == "30B-A3B"
    with pytest.raises(InputError, match="--as"):
        label_for(table, "/data/mine", None)
    with pytest.raises(InputError, match="'8B' is no model"):
        label_for(table, "/data/mine", "8B")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sfi-longbench-v9"], "'sfi-longbench-v9' is unknown"),
        (["sfi-longbench-v2"], "needs --model"),
        (["osp-ruler-32k", "--model", "nowhere"], "give --indexer"),
        (["sfi-longbench-v2", "--model", "m", "--limit", "0"], "--limit 0"),
        (["sfi-longbench-v2", "--model", "m", "--data", "nowhere"], "no folder"),
        (["sfi-longbench-v2", "--model", "m"], "add --as"),
        (["sfi-ablation", "--smoke", "--model", "no/such/folder"], "no/such/folder"),
    ],
)
def test_bad_input(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_list_prints_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in TABLES)
    assert main(["list", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert [entry["table"] for entry in described] == list(TABLES)


def test_smoke_run_of_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # as where LongBench's scorers are not installed: retrieval instead, which needs no lm-eval
    monkeypatch.setattr(smoke, "find_spec", lambda name: None)
    model = needle_checkpoint.save(tmp_path / "model")
    out = tmp_path / "out"
    command = ["sfi-ablation", "--smoke", "--model", str(model), "--out", str(out), "--json"]
    assert main(command) == 0
    printed, said = capsys.readouterr()
    result = json.loads((out / "sfi-ablation" / show.RESULT).read_text(encoding="utf-8"))
    assert json.loads(printed) == result
    assert "says nothing about the published value" in said
    assert "documents were made up" in said
    assert {"versions", "device", "commit"} <= set(result)
    assert [row["value"] for row in result["rows"]] == [46.10, 45.79, 46.77, 46.52, 0.31, 0.25]
    assert all(row["measured"] is not None for row in result["rows"])
    assert all(row["verdict"].startswith("not judged: smoke") for row in result["rows"])
    (detail,) = result["details"]
    assert {method["config"]["k"] for method in detail["methods"].values()} == {3836 // 16}
    assert all(line["figures"]["fast_steps"] > 0 for line in detail["lines"])


@pytest.mark.parametrize(("value", "code"), [(0.0, 0), (50.0, 1)])
def test_a_full_run_judges(
    value: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    difference = Spot(arm="sparse", against="dense", part="needle", length=600)
    table = Table(
        name="made-up", paper="none", section="none", models={"m": "nobody/model"}, hardware="any",
        rows=(replace(ROW, value=value, spot=difference), replace(ROW, spot=Spot(arm="gone"))),
        work=Quality(
            arms={"dense": "dense", "sparse": "default:k=16:recent=16"},
            runs=(Run(tasks=("needle",), lengths=(600,), arms=("dense", "sparse"), limit=1,
                      smoke=("needle",)),),
        ),
    )  # fmt: skip
    monkeypatch.setitem(TABLES, "made-up", table)
    model = needle_checkpoint.save(tmp_path / "model")
    command = ["made-up", "--model", str(model), "--out", str(tmp_path), "--json"]
    assert main(command) == code
    judged, missing = json.loads(capsys.readouterr().out)["rows"]
    assert judged["verdict"] == (OUTSIDE if code else WITHIN)
    assert judged["difference"] == judged["measured"] - value
    assert missing["verdict"].startswith("not run: no sample of gone")


def test_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "BESIDE", tmp_path / "nothing")
    shared, reasoning = named("osp-shared"), named("sfi-reasoning")
    assert smoke.stand_in(shared, None) == "smollm2"
    monkeypatch.setenv(smoke.MODEL, "/data/needle")
    assert smoke.stand_in(shared, None) == "/data/needle"
    assert smoke.stand_in(shared, "mine") == "mine"
    assert smoke.stand_in(reasoning, None) == "smollm2"
    with pytest.raises(InputError, match="strings that end answers"):
        smoke.stand_in(reasoning, str(needle_checkpoint.save(tmp_path / "model")))


def test_smoke_run_of_the_kernels_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = needle_checkpoint.save(tmp_path / "model")
    assert main(["sfi-kernel", "--smoke", "--model", str(model), "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("needs a GPU") == 9
    assert "CPU, reference" in out
