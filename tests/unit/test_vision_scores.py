"""How answers about documents and videos are scored."""

from __future__ import annotations

import pytest

from reread.evaluation.tasks.vision_scores import distance, document_score, letter_of, similarity

OPTIONS = ("A. Black.", "B. Gray.", "C. Green.", "D. Brown.")


@pytest.mark.parametrize(
    ("a", "b", "edits"),
    [("", "", 0), ("abc", "abc", 0), ("kitten", "sitting", 3), ("", "ab", 2), ("flaw", "lawn", 2)],
)
def test_distance(a: str, b: str, edits: int) -> None:
    assert distance(a, b) == distance(b, a) == edits


def test_similarity_counts_from_a_half_on() -> None:
    assert similarity("abcd", "abcx") == 0.75
    assert similarity("abcd", "abxx") == 0.0
    assert similarity("", "") == 1.0


@pytest.mark.parametrize(
    ("form", "expected", "answer", "right"),
    [
        ("Int", "8", "8", 1),
        ("Int", "8", "Answer: 8.", 1),
        ("Int", "1200", "1,200", 1),
        ("Int", "8", "9", 0),
        ("Int", "8", "8.5", 0),
        ("Int", "8", "eight", 0),
        ("Float", "18.29%", "18.3%", 1),
        ("Float", "18.29%", "0.1829", 1),
        ("Float", "$4.5", "4.6", 0),
        ("Float", "0", "0.0", 1),
        ("Float", "2.5", "about two", 0),
        ("Str", "Less well-off", "less well-off.", 1),
        ("Str", "Eating out", "Eating ouf", 0.9),
        ("Str", "Europe", "Asia", 0),
        ("Str", "TIME (magazine)", "Time", 1),
        ("Str", "Europe", "Europe\n\nThe map on page 3 says so.", 1),
        ("Str", "https://w.wiki/6gb", "https://w.wiki/6ga", 0),
        ("Str", "page 12", "page 13", 0),
        ("Str", "2015-2016", "2015-2017", 0),
        ("Str", "a.b@c.org", "a.b@c.com", 0),
        ("Str", "10:30 a.m.", "10:35 a.m.", 0),
        ("Str", "10:30 a.m.", "10:30 a.m.", 1),
        ("Str", "map.ipynb", "mop.ipynb", 0),
        ("None", "Not answerable", "Not answerable.", 1),
        ("None", "Not answerable", "Berlin", 0),
        ("Str", "Berlin", "Not answerable", 0),
        ("List", "['White', '10%']", "['10%', 'White']", 1),
        ("List", "['White', '10%']", "White, 10", 1),
        ("List", "['White', '10%']", "['White', '11%']", 0),
        ("List", "['White', '10%']", "['White']", 0),
        ("List", "['Circle', 'Rectangle']", "Circle and Rectangles", 0.9),
        ("List", "['Circle', 'Rectangle']", "[Circle, Rectangle]", 1),
        ("List", "['Circle']", "", 0),
        ("Str", "Europe", "", 0),
    ],
)
def test_the_rule_of_each_format(form: str, expected: str, answer: str, right: float) -> None:
    assert document_score(form, expected, answer) == pytest.approx(right)


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("C", "C"),
        ("C. Green.", "C"),
        (" (B) because of the sky", "B"),
        ("**D**", "D"),
        ("A", "A"),
        ("A man says the answer is B", "B"),
        ("The best answer is: D.", "D"),
        ("Option A", "A"),
        ("Green", "C"),
        ("Don't know", ""),
        ("Blue", ""),
        ("", ""),
        ("E", ""),
    ],
)
def test_the_letter_of_an_answer(answer: str, letter: str) -> None:
    assert letter_of(answer, OPTIONS) == letter
