"""The mass profile against a computation in NumPy from the model's own attention matrices."""

from __future__ import annotations

import builtins
import importlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reread.errors import InputError
from reread.evaluation.mass import (
    TARGETS,
    MassProfile,
    blocks_asked,
    check_plot,
    draw,
    mass_profile,
    positions_asked,
)

from . import tiny_checkpoint

LENGTH, BLOCK, QUERIES = 150, 16, 40
KS = (1, 4, 20, LENGTH, 10 * LENGTH)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 90, (LENGTH,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def profile(ids: torch.Tensor) -> MassProfile:
    return mass_profile(tiny_checkpoint.model(), ids, KS, queries=QUERIES, block=BLOCK)


@pytest.fixture(scope="module")
def attention(ids: torch.Tensor) -> list[np.ndarray[Any, Any]]:
    """Per layer, probabilities averaged over heads, [T, T]."""
    model = tiny_checkpoint.model()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(ids[None], output_attentions=True)
    return [layer[0].double().mean(dim=0).numpy() for layer in output.attentions]


def needed(row: np.ndarray[Any, Any], target: float) -> int:
    """Fewest tokens that hold `target` of the mass, by trying."""
    best = np.sort(row)[::-1]
    return next(k for k in range(1, len(row) + 1) if best[:k].sum() >= target * row.sum())


def check(found: Any, rows: list[np.ndarray[Any, Any]]) -> None:
    assert found.count == len(rows)
    for k in KS:
        held = [np.sort(row)[::-1][:k].sum() for row in rows]
        assert found.mass[k] == pytest.approx(np.mean(held), abs=1e-5)
    for target in TARGETS:
        ks = [needed(row, target) for row in rows]
        # at a rounding error's distance from the target, one token more or less
        assert found.needed[target]["mean"] == pytest.approx(np.mean(ks), abs=0.1)
        assert found.needed[target]["median"] == pytest.approx(np.median(ks), abs=1)
        assert found.needed[target]["p90"] == pytest.approx(np.quantile(ks, 0.9), abs=1)


def test_per_query_equals_brute_force(
    profile: MassProfile, attention: list[np.ndarray[Any, Any]]
) -> None:
    assert list(profile.per_query) == [0, 1]
    for layer, found in profile.per_query.items():
        check(found, [attention[layer][p] for p in positions_asked(LENGTH, QUERIES)])


def test_shared_equals_brute_force(
    profile: MassProfile, attention: list[np.ndarray[Any, Any]]
) -> None:
    for layer, found in profile.shared.items():
        blocks = blocks_asked(LENGTH, QUERIES, BLOCK)
        check(found, [attention[layer][block].mean(axis=0) for block in blocks])


def test_the_mass_grows_with_k_and_ends_at_one(profile: MassProfile) -> None:
    for found in (*profile.per_query.values(), *profile.shared.values()):
        masses = [found.mass[k] for k in KS]
        assert masses == sorted(masses)
        assert 0 < masses[0] < 1
        assert masses[-2] == masses[-1] == pytest.approx(1.0, abs=1e-12)
        for part in ("mean", "median", "p90"):
            ks = [found.needed[target][part] for target in TARGETS]
            assert ks == sorted(ks)


def test_small_pieces_change_nothing(ids: torch.Tensor, profile: MassProfile) -> None:
    model = tiny_checkpoint.model()
    again = mass_profile(model, ids, KS, queries=QUERIES, block=BLOCK, piece_bytes=1)
    for a, b in zip(again.shared.values(), profile.shared.values(), strict=True):
        assert a.mass == pytest.approx(b.mass, abs=1e-6)


def test_queries_stand_in_the_last_three_quarters_evenly() -> None:
    asked = positions_asked(8192, 256)
    assert len(asked) == 256
    assert min(asked) >= 2048
    assert asked[-1] == 8191
    assert {b - a for a, b in pairwise(asked)} == {24}
    assert len(positions_asked(128, 256)) == 96


def test_blocks_are_whole_and_aligned() -> None:
    blocks = blocks_asked(8192, 256, 64)
    assert len(blocks) == 16
    assert all(block == list(range(block[0], block[0] + 64)) for block in blocks)
    assert all(block[0] % 64 == 0 and block[0] >= 2048 for block in blocks)
    assert blocks[-1][-1] == 8191


def test_what_cannot_be_profiled_is_refused(ids: torch.Tensor) -> None:
    model = tiny_checkpoint.model()
    with pytest.raises(InputError, match="the text has 20 tokens: at least 32"):
        mass_profile(model, ids[:20], (4,), block=16)
    with pytest.raises(InputError, match=r"k=\[0\] is not possible"):
        mass_profile(model, ids, (0,), block=16)


def test_a_plot_is_the_same_file_each_time(profile: MassProfile, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.svg", "b.svg")]
    for file in files:
        draw(profile, file, "tiny")
    first, second = (file.read_text() for file in files)
    assert first == second
    assert all(f"{target:.0%} of the mass" in first for target in TARGETS)
    assert first.count("stroke-dasharray") > 0  # lines differ without colours


@pytest.mark.parametrize("name", ["a.png", "a.pdf"])
def test_other_kinds_of_plot_are_written(profile: MassProfile, tmp_path: Path, name: str) -> None:
    draw(profile, tmp_path / name, "tiny")
    assert (tmp_path / name).stat().st_size > 1000


def test_a_plot_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"ends in \.svg"):
        check_plot(tmp_path / "a.txt")
    with pytest.raises(InputError, match="folder does not exist"):
        check_plot(tmp_path / "none" / "a.svg")

    def missing(name: str, *args: Any) -> Any:
        if name == "matplotlib":
            raise ImportError(name)
        return builtins.__import__(name, *args)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(InputError, match="pip install matplotlib"):
        check_plot(tmp_path / "a.svg")
