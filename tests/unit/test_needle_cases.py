"""The retrieval cases have the form the checkpoint knows, and their answers stand in the text."""

from __future__ import annotations

import pytest

from reread.errors import InputError
from reread.evaluation.needle import KINDS, Question, Text, Vocabulary, make_texts, share_right

WORDS = [a + b + c + d for a in "bdfg" for b in "aeiou" for c in "klmn" for d in "aeiou"]
VOCABULARY = Vocabulary.of(
    [*WORDS, *(f"{i:02d}" for i in range(100)), "code", "note", "link", ".", "The", "<bos>"]
)


def texts(**changes: int) -> list[Text]:
    return make_texts(
        VOCABULARY, **{"tokens": 1024, "count": 3, "questions": 3, "seed": 0, **changes}
    )


def sentences(text: Text) -> list[list[str]]:
    assert text.words[0] == "<bos>"
    body = text.words[1:]
    return [body[i : i + 16] for i in range(0, len(body), 16)]


def key_of(question: Question) -> list[str]:
    return question.words[-3:-1]


def test_words_are_four_letters_and_never_those_that_frame_records() -> None:
    assert set(VOCABULARY.words) == set(WORDS)
    assert len(VOCABULARY.numbers) == 100


def test_every_sentence_has_sixteen_words_and_one_full_stop_at_its_end() -> None:
    for text in texts():
        for sentence in sentences(text):
            assert len(sentence) == 16
            assert sentence[-1] == "."
            assert sentence.count(".") == 1


def test_texts_of_one_call_are_equally_long_and_about_as_long_as_asked() -> None:
    (length,) = {len(text.words) for text in texts(tokens=4096)}
    assert 4096 - 32 <= length <= 4096


@pytest.mark.parametrize("kind", KINDS)
def test_questions_of_a_kind_are_equally_long_and_ask_for_different_records(kind: str) -> None:
    for text in texts():
        asked = text.questions[kind]  # type: ignore[index]
        assert len(asked) == 3
        assert len({tuple(q.words) for q in asked}) == 3
        assert len({(len(q.words), len(q.answer)) for q in asked}) == 1


def test_a_code_stands_in_the_text() -> None:
    for text in texts():
        for q in text.questions["code"]:
            (record,) = [s for s in sentences(text) if s[:5] == ["The", "code", "of", *key_of(q)]]
            assert record[5:11] == ["is", *q.answer[:4], ";"]
            assert q.answer[4:] == ["."]
            assert q.words == ["?", "code", "of", *key_of(q), ":"]


def test_a_note_stands_in_the_text() -> None:
    for text in texts():
        for q in text.questions["note"]:
            (record,) = [s for s in sentences(text) if s[:4] == ["Note", *key_of(q), ":"]]
            assert record[4:14] == q.answer
            assert q.words == ["?", "note", *key_of(q), ":"]


def test_a_chain_follows_three_links_of_the_text() -> None:
    for text in texts():
        links = {tuple(s[3:5]): s[6:8] for s in sentences(text) if s[:2] == ["The", "link"]}
        for q in text.questions["chain"]:
            at, want = key_of(q), []
            for _ in range(3):
                at = links[tuple(at)]
                want += [*at, "."]
            assert q.answer == want


def test_the_same_seed_gives_the_same_texts_and_another_seed_others() -> None:
    assert texts() == texts()
    assert texts()[0] != texts(seed=1)[0]
    assert texts()[0] != texts()[1]


@pytest.mark.parametrize("changes", [{"tokens": 100}, {"questions": 50}])
def test_a_text_too_short_for_its_questions_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(InputError, match="too short"):
        texts(**changes)


def test_the_share_counts_words_at_their_place() -> None:
    assert share_right(["a", "b", "c", "d"], ["a", "x", "c", "d", "e"]) == 0.75
    assert share_right(["a", "b"], []) == 0.0
    assert share_right(["a", "b"], ["b", "a"]) == 0.0
