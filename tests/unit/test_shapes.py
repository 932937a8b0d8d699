"""Sizes of models: against transformers' own count, by hand, and from a config.json."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from reread.errors import ConfigError, InputError
from reread.shapes import SHAPES, Shape, hf_config, shape_of

QWEN = Shape.named("qwen3-4b")
MOE = Shape.named("qwen3-30b-a3b")
# what a config.json needs at the least
SMALL: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
}


def saved(folder: Path, values: Any) -> str:
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_the_model_that_transformers_builds(name: str) -> None:
    shape = Shape.named(name)
    config = AutoConfig.for_model(**hf_config(shape))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    total = sum(p.numel() for p in model.parameters())
    assert shape.parameters <= total <= 1.001 * shape.parameters  # norms are left out
    # one row reads what it is multiplied with, every row all of a tied model
    assert shape.active_weight_bytes(1) == pytest.approx(2 * shape.active_parameters)
    assert shape.weight_bytes == 2 * shape.parameters
    assert shape.flops_per_token == 2 * shape.active_parameters


def test_bytes_by_hand() -> None:
    assert QWEN.kv_bytes_per_token() == 2 * 36 * 8 * 128 * 2 == 147_456
    assert QWEN.kv_bytes_per_token(dtype_bytes=1) == 73_728
    layer = 2560 * 128 * (32 + 8 + 8 + 32) + 3 * 2560 * 9728
    assert QWEN.parameters == 36 * layer + 151_936 * 2560
    assert QWEN.active_weight_bytes(1) == QWEN.active_weight_bytes(64) == QWEN.weight_bytes


def test_a_mixture_reads_the_experts_that_its_rows_touch() -> None:
    assert MOE.distinct_experts(1) == pytest.approx(8)
    assert MOE.distinct_experts(2) == pytest.approx(15.5)  # 128 (1 - (15/16)^2)
    read = [MOE.active_weight_bytes(rows) for rows in (1, 2, 16, 64, 10**6)]
    assert read == sorted(read)
    # an untied embedding is looked up, so that even all experts leave it out
    assert read[-1] == pytest.approx(MOE.weight_bytes - 2 * 151_936 * 2048)
    assert read[0] == pytest.approx(read[1] - 2 * 48 * 7.5 * 3 * 2048 * 768)


def test_keywords_suit_the_classes_of_transformers() -> None:
    dense, mixture = Qwen3Config(**hf_config(QWEN)), Qwen3MoeConfig(**hf_config(MOE))
    assert (dense.num_hidden_layers, dense.head_dim, dense.tie_word_embeddings) == (36, 128, True)
    assert (mixture.num_local_experts, mixture.num_experts_per_tok) == (128, 8)
    assert (mixture.moe_intermediate_size, mixture.tie_word_embeddings) == (768, False)


@pytest.mark.parametrize("name", SHAPES)
def test_a_saved_config_gives_the_shape_back(name: str, tmp_path: Path) -> None:
    shape = Shape.named(name)
    AutoConfig.for_model(**hf_config(shape)).save_pretrained(tmp_path)
    for given in (tmp_path, tmp_path / "config.json"):
        read = shape_of(str(given))
        assert dataclasses.replace(read, name=name) == shape
        assert hf_config(read) == json.loads((tmp_path / "config.json").read_text())


def test_what_a_config_leaves_out_takes_transformers_defaults(tmp_path: Path) -> None:
    shape = shape_of(saved(tmp_path, SMALL))
    assert (shape.kv_heads, shape.head_dim, shape.tied, shape.experts) == (4, 16, False, 0)
    assert shape_of(saved(tmp_path, {**SMALL, "model_type": "gemma2"})).tied
    assert shape_of(saved(tmp_path, {"text_config": SMALL, "tie_word_embeddings": True})).tied
    mixture = {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}
    assert shape_of(saved(tmp_path, mixture)).mlp_parameters == 3 * 64 * 96


def test_only_full_attention_layers_keep_all_keys(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    shape = shape_of(saved(tmp_path, {**SMALL, "layer_types": kinds, "sliding_window": 8}))
    assert (shape.layers, shape.total_layers) == (1, 3)
    assert shape.kv_bytes_per_token() == 2 * 4 * 16 * 2
    off = {**SMALL, "use_sliding_window": False, "sliding_window": 8}
    assert shape_of(saved(tmp_path, off)).layers == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({key: None}, f"{key} is missing") for key in SMALL),
        ({"hidden_size": "64"}, "hidden_size='64'"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_key_value_heads": 3}, "kv_heads=3 .* divisor of heads=4"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types=.*full_attention among them"),
        ({"layer_types": ["full_attention"]}, "layer_types=.*3 names"),
        ({"sliding_window": 8}, "sliding_window=8 without layer_types"),
        ({"kv_lora_rank": 512}, "kv_lora_rank=512"),
        ({"n_shared_experts": 1}, "n_shared_experts=1"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2 .* none or 1"),
        ({"num_experts": 4}, "num_experts_per_tok is missing"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "experts_per_token=5 .* from 1 to 4"),
        ({"tie_word_embeddings": "no"}, "tied='no'"),
    ],
)
def test_a_config_that_cannot_be_right_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=f"config.json.*{message}"):
        shape_of(saved(tmp_path, {**SMALL, **changes}))


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
def test_a_file_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=r"config\.json.*JSON"):
        shape_of(str(tmp_path))


def test_unknown_names_and_empty_folders_are_refused(tmp_path: Path) -> None:
    assert shape_of("Qwen3-4B") is QWEN
    with pytest.raises(InputError, match=r"'qwen3-5b' is unknown: one of qwen3-0\.6b"):
        shape_of("qwen3-5b")
    with pytest.raises(InputError, match=r"has no config\.json"):
        shape_of(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 37}, "total_layers=36 .* at least 37"),
        ({"kv_heads": 5}, "kv_heads=5"),
        ({"experts_per_token": 1}, "experts_per_token=1 .* from 0 to 0"),
        ({"vocabulary": True}, "vocabulary=True"),
    ],
)
def test_sizes_that_cannot_be_right_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(QWEN, **changes)


def test_planning_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, reread.planner, reread.shapes, reread.hardware;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
