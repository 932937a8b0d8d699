"""Long prompts whose layers are compiled around attention: the same tokens and caches as the
model's own forward leaves, and the model untouched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP

import reread
from reread import Config, InputError, UnsupportedError
from reread.bench import ttft
from reread.bench.model import random_model
from reread.integrations.hf import prompt_layers
from reread.integrations.hf.indexers import new_indexer
from reread.shapes import Shape

from . import device, tiny
from .device import generate
from .tiny import CACHE, cache_of, left_padded, prompt, sparse

PREFILL = {"k": 24, "b_sel": 16, "sink": 2, "local": 8, "dense_below": 0}
SPARSE = {**PREFILL, "chooser": "oracle"}
INDEXED = {**PREFILL, "chooser": "indexer"}
CONFIGS: dict[str, Config] = {
    "dense": Config(mode="dense", prefill=reread.SparsePrefill(**SPARSE)),
    "slow-fast": sparse(k=16, t_max=3, first_step=False).updated({"prefill": SPARSE}),
    "indexer": Config(mode="dense", prefill=reread.SparsePrefill(**INDEXED)),
    "indexed": sparse(k=16).updated({"mode": "indexed", "prefill": INDEXED}),
}


@pytest.fixture(autouse=True)
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Compiled from 32 tokens on; how many tokens each compiled forward had."""
    found: list[int] = []
    original = prompt_layers.run_compiled

    def noted(*args: Any) -> Any:
        output = original(*args)
        found.append(args[3]["input_ids"].shape[1])
        return output

    monkeypatch.setattr(prompt_layers, "COMPILED_FROM", 32)
    monkeypatch.setattr(prompt_layers, "run_compiled", noted)
    yield found
    assert not prompt_layers._ATTEND
    assert not prompt_layers._HANDED


def both(net: Any, ids: Tensor, config: Config, **options: Any) -> tuple[Any, Any]:
    """The outputs of both ways, the compiled one first, after comparing them and their caches."""
    indexer = new_indexer(net, 16, 1, "svd") if config.uses_indexer else None
    outputs = []
    for length in (32, 10_000):
        prompt_layers.COMPILED_FROM = length
        with reread.attach(net, config, indexer=indexer) as session:
            outputs.append(generate(net, ids, 4, **options))
            assert session.stats.notes == []
            outputs[-1].stats = session.stats
        untouched(net)
    got, want = outputs
    device.same(got, want)
    assert device.counted(got.stats) == device.counted(want.stats)
    assert got.stats.prefill_keys_share == want.stats.prefill_keys_share < 1
    assert got.stats.prefill_backend == want.stats.prefill_backend == "triton"
    same_caches(cache_of(got), cache_of(want))
    return got, want


def same_caches(got: Any, want: Any) -> None:
    for mine, other in zip(got.layers, want.layers, strict=True):
        a, b = mine.state, other.state
        assert type(mine) is type(other)
        assert (a.kv.length, a.kv.indexed, mine.is_initialized) == (
            b.kv.length, b.kv.indexed, other.is_initialized,
        )  # fmt: skip
        torch.testing.assert_close(a.kv.keys, b.kv.keys, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(a.kv.values, b.kv.values, rtol=1e-3, atol=1e-3)
        if a.kv.indexed:
            torch.testing.assert_close(a.kv.index, b.kv.index, rtol=1e-3, atol=1e-3)


def untouched(net: Any) -> None:
    assert net.config._attn_implementation == "sdpa"
    for module in net.modules():
        assert "forward" not in vars(module)
        assert not module._forward_pre_hooks
    assert prompt_layers.ATTENTION not in ALL_ATTENTION_FUNCTIONS
    assert prompt_layers.ATTENTION not in ALL_MASK_ATTENTION_FUNCTIONS
    assert not any("reread" in type(module).__module__ for module in net.modules())


@pytest.mark.parametrize(
    ("name", "decoding"),
    [*(("qwen3", name) for name in CONFIGS), ("llama", "slow-fast"), ("qwen2", "indexed")],
)
def test_one_row(name: str, decoding: str, ran: list[int]) -> None:
    got, _ = both(device.model(name), prompt(90), device.triton("graph", CONFIGS[decoding]))
    assert ran == [90]
    assert got.stats.runner == "graph, compiled layers"


@pytest.mark.parametrize("decoding", ["slow-fast", "indexed"])
def test_a_ragged_batch(decoding: str, ran: list[int]) -> None:
    ids, mask = left_padded([prompt(n, seed=n) for n in (60, 75, 97)])
    config = device.triton("graph", CONFIGS[decoding])
    both(device.model("qwen3"), ids, config, attention_mask=mask)
    assert ran == [97]


@pytest.mark.parametrize(("decoding", "chunk"), [("slow-fast", 33), ("indexed", 48)])
def test_chunks(decoding: str, chunk: int, ran: list[int]) -> None:
    """The last chunk is too short to be compiled."""
    ids, mask = left_padded([prompt(n, seed=n) for n in (85, 100)])
    config = device.triton("graph", CONFIGS[decoding])
    both(device.model("qwen3"), ids, config, attention_mask=mask, prefill_chunk_size=chunk)
    # the first of 33 reads everything, and has padding: the model's own forward
    assert ran == ([33] * 2 if chunk == 33 else [48] * 2)


@torch.no_grad()
@pytest.mark.parametrize("indexed", [False, True])
def test_a_loop_of_ones_own_that_gives_no_positions(indexed: bool, ran: list[int]) -> None:
    net, ids, found = device.model("qwen3"), prompt(110), []
    config = device.triton("auto", CONFIGS["indexed" if indexed else "dense"])
    indexer = new_indexer(net, 16, 1, "svd") if indexed else None
    for length in (32, 10_000):
        prompt_layers.COMPILED_FROM = length
        cache = tiny.DynamicCache(config=net.config)
        with reread.attach(net, config, indexer=indexer):
            given: dict[str, Any] = {CACHE: cache, "use_cache": True}
            for part in (ids[:, :70], ids[:, 70:]):
                output = net(part, **given, logits_to_keep=3)
                assert cache_of(output) is cache
                assert output.logits.shape[1] == 3
        found.append((output.logits, cache))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-3, atol=2e-3)
    same_caches(found[0][1], found[1][1])
    assert ran == [70, 40]


