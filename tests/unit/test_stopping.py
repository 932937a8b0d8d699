"""Answers that end at given strings."""

from __future__ import annotations

import pytest
import torch

from reread.evaluation.stopping import Until, cut
from reread.integrations.hf.load import Loaded

from . import needle_checkpoint


@pytest.mark.parametrize(
    ("until", "left"),
    [((), "a b. c"), (("",), "a b. c"), (("", "."), "a b"), (("c", "b"), "a "), (("x",), "a b. c")],
)
def test_a_text_is_cut_at_the_first_of_them(until: tuple[str, ...], left: str) -> None:
    assert cut("a b. c", until) == left


@pytest.mark.parametrize(
    ("until", "stops"),
    [(("37",), 4), (("code 37",), 4), (("Note",), 6), (("",), None), ((), None), (("12",), None)],
)
def test_a_row_stops_when_it_has_said_one(until: tuple[str, ...], stops: int | None) -> None:
    tokenizer = needle_checkpoint.tokenizer()
    ids = tokenizer.convert_tokens_to_ids(["12", "The", "code", "37", ".", "Note", "of"])
    criterion = Until(Loaded(None, tokenizer, "tiny"), until, 1)
    said = [bool(criterion(torch.tensor([ids[:n]]), None)) for n in range(2, len(ids) + 1)]
    first = said.index(True) + 2 if True in said else None
    assert first == stops
