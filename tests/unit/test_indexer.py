"""The indexer: its equation, where its weights start, its file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from reread.errors import InputError
from reread.indexer.model import (
    WEIGHTS,
    Indexer,
    IndexerCard,
    identity,
    initialise_from,
    predicted_mass,
    rotate,
)


def card(**changes: object) -> IndexerCard:
    values: dict[str, object] = {
        "layers": (1, 3), "hidden": 12, "width": 8, "theta": 10_000.0, "backbone": "b" * 64,
    }  # fmt: skip
    return IndexerCard(**{**values, **changes})  # type: ignore[arg-type]  # values are as declared


def test_scores_are_the_equation_by_hand() -> None:
    torch.manual_seed(0)
    indexer = Indexer(card())
    x = torch.randn(5, 12)
    at = torch.arange(5)
    iq, ik = indexer.queries(3, x, at)[0], indexer.keys(3, x, at)[0]
    w_q, w_k = (part["3"].weight.detach().double() for part in (indexer.query, indexer.key))
    for t in range(5):
        for j in range(t + 1):
            want = 0.0
            a, b = w_q @ x[t].double(), w_k @ x[j].double()
            for i in range(4):
                # a pair turned by t against one turned by j: what counts is t - j
                angle = torch.tensor((t - j) * 10_000.0 ** (-i / 4)).double()
                want += float((a[i] * b[i] + a[i + 4] * b[i + 4]) * angle.cos())
                want += float((a[i] * b[i + 4] - a[i + 4] * b[i]) * angle.sin())
            assert float(iq[t] @ ik[j]) == pytest.approx(want / 8**0.5, rel=1e-4, abs=1e-5)


def test_it_depends_on_position_and_only_on_the_distance() -> None:
    torch.manual_seed(1)
    indexer = Indexer(card())
    x = torch.randn(6, 12)

    def scores(shift: int, order: list[int]) -> torch.Tensor:
        at = torch.arange(6) + shift
        y = x[order]
        return (indexer.queries(1, y, at) @ indexer.keys(1, y, at).mT)[0]

    straight = scores(0, [0, 1, 2, 3, 4, 5])
    torch.testing.assert_close(scores(77, [0, 1, 2, 3, 4, 5]), straight, atol=1e-4, rtol=1e-4)
    swapped = scores(0, [1, 0, 2, 3, 4, 5])
    assert float((swapped[5, [1, 0]] - straight[5, [0, 1]]).abs().max()) > 1e-3


def test_rotation_keeps_lengths_and_position_zero() -> None:
    x = torch.randn(3, 4, 8)
    turned = rotate(x, torch.arange(4).expand(3, 4), 500.0)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(turned[:, 0], x[:, 0])


def test_it_starts_from_the_layers_own_projections() -> None:
    """With a width that holds the whole product, scores at equal positions are the mean head's."""
    torch.manual_seed(2)
    w_q, w_k = torch.randn(4 * 6, 12), torch.randn(2 * 6, 12)
    indexer = Indexer(card(width=12, layers=(0,)))
    initialise_from(indexer, {0: (w_q, w_k)}, head_dim=6)
    x, at = torch.randn(5, 12), torch.zeros(5, dtype=torch.long)
    got = (indexer.queries(0, x, at) @ indexer.keys(0, x, at).mT)[0] * 12**0.5
    q = (x @ w_q.T).view(5, 4, 6)
    k = (x @ w_k.T).view(5, 2, 6).repeat_interleave(2, dim=1)
    want = torch.einsum("thd,shd->ts", q, k) / 4
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)


def test_a_narrow_one_starts_from_the_best_approximation() -> None:
    torch.manual_seed(3)
    w_q, w_k = torch.randn(2 * 6, 12), torch.randn(2 * 6, 12)
    mean = (w_q.T @ w_k) / 2
    errors = []
    for width in (2, 4, 8):
        indexer = Indexer(card(width=width, layers=(0,)))
        initialise_from(indexer, {0: (w_q, w_k)}, head_dim=6)
        made = indexer.query["0"].weight.T @ indexer.key["0"].weight
        errors.append(float((made - mean).norm()))
        rest = torch.linalg.svdvals(mean)[width:]
        assert errors[-1] == pytest.approx(float(rest.norm()), rel=1e-3)
    assert errors == sorted(errors, reverse=True)


def test_the_prediction_is_a_distribution_over_the_past() -> None:
    p = predicted_mass(torch.randn(2, 3, 8), torch.randn(2, 10, 8), [4, 7, 9], 2)
    torch.testing.assert_close(p.sum(1), torch.ones(3))
    assert bool((p[:, :2] == 0).all())
    assert bool((p[0, 5:] == 0).all())


def test_a_file_holds_everything(tmp_path: Path) -> None:
    torch.manual_seed(4)
    made = Indexer(card(record={"tokens": 5, "data": "needle"}))
    made.save(tmp_path / "a" / "b")
    found = Indexer.load(tmp_path / "a" / "b", backbone="b" * 64)
    assert found.card == made.card == Indexer.read_card(tmp_path / "a" / "b")
    assert all(p.requires_grad for p in found.parameters())
    for name, value in made.state_dict().items():
        assert torch.equal(found.state_dict()[name], value)


def test_another_backbone_is_refused(tmp_path: Path) -> None:
    Indexer(card()).save(tmp_path)
    with pytest.raises(InputError, match=r"another backbone \(config hash bbbbbbbbbbbb"):
        Indexer.load(tmp_path, backbone="c" * 64)


@pytest.mark.parametrize("read", [Indexer.load, Indexer.read_card])
def test_broken_files_are_named(read: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{WEIGHTS} is missing"):
        read(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"nonsense")
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        read(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / WEIGHTS)
    with pytest.raises(InputError, match="is no indexer of format 1"):
        read(tmp_path)
    made = Indexer(card())
    path = made.save(tmp_path)
    cut = {k: v for k, v in made.state_dict().items() if "key" not in k}
    save_file(cut, path, metadata={"format": "1", "card": json.dumps(asdict(made.card))})
    with pytest.raises(InputError, match="does not hold what its card says"):
        read(tmp_path)
    Indexer(card(theta=math.inf)).save(tmp_path)
    with pytest.raises(InputError, match="values are not possible"):
        read(tmp_path)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_refused(bad: float, tmp_path: Path) -> None:
    made = Indexer(card())
    with torch.no_grad():
        next(made.parameters())[0, 0] = bad
    made.save(tmp_path)
    with pytest.raises(InputError, match="no finite numbers"):
        Indexer.load(tmp_path)


@pytest.mark.parametrize("width", [0, 1, 7])
def test_odd_widths_are_refused(width: int) -> None:
    with pytest.raises(InputError, match=f"width={width} is not possible"):
        Indexer(card(width=width))


def test_identity_is_of_the_weights() -> None:
    config = {"hidden_size": 12, "layers": 3, "dtype": "float32", "_name_or_path": "here"}
    assert identity(config) == identity({**config, "dtype": "bfloat16", "_name_or_path": "there"})
    assert identity(config) != identity({**config, "hidden_size": 13})
