"""Mode "exact": what is counted, what is refused, and what an interrupt leaves behind."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import BaseStreamer

import reread
from reread import Config, InputError, RereadError, UnsupportedError

from . import tiny
from .exact_cases import NEW, dense, ends, everything, exact, ragged
from .tiny import CACHE, MATRIX, left_padded, model, ours, prompt

some = pytest.mark.parametrize("name", ["llama", "qwen2-windowed", "qwen3.5"])
drafting = pytest.mark.parametrize("config", [exact(k=24), everything()], ids=["k=24", "all"])


# ---- counts


@some
@drafting
@pytest.mark.parametrize("ended", [False, True])
def test_the_counts_agree_with_each_other(name: str, config: Config, ended: bool) -> None:
    ids, mask = ragged()
    stop = ends(dense(name, 8)) if ended else []
    end = {"eos_token_id": stop, "pad_token_id": 0} if ended else {}
    got, stats = ours(model(name), ids, config, NEW, mask=mask, **end)
    drafts = stats.drafts
    assert drafts is not None
    texts = [
        next((n + 1 for n, token in enumerate(row) if token in stop), NEW) for row in got.tolist()
    ]
    assert drafts.tokens == sum(texts)
    assert sum(drafts.lengths.values()) == drafts.verified == sum(stats.slow_steps)
    assert sum(n * times for n, times in drafts.lengths.items()) == drafts.drafted
    assert drafts.drafted == sum(stats.fast_steps)
    assert drafts.accepted <= drafts.drafted
    assert drafts.accepted > 0 or name != "llama"
    # of every row: the prefill's token, each verification's own one, and the drafts that stand;
    # the text of a row may end in a draft, or before what dense would say next
    assert drafts.tokens - 8 <= drafts.verified + drafts.accepted
    assert drafts.acceptance == drafts.accepted / drafts.drafted
    assert drafts.accepted_per_verify == drafts.accepted / drafts.verified
    assert stats.full_steps == [0] * 8
    assert stats.new_tokens == got.shape[1]
    assert stats.slow_reasons == {}
    assert stats.decode_steps <= sum(stats.slow_steps) + sum(stats.fast_steps)
    assert stats.decode_s > 0
    assert stats.tokens_per_s == pytest.approx((drafts.tokens - 8) / stats.decode_s)


@some
@drafting
@pytest.mark.parametrize("rows", [1, 8])
def test_every_token_is_verified_or_an_accepted_draft(name: str, config: Config, rows: int) -> None:
    """A token that the row does not take is not accepted, also where rows wait for each other."""
    ids, mask = (prompt(90), None) if rows == 1 else ragged()
    _, stats = ours(model(name), ids, config, NEW, mask=mask)
    assert stats.drafts is not None
    assert stats.drafts.tokens == rows + stats.drafts.verified + stats.drafts.accepted


@drafting
def test_tokens_of_a_draft_behind_the_end_are_not_accepted(config: Config) -> None:
    ids, mask = ragged()
    end = {"eos_token_id": ends(dense("llama", 8)), "pad_token_id": 0}
    _, stats = ours(model("llama"), ids, config, NEW, mask=mask, **end)
    assert stats.drafts is not None
    # the last verification of a row that ended within its draft adds no token of its own
    assert stats.drafts.accepted <= stats.drafts.tokens - 8
    assert stats.drafts.tokens <= 8 + stats.drafts.verified + stats.drafts.accepted


def test_good_drafts_of_a_small_budget_read_less_than_dense() -> None:
    """A model that says one thing again and again: its drafts stand whatever they read."""
    net = tiny.build(
        MATRIX["llama"], initializer_range=0.02, num_hidden_layers=1, tie_word_embeddings=True
    )
    got, stats = ours(net, prompt(400), exact(k=16, tokens=8), 64)
    assert got.tolist() == tiny.stock(net, prompt(400), 64).tolist()
    assert stats.drafts is not None
    assert stats.drafts.acceptance > 0.9
    assert stats.keys_read_share < 0.4


def test_the_share_of_keys_is_what_the_passes_read() -> None:
    """Everything is selected: one verification reads a row's keys once for all its tokens."""
    _, stats = ours(model("llama"), prompt(90), everything(4), 11)
    # 10 tokens behind the first, two cycles; of each draft the newest token counts among its keys
    assert stats.drafts is not None
    assert stats.drafts.lengths == {4: 2}
    drafted = sum(range(91, 95)) + sum(range(96, 100))
    verified = 95 + 100
    assert stats.keys_read_share == pytest.approx((drafted + verified) / sum(range(91, 101)))


