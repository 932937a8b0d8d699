"""`generate` works as ever under `attach`, nothing is left behind, and stats say what ran."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
)
from transformers.generation import BaseStreamer, StoppingCriteria

import reread
from reread import Config, InputError

from . import tiny
from .tiny import (
    BOUNDARY_IDS,
    CACHE,
    cache_of,
    left_padded,
    model,
    ours,
    prompt,
    select_everything,
    sparse,
)

NEW = 24


def both(
    net: Any, ids: Tensor, config: Config | None = None, *, seed: int = 7, **options: Any
) -> tuple[Any, Any]:
    """The same call without and with reread."""
    options.setdefault("max_new_tokens", NEW)
    torch.manual_seed(seed)
    want = net.generate(ids, **options)
    torch.manual_seed(seed)
    with reread.attach(net, config or select_everything()) as session:
        got = net.generate(ids, **options)
    assert sum(session.stats.fast_steps) > 0
    return want, got


# ---- what generate can do


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7, "top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"num_return_sequences": 3},
    ],
)
def test_sampling_with_a_seed_gives_stocks_samples(options: dict[str, Any], llama: Any) -> None:
    want, got = both(llama, prompt(100, rows=2), do_sample=True, **options)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 1},
        {"bad_words_ids": [[i] for i in range(0, 128, 2)]},
        {"suppress_tokens": list(range(64))},
        {"renormalize_logits": True},
    ],
)
def test_logits_processors_work(options: dict[str, Any], llama: Any) -> None:
    plain = llama.generate(prompt(100), max_new_tokens=NEW, do_sample=False)
    want, got = both(llama, prompt(100), do_sample=False, **options)
    assert torch.equal(got, want)
    assert "renormalize_logits" in options or not torch.equal(want, plain)


def test_a_logits_processor_of_ones_own_sees_every_step(llama: Any) -> None:
    class Odd(LogitsProcessor):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            self.seen.append(input_ids.shape[1])
            scores[:, ::2] = -math.inf
            return scores

    odd = Odd()
    with reread.attach(llama, sparse()):
        out = llama.generate(
            prompt(50),
            max_new_tokens=NEW,
            do_sample=False,
            logits_processor=LogitsProcessorList([odd]),
        )
    assert odd.seen == list(range(50, 50 + NEW))
    assert all(token % 2 for token in out[0, 50:].tolist())


def test_min_new_tokens_holds_the_end_back(llama: Any) -> None:
    ids = prompt(100)
    first = int(llama.generate(ids, max_new_tokens=1, do_sample=False)[0, -1])
    want, got = both(
        llama, ids, do_sample=False, eos_token_id=first, min_new_tokens=6, pad_token_id=0
    )
    assert torch.equal(got, want)
    assert got.shape[1] > 106


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.values: list[int] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.values.extend(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("through", ["attach", "generate"])
def test_a_streamer_receives_every_token_once(through: str, llama: Any) -> None:
    ids, recorder = prompt(80), Recorder()
    if through == "attach":
        with reread.attach(llama, sparse()):
            out = llama.generate(ids, max_new_tokens=NEW, do_sample=False, streamer=recorder)
    else:
        out = reread.generate(
            llama, ids, config=sparse(), max_new_tokens=NEW, do_sample=False, streamer=recorder
        ).sequences
    assert recorder.values == out[0].tolist()
    assert recorder.ended == 1


def test_stopping_criteria_stop_where_stock_stops(llama: Any) -> None:
    class Tenth(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 110)

    want, got = both(llama, prompt(100), do_sample=False, stopping_criteria=[Tenth()])
    assert torch.equal(got, want)
    assert got.shape[1] == 110


def test_an_end_token_stops_where_stock_stops(llama: Any) -> None:
    ids = prompt(100)
    free = llama.generate(ids, max_new_tokens=NEW, do_sample=False)[0, 100:].tolist()
    end = next(token for i, token in enumerate(free) if i > 8 and token not in free[:i])
    want, got = both(llama, ids, do_sample=False, eos_token_id=end, pad_token_id=0)
    assert torch.equal(got, want)
    assert got.shape[1] == 100 + free.index(end) + 1


def test_the_output_object_holds_what_stocks_holds(llama: Any) -> None:
    want, got = both(
        llama,
        prompt(100),
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
    )
    assert got.keys() == want.keys()
    assert torch.equal(got.sequences, want.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(
            torch.stack(got[name]), torch.stack(want[name]), rtol=1e-3, atol=1e-3
        )
    torch.testing.assert_close(
        got.hidden_states[-1][-1], want.hidden_states[-1][-1], rtol=1e-3, atol=1e-3
    )


def test_several_samples_per_prompt_are_rows_of_their_own(llama: Any) -> None:
    ids = prompt(90, rows=2)
    with reread.attach(llama, sparse()):
        torch.manual_seed(3)
        three = llama.generate(ids, max_new_tokens=NEW, do_sample=True, num_return_sequences=3)
        torch.manual_seed(3)
        six = llama.generate(ids.repeat_interleave(3, 0), max_new_tokens=NEW, do_sample=True)
    assert torch.equal(three, six)
    assert len({tuple(row) for row in three.tolist()}) == 6


def test_prompts_can_be_given_in_every_way_stock_takes_them(llama: Any) -> None:
    ids = prompt(60)
    mask, options = torch.ones_like(ids), {"max_new_tokens": 12, "do_sample": False}
    with reread.attach(llama, sparse()):
        want = llama.generate(ids, **options)
        assert torch.equal(llama.generate(input_ids=ids, attention_mask=mask, **options), want)
        assert torch.equal(llama.generate(inputs=ids, **options), want)
        assert torch.equal(llama.generate(input_ids=ids, attention_mask=mask, **options), want)
        as_config = GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert torch.equal(llama.generate(ids, as_config), want)
        assert torch.equal(llama.generate(ids, generation_config=as_config), want)
        embedded = llama.generate(inputs_embeds=llama.get_input_embeddings()(ids), **options)
        assert torch.equal(embedded, want[:, 60:])
        assert torch.equal(llama.generate(ids, max_length=72, do_sample=False), want)


def test_generate_returns_prompt_and_continuation(llama: Any) -> None:
    ids = prompt(70, rows=2)
    out = reread.generate(llama, ids, config=sparse(), max_new_tokens=NEW, do_sample=False)
    with reread.attach(llama, sparse()):
        want = llama.generate(ids, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(out.sequences, want)
    assert torch.equal(out.sequences[:, :70], ids)


# ---- rows that end early


def early_end(net: Any, rows: list[Tensor], config: Config) -> tuple[int, int]:
    """A token that row 0 alone produces, after a few steps, and where."""
    texts = [ours(net, row, config)[0][0].tolist() for row in rows]
    for i in range(4, NEW - 4):
        token = texts[0][i]
        if token not in texts[0][:i] and all(token not in text for text in texts[1:]):
            return token, i
    raise AssertionError("the prompts of this test must be chosen anew")


def test_a_row_that_ends_early_does_not_disturb_the_others(llama: Any) -> None:
    config, rows = sparse(t_max=4), [prompt(n, seed=n) for n in (64, 75, 97)]
    end, at = early_end(llama, rows, config)
    ids, mask = left_padded(rows)
    got, stats = ours(llama, ids, config, mask=mask, eos_token_id=end, pad_token_id=0)
    for b, row in enumerate(rows):
        alone, own = ours(llama, row, config, eos_token_id=end, pad_token_id=0)
        assert got[b, : alone.shape[1]].tolist() == alone[0].tolist()
        assert bool((got[b, alone.shape[1] :] == 0).all())
        assert stats.slow_steps[b] + stats.fast_steps[b] == own.decode_steps
        assert (stats.slow_steps[b], stats.fast_steps[b]) == (own.slow_steps[0], own.fast_steps[0])
    assert stats.slow_steps[0] + stats.fast_steps[0] == at
    assert stats.decode_steps == NEW - 1


def test_the_padding_token_inside_a_text_does_not_end_the_row(llama: Any) -> None:
    """Only an end token ends a row. A model may well say what the tokenizer pads with."""
    free, _ = ours(llama, prompt(90), sparse())
    padding = int(free[0, 5])
    unused = next(i for i in range(3, 128) if i not in free[0].tolist())
    got, stats = ours(llama, prompt(90), sparse(), eos_token_id=unused, pad_token_id=padding)
    assert got.tolist() == free.tolist()
    assert stats.slow_steps[0] + stats.fast_steps[0] == NEW - 1


# ---- attaching and leaving


def fingerprint(net: Any) -> tuple[Any, ...]:
    return (
        sorted(vars(net)),
        net.config._attn_implementation,
        json.dumps(net.config.to_dict(), default=str, sort_keys=True),
        json.dumps(net.generation_config.to_dict(), default=str, sort_keys=True),
        [(n, len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in net.named_modules()],
        [(n, type(m), m.forward.__func__) for n, m in net.named_modules()],
        net.generate.__func__,
        [(n, p.data_ptr()) for n, p in net.named_parameters()],
    )


def test_leaving_attach_restores_the_model_exactly(llama: Any) -> None:
    before = fingerprint(llama)
    dense = llama.generate(prompt(60), max_new_tokens=5, do_sample=False)
    with reread.attach(llama, sparse()):
        llama.generate(prompt(60), max_new_tokens=5, do_sample=False)
    assert fingerprint(llama) == before
    assert torch.equal(llama.generate(prompt(60), max_new_tokens=5, do_sample=False), dense)


def test_leaving_attach_by_an_exception_restores_the_model(llama: Any) -> None:
    before = fingerprint(llama)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), reread.attach(llama, sparse()):
        llama.generate(prompt(60), max_new_tokens=5, do_sample=False, logits_processor=[interrupt])
    assert fingerprint(llama) == before


def test_a_refused_generate_leaves_the_session_usable_and_the_model_restorable(llama: Any) -> None:
    before = fingerprint(llama)
    want, _ = ours(llama, prompt(60), sparse())
    with reread.attach(llama, sparse()):
        with pytest.raises(reread.UnsupportedError):
            llama.generate(prompt(60), max_new_tokens=5, num_beams=2)
        got = llama.generate(prompt(60), max_new_tokens=NEW, do_sample=False)
    assert got[:, 60:].tolist() == want.tolist()
    assert fingerprint(llama) == before


def test_an_instances_own_generate_comes_back() -> None:
    net = tiny.build(tiny.MATRIX["llama"])
    calls: list[int] = []
    stock = net.generate

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return stock(*args, **kwargs)

    net.generate = own
    with reread.attach(net, sparse()):
        net.generate(prompt(30), max_new_tokens=3, do_sample=False)
    assert net.generate is own
    assert calls == [1]


def test_the_same_model_cannot_be_attached_twice(llama: Any) -> None:
    before = fingerprint(llama)
    with reread.attach(llama, sparse()):
        with pytest.raises(InputError, match="attached already"), reread.attach(llama, sparse()):
            raise AssertionError("attached")
        got = llama.generate(prompt(60), max_new_tokens=NEW, do_sample=False)
    assert fingerprint(llama) == before
    assert got[:, 60:].tolist() == ours(llama, prompt(60), sparse())[0].tolist()


def test_a_session_can_be_entered_again_after_it_was_left(llama: Any) -> None:
    session = reread.attach(llama, sparse())
    texts = []
    for _ in range(2):
        with session:
            texts.append(llama.generate(prompt(60), max_new_tokens=NEW, do_sample=False).tolist())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_models_can_be_attached_at_once_and_left_in_any_order(order: tuple[int, int]) -> None:
    nets = [model("llama"), model("qwen3")]
    configs = [sparse(), sparse(k=20, t_max=3)]
    before = [fingerprint(net) for net in nets]
    want = [ours(net, prompt(80), c)[0].tolist() for net, c in zip(nets, configs, strict=True)]
    sessions = [reread.attach(net, c) for net, c in zip(nets, configs, strict=True)]
    with ExitStack() as stack:
        for session in sessions:
            session.__enter__()
        for which in order:
            for i in {0, 1} - (set() if which == order[0] else {order[0]}):
                got = nets[i].generate(prompt(80), max_new_tokens=NEW, do_sample=False)
                assert got[:, 80:].tolist() == want[i]
            sessions[which].__exit__(None, None, None)
        stack.pop_all()
    assert [fingerprint(net) for net in nets] == before


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_models_that_share_one_config_object_can_be_attached_and_left(
    order: tuple[int, int],
) -> None:
    first = tiny.build(tiny.MATRIX["llama"])
    torch.manual_seed(1)
    nets = [first, LlamaForCausalLM(first.config).eval()]
    assert nets[0].config is nets[1].config
    before = [fingerprint(net) for net in nets]
    want = [ours(net, prompt(80), sparse())[0].tolist() for net in nets]
    sessions = [reread.attach(net, sparse()) for net in nets]
    for session in sessions:
        session.__enter__()
    for net, text in zip(nets, want, strict=True):
        assert (
            net.generate(prompt(80), max_new_tokens=NEW, do_sample=False)[:, 80:].tolist() == text
        )
    for i in order:
        sessions[i].__exit__(None, None, None)
    assert [fingerprint(net) for net in nets] == before
    for net in nets:
        net.generate(prompt(20), max_new_tokens=2, do_sample=False)


def test_importing_reread_changes_nothing_in_transformers_or_torch() -> None:
    code = """
