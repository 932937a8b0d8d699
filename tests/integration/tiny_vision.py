"""Tiny random vision-language models of several families, what goes into them, and a checkpoint
with a processor that needs no file from elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, CLIPImageProcessor, LlavaProcessor

from reread.integrations.hf.load import quiet

from ..unit import tiny_checkpoint
from .tiny import BASE, HYBRID, VOCABULARY, WINDOWED

IMAGE, VIDEO, BEGIN, END = range(VOCABULARY - 8, VOCABULARY - 4)  # token ids
SPECIAL = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}
LLAMA = {"model_type": "llama", **BASE}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
QWEN_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "in_channels": 3,
}
PER_IMAGE = 17  # tokens by `processor`: 16 patches and the class token
PATCHES = 64  # of an image of 8 x 8 for Qwen's towers, merged to 16 tokens


def rotary(*section: int, share: float = 1.0) -> dict[str, Any]:
    """Positions of three axes, each for a section of the head's rotary pairs."""
    return {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": list(section),
            "mrope_interleaved": True,
            "partial_rotary_factor": share,
        }
    }


@dataclass(frozen=True)
class Family:
    """A kind of model: its config, tokens of an image, and the tensors of `count` images that go
    with ids [B, T]."""

    config: dict[str, Any]
    tokens: int
    pictures: Callable[[Tensor, int], dict[str, Tensor]]
    layers: tuple[int, int] = (2, 2)  # sparse ones, of how many


def _plain(ids: Tensor, count: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(count, 3, 16, 16)}


def _typed(ids: Tensor, count: int) -> dict[str, Tensor]:
    return {**_plain(ids, count), "token_type_ids": (ids == IMAGE).long()}


def _sized(ids: Tensor, count: int) -> dict[str, Tensor]:
    return {**_plain(ids, count), "image_sizes": torch.tensor([[16, 16]] * count)}


def _by_row(ids: Tensor, count: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(ids.shape[0], count // ids.shape[0], 3, 16, 16)}


def _qwen(ids: Tensor, count: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(count * PATCHES, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 8, 8]] * count),
        "mm_token_type_ids": (ids == IMAGE).long(),
    }


_GEMMA = {
    "model_type": "gemma3",
    "text_config": {**BASE, **WINDOWED, "query_pre_attn_scalar": 16},
    "vision_config": {"model_type": "siglip_vision_model", **TOWER},
    "mm_tokens_per_image": 4,
    "boi_token_index": BEGIN,
    "eoi_token_index": END,
    "tie_word_embeddings": False,
    "image_token_index": IMAGE,
    "image_token_id": IMAGE,
}
FAMILIES = {
    "qwen2.5-vl": Family(
        {
            "model_type": "qwen2_5_vl",
            "text_config": {**BASE, **rotary(2, 3, 3)},
            "vision_config": {**QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [1]},
            **SPECIAL,
        },
        16,
        _qwen,
    ),
    "qwen3-vl": Family(
        {
            "model_type": "qwen3_vl",
            "text_config": {**BASE, **rotary(2, 3, 3)},
            "vision_config": {
                **QWEN_TOWER,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0],
            },
            **SPECIAL,
        },
        16,
        _qwen,
    ),
    "qwen3.5": Family(
        {
            "model_type": "qwen3_5",
            "text_config": {**BASE, **HYBRID, **rotary(1, 1, 0, share=0.25)},
            "vision_config": {**QWEN_TOWER, "num_position_embeddings": 64},
            **SPECIAL,
        },
        16,
        _qwen,
        (2, 4),
    ),
    "llava": Family(
        {
            "model_type": "llava",
            "text_config": LLAMA,
            "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **TOWER},
            "vision_feature_layer": -1,
            "image_token_index": IMAGE,
            "image_token_id": IMAGE,
        },
        16,
        _plain,
    ),
    "mistral3": Family(
        {
            "model_type": "mistral3",
            "text_config": {"model_type": "mistral", **BASE, "sliding_window": None},
            "vision_config": {"model_type": "pixtral", "head_dim": 16, **TOWER},
            "spatial_merge_size": 2,
            "image_token_index": IMAGE,
            "image_token_id": IMAGE,
        },
        4,
        _sized,
    ),
    "gemma3": Family(_GEMMA, 4, _typed, (2, 4)),
    "idefics3": Family(
        {
            "model_type": "idefics3",
            "text_config": LLAMA,
            "vision_config": TOWER,
            "scale_factor": 2,
            "pad_token_id": 0,
            "image_token_id": IMAGE,
        },
        4,
        _by_row,
    ),
    "smolvlm": Family(
        {
            "model_type": "smolvlm",
            "text_config": LLAMA,
            "vision_config": TOWER,
            "scale_factor": 2,
            "pad_token_id": 0,
            "image_token_id": IMAGE,
        },
        4,
        _by_row,
    ),
}
MLLAMA = {
    "model_type": "mllama",
    "text_config": {**BASE, "cross_attention_layers": [1], **rotary()},
    "vision_config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "attention_heads": 2,
        "intermediate_size": 48,
        "vision_output_dim": 64,
        "image_size": 16,
        "patch_size": 4,
        "intermediate_layers_indices": [0],
        "max_num_tiles": 1,
        "supported_aspect_ratios": [[1, 1]],
    },
    "image_token_index": IMAGE,
}