def test_stats_are_plain_values() -> None:
    _, stats = ours(model("llama"), prompt(90), exact(k=24), NEW)
    told = json.loads(json.dumps(stats.to_dict()))
    assert told["drafts"]["drafted"] == sum(stats.fast_steps)
    assert told["tokens_per_s"] > 0
    assert told["config"]["draft"] == {"tokens": 4, "adapt": False, "min_probability": 0.0}
    assert Config.from_dict(told["config"]).mode == "exact"


@some
def test_the_same_call_gives_the_same_text_and_the_same_counts(name: str) -> None:
    ids, mask = ragged()
    seen = []
    for _ in range(2):
        got, stats = ours(model(name), ids, exact(k=24), NEW, mask=mask)
        counts = stats.drafts, stats.slow_steps, stats.fast_steps, stats.keys_read_share
        seen.append((got.tolist(), counts, stats.decode_steps))
    assert seen[0] == seen[1]


def test_progress_grows_up_to_the_last_token() -> None:
    seen: list[tuple[str, int, int]] = []
    ours(model("llama"), prompt(90), everything(4), NEW, progress=lambda *told: seen.append(told))
    assert seen[0] == ("prefill", 90, 90)
    done = [done for phase, done, total in seen if phase == "decode" and total == NEW]
    assert done == sorted(done)
    assert done[-1] == NEW


def test_a_single_new_token_needs_no_pass_of_its_own() -> None:
    got, stats = ours(model("llama"), prompt(90), exact(), 1)
    assert got.tolist() == dense("llama", 1)[:, :1].tolist()
    assert stats.drafts is not None
    assert (stats.decode_steps, stats.drafts.verified, stats.drafts.tokens) == (0, 0, 1)
    assert stats.tokens_per_s == 0.0


# ---- refused before the first token


class NoToken(BaseStreamer):
    def __init__(self) -> None:
        self.calls = 0

    def put(self, value: Tensor) -> None:
        self.calls += 1
        assert self.calls == 1, "a token was produced"  # the first call hands over the prompt

    def end(self) -> None:
        pass


def refused(error: type[RereadError], match: str, **options: Any) -> None:
    """Refused, and the session serves the next call."""
    net, ids = model("llama"), prompt(90)
    with reread.attach(net, exact(k=24)):
        with pytest.raises(error, match=match):
            net.generate(ids, do_sample=False, streamer=NoToken(), max_new_tokens=4, **options)
        got = net.generate(ids, do_sample=False, max_new_tokens=4)
    assert got[:, 90:].tolist() == dense("llama", 1)[:, :4].tolist()


@pytest.mark.parametrize("name", ["output_scores", "output_logits", "output_hidden_states"])
@pytest.mark.parametrize("through", ["argument", "generation_config"])
def test_outputs_that_drafts_have_no_counterpart_of_are_refused(name: str, through: str) -> None:
    options: dict[str, Any] = {name: True, "return_dict_in_generate": True}
    if through == "generation_config":
        options = {"generation_config": GenerationConfig(**options)}
    refused(UnsupportedError, name, **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 2),
        ("assistant_model", object()),
        ("prompt_lookup_num_tokens", 3),
        ("custom_generate", lambda *args, **kwargs: None),
        ("custom_generate", "somebody/method"),
        ("output_attentions", True),
        ("use_cache", False),
    ],
)
def test_other_ways_of_decoding_are_refused(name: str, value: Any) -> None:
    refused(UnsupportedError, name, **{name: value})


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    refused(InputError, "tokenizer", stop_strings=["w3"])


