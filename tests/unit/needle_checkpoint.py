"""A tiny random Llama with the vocabulary of needle texts, saved as a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from reread.evaluation.needle import NEEDLE_WORDS

POSITIONS = 1200
WORDS = [a + b + c + d for a in "bdfg" for b in "aeiou" for c in "klmn" for d in "aeiou"]
NUMBERS = [f"{i:02d}" for i in range(100)]


def tokenizer() -> Any:
    """One token a word."""
    words = ["<unk>", *NEEDLE_WORDS, ".", *WORDS, *NUMBERS]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def model(seed: int = 0) -> LlamaForCausalLM:
    """Random weights; it never ends a sequence by itself."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def save(folder: Path, seed: int = 0) -> Path:
    """A folder that `load` takes."""
    model(seed).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
