"""Triggers that depend on the text: token sets built once from a vocabulary, and the entropy of an
output."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# Sentence ends of many scripts: Latin and Greek, CJK full and half width, Arabic and Urdu,
# Devanagari, Armenian, Ethiopic, Khmer, Burmese, Tibetan, and the ellipsis.
SENTENCE_ENDS = (
    ".?!;" + "。！？；｡．…‥" + "؟۔؛" + "।॥" + "։" + "።፧" + "។៕" + "။" + "།" + "‼⁇⁈⁉" + "\u037e"
)
LINE_ENDS = "\n\r\u2028\u2029\u0085"
# What may close a sentence after its mark: it stays a boundary.
CLOSERS = "\"'”’»)]}」』）】〉》*_`"


def is_boundary(text: str) -> bool:
    """Whether a token's text ends a sentence or a line.

    Spaces and closing quotes or brackets after the mark do not undo it (`." ` ends a sentence),
    but closers alone are no end.
    """
    if any(mark in text for mark in LINE_ENDS):
        return True
    core = text.rstrip().rstrip(CLOSERS).rstrip()
    return core != "" and core[-1] in SENTENCE_ENDS


def boundary_table(pieces: Iterable[str]) -> Tensor:
    """One flag per token id: does the token end a sentence or a line?

    Args:
        pieces: the text of every token id, in order of id.

    Returns:
        bool [vocabulary].
    """
    return torch.tensor([is_boundary(piece) for piece in pieces], dtype=torch.bool)


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits) over the last dim: -sum p log p.

    Args:
        logits: [B, V]; -inf is a token of probability 0.

    Returns:
        fp32 [B].
    """
    log_p = torch.log_softmax(logits.float(), dim=-1)
    p = log_p.exp()
    return -(p * log_p.where(p > 0, 0.0)).sum(dim=-1)
