"""Configuration: frozen, keyword-only, checked when made. Presets are named points in it."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

from .checks import require, require_bool, require_int
from .decoding import SelectorConfig, TriggerConfig
from .drafting import DraftConfig
from .errors import ConfigError
from .prefilling import SparsePrefill
from .refinements import REFINEMENTS, Refinement, SoftNMS, Span

Mode = Literal["slow-fast", "indexed", "oracle", "exact", "dense"]
AFRESH = ("indexed", "oracle")  # modes that choose the keys of every decode step anew
Backend = Literal["auto", "reference", "triton"]
Runner = Literal["auto", "graph", "eager"]
PresetName = Literal["default", "paper", "indexed", "exact", "dense"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that decides what reread does to a model. Frozen: change it with `updated`.

    Attributes:
        mode: "slow-fast"; "indexed": an indexer chooses the keys of every decode step anew, and
            steps that a trigger makes slow read everything; "oracle": the same by the step's own
            attention mass, a reference and never an accelerator; "exact": fast steps draft, dense
            attention verifies, the text is dense's; or "dense": every step reads everything, from
            the same cache.
        indexer: folder of the indexer for mode "indexed"; None: that of `prefill`. In mode "exact"
            one chooses the keys of every drafted token anew; None: the Selector chooses them by
            what dense passes attend to.
        sink: first positions of a row, always read.
        recent: newest positions, always read; at least 1, the current token is one of them.
        k: selected positions per KV head; where an indexer or the oracle chooses, all KV heads
            share them.
        triggers: when a step is slow.
        selector: how a slow step chooses.
        draft: how much is drafted in mode "exact"; its passes that verify are its slow steps, and
            triggers play no part there.
        prefill: how a prompt is read sparsely; None: by the model's own dense attention.
        backend: "auto", or the ops by name ("reference", "triton"); never a silent fallback.
        runner: how a decode step runs with the Triton backend: "graph" as one CUDA graph around
            compiled layers, "eager" kernel by kernel, "auto" as a graph where the model allows (the
            stats say whether and why not).
        dense_below_budget: while sink + recent + k covers the whole row, run dense attention
            (equal result, no gathering). False forces the sparse path even there; a debugging aid.

    Raises:
        ConfigError: a value that cannot be right, by name.
    """

    mode: Mode = "slow-fast"
    indexer: str | None = None
    sink: int = 4
    recent: int = 256
    k: int = 512
    triggers: TriggerConfig = field(default_factory=TriggerConfig)
    selector: SelectorConfig = field(default_factory=SelectorConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    prefill: SparsePrefill | None = None
    backend: Backend = "auto"
    runner: Runner = "auto"
    dense_below_budget: bool = True

    def __post_init__(self) -> None:
        for name, choices in (
            ("mode", get_args(Mode)),
            ("backend", get_args(Backend)),
            ("runner", get_args(Runner)),
        ):
            value = getattr(self, name)
            require(value in choices, name, value, f"one of {', '.join(choices)}")
        if isinstance(self.indexer, os.PathLike):
            object.__setattr__(self, "indexer", os.fspath(self.indexer))
        ok = self.indexer is None or (isinstance(self.indexer, str) and self.indexer != "")
        require(ok, "indexer", self.indexer, "the folder of an indexer, or None")
        require_int("sink", self.sink, 0)
        require_int("recent", self.recent, 1)
        require_int("k", self.k, 1)
        require_bool("dense_below_budget", self.dense_below_budget)
        require(
            isinstance(self.triggers, TriggerConfig), "triggers", self.triggers, "a TriggerConfig"
        )
        require(
            isinstance(self.selector, SelectorConfig), "selector", self.selector, "a SelectorConfig"
        )
        require(isinstance(self.draft, DraftConfig), "draft", self.draft, "a DraftConfig")
        ok = self.prefill is None or isinstance(self.prefill, SparsePrefill)
        require(ok, "prefill", self.prefill, "a SparsePrefill or None")
        dense = self.prefill is None or self.mode != "exact"
        require(dense, "prefill", self.prefill, "None in mode 'exact', which is dense's text")
        other = None if self.prefill is None else self.prefill.indexer
        folders = {os.path.normpath(folder) for folder in (self.indexer, other) if folder}
        same = len(folders) < 2
        require(same, "indexer", self.indexer, f"the prefill's, {other!r}: one model has one")
        used = self.indexer is None or self.uses_indexer
        require(used, "indexer", self.indexer, "None, for neither mode nor prefill uses one")

    @property
    def indexer_folder(self) -> str | None:
        """Where the indexer lies that decoding or prefill uses."""
        return self.indexer or (None if self.prefill is None else self.prefill.indexer)

    @property
    def uses_indexer(self) -> bool:
        """Whether an indexer chooses anything."""
        of_prefill = self.prefill is not None and self.prefill.chooser == "indexer"
        return self.indexed or of_prefill

    @property
    def indexed(self) -> bool:
        """Whether an indexer chooses the keys of every fast step; in mode "exact", of drafts."""
        return self.mode == "indexed" or (self.mode == "exact" and self.indexer is not None)

    @property
    def budget(self) -> int:
        """Keys that a fast step reads per KV head right after a refresh: sink + recent + k."""
        return self.sink + self.recent + self.k

    @classmethod
    def preset(cls, name: str) -> Config:
        """The named configuration: "default", "paper" (SFI's own constants), "indexed" (it needs an
        indexer besides), "exact" or "dense".

        Raises:
            ConfigError: `name` is none of them.
        """
        make = _PRESETS.get(name)
        if make is None:
            raise ConfigError(f"preset {name!r} is unknown: one of {', '.join(_PRESETS)}")
        return make()

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dicts, for JSON; `from_dict` takes it back."""
        return dict(_encode(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Inverse of `to_dict`; missing keys take their defaults.

        Raises:
            ConfigError: an unknown key, or a value that cannot be right.
        """
        return _decode(cls, values, "")

    def updated(self, changes: Mapping[str, Any]) -> Config:
        """A copy with some values changed. Keys are dotted paths ("triggers.t_max") or a unique
        last part ("t_max").

        Letter case does not matter ("K", "T_max"). `refine` takes "span", "soft_nms", "none" or a
        dict with "kind"; `prefill` takes "indexer", "oracle", "sampled", "none" or a dict of its
        values.

        Raises:
            ConfigError: a key that is unknown or ambiguous, or a value that cannot be right.
        """
        tree = self.to_dict()
        # a change of kind goes first: it brings the new kind's own keys into being
        for key, value in sorted(
            changes.items(), key=lambda item: not item[0].lower().endswith(("refine", "prefill"))
        ):
            *parents, leaf = _resolve(tree, key)
            node = tree
            for part in parents:
                node = node[part]
            decode = _WHOLE.get(leaf)
            node[leaf] = value if decode is None else _encode(decode(value, key))
        return Config.from_dict(tree)


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        out = {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        kind = next((name for name, cls in REFINEMENTS.items() if type(value) is cls), None)
        return {"kind": kind, **out} if kind else out
    return value


_C = TypeVar("_C")


def _decode(cls: type[_C], values: Mapping[str, Any], path: str) -> _C:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path.rstrip('.') or 'config'}={values!r} is not possible: a mapping")
    fields = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]  # ours are such
    for key in values:
        if key not in fields:
            raise ConfigError(
                f"unknown key {path + str(key)!r}: one of {', '.join(sorted(fields))}"
            )
    nested: dict[str, Callable[[Any], Any]] = {
        "triggers": lambda v: _decode(TriggerConfig, v, "triggers."),
        "selector": lambda v: _decode(SelectorConfig, v, "selector."),
        "draft": lambda v: _decode(DraftConfig, v, "draft."),
        **{name: functools.partial(decode, name=path + name) for name, decode in _WHOLE.items()},
    }
    return cls(
        **{key: nested[key](value) if key in nested else value for key, value in values.items()}
    )