def test_what_reads_everything_is_dense_where_no_mask_is_needed(ran: list[int]) -> None:
    net, config = device.model("qwen3"), device.triton("graph", CONFIGS["dense"])
    config = config.updated({"prefill.dense_below": 64})
    with reread.attach(net, config) as session:
        got = generate(net, prompt(60), 4)
        assert session.stats.prefill_keys_share == 1
    prompt_layers.COMPILED_FROM = 10_000
    with reread.attach(net, config):
        want = generate(net, prompt(60), 4)
    device.same(got, want)
    same_caches(cache_of(got), cache_of(want))
    assert ran == [60]
    prompt_layers.COMPILED_FROM = 32
    ids, mask = left_padded([prompt(n, seed=n) for n in (50, 60)])
    with reread.attach(net, config):
        generate(net, ids, attention_mask=mask)
    assert ran == [60]


def test_one_compilation_for_all_lengths_and_layers(ran: list[int]) -> None:
    from torch._dynamo.utils import counters

    # 64 is the model's width, too
    net = device.build("qwen3", num_hidden_layers=4)
    torch._dynamo.reset()
    counters.clear()
    with reread.attach(net, device.triton("auto", CONFIGS["dense"])):
        for length in (64, 48, 90, 64):
            generate(net, prompt(length), 1)
    assert ran == [64, 48, 90, 64]
    assert counters["stats"]["unique_graphs"] == 1


def test_no_mask_is_made(monkeypatch: pytest.MonkeyPatch, ran: list[int]) -> None:
    def refuse(**_: Any) -> None:
        raise AssertionError("a mask was made")

    net = device.model("qwen3")
    ids, mask = left_padded([prompt(n, seed=n) for n in (60, 97)])
    with (
        reread.attach(net, device.triton("auto", CONFIGS["dense"])),
        monkeypatch.context() as patched,
    ):
        for name in list(ALL_MASK_ATTENTION_FUNCTIONS):
            patched.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, refuse)
        generate(net, ids, 1, attention_mask=mask)
    assert ran == [97]


@pytest.mark.parametrize("case", ["runner", "short", "gradients", "argument"])
def test_where_the_models_own_forward_runs(case: str, ran: list[int]) -> None:
    net = device.small()
    runner = "eager" if case == "runner" else "auto"
    cache = tiny.DynamicCache(config=net.config)
    given: dict[str, Any] = {CACHE: cache}
    if case == "argument":
        given["output_hidden_states"] = True
    ids = prompt(31 if case == "short" else 60)
    with (
        reread.attach(net, device.triton(runner, CONFIGS["dense"])),
        torch.set_grad_enabled(case == "gradients"),
    ):
        net(ids, use_cache=True, **given)
    assert ran == []
    assert cache.get_seq_length() == ids.shape[1]