import json, logging, sys, warnings
import torch, transformers
from transformers import DynamicCache, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

CLASSES = (DynamicCache, DynamicLayer, LlamaForCausalLM)

def state():
    return [
        sorted((n, id(f)) for n, f in ALL_ATTENTION_FUNCTIONS.items()),
        sorted((n, id(f)) for n, f in ALL_MASK_ATTENTION_FUNCTIONS.items()),
        [sorted((n, id(v)) for n, v in vars(c).items()) for c in CLASSES],
        [id(LlamaForCausalLM.generate), id(torch.nn.functional.scaled_dot_product_attention)],
        [str(torch.get_default_dtype()), torch.get_num_threads(), torch.is_grad_enabled()],
        [len(warnings.filters), len(logging.getLogger().handlers), torch.initial_seed()],
    ]

before = state()
import reread
reread.attach, reread.generate, reread.Config(), reread.Session, reread.Output
import reread.generation, reread.integrations.hf.attach, reread.integrations.hf.session
print(json.dumps(state() == before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "true"


def test_no_module_stands_in_the_way_of_a_name() -> None:
    code = """
import importlib, pkgutil, types, reread
for found in pkgutil.iter_modules(reread.__path__):
    if not found.name.startswith("_"):
        importlib.import_module(f"reread.{found.name}")
print([name for name in reread.__all__ if isinstance(getattr(reread, name), types.ModuleType)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_import_alone_does_not_load_transformers() -> None:
    code = "import sys, reread; reread.Config(); print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


# ---- caches in and out


def as_plain(cache: Any, net: Any) -> Any:
    """The same keys and values in a cache of transformers' own."""
    plain = DynamicCache(config=net.config)
    for i, layer in enumerate(cache.layers):
        plain.update(layer.keys.clone(), layer.values.clone(), i)
    return plain


def test_a_cache_made_under_attach_continues_densely_outside(llama: Any) -> None:
    with reread.attach(llama, sparse()):
        one = llama.generate(
            prompt(80), max_new_tokens=12, do_sample=False, return_dict_in_generate=True
        )
    cache = cache_of(one)
    longer = torch.cat([one.sequences, prompt(9, seed=8)], 1)
    want = llama.generate(
        longer, max_new_tokens=NEW, do_sample=False, **{CACHE: as_plain(cache, llama)}
    )
    got = llama.generate(longer, max_new_tokens=NEW, do_sample=False, **{CACHE: cache})
    assert torch.equal(got, want)
    assert cache.get_seq_length() == got.shape[1] - 1


@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_cache_made_outside_continues_under_attach(name: str, with_config: bool) -> None:
    net = model(name)

    def turn(under: bool) -> Tensor:
        cache = DynamicCache(config=net.config) if with_config else DynamicCache()
        one = net.generate(prompt(80), max_new_tokens=12, do_sample=False, **{CACHE: cache})
        longer = torch.cat([one, prompt(9, seed=8)], 1)
        if not under:
            return net.generate(longer, max_new_tokens=NEW, do_sample=False, **{CACHE: cache})
        out = reread.generate(
            net,
            longer,
            config=select_everything(),
            max_new_tokens=NEW,
            do_sample=False,
            **{CACHE: cache},
        )
        assert out.stats.fast_steps[0] > 0
        return out.sequences

    assert torch.equal(turn(True), turn(False))


def test_a_cache_travels_between_sessions_with_different_configs(llama: Any) -> None:
    """What one session chose is of no use to the next one."""
    with reread.attach(llama, sparse(k=6)):
        one = llama.generate(
            prompt(80), max_new_tokens=12, do_sample=False, return_dict_in_generate=True
        )
    plain, longer = as_plain(cache_of(one), llama), torch.cat([one.sequences, prompt(9, seed=8)], 1)
    want, stats = ours(llama, longer, sparse(k=30), **{CACHE: plain})
    got, same = ours(llama, longer, sparse(k=30), **{CACHE: cache_of(one)})
    assert got.tolist() == want.tolist()
    assert same.keys_read_share == stats.keys_read_share


def test_cropping_the_cache_takes_the_last_answer_back(llama: Any) -> None:
    config = sparse()
    with reread.attach(llama, config):
        one = llama.generate(
            prompt(80), max_new_tokens=12, do_sample=False, return_dict_in_generate=True
        )
        cache = cache_of(one)
        cache.crop(-(cache.get_seq_length() - 79))
        assert cache.get_seq_length() == 79
        again = llama.generate(prompt(80), max_new_tokens=12, do_sample=False, **{CACHE: cache})
    assert torch.equal(again, one.sequences)


# ---- loops of one's own


@pytest.mark.parametrize("grad", [False, True])
def test_a_loop_of_ones_own_gives_what_generate_gives(grad: bool, llama: Any) -> None:
    """With gradients as well: nobody is told that a loop around a model needs `no_grad`."""
    ids, config = prompt(90), sparse()
    want, stats = ours(llama, ids, config)
    with reread.attach(llama, config) as session, torch.set_grad_enabled(grad):
        cache = DynamicCache(config=llama.config)
        llama(ids[:, :-1], use_cache=True, **{CACHE: cache})
        out = llama(ids[:, -1:], use_cache=True, **{CACHE: cache})  # one token, yet the prompt's
        tokens = [int(out.logits[0, -1].argmax())]
        with session.decoding():
            for _ in range(NEW - 1):
                out = llama(torch.tensor([[tokens[-1]]]), use_cache=True, **{CACHE: cache})
                tokens.append(int(out.logits[0, -1].argmax()))
    assert tokens == want[0].tolist()
    assert session.stats.slow_steps == stats.slow_steps
    assert session.stats.fast_steps == stats.fast_steps
    assert session.stats.decode_steps == NEW - 1


@torch.no_grad()
@pytest.mark.parametrize("removed", [1, 3])
def test_cropping_between_two_steps_forgets_what_was_chosen(removed: int, llama: Any) -> None:
    """What a loop does that takes tokens back: the next step must not read the ones it removed."""
    ids = prompt(90)
    with reread.attach(llama, sparse(t_max=None)) as session, session.decoding():
        cache = DynamicCache(config=llama.config)
        llama(ids, use_cache=True, **{CACHE: cache})
        for token in (7, 8, 9, 10):
            llama(torch.tensor([[token]]), use_cache=True, **{CACHE: cache})
        cache.crop(-removed)
        plain = as_plain(cache, llama)
        got = llama(torch.tensor([[11]]), use_cache=True, **{CACHE: cache}).logits
    want = llama(torch.tensor([[11]]), use_cache=True, **{CACHE: plain}).logits
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    assert session.stats.slow_steps == [2]


@torch.no_grad()
def test_forwards_outside_decoding_are_prefill_even_token_by_token(llama: Any) -> None:
    ids = prompt(90)
    dense = llama(ids).logits
    with reread.attach(llama, sparse()):
        cache = tiny.prefilled(llama, ids[:, :80])
        for i in range(80, 90):
            out = llama(ids[:, i : i + 1], use_cache=True, **{CACHE: cache})
            torch.testing.assert_close(out.logits[:, -1], dense[:, i], rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_a_forward_without_a_cache_is_plain_dense_attention(llama: Any) -> None:
    ids = prompt(70, rows=2)
    dense = llama(ids, use_cache=False).logits
    with reread.attach(llama, sparse()) as session:
        assert torch.equal(llama(ids, use_cache=False).logits, dense)
        with session.decoding():
            assert torch.equal(llama(ids, use_cache=False).logits, dense)


# ---- around the model


def test_weights_that_are_moved_to_the_device_when_needed_keep_working(llama: Any) -> None:
    """What `device_map` does to a model: hooks that replace every module's forward."""
    net = copy.deepcopy(llama)
    accelerate.cpu_offload(net, execution_device=torch.device("cpu"))
    assert (
        ours(net, prompt(90), sparse())[0].tolist() == ours(llama, prompt(90), sparse())[0].tolist()
    )


def test_a_cache_from_inference_mode_continues_outside_of_it(llama: Any) -> None:
    texts = []
    for mode in (torch.inference_mode, torch.no_grad):
        with reread.attach(llama, sparse()):
            with mode():
                one = llama.generate(
                    prompt(80), max_new_tokens=8, do_sample=False, return_dict_in_generate=True
                )
            longer = torch.cat([one.sequences, prompt(9)], 1)
            two = llama.generate(
                longer, max_new_tokens=NEW, do_sample=False, **{CACHE: cache_of(one)}
            )
        texts.append(two.tolist())
    assert texts[0] == texts[1]


def test_a_copied_cache_is_a_conversation_of_its_own(llama: Any) -> None:
    with reread.attach(llama, sparse()):
        one = llama.generate(
            prompt(80), max_new_tokens=8, do_sample=False, return_dict_in_generate=True
        )
        fork = copy.deepcopy(cache_of(one))
        longer = torch.cat([one.sequences, prompt(9)], 1)
        texts = [
            llama.generate(longer, max_new_tokens=NEW, do_sample=False, **{CACHE: cache})
            for cache in (fork, cache_of(one))
        ]
    assert torch.equal(*texts)


def test_two_models_decode_in_two_threads() -> None:
    nets = [model("llama"), model("qwen3")]
    want = [ours(net, prompt(80), sparse())[0].tolist() for net in nets]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            got = list(pool.map(lambda net: ours(net, prompt(80), sparse())[0].tolist(), nets))
            assert got == want


# ---- stats


def steps(tokens: list[int], slow: Any) -> int:
    """Slow steps among those that read tokens[0], tokens[1], … (the last token is never read)."""
    return sum(bool(slow(i, token)) for i, token in enumerate(tokens[:-1]))


@pytest.mark.parametrize("t_max", [1, 2, 5, 23, 24, None])
def test_the_interval_trigger_is_exact(t_max: int | None, llama: Any) -> None:
    got, stats = ours(llama, prompt(100), sparse(t_max=t_max))
    slow = steps(got[0].tolist(), lambda i, _: i == 0 or (t_max is not None and i % t_max == 0))
    assert (stats.slow_steps, stats.fast_steps, stats.full_steps) == ([slow], [NEW - 1 - slow], [0])


def test_the_boundary_trigger_is_exact_for_every_row(llama: Any) -> None:
    ids, mask = left_padded([prompt(n, seed=n) for n in (60, 75, 97, 130)])
    got, stats = ours(
        llama, ids, sparse(t_max=None, boundary=True), mask=mask, tokenizer=tiny.tokenizer(), new=40
    )
    want = [steps(row, lambda i, token: i == 0 or token in BOUNDARY_IDS) for row in got.tolist()]
    assert stats.slow_steps == want
    assert max(want) > 2
    assert sum(stats.slow_reasons.values()) == sum(want)


@pytest.mark.parametrize(("threshold", "slow"), [(0.0, NEW - 1), (1e9, 1)])
def test_the_uncertainty_trigger_at_its_extremes(threshold: float, slow: int, llama: Any) -> None:
    _, stats = ours(llama, prompt(100), sparse(t_max=None, uncertainty=threshold))
    assert (stats.slow_steps, stats.fast_steps) == ([slow], [NEW - 1 - slow])


def test_keys_read_share_is_exact(llama: Any) -> None:
    n = 100
    _, stats = ours(llama, prompt(n), sparse(sink=2, recent=8, k=12, t_max=5))
    cached = [n + 1 + i for i in range(NEW - 1)]
    read = [length if i % 5 == 0 else 2 + 12 + 8 + i % 5 for i, length in enumerate(cached)]
    assert stats.keys_read_share == pytest.approx(sum(read) / sum(cached), rel=1e-12)


def test_keys_read_share_counts_rows_of_a_ragged_batch_by_what_they_hold(llama: Any) -> None:
    lengths = (60, 97)
    ids, mask = left_padded([prompt(n, seed=n) for n in lengths])
    _, stats = ours(llama, ids, sparse(t_max=5), mask=mask)
    cached = [n + 1 + i for n in lengths for i in range(NEW - 1)]
    read = [n + 1 + i if i % 5 == 0 else 22 + i % 5 for n in lengths for i in range(NEW - 1)]
    assert stats.keys_read_share == pytest.approx(sum(read) / sum(cached), rel=1e-12)


def test_dense_mode_reads_everything_and_says_so(llama: Any) -> None:
    got, stats = ours(llama, prompt(100, rows=2), Config.preset("dense"))
    assert got.tolist() == tiny.stock(llama, prompt(100, rows=2)).tolist()
    assert (stats.full_steps, stats.slow_steps, stats.fast_steps) == ([NEW - 1] * 2, [0, 0], [0, 0])
    assert stats.keys_read_share == 1.0


def test_stats_carry_times_backend_and_config(llama: Any) -> None:
    config = sparse()
    _, stats = ours(llama, prompt(100), config)
    assert stats.prefill_s > 0
    assert stats.decode_s > 0
    assert stats.tokens_per_s > 0
    assert stats.backend == "reference"
    assert Config.from_dict(stats.config) == config
    assert (stats.decode_steps, stats.new_tokens) == (NEW - 1, NEW)
    json.dumps(stats.to_dict())


def test_stats_are_those_of_the_latest_generate(llama: Any) -> None:
    with reread.attach(llama, sparse()) as session:
        llama.generate(prompt(60, rows=2), max_new_tokens=NEW, do_sample=False)
        first = session.stats
        llama.generate(prompt(60), max_new_tokens=4, do_sample=False)
        assert session.stats.decode_steps == 3
        assert len(session.stats.slow_steps) == 1
        assert first.decode_steps == NEW - 1
        assert len(first.slow_steps) == 2


def test_one_new_token_needs_no_decode_step(llama: Any) -> None:
    got, stats = ours(llama, prompt(60), sparse(), new=1)
    assert got.tolist() == tiny.stock(llama, prompt(60), new=1).tolist()
    assert stats.decode_steps == 0
    assert stats.keys_read_share == 1.0
    assert stats.slow_steps == stats.fast_steps == stats.full_steps == [0]


def test_without_a_tokenizer_the_boundary_trigger_is_reported_as_off(llama: Any) -> None:
    with pytest.warns(UserWarning, match="tokenizer"):
        session = reread.attach(llama, sparse(boundary=True))
    with session:
        llama.generate(prompt(60), max_new_tokens=4, do_sample=False)
    assert any("tokenizer" in note for note in session.stats.notes)


def test_with_a_tokenizer_nothing_is_to_be_warned_of(llama: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        _, stats = ours(llama, prompt(60), sparse(boundary=True), tokenizer=tiny.tokenizer(), new=4)
        _, other = ours(llama, prompt(60), sparse(boundary=False), new=4)
    assert stats.notes == other.notes == []


@pytest.mark.parametrize("chunk", [None, 16])
def test_progress_counts_up_to_the_prompt_and_then_to_the_answer(
    chunk: int | None, llama: Any
) -> None:
    calls: list[tuple[str, int, int]] = []
    ours(
        llama, prompt(50), sparse(), prefill_chunk=chunk, progress=lambda *call: calls.append(call)
    )
    prefill = [call[1:] for call in calls if call[0] == "prefill"]
    decode = [call[1:] for call in calls if call[0] == "decode"]
    assert prefill[-1] == (50, 50)
    assert [done for done, _ in prefill] == sorted({done for done, _ in prefill})
    assert len(prefill) == (1 if chunk is None else 4)
    assert decode == [(i, NEW) for i in range(1, NEW + 1)]