def _decode_refine(value: Any, name: str) -> Refinement | None:
    if value is None or isinstance(value, SoftNMS | Span):
        return value
    kind, rest = (value, {}) if isinstance(value, str) else ("", {})
    if isinstance(value, Mapping):
        rest = dict(value)
        kind = rest.pop("kind", "")
    if kind == "none" and not rest:
        return None
    if kind not in REFINEMENTS:
        raise ConfigError(
            f"{name}={value!r} is not possible: kind is one of {', '.join(REFINEMENTS)}, none"
        )
    return _decode(REFINEMENTS[kind], rest, f"{name}.")


def _decode_prefill(value: Any, name: str) -> SparsePrefill | None:
    if value is None or value == "none" or isinstance(value, SparsePrefill):
        return None if value == "none" else value
    values = {"chooser": value} if isinstance(value, str) else value
    return _decode(SparsePrefill, values, f"{name}.")


# values of several kinds: they can be given as a whole, by name or as a dict
_WHOLE: dict[str, Callable[..., Any]] = {"refine": _decode_refine, "prefill": _decode_prefill}


def _leaves(tree: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    out: list[tuple[str, ...]] = []
    for key, value in tree.items():
        if key == "kind":
            continue
        if key in _WHOLE or not isinstance(value, Mapping):
            out.append((*prefix, key))
        if isinstance(value, Mapping):
            out.extend(_leaves(value, (*prefix, key)))
    return out


def _resolve(tree: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The path in `tree` that `key` names: a dotted path, or any unique tail of one."""
    wanted = tuple(key.lower().split("."))
    paths = _leaves(tree)
    found = [p for p in paths if p == wanted] or [p for p in paths if p[-len(wanted) :] == wanted]
    if len(found) == 1:
        return found[0]
    if not found and wanted[0] == "prefill" and not any(p[0] == "prefill" and p[1:] for p in paths):
        raise ConfigError(f"key {key!r} needs a prefill: set prefill to 'indexer', for one, too")
    if found:
        raise ConfigError(f"key {key!r} is ambiguous: {' or '.join('.'.join(p) for p in found)}")
    raise ConfigError(f"unknown key {key!r}: one of {', '.join('.'.join(p) for p in paths)}")


def _paper() -> Config:
    return Config(
        k=2048,
        triggers=TriggerConfig(boundary=True, t_max=64, t_min=1),
        selector=SelectorConfig(lambda_clip=0.02, refine=SoftNMS(), alpha_cross=0.35),
    )


def _indexed() -> Config:
    # chosen anew at every step, so nothing needs a step that reads everything
    return Config(
        mode="indexed",
        k=256,
        triggers=TriggerConfig(boundary=False, t_max=None, first_step=False),
    )


_PRESETS: dict[str, Callable[[], Config]] = {
    "default": Config,
    "paper": _paper,
    "indexed": _indexed,
    # a refused draft costs a pass over all keys, more keys in a draft little: see exact_acceptance
    "exact": lambda: Config(mode="exact", k=1024),
    "dense": lambda: Config(mode="dense"),
}

__all__ = [
    "Config",
    "DraftConfig",
    "SelectorConfig",
    "SoftNMS",
    "Span",
    "SparsePrefill",
    "TriggerConfig",
]
