"""A tiny random Llama with a character tokenizer, saved as a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
POSITIONS = 400
# printable ASCII, space and newline as the byte-level alphabet writes them
CHARACTERS = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
# one token per byte: most characters beyond ASCII take several
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def tokenizer(*, template: bool = True, characters: list[str] | None = None) -> Any:
    """One token per character; what is not in `characters` becomes <unk>."""
    pieces = ["<unk>", *(CHARACTERS if characters is None else characters)]
    made = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    wrapped.chat_template = TEMPLATE if template else None
    return wrapped


def model(positions: int = POSITIONS) -> LlamaForCausalLM:
    """Random weights from a fixed seed; it never ends a sequence by itself."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS) + 1,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def save(folder: Path, *, template: bool = True, positions: int = POSITIONS) -> Path:
    """A folder that `load` takes."""
    model(positions).save_pretrained(folder)
    tokenizer(template=template).save_pretrained(folder)
    return folder
