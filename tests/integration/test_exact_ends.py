"""Mode "exact": where rows end, what chooses and filters tokens, and what streamers see."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast
from transformers.generation import BaseStreamer, StoppingCriteria

import reread
from reread import Config

from . import tiny
from .exact_cases import NEW, both, dense, ends, everything, exact, ragged
from .tiny import MATRIX, model, prompt

some = pytest.mark.parametrize("name", ["llama", "qwen2-windowed", "qwen3.5"])
# drafts that break off, and drafts that run past the end of a row
drafting = pytest.mark.parametrize("config", [exact(k=24), everything()], ids=["k=24", "all"])


def rows_of(name: str) -> tuple[Any, Tensor, Tensor, Tensor]:
    """A model, the ragged batch and its mask, and dense's free-running text."""
    ids, mask = ragged()
    return model(name), ids, mask, dense(name, 8)


# ---- ends


@some
@drafting
def test_rows_that_end_at_different_steps_are_padded_as_denses(name: str, config: Config) -> None:
    net, ids, mask, free = rows_of(name)
    want, got, stats = both(net, ids, config, attention_mask=mask, eos_token_id=ends(free))
    assert got.tolist() == want.tolist()
    lengths = [next((n for n in range(NEW) if row[n:] == [0] * (NEW - n)), NEW) for row in
               got[:, ids.shape[1] :].tolist()]  # fmt: skip
    assert len(set(lengths)) >= 3
    assert stats.drafts is not None
    assert stats.drafts.tokens == sum(lengths)


@some
def test_a_batch_whose_rows_all_end_stops_where_dense_stops(name: str) -> None:
    net, ids, mask, free = rows_of(name)
    want, got, _ = both(
        net, ids, everything(), attention_mask=mask, eos_token_id=ends(free, spare=0),
        max_new_tokens=60,
    )  # fmt: skip
    assert got.tolist() == want.tolist()
    assert got.shape[1] < ids.shape[1] + 60


@drafting
def test_an_end_token_of_the_model_itself_ends_rows(config: Config) -> None:
    free = dense("llama", 1)
    net = tiny.build(MATRIX["llama"], eos_token_id=ends(free, spare=0)[:1])
    want, got, _ = both(net, prompt(90), config)
    assert got.tolist() == want.tolist()
    assert got.shape[1] < 90 + NEW


class EndsWith(StoppingCriteria):
    """Stops a row behind one of some tokens. It is no end token: dense goes on with the row."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.isin(input_ids[:, -1], self.tokens)


@some
@drafting
@pytest.mark.parametrize("spare", [0, 1])
def test_rows_without_an_end_token_go_on_until_all_have_stopped(
    name: str, config: Config, spare: int
) -> None:
    net, ids, mask, free = rows_of(name)
    stop = [EndsWith(ends(free, spare))]
    want, got, _ = both(net, ids, config, attention_mask=mask, stopping_criteria=stop)
    assert got.tolist() == want.tolist()
    assert (got.shape[1] == ids.shape[1] + NEW) == bool(spare)


def test_an_end_token_and_a_stopping_criterion_work_together() -> None:
    net, ids, mask, free = rows_of("llama")
    one, *others = ends(free, spare=0)
    want, got, _ = both(
        net, ids, everything(), attention_mask=mask, eos_token_id=one,
        stopping_criteria=[EndsWith(others)],
    )  # fmt: skip
    assert got.tolist() == want.tolist()


def spelling() -> Any:
    """One word an id; transformers looks for stop strings behind a word of its own, "abcdef"."""
    vocab = {f"w{i}": i for i in range(tiny.VOCABULARY - 1)} | {"abcdef": tiny.VOCABULARY - 1}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocab, unk_token="w3")))


@pytest.mark.parametrize("rows", [1, 8])
@drafting
def test_stop_strings_stop_where_dense_stops(rows: int, config: Config) -> None:
    net, ids, mask, free = rows_of("llama")
    if rows == 1:
        ids, mask, free = prompt(90), torch.ones(1, 90, dtype=torch.long), dense("llama", 1)
    words = spelling()
    strings = [words.convert_ids_to_tokens(token) for token in ends(free, spare=0)]
    want, got, _ = both(
        net, ids, config, attention_mask=mask, stop_strings=strings, tokenizer=words
    )
    assert got.tolist() == want.tolist()
    assert got.shape[1] < ids.shape[1] + NEW


@pytest.mark.parametrize("new", [1, 2, 3, 6, 17, 18, 19])
def test_the_longest_text_may_end_in_the_middle_of_a_draft(new: int) -> None:
    ids, mask = ragged()
    with reread.attach(model("llama"), everything()):
        got = model("llama").generate(
            ids, attention_mask=mask, max_length=ids.shape[1] + new, do_sample=False
        )
    assert got[:, ids.shape[1] :].tolist() == dense("llama", 8, 19)[:, :new].tolist()


# ---- what changes the scores


class Climbs(LogitsProcessor):
    """Depends on the row's text, on its length, and works in place."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        odd = (input_ids[:, -1] + input_ids.shape[1]) % 2 == 1
        scores[odd, ::2] = -math.inf
        return scores


