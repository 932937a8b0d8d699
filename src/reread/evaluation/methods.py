"""The methods that `reread eval` compares: presets, changes to them, and the baselines of others.

dense, default, paper, exact
                        presets
oracle                  every decode step chooses by its own attention mass (a reference)
indexer                 preset "indexed": an indexer chooses for every decode step
prefill                 sparse prefill by an indexer, then dense decoding
NAME:key=value:...      one of these with values changed, as by --set
snapkv, streaming-llm, ...  baselines, see `baselines.presses`
NAME@3%                 with keys for 3 % of the text's tokens, sink and window included
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..config import Config
from ..errors import ConfigError, InputError

# names as users write them -> class in kvpress
PRESSES = {
    "streaming-llm": "StreamingLLMPress",
    "tova": "TOVAPress",
    "think": "ThinKPress",
    "snapkv": "SnapKVPress",
    "chunkkv": "ChunkKVPress",
    "lagkv": "LagKVPress",
    "knorm": "KnormPress",
    "pyramidkv": "PyramidKVPress",
}
OURS = ("dense", "default", "paper", "oracle", "indexer", "exact", "prefill")
DEFAULT_SHARE = 0.5  # of a baseline without one: what the SFI paper's tables keep
MOST_RECENT = 4  # at a share, the window takes at most a quarter of the keys


@dataclass(frozen=True, slots=True)
class Method:
    """One way to read and answer.

    Attributes:
        name: as the user wrote it.
        config: ours; None for a baseline.
        share: of the text's tokens, keys that a fast step reads (ours) or that stay (baselines);
            None: as the config says.
        press: class of kvpress, for a baseline.
    """

    name: str
    config: Config | None = None
    share: float | None = None
    press: str | None = None

    def at(self, length: int) -> Config:
        """Our configuration for a text of `length` tokens.

        Raises:
            ConfigError: the share leaves no key besides the sink; or a baseline.
        """
        if self.config is None:
            raise ConfigError(f"method {self.name!r} is a baseline and has no configuration")
        if self.share is None:
            return self.config
        budget = int(self.share * length)
        recent = min(self.config.recent, budget // MOST_RECENT)
        k = budget - self.config.sink - recent
        if recent < 1 or k < 1:
            raise ConfigError(
                f"method {self.name!r} is not possible at {length} tokens: {budget} keys, and "
                f"{self.config.sink} of them are the sink"
            )
        return self.config.updated({"recent": recent, "k": k})

    def to_dict(self) -> dict[str, Any]:
        """What decides its results, for comparison with an earlier run's."""
        config = None if self.config is None else self.config.to_dict()
        return json.loads(  # type: ignore[no-any-return]  # of our own dict
            json.dumps({"config": config, "share": self.share, "press": self.press})
        )


def parse_methods(text: str, indexer: str | None = None) -> list[Method]:
    """ "dense,default:k=256,snapkv@3%" as methods, each once.

    Args:
        indexer: folder of the indexer that methods may use.

    Raises:
        InputError: an unknown method, a share that is none, or no method at all.
        ConfigError: a value that cannot be right.
    """
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise InputError(f"no method: give some of {', '.join((*OURS, *PRESSES))}")
    return [_parse(name, indexer) for name in names]


def _parse(name: str, indexer: str | None) -> Method:
    whole, _, percent = name.partition("@")
    share = _share(name, percent) if "@" in name else None
    base, *changes = whole.split(":")
    if base in PRESSES:
        if changes:
            raise InputError(f"method {name!r}: a baseline takes a share, as in {base}@50%")
        return Method(name, share=DEFAULT_SHARE if share is None else share, press=PRESSES[base])
    if base not in OURS:
        raise InputError(f"method {base!r} is unknown: one of {', '.join((*OURS, *PRESSES))}")
    config = _ours(base).updated(dict(_pair(name, change) for change in changes))
    if config.uses_indexer and config.indexer_folder is None:
        if indexer is None:
            raise InputError(f"method {name!r} needs an indexer: give --indexer FOLDER")
        where = "prefill.indexer" if config.mode != "indexed" else "indexer"
        config = config.updated({where: indexer})
    if share is not None and config.mode == "dense":
        raise InputError(
            f"method {name!r}: a share is of the keys of decode steps, and this one reads every key"
        )
    return Method(name, config, share)


def _ours(base: str) -> Config:
    if base == "oracle":
        return Config.preset("indexed").updated({"mode": "oracle"})
    if base == "indexer":
        return Config.preset("indexed")
    if base == "prefill":
        return Config.preset("dense").updated({"prefill": "indexer"})
    return Config.preset(base)


def _share(name: str, percent: str) -> float:
    """ "3%" as 0.03."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)%", percent)
    share = float(found[1]) / 100 if found else 0.0
    if not 0 < share < 1:
        raise InputError(f"method {name!r}: {percent!r} is no share such as 3% or 50%")
    return share


def _pair(name: str, change: str) -> tuple[str, Any]:
    key, equals, value = change.partition("=")
    if not equals or not key:
        raise InputError(f"method {name!r}: {change!r} is not of the form key=value")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def needs_baselines(methods: Sequence[Method]) -> bool:
    """Whether some method is a baseline."""
    return any(method.press is not None for method in methods)
