"""Impossible values and unknown keys raise, presets say what the spec says, dicts round-trip."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from reread.config import Config, SelectorConfig, SoftNMS, Span, TriggerConfig
from reread.errors import ConfigError, RereadError

PRESETS = ["default", "paper", "dense"]


def test_the_paper_preset_has_the_papers_constants() -> None:
    c = Config.preset("paper")
    assert (c.sink, c.recent, c.k) == (4, 256, 2048)
    assert (c.triggers.boundary, c.triggers.t_max, c.triggers.uncertainty) == (True, 64, None)
    s = c.selector
    assert (s.tail_queries, s.lambda_clip, s.alpha_cross, s.beta, s.p, s.eta, s.eps) == (
        16,
        0.02,
        0.35,
        1,
        1,
        2,
        1e-8,
    )
    assert (s.alpha, s.gamma, s.temperature) == (0.5, 0.5, 1.0)
    assert s.refine == SoftNMS(alpha=0.5, neighbourhood=5)


def test_the_default_preset_keeps_spans() -> None:
    c = Config.preset("default")
    assert c == Config()
    assert isinstance(c.selector.refine, Span)
    assert c.mode == "slow-fast"


def test_the_dense_preset_is_dense() -> None:
    assert Config.preset("dense").mode == "dense"


@pytest.mark.parametrize("name", ["", "Default", "fast", "papers"])
def test_an_unknown_preset_raises_and_names_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=r"default.*paper.*dense"):
        Config.preset(name)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_a_trip_through_json(name: str) -> None:
    c = Config.preset(name)
    assert Config.from_dict(json.loads(json.dumps(c.to_dict()))) == c


def test_from_dict_fills_what_is_missing_with_defaults() -> None:
    assert Config.from_dict({}) == Config()
    assert Config.from_dict({"triggers": {"t_max": 3}}) == Config(triggers=TriggerConfig(t_max=3))


@pytest.mark.parametrize(
    "values",
    [
        {"kk": 5},
        {"triggers": {"tmax": 4}},
        {"selector": {"lambda": 0.1}},
        {"selector": {"refine": {"kind": "span", "forward": 3}}},
        {"selector": {"refine": {"kind": "nms"}}},
        {"selector": {"refine": {"back": 3}}},
        {"triggers": 5},
        {"selector": "span"},
        {"selector": None},
    ],
)
def test_from_dict_refuses_unknown_keys_and_shapes(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Config.from_dict(values)


def test_an_unknown_key_is_named_together_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"triggers\.tmax.*t_max"):
        Config.from_dict({"triggers": {"tmax": 4}})
    with pytest.raises(ConfigError, match="recnt"):
        Config().updated({"recnt": 4})


@pytest.mark.parametrize(
    "bad",
    [
        {"k": 0},
        {"k": -1},
        {"k": 1.5},
        {"k": "512"},
        {"k": True},
        {"k": None},
        {"recent": 0},
        {"recent": -3},
        {"sink": -1},
        {"sink": 1.0},
        {"mode": "sparse"},
        {"mode": 1},
        {"backend": "cuda"},
        {"dense_below_budget": 1},
        {"triggers": None},
        {"triggers": {"t_max": 4}},
        {"selector": SoftNMS()},
    ],
)
def test_impossible_top_level_values_raise_and_are_named(bad: dict[str, Any]) -> None:
    (name, value) = next(iter(bad.items()))
    with pytest.raises(ConfigError, match=name) as error:
        Config(**bad)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    "bad",
    [
        {"t_max": 0},
        {"t_max": -1},
        {"t_max": 2.0},
        {"t_max": True},
        {"uncertainty": -0.1},
        {"uncertainty": math.nan},
        {"uncertainty": math.inf},
        {"uncertainty": "1"},
        {"boundary": 1},
        {"first_step": None},
    ],
)
def test_impossible_triggers_raise(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        TriggerConfig(**bad)


@pytest.mark.parametrize(
    "bad",
    [
        {"tail_queries": 0},
        {"alpha": 0.0},
        {"alpha": -1.0},
        {"alpha": math.nan},
        {"lambda_clip": -0.01},
        {"lambda_clip": 1.01},
        {"gamma": -1},
        {"temperature": 0},
        {"eps": 0.0},
        {"eta": math.inf},
        {"p": "1"},
        {"refine": "span"},
        {"refine": 3},
    ],
)
def test_impossible_selector_values_raise(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        SelectorConfig(**bad)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SoftNMS(neighbourhood=4),
        lambda: SoftNMS(neighbourhood=0),
        lambda: SoftNMS(alpha=-0.1),
        lambda: Span(back=-1),
        lambda: Span(ahead=1.5),  # type: ignore[arg-type]  # that is the test
    ],
)
def test_impossible_refinements_raise(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


def test_config_errors_are_value_errors_of_reread() -> None:
    with pytest.raises(ValueError, match="k=0"):
        Config(k=0)
    with pytest.raises(RereadError):
        Config(k=0)


def test_configurations_are_frozen_and_take_no_stray_attribute() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().k = 3  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        object.__setattr__(Config(), "kay", 3)
    with pytest.raises(TypeError):
        Config("slow-fast")  # type: ignore[misc]
    with pytest.raises(TypeError):
        Config(kk=3)  # type: ignore[call-arg]


def test_a_budget_is_sink_plus_recent_plus_k() -> None:
    assert Config(sink=1, recent=20, k=300).budget == 321


@pytest.mark.parametrize("key", ["triggers.t_max", "t_max", "T_max", "TRIGGERS.T_MAX"])
def test_updated_finds_a_key_by_path_or_by_unique_name_in_any_case(key: str) -> None:
    before = Config()
    after = before.updated({key: 7})
    assert after.triggers.t_max == 7
    assert after == dataclasses.replace(
        before, triggers=dataclasses.replace(before.triggers, t_max=7)
    )
    assert before.triggers.t_max != 7


def test_updated_changes_several_keys_at_once() -> None:
    c = Config().updated({"K": 77, "recent": 9, "lambda_clip": 0.1, "selector.alpha_cross": 0.2})
    assert (c.k, c.recent, c.selector.lambda_clip, c.selector.alpha_cross) == (77, 9, 0.1, 0.2)


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"refine": "soft_nms"}, SoftNMS()),
        ({"refine": "span"}, Span()),
        ({"refine": "none"}, None),
        ({"refine": None}, None),
        ({"refine": {"kind": "span", "back": 1, "ahead": 2}}, Span(back=1, ahead=2)),
        ({"refine": "soft_nms", "neighbourhood": 9}, SoftNMS(neighbourhood=9)),
        ({"neighbourhood": 9, "refine": "soft_nms"}, SoftNMS(neighbourhood=9)),
        ({"ahead": 3}, Span(ahead=3)),
        ({"selector.refine.back": 0}, Span(back=0)),
    ],
)
def test_updated_replaces_the_refinement(changes: dict[str, Any], want: Any) -> None:
    assert Config().updated(changes).selector.refine == want


@pytest.mark.parametrize(
    "changes",
    [
        {"neighbourhood": 3},  # the default refinement is a span: the key does not exist
        {"alpha": 0.1, "refine": "soft_nms"},  # selector.alpha or selector.refine.alpha?
        {"k.k": 3},
        {"": 3},
        {"triggers": {"t_max": 3}},
        {"refine": "spam"},
        {"refine": 5},
        {"k": 0},
        {"t_max": "4"},
        {"kind": "span"},
    ],
)
def test_updated_refuses_unknown_ambiguous_and_impossible(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Config().updated(changes)


def test_an_ambiguous_key_is_told_with_its_candidates() -> None:
    with pytest.raises(ConfigError, match=r"selector\.alpha.*selector\.refine\.alpha"):
        Config.preset("paper").updated({"alpha": 0.1})


def test_equal_configurations_are_equal_and_hashable() -> None:
    assert Config.preset("paper") == Config.preset("paper") != Config()
    assert len({Config(), Config(), Config(k=5)}) == 2


def test_a_prefills_key_without_a_prefill_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="needs a prefill: set prefill to 'indexer'"):
        Config().updated({"prefill.indexer": "folder"})
    with pytest.raises(ConfigError, match=r"unknown key 'prefill\.nonsense'"):
        Config().updated({"prefill": "oracle", "prefill.nonsense": 1})