@some
@drafting
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 1},
        {"logits_processor": LogitsProcessorList([Climbs()])},
        {"bad_words_ids": [[i] for i in range(3, 128, 2)]},
        # knows rows by their index
        {"prefix_allowed_tokens_fn": lambda row, ids: list(range(3 + row, 128, 2))},
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_see_what_dense_shows_them(
    name: str, config: Config, options: dict[str, Any]
) -> None:
    net, ids, mask, free = rows_of(name)
    ids, mask = ids[::3], mask[::3]
    want, got, stats = both(net, ids, config, attention_mask=mask, **options)
    assert got.tolist() == want.tolist()
    assert got[:, ids.shape[1] :].tolist() != free[::3].tolist()
    assert stats.drafts is not None
    assert (stats.drafts.acceptance == 1.0) == (config.k > 1000)


@drafting
def test_min_new_tokens_holds_the_end_back(config: Config) -> None:
    net, ids, mask, free = rows_of("llama")
    options = {"attention_mask": mask, "eos_token_id": ends(free), "min_new_tokens": 11}
    want, got, _ = both(net, ids, config, **options)
    assert got.tolist() == want.tolist()
    assert got[:, ids.shape[1] : ids.shape[1] + 11].tolist() != free[:, :11].tolist()


def test_several_answers_to_a_prompt_are_rows_of_their_own() -> None:
    """top_k=1 samples what greedy decoding chooses, so every answer is known."""
    options = {"do_sample": True, "top_k": 1, "num_return_sequences": 3}
    ids, mask = ragged()
    want, got, _ = both(model("llama"), ids[:2], exact(k=24), attention_mask=mask[:2], **options)
    assert got.tolist() == want.tolist()
    assert got[::3, ids.shape[1] :].tolist() == dense("llama", 8)[:2].tolist()


# ---- streams


class Stream(BaseStreamer):
    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        assert not self.ended
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


@some
@drafting
@pytest.mark.parametrize("through", ["attach", "generate"])
def test_a_streamer_sees_verified_tokens_alone_and_in_order(
    name: str, config: Config, through: str
) -> None:
    ids, stream, net = prompt(90), Stream(), model(name)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "streamer": stream}
    if through == "attach":
        with reread.attach(net, config) as session:
            net.generate(ids, **options)
        drafts = session.stats.drafts
    else:
        drafts = reread.generate(net, ids, config=config, **options).stats.drafts
    assert drafts is not None
    assert (drafts.accepted < drafts.drafted) == (config.k < 1000)
    assert stream.puts == [ids[0].tolist(), *[[token] for token in dense(name, 1)[0].tolist()]]
    assert stream.ended == 1


def test_a_streamer_sees_nothing_behind_an_end() -> None:
    free = dense("llama", 1)
    end = ends(free, spare=0)[:1]
    streams = Stream(), Stream()
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": end}
    model("llama").generate(prompt(90), streamer=streams[0], pad_token_id=0, **options)
    with reread.attach(model("llama"), everything()):
        model("llama").generate(prompt(90), streamer=streams[1], pad_token_id=0, **options)
    assert streams[1].puts == streams[0].puts
    assert streams[1].puts[-1] == end
    assert streams[1].ended == 1