class Uncompilable(LlamaMLP):
    """Works, but not under a compiler."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class Failing(LlamaMLP):
    """Cannot run within a compiled prompt."""

    def forward(self, x: Tensor) -> Tensor:
        if prompt_layers._ATTEND:
            torch.ops.aten._assert_async.msg(x.isnan().any(), "not here")
        return super().forward(x)


@pytest.mark.parametrize(
    ("mlp", "decoding", "chunk"),
    [(Uncompilable, "slow-fast", 48), (Uncompilable, "indexed", None), (Failing, "indexed", 48)],
)
def test_a_layer_that_cannot_be_compiled_is_told(
    mlp: type, decoding: str, chunk: int | None, ran: list[int]
) -> None:
    """Layer 0 has written its cache by then."""
    net, config = device.build("llama"), device.triton("auto", CONFIGS[decoding])
    indexer = new_indexer(net, 16, 1, "svd") if config.uses_indexer else None
    options = {"prefill_chunk_size": chunk} if chunk else {}
    outputs = []
    for length in (32, 10_000):
        prompt_layers.COMPILED_FROM = length
        net.model.layers[1].mlp.__class__ = mlp if length == 32 else LlamaMLP
        with reread.attach(net, config, indexer=indexer) as session:
            for _ in range(2):
                outputs.append(generate(net, prompt(100), 4, **options))
                outputs[-1].stats = session.stats
        untouched(net)
    notes = [n for n in outputs[0].stats.notes if n.startswith("prefill layers are not compiled (")]
    assert len(notes) == 1
    assert ran == []
    for got, want in zip(outputs[:2], outputs[2:], strict=True):
        device.same(got, want)
        assert device.counted(got.stats) == device.counted(want.stats)
        assert got.stats.prefill_keys_share == want.stats.prefill_keys_share
        same_caches(cache_of(got), cache_of(want))


@torch.no_grad()
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), InputError("no"), torch.OutOfMemoryError("no"), RuntimeError()]
)
def test_the_cache_is_put_back(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, ran: list[int]
) -> None:
    net, config = device.model("qwen3"), device.triton("auto", CONFIGS["slow-fast"])
    ids = prompt(110)
    cache, other = (tiny.DynamicCache(config=net.config) for _ in range(2))
    with reread.attach(net, config) as session:
        net(ids[:, :60], use_cache=True, **{CACHE: cache})
        read = session._prompts._read  # type: ignore[union-attr]  # where attention is decided

        def failing(call: Any, state: Any, *rest: Any) -> Any:
            out = read(call, state, *rest)
            if state is cache.layers[1].state:
                raise error
            return out

        session._prompts._read = failing  # type: ignore[union-attr]  # it is there, see above
        if type(error) is RuntimeError:
            net(ids[:, 60:], use_cache=True, **{CACHE: cache})
        else:
            with pytest.raises(type(error)):
                net(ids[:, 60:], use_cache=True, **{CACHE: cache})
            assert [layer.state.kv.length for layer in cache.layers] == [60, 60]
            session._prompts._read = read  # type: ignore[union-attr]  # it is there, see above
            net(ids[:, 60:], use_cache=True, **{CACHE: cache})
        for part in (ids[:, :60], ids[:, 60:]):
            net(part, use_cache=True, **{CACHE: other})
    same_caches(cache, other)
    for mine, its in zip(cache.layers, other.layers, strict=True):
        torch.testing.assert_close(mine.state.tail, its.state.tail, rtol=1e-3, atol=1e-3)
        assert mine.state.tail_positions.tolist() == its.state.tail_positions.tolist()
    untouched(net)


def test_keys_that_change_after_caching_are_refused_as_ever(
    monkeypatch: pytest.MonkeyPatch, ran: list[int]
) -> None:
    from transformers.models.llama import modeling_llama

    net, config = device.build("llama"), device.triton("auto", CONFIGS["dense"])
    own = type(net.model.layers[0].self_attn)

    class Changing(own):  # type: ignore[misc, valid-type]  # a class known only here
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            cache = kwargs[CACHE]
            return own.forward(self, *args, **{**kwargs, CACHE: Scaling(cache)})

    class Scaling:
        def __init__(self, cache: Any) -> None:
            self.cache = cache

        def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            keys, values = self.cache.update(*args, **kwargs)
            return keys * 2, values

    assert modeling_llama.LlamaAttention is own
    for layer in net.model.layers:
        layer.self_attn.__class__ = Changing
    with (
        reread.attach(net, config),
        pytest.raises(UnsupportedError, match="changes its keys after caching them"),
    ):
        generate(net, prompt(60))
    assert ran == []


SHAPE = Shape(
    name="tiny", layers=2, total_layers=2, hidden=64, heads=4, kv_heads=2, head_dim=64,
    intermediate=96, vocabulary=128, tied=True,
)  # fmt: skip


def test_the_benchmark_compares_with_compiled_dense_layers(ran: list[int]) -> None:
    cpu = torch.device("cpu")
    net = random_model(SHAPE, cpu, torch.float32)
    kept = {name: p.clone() for name, p in net.named_parameters()}
    prompts = ttft.Prompts(
        SHAPE, reread.SparsePrefill(**INDEXED), cpu, net, new_indexer(net, 16, 1, "random"),
        backend="triton", backends={"cudnn": SDPBackend.MATH}, warm_tokens=32,
    )  # fmt: skip
    found = ttft.at_length(prompts, 96)
    plain, compiled = found["dense"]
    assert (plain["arm"], compiled["arm"]) == ("cudnn", "cudnn, compiled layers")
    assert compiled["sdpa"] == [{"attn_mask": False, "is_causal": True, "enable_gqa": True}]
    assert compiled["against_first"] < 1e-4
    # projections are part of the attention's own product
    assert found["sparse"]["parts"]["calls"].keys() >= {"selection", "attention"}
    assert "projections" not in found["sparse"]["parts"]["calls"]
    assert found["sparse"]["notes"] == []
    assert set(ran) == {32, 96}
    untouched(net)
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, kept[name])
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
