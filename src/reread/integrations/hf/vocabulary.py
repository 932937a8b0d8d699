"""Which token ids end a sentence or a line, from a tokenizer's vocabulary."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...errors import InputError
from ...policy.trigger import boundary_table

_TABLES: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()


def boundary_tokens(tokenizer: Any, vocabulary: int) -> Tensor:
    """The boundary trigger's table: decoded once, then looked up by token id.

    A character that the tokenizer splits into several byte tokens cannot be recognised by its last
    token alone; such marks are left to the interval trigger.

    Args:
        tokenizer: a Hugging Face tokenizer.
        vocabulary: rows of the model's embedding; ids beyond the tokenizer's own are no boundary.

    Returns:
        bool [vocabulary], on the CPU.

    Raises:
        InputError: the tokenizer has more ids than the model, so it belongs to another model.
    """
    table = _TABLES.get(tokenizer)
    if table is None:
        pieces = tokenizer.batch_decode(
            [[i] for i in range(len(tokenizer))], skip_special_tokens=False
        )
        table = _TABLES[tokenizer] = boundary_table(pieces)
    if table.numel() > vocabulary and bool(table[vocabulary:].any()):
        raise InputError(
            f"the tokenizer has {table.numel()} ids, the model {vocabulary}: pass this model's own"
        )
    return torch.nn.functional.pad(table[:vocabulary], (0, max(0, vocabulary - table.numel())))


def find_tokenizer(model: Any) -> Any | None:
    """The tokenizer saved beside the model's weights (a folder or the local hub cache), or None.
    Never downloads."""
    from transformers import AutoTokenizer

    source = getattr(model, "name_or_path", "") or getattr(model.config, "_name_or_path", "")
    if not source:
        return None
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=True)
    except Exception:  # many kinds mean "no tokenizer here"; the caller warns that there is none
        return None
