"""Shapes of language models: what their weights and keys weigh, without torch or transformers.

A shape comes from a name (`Shape.named`) or from the config.json of a saved checkpoint
(`shape_of`), read as plain JSON. Counts leave out norms and biases: below 0.1 % of any of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .checks import is_int, require, require_bool, require_int
from .errors import ConfigError, InputError

BYTES = 2  # of a weight, key or value: bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes that decide what a decode step reads and computes.

    Attributes:
        name: what the user called it.
        layers: full-attention layers, whose keys grow with the context.
        total_layers: all layers; those with a sliding window or linear attention too.
        hidden: width of the residual stream.
        heads, kv_heads, head_dim: [H, Hkv, D].
        intermediate: width of the gated feed-forward (three matrices); of one expert in a mixture.
        vocabulary: rows of the embedding.
        tied: the embedding serves as the output matrix too.
        experts, experts_per_token: of a mixture of experts; 0 and 0 in a dense model.
        source: the checkpoint's config.json; None for a named shape.

    Raises:
        ConfigError: a size that cannot be right, by name.
    """

    name: str
    layers: int
    total_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    experts: int = 0
    experts_per_token: int = 0
    source: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate"):
            require_int(name, getattr(self, name), 1)
        require_int("vocabulary", self.vocabulary, 1)
        require_int("total_layers", self.total_layers, self.layers)
        require_bool("tied", self.tied)
        require_int("experts", self.experts, 0)
        divides = self.heads % self.kv_heads == 0
        require(divides, "kv_heads", self.kv_heads, f"a divisor of heads={self.heads}")
        chosen, low = self.experts_per_token, min(self.experts, 1)
        ok = is_int(chosen) and low <= chosen <= self.experts
        require(ok, "experts_per_token", chosen, f"an integer from {low} to {self.experts}")

    @classmethod
    def named(cls, name: str) -> Shape:
        """The shape of that name, letter case ignored.

        Raises:
            InputError: no such name.
        """
        shape = SHAPES.get(name.lower())
        if shape is None:
            raise InputError(f"shape {name!r} is unknown: one of {', '.join(SHAPES)}, or a folder")
        return shape

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding, and of the output matrix: vocabulary x hidden."""
        return self.vocabulary * self.hidden

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's query, key, value and output projections."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Weights of one feed-forward, or of one expert: gate, up and down."""
        return 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """All weights."""
        blocks = self._layers_with(max(self.experts, 1))
        return round(blocks) + self.embedding_parameters * (1 if self.tied else 2)

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with: its experts only, and the output matrix."""
        return round(self._layers_with(max(self.experts_per_token, 1))) + self.embedding_parameters

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in bfloat16."""
        return BYTES * self.parameters

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations of the linear layers for one token, attention not counted."""
        return 2 * self.active_parameters

    def kv_bytes_per_token(self, dtype_bytes: int = BYTES) -> int:
        """Bytes that one token's keys and values take over the full-attention layers.

        Args:
            dtype_bytes: bytes of one number; 2 for bfloat16.
        """
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes

    def distinct_experts(self, rows: int) -> float:
        """Expected experts of a layer that `rows` tokens touch: E (1 - (1 - k/E)^rows), for tokens
        that choose evenly and independently. 1 in a dense model: its only feed-forward."""
        if not self.experts:
            return 1.0
        return self.experts * (1 - (1 - self.experts_per_token / self.experts) ** rows)

    def active_weight_bytes(self, rows: int) -> float:
        """Bytes of weights that a step of `rows` tokens reads: each matrix once, of the experts
        those that are touched. An untied embedding is looked up, not read."""
        return BYTES * (self._layers_with(self.distinct_experts(rows)) + self.embedding_parameters)

    def _layers_with(self, experts: float) -> float:
        """Weights of all layers that hold this many feed-forwards each."""
        fixed = self.attention_parameters + self.hidden * self.experts  # the latter: its router
        return self.total_layers * (fixed + experts * self.mlp_parameters)


def _qwen3(name: str, layers: int, hidden: int, heads: int, intermediate: int) -> Shape:
    return Shape(
        name=name,
        layers=layers,
        total_layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        intermediate=intermediate,
        vocabulary=151_936,
        tied=True,
    )


SHAPES: dict[str, Shape] = {
    "qwen3-0.6b": _qwen3("qwen3-0.6b", 28, 1024, 16, 3072),
    "qwen3-4b": _qwen3("qwen3-4b", 36, 2560, 32, 9728),
    "qwen3-30b-a3b": Shape(
        name="qwen3-30b-a3b",
        layers=48,
        total_layers=48,
        hidden=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        intermediate=768,
        vocabulary=151_936,
        tied=False,
        experts=128,
        experts_per_token=8,
    ),
}

# Keys of config.json that mean latent attention, shared experts, or dense layers among mixtures:
# their weights or keys are laid out in a way that a Shape cannot say. With the values that do not.
_UNKNOWN: dict[str, tuple[Any, ...]] = {
    "kv_lora_rank": (None, 0),
    "shared_expert_intermediate_size": (None, 0),
    "n_shared_experts": (None, 0),
    "first_k_dense_replace": (None, 0),
    "mlp_only_layers": (None, []),
    "decoder_sparse_step": (None, 1),
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# the families whose config.json says nothing of ties when they are there
_TIED_BY_DEFAULT = ("gemma", "cohere")


def shape_of(name_or_folder: str) -> Shape:
    """The named shape, or that of a checkpoint's folder or config.json.

    Raises:
        InputError: no such name or file, or a config.json that lacks something or is wrong.
    """
    if name_or_folder.lower() in SHAPES:
        return Shape.named(name_or_folder)
    path = Path(name_or_folder).expanduser()
    folder = path.is_dir()
    path = path / "config.json" if folder else path
    if not path.is_file():
        if folder:
            raise InputError(f"folder {path.parent} has no config.json: it is no saved checkpoint")
        return Shape.named(name_or_folder)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise InputError(f"holds {type(values).__name__}: a JSON object is needed")
        return _from_json(name_or_folder, values)
    except (ConfigError, InputError) as error:
        raise InputError(f"{path}: {error}") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no JSON file that can be read: {error}") from error


def hf_config(shape: Shape) -> dict[str, Any]:
    """Keywords for transformers' Qwen3Config or Qwen3MoeConfig (`AutoConfig.for_model(**keywords)`
    makes the right one), to build the model with random weights; a checkpoint's own config.json
    where the shape comes from one."""
    if shape.source is not None:
        return dict(shape.source)
    common = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.total_layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": 262_144,
    }
    if not shape.experts:
        return {"model_type": "qwen3", **common}
    mixture = {
        "moe_intermediate_size": shape.intermediate,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
    }
    return {"model_type": "qwen3_moe", **common, **mixture}


def _from_json(name: str, source: Mapping[str, Any]) -> Shape:
    # a model of several kinds of input keeps its language model's sizes under text_config
    nested = source.get("text_config")
    values = nested if isinstance(nested, dict) else source
    for key, harmless in _UNKNOWN.items():
        if values.get(key) not in harmless:
            want = " or ".join("none" if value is None else repr(value) for value in harmless)
            raise InputError(f"{key}={values[key]!r} is a layout that no Shape can say: {want}")
    wanted = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    total, hidden, heads, vocabulary = (_size(values, key) for key in wanted)
    experts = next((_size(values, key) for key in _EXPERTS if values.get(key)), 0)
    narrow = "moe_intermediate_size" if experts and "moe_intermediate_size" in values else None
    tied = str(values.get("model_type", "")).startswith(_TIED_BY_DEFAULT)
    return Shape(
        name=name,
        layers=_full_layers(values, total),
        total_layers=total,
        hidden=hidden,
        heads=heads,
        kv_heads=_size(values, "num_key_value_heads", heads),
        head_dim=_size(values, "head_dim", hidden // heads),
        intermediate=_size(values, narrow or "intermediate_size"),
        vocabulary=vocabulary,
        tied=values.get("tie_word_embeddings", source.get("tie_word_embeddings", tied)),
        experts=experts,
        experts_per_token=_size(values, "num_experts_per_tok") if experts else 0,
        source=source,
    )


def _size(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A size of at least 1; null counts as missing, as transformers takes it."""
    value = values.get(key)
    if value is None:
        if default is None:
            raise InputError(f"{key} is missing: an integer of at least 1 is needed")
        return default
    require_int(key, value, 1)
    return int(value)


def _full_layers(values: Mapping[str, Any], total: int) -> int:
    """How many layers attend to everything."""
    kinds = values.get("layer_types")
    if isinstance(kinds, list):
        full = kinds.count("full_attention")
        want = f"{total} names, one a layer, full_attention among them"
        require(len(kinds) == total and full > 0, "layer_types", kinds, want)
        return full
    window = values.get("sliding_window")
    if window is not None and values.get("use_sliding_window") is not False:
        raise InputError(f"sliding_window={window!r} without layer_types: name each layer's kind")
    return total
