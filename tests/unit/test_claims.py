"""Every table of the README comes from a result file of this repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import readme
from benchmarks.common import RESULTS


def test_the_readme_shows_what_the_result_files_hold() -> None:
    text = readme.README.read_text(encoding="utf-8")
    assert readme.render(text) == text


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda p: p.stem)
def test_a_result_says_where_it_comes_from(path: Path) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    assert {"config", "versions", "device", "commit"} <= result.keys()


def test_the_picture_shows_what_the_result_files_hold(tmp_path: Path) -> None:
    plots = pytest.importorskip("benchmarks.plots", reason="matplotlib is not installed")
    drawn = tmp_path / "drawn.svg"
    plots.draw(drawn)
    assert drawn.read_bytes() == plots.TARGET.read_bytes()


def test_the_default_preset_holds_denses_quality_on_the_gpu() -> None:
    """Within 0.01 of dense in every cell, with the budget that the speed tables use."""
    rows = {(r["variant"], r["tokens"]): r for r in readme.load("needle_gpu")["rows"]}
    lengths = {tokens for _, tokens in rows}
    assert len(lengths) == 3
    for tokens in lengths:
        ours, dense = rows["default", tokens], rows["dense", tokens]
        assert ours["settings"]["k"] == readme.load("gpu_decode")["config"]["k"]
        assert ours["fast_keys_share"] <= 0.05
        for kind in ("code", "note", "chain"):
            assert ours[kind] >= dense[kind] - 0.01, (tokens, kind)


def test_the_default_preset_beats_the_paper_preset_in_kl_at_every_budget() -> None:
    rows = {row["variant"]: row for row in readme.load("fidelity")["rows"]}
    budgets = [name.removeprefix("default") for name in rows if name.startswith("default, K=")]
    assert len(budgets) >= 4
    for budget in budgets:
        assert rows[f"default{budget}"]["kl"] < rows[f"paper{budget}"]["kl"], budget