def test_steps_of_a_loop_of_ones_own_read_everything() -> None:
    net, ids, tokens = model("llama"), prompt(90), list[int]()
    with reread.attach(net, exact(k=8)) as session, torch.no_grad():
        cache = tiny.prefilled(net, ids[:, :-1])
        with session.decoding():
            newest = ids[:, -1:]
            for _ in range(NEW):
                newest = net(newest, use_cache=True, **{CACHE: cache}).logits[:, -1:].argmax(-1)
                tokens.append(int(newest))
    assert [tokens] == dense("llama", 1).tolist()
    assert session.stats.fast_steps == [0]
    assert session.stats.keys_read_share == 1.0


# ---- interrupts


class Stop(Exception):
    pass


class Breaks(BaseStreamer):
    """Takes so many tokens, then raises; as a logits processor: at so many calls."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.tokens: list[int] = []
        self.calls = 0

    def put(self, value: Tensor) -> None:
        if value.numel() > 1:
            return  # the prompt
        self.tokens += value.tolist()
        if len(self.tokens) == self.after:
            raise Stop

    def end(self) -> None:
        raise AssertionError("the generation did not end")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.after:
            raise Stop
        return scores


@some
@drafting
@pytest.mark.parametrize("by", ["streamer", "logits_processor"])
def test_an_interrupt_leaves_session_and_model_usable(name: str, config: Config, by: str) -> None:
    net, ids = model(name), prompt(90)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    breaks = Breaks(after=7)
    with reread.attach(net, config):
        with pytest.raises(Stop):
            net.generate(ids, **options, **{by: breaks if by == "streamer" else [breaks]})
        got = net.generate(ids, **options)
    assert got[:, 90:].tolist() == dense(name, 1).tolist()
    assert tiny.stock(net, ids, NEW).tolist() == dense(name, 1).tolist()
    with reread.attach(net, config):
        assert torch.equal(net.generate(ids, **options), got)


@drafting
@pytest.mark.parametrize("after", [1, 3, 7])
@pytest.mark.parametrize("exactly", [False, True])
def test_an_interrupted_cache_serves_plain_transformers_up_to_the_streamed_text(
    config: Config, after: int, exactly: bool
) -> None:
    net, ids, breaks = model("llama"), prompt(90), Breaks(after)
    cache = tiny.prefilled(net, ids[:, :50])
    with reread.attach(net, config), pytest.raises(Stop):
        net.generate(ids, max_new_tokens=NEW, do_sample=False, streamer=breaks, **{CACHE: cache})
    text = torch.cat([ids, torch.tensor([breaks.tokens])], 1)
    assert breaks.tokens == dense("llama", 1)[0, :after].tolist()
    assert cache.get_seq_length() >= text.shape[1] - 1
    cache.crop(text.shape[1] - 1 - cache.get_seq_length())  # the newest token is not in it
    options: dict[str, Any] = {"max_new_tokens": NEW - after, "do_sample": False, CACHE: cache}
    if exactly:
        with reread.attach(net, config):
            got = net.generate(text, **options)
    else:
        got = net.generate(text, **options)
    assert got[:, 90:].tolist() == dense("llama", 1).tolist()


def test_an_interrupt_in_a_batch_disturbs_nobody_afterwards() -> None:
    ids, mask = left_padded([prompt(n, seed=n) for n in (40, 66, 90)])
    want = tiny.stock(model("llama"), ids, NEW, attention_mask=mask)
    with reread.attach(model("llama"), exact(k=24)):
        for after in (1, 5, 23, 40):
            with pytest.raises(Stop):
                model("llama").generate(
                    ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False,
                    logits_processor=[Breaks(after)],
                )  # fmt: skip
        got = model("llama").generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    assert got[:, 90:].tolist() == want.tolist()
