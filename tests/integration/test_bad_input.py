"""What cannot work is refused before the first token, by an error that names the value."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DynamicCache,
    GenerationConfig,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

import reread
from reread import ConfigError, InputError, NumericalError, RereadError, UnsupportedError

from . import tiny
from .tiny import CACHE, model, ours, prompt, sparse


class NoToken:
    """A streamer that fails the test when a token is produced."""

    def __init__(self) -> None:
        self.calls = 0

    def put(self, value: Tensor) -> None:
        self.calls += 1
        assert self.calls == 1, "a token was produced"  # the first call hands over the prompt

    def end(self) -> None:
        pass


def refused(net: Any, ids: Any, error: type[RereadError], match: str, **options: Any) -> None:
    """Both ways in refuse, and no token comes out."""
    options.setdefault("max_new_tokens", 8)
    with reread.attach(net, sparse()), pytest.raises(error, match=match):
        net.generate(ids, do_sample=False, **options)
    mask = options.pop("attention_mask", None)
    with pytest.raises(error, match=match):
        reread.generate(net, ids, mask, config=sparse(), do_sample=False, **options)


# ---- prompts


def test_an_empty_prompt_is_refused(llama: Any) -> None:
    refused(llama, torch.zeros(1, 0, dtype=torch.long), InputError, "empty")


def test_an_empty_batch_is_refused(llama: Any) -> None:
    refused(llama, torch.zeros(0, 5, dtype=torch.long), InputError, "empty")


def test_a_prompt_longer_than_the_positions_is_refused(llama: Any) -> None:
    refused(llama, prompt(513), InputError, "513.*512")


def test_a_prompt_of_exactly_the_positions_is_served(llama: Any) -> None:
    got, _ = ours(llama, prompt(512), sparse(), new=1)
    assert got.tolist() == tiny.stock(llama, prompt(512), new=1).tolist()


@pytest.mark.parametrize("bad", [-1, 128, 10**6])
def test_an_id_outside_the_vocabulary_is_refused_and_named(bad: int, llama: Any) -> None:
    ids = prompt(20)
    ids[0, 7] = bad
    refused(llama, ids, InputError, str(bad))


@pytest.mark.parametrize(
    "ids",
    [
        torch.zeros(5, dtype=torch.long),
        torch.zeros(1, 2, 3, dtype=torch.long),
        torch.ones(1, 5),
        [[3, 4, 5]],
        "text",
    ],
    ids=["1-d", "3-d", "float", "list", "string"],
)
def test_ids_of_the_wrong_kind_are_refused(ids: Any, llama: Any) -> None:
    refused(llama, ids, InputError, "input_ids")


@pytest.mark.parametrize("shape", [(1, 5), (1, 21), (2, 20), (20,), (1, 1, 20, 20)])
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, ...], llama: Any) -> None:
    refused(
        llama,
        prompt(20),
        InputError,
        "attention_mask",
        attention_mask=torch.ones(*shape, dtype=torch.long),
    )


def test_a_row_of_padding_alone_is_refused(llama: Any) -> None:
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1] = 0
    refused(llama, prompt(20, rows=2), InputError, "row 1", attention_mask=mask)


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True, None])
def test_an_impossible_number_of_new_tokens_is_refused(value: Any, llama: Any) -> None:
    with pytest.raises(InputError, match="max_new_tokens"):
        reread.generate(llama, prompt(20), config=sparse(), max_new_tokens=value)


@pytest.mark.parametrize("value", [0, -4, 2.0, True, "16"])
def test_an_impossible_chunk_is_refused(value: Any, llama: Any) -> None:
    with pytest.raises(InputError, match="prefill_chunk"):
        reread.generate(llama, prompt(20), config=sparse(), max_new_tokens=4, prefill_chunk=value)


@pytest.mark.parametrize("config", [{"k": 5}, "paper", 512, tiny.BASE])
def test_a_config_of_another_type_is_refused(config: Any, llama: Any) -> None:
    with pytest.raises(ConfigError, match="Config"):
        reread.attach(llama, config)


def test_the_tokenizer_of_another_model_is_refused() -> None:
    small = tiny.build(tiny.MATRIX["llama"], vocab_size=64)
    with pytest.raises(InputError, match=r"128.*64"):
        reread.attach(small, sparse(boundary=True), tokenizer=tiny.tokenizer())


# ---- caches


def test_a_cache_with_another_batch_is_refused(llama: Any) -> None:
    ids = prompt(30, rows=2)
    refused(
        llama,
        torch.cat([ids, ids]),
        InputError,
        "rows",
        **{CACHE: tiny.prefilled(llama, ids[:, :20])},
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4},
        {"head_dim": 8},
        {"num_hidden_layers": 1},
        {"num_hidden_layers": 3},
    ],
    ids=str,
)
def test_the_cache_of_another_model_is_refused(changes: dict[str, int], llama: Any) -> None:
    other, ids = tiny.build(tiny.MATRIX["llama"], **changes), prompt(30)
    refused(llama, ids, InputError, "cache", **{CACHE: tiny.prefilled(other, ids[:, :20])})


@pytest.mark.parametrize("cached", [20, 30])
def test_a_cache_that_leaves_nothing_of_the_prompt_to_read_is_refused(
    cached: int, llama: Any
) -> None:
    refused(
        llama, prompt(20), InputError, "cache", **{CACHE: tiny.prefilled(llama, prompt(cached))}
    )


def test_static_cache_objects_are_refused(llama: Any) -> None:
    cache = StaticCache(config=llama.config, max_cache_len=64)
    refused(llama, prompt(20), UnsupportedError, "StaticCache", **{CACHE: cache})


def test_offloaded_cache_objects_are_refused(llama: Any) -> None:
    cache = DynamicCache(config=llama.config)
    cache.offloading = True
    refused(llama, prompt(20), UnsupportedError, "offload", **{CACHE: cache})


@pytest.mark.parametrize(
    "name", ["static", "offloaded", "offloaded_static", "quantized", "hybrid", "no-such-cache"]
)
def test_other_cache_implementations_are_refused(name: str, llama: Any) -> None:
    refused(llama, prompt(20), UnsupportedError, "cache_implementation", cache_implementation=name)


def test_decoding_without_a_cache_is_refused(llama: Any) -> None:
    refused(llama, prompt(20), UnsupportedError, "use_cache", use_cache=False)


# ---- ways of decoding


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"num_beams": 4, "num_return_sequences": 2}, "num_beams=4"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
        ({"dola_layers": "low"}, "dola"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    ],
)
def test_other_ways_of_decoding_are_refused(
    options: dict[str, Any], match: str, llama: Any
) -> None:
    with reread.attach(llama, sparse()), pytest.raises(UnsupportedError, match=match):
        llama.generate(prompt(20), max_new_tokens=8, streamer=None, **options)


def test_assisted_decoding_is_refused(llama: Any) -> None:
    refused(llama, prompt(20), UnsupportedError, "assistant", assistant_model=model("qwen2"))


def test_what_a_generation_config_asks_for_is_refused_too(llama: Any) -> None:
    as_config = GenerationConfig(num_beams=3, max_new_tokens=4)
    refused(llama, prompt(20), UnsupportedError, "num_beams=3", generation_config=as_config)
    net = tiny.build(tiny.MATRIX["llama"])
    net.generation_config.num_beams = 3
    refused(net, prompt(20), UnsupportedError, "num_beams=3")


def test_a_generation_config_given_by_position_is_read_as_well(llama: Any) -> None:
    with reread.attach(llama, sparse()), pytest.raises(UnsupportedError, match="num_beams=3"):
        llama.generate(prompt(20), GenerationConfig(num_beams=3, max_new_tokens=4))


# ---- models


def test_an_encoder_decoder_is_refused() -> None:
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        reread.attach(t5, sparse())


@pytest.mark.parametrize(
    "thing",
    [torch.nn.Linear(2, 2), None, "gpt2", object()],
    ids=["module", "none", "str", "object"],
)
def test_what_is_no_model_is_refused(thing: Any) -> None:
    with pytest.raises(UnsupportedError, match="not a transformers model"):
        reread.attach(thing, sparse())


def test_a_model_whose_attention_is_out_of_reach_is_refused_before_the_first_token() -> None:
    net = AutoModelForCausalLM.from_config(
        BloomConfig(vocab_size=128, hidden_size=32, n_head=2, n_layer=2)
    ).eval()
    with pytest.raises(UnsupportedError, match="attention interface"), reread.attach(net, sparse()):
        net.generate(prompt(20), max_new_tokens=4, do_sample=False, streamer=NoToken())


def randomised(arch: tiny.Arch, part: str) -> Any:
    """A model whose parameters named `part`, which start at a neutral value, are drawn anew."""
    net = tiny.build(arch)
    with torch.no_grad():
        for path, parameter in net.named_parameters():
            if part in path:
                parameter.normal_(generator=torch.Generator().manual_seed(3))
    return net


@pytest.mark.parametrize(
    ("arch", "part"),
    [
        # rearranges the values of two heads between the cache and attention
        (tiny.Arch("diffllama"), "lambda"),
        # adds a learned bias to the attention mask
        (tiny.Arch("doge"), "self_attn.A"),
        # caches a compressed key and expands it for attention
        (tiny.Arch("deepseek_v3", tiny.MLA), "q_a_layernorm"),
    ],
    ids=["diffllama", "doge", "deepseek-v3"],
)
def test_attention_that_does_more_than_softmax_over_the_cache_is_refused(
    arch: tiny.Arch, part: str
) -> None:
    """Each of these goes through the attention interface, and would come out silently wrong."""
    net, streamer = randomised(arch, part), NoToken()
    with reread.attach(net, sparse()), pytest.raises(UnsupportedError):
        net.generate(prompt(60), max_new_tokens=6, do_sample=False, streamer=streamer)


# ---- numbers


@pytest.mark.parametrize(
    "config",
    [sparse(), sparse(uncertainty=1.0), tiny.Config.preset("dense")],
    ids=["plain", "uncertainty", "dense"],
)
def test_nan_in_the_weights_raises_instead_of_giving_a_token(config: Any) -> None:
    net = tiny.build(tiny.MATRIX["llama"])
    with torch.no_grad():
        net.model.layers[0].self_attn.o_proj.weight[0, 0] = math.nan
    with pytest.raises(NumericalError, match="NaN"):
        reread.generate(
            net, prompt(20), config=config, max_new_tokens=4, do_sample=False, streamer=NoToken()
        )


def test_nan_that_appears_while_decoding_raises_and_names_the_row() -> None:
    net = tiny.build(tiny.MATRIX["llama"], tie_word_embeddings=False)
    ids = prompt(40, rows=2)
    text = tiny.stock(net, ids, new=6)
    poisoned = next(
        t
        for t in text[1, 1:5].tolist()
        if t not in text[0].tolist() and t not in ids.flatten().tolist()
    )
    at = text[1].tolist().index(poisoned)
    with torch.no_grad():
        net.get_input_embeddings().weight[poisoned] = math.nan
    with pytest.raises(NumericalError, match="row 1"):
        reread.generate(
            net, ids, config=tiny.select_everything(), max_new_tokens=8, do_sample=False
        )
    healthy = reread.generate(
        net, ids, config=tiny.select_everything(), max_new_tokens=at + 1, do_sample=False
    )
    assert healthy.sequences[:, 40:].tolist() == text[:, : at + 1].tolist()


def test_an_infinite_score_is_not_mistaken_for_nan(llama: Any) -> None:
    net = copy.deepcopy(llama)
    got, _ = ours(net, prompt(40), sparse(uncertainty=1.0), suppress_tokens=list(range(100)))
    assert min(got[0].tolist()) >= 100


def test_errors_are_both_rereads_own_and_pythons_kind() -> None:
    assert issubclass(InputError, (RereadError, ValueError))
    assert issubclass(InputError, ValueError)
    assert issubclass(UnsupportedError, NotImplementedError)
    assert issubclass(UnsupportedError, RereadError)
    assert issubclass(NumericalError, ArithmeticError)
    assert issubclass(NumericalError, RereadError)