def build(config: dict[str, Any], *, seed: int = 0) -> Any:
    """A fresh model, eval mode, fp32."""
    values = dict(config)
    made = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(seed)
    net = AutoModelForImageTextToText.from_config(made, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            # Gemma's projection of images starts at zero
            if parameter.dim() == 2 and not parameter.any():
                parameter.normal_(std=0.3)
    return net


@functools.cache
def model(name: str) -> Any:
    """The shared model of a family. Tests must leave it as they found it."""
    return build(FAMILIES[name].config)


def prompt(family: Family, images: int, text: int, *, seed: int = 1) -> Tensor:
    """Five tokens, `images` images, `text` tokens: int64 [1, T]."""
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(3, IMAGE, (1, 5 + text), generator=draw)
    image = torch.tensor([[BEGIN, *[IMAGE] * family.tokens, END]])
    return torch.cat([words[:, :5], *[image] * images, words[:, 5:]], dim=1)


def inputs(family: Family, ids: Tensor, images: int, *, seed: int = 1) -> dict[str, Tensor]:
    """What `generate` takes besides ids, with random images."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return family.pictures(ids, images)


def processor() -> Any:
    """LLaVA's, of one token per character; an image is 16 x 16 pixels and PER_IMAGE tokens."""
    tokenizer = tiny_checkpoint.tokenizer(template=False)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"], "pad_token": "<unk>"})
    side = {"height": 16, "width": 16}
    with quiet():
        return LlavaProcessor(
            image_processor=CLIPImageProcessor(size=side, crop_size=side),
            tokenizer=tokenizer,
            patch_size=4,
            vision_feature_select_strategy="full",
            num_additional_image_tokens=1,
            chat_template=(
                "{% for m in messages %}{% for part in m['content'] %}"
                "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
                "{% endfor %}{% endfor %}{% if add_generation_prompt %}\n{% endif %}"
            ),
        )


def save(folder: Path, *, positions: int = 1024) -> Path:
    """A LLaVA checkpoint that `load_vision` takes; its words are printable characters."""
    made = processor()
    image = made.tokenizer.convert_tokens_to_ids("<image>")
    text = {**LLAMA, "vocab_size": len(made.tokenizer), "max_position_embeddings": positions}
    config = {
        **FAMILIES["llava"].config,
        "text_config": {**text, "bos_token_id": None},
        "vision_feature_select_strategy": "full",
        "image_token_index": image,
        "image_token_id": image,
    }
    build(config).save_pretrained(folder)
    made.save_pretrained(folder)
    return folder
