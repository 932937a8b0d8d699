"""Methods as users write them."""

from __future__ import annotations

import pytest

from reread import Config
from reread.errors import ConfigError, InputError
from reread.evaluation.methods import DEFAULT_SHARE, PRESSES, needs_baselines, parse_methods


def test_presets_and_changes() -> None:
    dense, changed = parse_methods("dense, default:k=64:t_max=8:refine=none")
    assert dense.at(4096) == Config.preset("dense")
    expected = Config.preset("default").updated({"k": 64, "t_max": 8, "refine": "none"})
    assert changed.at(4096) == expected


def test_a_method_is_taken_once_and_keeps_its_place() -> None:
    names = [method.name for method in parse_methods("paper,dense,paper")]
    assert names == ["paper", "dense"]


@pytest.mark.parametrize("length", [512, 4096, 16_384, 65_536])
@pytest.mark.parametrize("share", ["3%", "2.5%", "50%"])
def test_a_share_is_never_exceeded(length: int, share: str) -> None:
    (method,) = parse_methods(f"default@{share}")
    budget = method.at(length).budget
    assert budget <= float(share[:-1]) / 100 * length
    assert budget >= float(share[:-1]) / 100 * length - 1


def test_a_share_changes_nothing_but_the_budget() -> None:
    (method,) = parse_methods("default:t_max=8@3%")
    config = method.at(16_384)
    assert config.updated({"k": 512, "recent": 256}) == Config().updated({"t_max": 8})


@pytest.mark.parametrize("name", PRESSES)
def test_baselines_have_a_share(name: str) -> None:
    plain, given = parse_methods(f"{name},{name}@3%")
    assert (plain.share, given.share) == (DEFAULT_SHARE, 0.03)
    assert plain.press == PRESSES[name]
    assert needs_baselines([plain])
    with pytest.raises(ConfigError, match="baseline"):
        plain.at(4096)


def test_an_indexer_goes_where_it_is_used() -> None:
    indexer, prefill, both = parse_methods("indexer,prefill,default:prefill=indexer", "folder")
    assert indexer.at(1000).indexer == "folder"
    assert indexer.at(1000).mode == "indexed"
    assert prefill.at(1000).mode == "dense"
    for method in (prefill, both):
        assert method.config is not None
        assert method.config.prefill is not None
        assert method.config.prefill.indexer == "folder"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no method"),
        ("dnese", "'dnese' is unknown"),
        ("default@3", "'3' is no share"),
        ("default@0%", "no share"),
        ("default@100%", "no share"),
        ("snapkv@nan%", "no share"),
        ("snapkv:k=3", "takes a share"),
        ("default:k", "key=value"),
        ("dense@3%", "this one reads every key"),
        ("indexer", "--indexer"),
        ("prefill", "--indexer"),
    ],
)
def test_what_cannot_be_right(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse_methods(text)


@pytest.mark.parametrize(("text", "said"), [("default:kk=3", "kk"), ("default:k=0", "k=0")])
def test_values_that_cannot_be_right(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_methods(text)


def test_too_small_a_share() -> None:
    (method,) = parse_methods("default@1%")
    with pytest.raises(ConfigError, match="at 500 tokens: 5 keys"):
        method.at(500)
