"""Triggers that read the text: boundary tokens of many scripts, and the entropy of an output."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reread.policy.trigger import boundary_table, entropy, is_boundary

ENDS = {
    "latin": [".", "?", "!", ";", "word.", " end?", "!!", "...", "?!", "e.g."],
    "cjk": ["。", "！", "？", "；", "終わり。", "．", "｡"],
    "arabic and urdu": ["؟", "۔", "؛", "هل؟"],
    "devanagari": ["।", "॥", "है।"],
    "armenian": ["։", "բառ։"],
    "ethiopic": ["።", "ቃል።"],
    "khmer": ["។", "៕"],
    "burmese": ["။"],
    "tibetan": ["།"],
    "greek question mark": ["\u037e"],
    "ellipsis": ["…"],
    "double marks": ["‼", "⁇", "⁈", "⁉"],
    "lines": [
        "\n",
        "\n\n",
        "\r\n",
        "\r",
        "  \n",
        "\n    ",
        "x\n",
        ";\n",
        "\u2028",
        "\u2029",
        "\u0085",
        "},\n",
    ],
    "closers behind the mark": [
        '."',
        ".'",
        ".)",
        "?”",
        "!’",
        ".»",
        "。」",
        "！』",
        "?]",
        '." ',
        ". ",
        ".\u00a0",
    ],
}
NO_ENDS = {
    "words": ["word", " word", "The", "a", "字", "كلمة"],
    "nothing": ["", " ", "\t", "   "],
    "closers alone": ['"', ")", "”", "」", "'", " )", '" '],
    "inner punctuation": [",", ":", "-", "—", "、", "，", "،", "：", "(", "/", "#"],
    "a mark inside": [".com", "3.14", "?x", "a;b", ".5", "...and"],
    "special tokens": ["<pad>", "<|im_end|>", "<s>"],
}


def cases(table: dict[str, list[str]]) -> list[object]:
    return [
        pytest.param(text, id=f"{name}-{text!r}") for name, texts in table.items() for text in texts
    ]


@pytest.mark.parametrize("text", cases(ENDS))
def test_sentence_and_line_ends_are_boundaries(text: str) -> None:
    assert is_boundary(text)


@pytest.mark.parametrize("text", cases(NO_ENDS))
def test_what_ends_nothing_is_no_boundary(text: str) -> None:
    assert not is_boundary(text)


@given(st.text(max_size=6))
def test_text_that_ends_with_a_mark_of_the_paper_is_a_boundary(text: str) -> None:
    for mark in ".?!;\n":
        assert is_boundary(text + mark)


@given(st.text(alphabet=st.characters(categories=["L", "N"]), min_size=1, max_size=8))
def test_letters_and_digits_are_never_boundaries(text: str) -> None:
    assert not is_boundary(text)


def test_the_table_has_one_flag_per_token_id_in_order() -> None:
    pieces = ["a", ".", " b", "\n", "。", ",", ""]
    table = boundary_table(pieces)
    assert table.dtype == torch.bool
    assert table.tolist() == [False, True, False, True, True, False, False]


def test_the_table_takes_any_iterable() -> None:
    assert boundary_table(piece for piece in ("x", "?")).tolist() == [False, True]


def test_entropy_of_a_uniform_output_is_log_v() -> None:
    assert entropy(torch.zeros(2, 50)).tolist() == pytest.approx([math.log(50)] * 2, rel=1e-5)


def test_entropy_of_a_sure_output_is_zero() -> None:
    logits = torch.full((1, 10), -1e4)
    logits[0, 3] = 0.0
    assert float(entropy(logits)) == pytest.approx(0.0, abs=1e-6)


def test_entropy_takes_minus_infinity_as_probability_zero() -> None:
    logits = torch.tensor(
        [[0.0, 0.0, -math.inf, -math.inf], [0.0, -math.inf, -math.inf, -math.inf]]
    )
    assert entropy(logits).tolist() == pytest.approx([math.log(2), 0.0], abs=1e-6)


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=30), st.floats(-50, 50))
def test_entropy_is_minus_sum_p_log_p_and_ignores_a_shift(
    values: list[float], shift: float
) -> None:
    e = [math.exp(v - max(values)) for v in values]
    want = -sum(x / sum(e) * math.log(x / sum(e)) for x in e)
    logits = torch.tensor([values])
    assert float(entropy(logits)) == pytest.approx(want, abs=2e-5)
    assert float(entropy(logits + shift)) == pytest.approx(want, abs=2e-3)


def test_entropy_of_half_precision_is_taken_in_full_precision() -> None:
    logits = torch.zeros(1, 5000, dtype=torch.bfloat16)
    got = entropy(logits)
    assert got.dtype == torch.float32
    assert float(got) == pytest.approx(math.log(5000), rel=1e-4)


def test_entropy_of_nan_is_nan_not_a_number_that_compares() -> None:
    assert math.isnan(float(entropy(torch.tensor([[0.0, math.nan]]))))
