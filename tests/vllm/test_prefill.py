"""Sparse prefill inside vLLM: the Hugging Face path's tokens, whatever the chunks, the prefix cache
and the batch; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reread.errors import ConfigError, InputError, UnsupportedError

from .engines import SMALL, greedy, hugging_face, ragged, save_gemma3, save_indexer, stats

Start = Callable[..., Any]
SPARSE = {"k": 24, "b_sel": 16, "local": 16}


@pytest.fixture(scope="module")
def indexer(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_indexer(tiny, tmp_path_factory.mktemp("indexer") / "of-tiny", width=16)


def asks(indexer: str, **prefill: Any) -> dict[str, Any]:
    return {**SMALL, "prefill": {"indexer": indexer, **SPARSE, **prefill}}


def test_tokens_of_the_hugging_face_path(indexer: str, tiny: str, engine: Start) -> None:
    ask = asks(indexer)
    llm = engine(tiny, ask)
    prompts = ragged(llm.get_tokenizer(), 5, 20, 700)
    found = greedy(llm, prompts, 32)
    counted = stats(llm)
    assert counted["fast_steps"] > 50
    assert counted["prompt_keys_read_share"] < 0.4
    assert found == hugging_face(tiny, ask, prompts, 32)
    # the case would prove little if reading sparsely changed nothing
    dense = engine(tiny, SMALL)
    assert greedy(dense, prompts, 32) != found
    assert stats(dense)["prompt_keys_read_share"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["dense", "paper"])
def test_other_decoding_behind_it(mode: str, indexer: str, tiny: str, engine: Start) -> None:
    ask = {"preset": mode, **asks(indexer)}
    llm = engine(tiny, ask)
    prompts = ragged(llm.get_tokenizer(), 3, 100, 500)
    assert greedy(llm, prompts, 24) == hugging_face(tiny, ask, prompts, 24)


def test_neither_chunks_nor_caching_nor_batching_matter(
    indexer: str, tiny: str, engine: Start
) -> None:
    """Prompts of which one begins as another does, and one ends a token behind a block."""
    ask = asks(indexer, b_sel=32)
    llm = engine(tiny, ask, enable_prefix_caching=False)
    prompts = ragged(llm.get_tokenizer(), 4, 60, 600)
    prompts += [prompts[0][:300] + prompts[1][:200], prompts[2][:97], prompts[0][:416]]
    expected = greedy(llm, prompts, 16)
    for arguments in ({"max_num_batched_tokens": 48}, {"max_num_batched_tokens": 150}):
        llm = engine(tiny, ask, **arguments)
        assert greedy(llm, prompts, 16) == expected
        # again, now that everything is cached, and one by one
        assert [greedy(llm, [ids], 16)[0] for ids in prompts] == expected


def test_preemption_changes_nothing(indexer: str, tiny: str, engine: Start) -> None:
    texts = []
    for pages in (400, 30):
        llm = engine(
            tiny, asks(indexer), num_gpu_blocks_override=pages, max_model_len=640,
            max_num_batched_tokens=64, max_num_seqs=8, disable_log_stats=False,
        )  # fmt: skip
        prompts = ragged(llm.get_tokenizer(), 8, 60, 160)
        texts.append(greedy(llm, prompts, 160))
    preempted = next(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    assert preempted > 2
    assert texts[0] == texts[1]


def test_several_index_heads_and_sliding_windows(
    smollm2: str, engine: Start, tmp_path: Path
) -> None:
    folder = save_gemma3(tmp_path, smollm2)
    ask = asks(save_indexer(folder, tmp_path / "indexer", width=16, heads=2))
    llm = engine(folder, ask, max_num_batched_tokens=256)
    prompts = ragged(llm.get_tokenizer(), 3, 100, 500)
    assert greedy(llm, prompts, 24) == hugging_face(folder, ask, prompts, 24)
    assert stats(llm)["prompt_keys_read_share"] < 0.6


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_index_keys_are_within_the_pool(
    kind: str, tiny: str, smollm2: str, engine: Start, tmp_path: Path
) -> None:
    folder = tiny if kind == "llama" else save_gemma3(tmp_path / "gemma3", smollm2)
    ask = {"mode": "dense", **asks(save_indexer(folder, tmp_path / "indexer", width=64))}
    given = 2**26
    llm = engine(folder, ask, kv_cache_memory_bytes=given)

    def bytes_of(worker: Any) -> tuple[int, int]:
        from reread.integrations.vllm import compat

        layers = compat.attention_layers(worker.vllm_config).values()
        held = [layer.kv_cache.untyped_storage() for layer in layers]
        pages = sum({part.data_ptr(): part.nbytes() for part in held}.values())
        return pages, worker.reread.reader.index.nbytes

    pages, index = llm.collective_rpc(bytes_of)[0]
    assert index > 0
    assert 0.9 * given < pages + index <= given


@pytest.mark.slow
def test_compiled_layers_hand_over_the_same(indexer: str, tiny: str, engine: Start) -> None:
    ask = asks(indexer)
    eager = engine(tiny, ask)
    prompts = ragged(eager.get_tokenizer(), 4, 60, 300)
    expected = greedy(eager, prompts, 16)
    assert greedy(engine(tiny, ask, enforce_eager=False), prompts, 16) == expected


def test_layers_are_compiled_around_the_call() -> None:
    """As vLLM splits a model on a GPU: what is compiled holds no layer's name."""
    from vllm.compilation.backends import split_graph

    from reread.integrations.vllm import compat
    from reread.integrations.vllm.listening import listen

    class Home(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.proj = torch.nn.Identity(), torch.nn.Linear(8, 8)

        def forward(self, positions: Any, hidden_states: torch.Tensor) -> torch.Tensor:
            return self.attn(self.proj(hidden_states)) + 1

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Home())
    home: Any = model[1]
    listen(model, {"layers.7.attn": home.attn})
    told: list[tuple[str, bool]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        found = split_graph(graph, ["vllm::something", compat.READ_ALONG])
        parts = found[1] if isinstance(found, tuple) else found
        told.extend((str(part.graph.graph), part.is_splitting_graph) for part in parts)
        return graph.forward

    compiled = torch.compile(
        lambda x: home(positions=None, hidden_states=model[0](x)), backend=backend, fullgraph=True
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "layer_context", lambda name: (None, None, None))
        compiled(torch.randn(3, 8))
    assert [splits for _, splits in told] == [False, True, False]
    assert ["layers.7.attn" in text for text, _ in told] == [False, True, False]


def test_flash_attention_is_told_of_dense_runs_alone() -> None:
    """On a GPU: of a batch of a decode row, a short prompt, one that crosses the edge, and one
    behind it, each run names its rows' tokens, positions and pages."""
    pytest.importorskip("vllm.v1.attention.backends.flash_attn")
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from reread.config import SparsePrefill
    from reread.integrations.vllm.compat import BatchRow
    from reread.integrations.vllm.gpu_backend import _of_run
    from reread.integrations.vllm.prompts import split

    given = [(90, 95, 1), (40, 0, 40), (300, 32, 128), (500, 0, 200), (30, 10, 20)]
    rows = [BatchRow(str(i), None, *values) for i, values in enumerate(given)]
    config = SparsePrefill(k=8, b_sel=16, local=8, chooser="indexer", dense_below=64)
    spans = [torch.arange(row.cached, row.cached + row.new) for row in rows]
    starts = torch.tensor([0, *(row.new for row in rows)]).cumsum(0).to(torch.int32)
    lengths = torch.tensor([row.cached + row.new for row in rows], dtype=torch.int32)
    slots = torch.cat([1000 * i + span for i, span in enumerate(spans)])
    whole = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=len(rows),
        num_actual_tokens=len(slots), max_query_len=200, max_seq_len=160,
        block_table_tensor=torch.arange(len(rows))[:, None], slot_mapping=slots,
        positions=torch.cat(spans),
    )  # fmt: skip
    runs, parts = split(rows, 1, config)
    seen: dict[int, list[int]] = {}
    for run in runs:
        told = _of_run(whole, run)
        assert told.num_reqs == len(told.seq_lens) == len(told.block_table_tensor)
        assert told.num_actual_tokens == len(told.slot_mapping) == run.last - run.first
        assert told.max_query_len == max(run.queries)
        assert told.max_seq_len == int(told.seq_lens.max())
        edges = told.query_start_loc.tolist()
        for i, row in enumerate(told.block_table_tensor[:, 0].tolist()):
            at = slice(edges[i], edges[i + 1])
            positions = told.positions[at].tolist()
            assert positions[-1] == int(told.seq_lens[i]) - 1
            assert told.slot_mapping[at].tolist() == [1000 * row + p for p in positions]
            seen[row] = positions
    behind = {part.row: range(part.begin, part.end) for part in parts}
    for row in range(1, len(rows)):
        assert [*seen.get(row, []), *behind.get(row, [])] == spans[row].tolist()
    assert {row: list(at) for row, at in behind.items()} == {
        2: list(range(64, 160)), 3: list(range(64, 200))
    }  # fmt: skip


def refused(engine: Start, folder: str, ask: Any, error: type[Exception], text: str,
            **arguments: Any) -> None:  # fmt: skip
    with pytest.raises(error, match=text):
        engine(folder, ask, **arguments)


def test_what_is_refused_before_weights_load(
    indexer: str, tiny: str, smollm2: str, engine: Start, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from vllm.v1.worker.cpu_worker import CPUWorker

    def never(self: Any, **kwargs: Any) -> None:
        raise AssertionError("weights are being loaded")

    monkeypatch.setattr(CPUWorker, "load_model", never)
    refused(engine, tiny, asks(str(tmp_path / "none")), InputError, "holds no indexer")
    refused(engine, smollm2, asks(indexer), InputError, "no part for layers|reads inputs of 96")
    refused(engine, tiny, {"prefill": "oracle"}, UnsupportedError, "prefill.chooser='oracle'")
    refused(engine, tiny, {"prefill": "indexer"}, ConfigError, "set prefill.indexer")
    small = {"max_num_batched_tokens": 24}
    refused(engine, tiny, asks(indexer), ConfigError, "at least 32", **small)
    few = {"max_num_scheduled_tokens": 8}
    refused(engine, tiny, asks(indexer), ConfigError, "max_num_scheduled_tokens=8", **few)
    half = {"dtype": "float16"}
    refused(engine, tiny, asks(indexer), UnsupportedError, "dtype=float16", **half)
    one = {"long_prefill_token_threshold": 1}
    refused(engine, tiny, asks(indexer, b_sel=1), ConfigError, "chunks of 2: 0", **one)
    short = {"long_prefill_token_threshold": 8}
    refused(engine, tiny, asks(indexer), ConfigError, "long_prefill_token_threshold=8", **short)


def test_an_indexer_of_another_training_is_refused(
    indexer: str, smollm2: str, engine: Start, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .engines import save_tiny

    folder = save_tiny(tmp_path, smollm2)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight += 1
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(folder)
    refused(engine, folder, asks(indexer), InputError, "another backbone")


def test_no_weights_are_read_before_vllm_forks(
    indexer: str, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that computed with several threads leaves a forked one in which that hangs."""
    from vllm.engine.arg_utils import EngineArgs

    from reread.indexer.model import Indexer
    from reread.integrations.vllm import compat, plugin

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights of the indexer are read")

    monkeypatch.setattr(Indexer, "load", never)
    plugin.register()
    made = EngineArgs(
        tiny, dtype="float32", max_model_len=2048, max_num_seqs=4,
        additional_config={"reread": asks(indexer)},
    ).create_engine_config()  # fmt: skip
    ops = made.compilation_config.splitting_ops
    assert not ops or compat.READ_ALONG in ops


def test_no_lone_token_completes_a_page() -> None:
    """On a GPU it is read densely, and leaves no index key."""
    from reread.config import SparsePrefill
    from reread.integrations.vllm.prefill_checks import whole_blocks
    from reread.integrations.vllm.scheduler import aligned_chunk

    for b_sel in (1, 2, 7, 21, 64, 100):
        block = whole_blocks(SparsePrefill(b_sel=b_sel, chooser="indexer"))
        assert block % b_sel == 0
        for prompt in range(1, 5 * block):
            request = SimpleNamespace(num_computed_tokens=0, num_prompt_tokens=prompt)
            while request.num_computed_tokens < prompt:
                rest = min(3 * block // 2, prompt - request.num_computed_tokens)
                new = aligned_chunk(block, None, request, rest)
                request.num_computed_tokens += new
                assert new > 1 or prompt == 1 or request.num_computed_tokens % 2
            assert request.num_computed_tokens == prompt


def test_chunks_end_with_blocks() -> None:
    from reread.integrations.vllm.scheduler import align_hits, aligned_chunk

    request = SimpleNamespace(num_computed_tokens=0, num_prompt_tokens=200)
    assert aligned_chunk(64, None, request, 150) == 128
    assert aligned_chunk(64, None, request, 200) == 200
    assert aligned_chunk(64, None, request, 63) == 0
    assert aligned_chunk(64, None, request, 100, 48, 0) == 80
    request.num_computed_tokens = 199
    assert aligned_chunk(64, None, request, 1) == 1
    halves = lambda request, new, *rest: new // 2  # noqa: E731  # a stand-in of one line
    request.num_computed_tokens = 0
    assert aligned_chunk(64, halves, request, 150) == 64

    find = lambda hashes, longest: (["pages"], longest // 48 * 48)  # noqa: E731  # likewise
    coordinator = SimpleNamespace(find_longest_cache_hit=find)
    align_hits(SimpleNamespace(coordinator=coordinator), 64)
    assert coordinator.find_longest_cache_hit([], 500) == (["pages"], 384)
    assert coordinator.find_longest_cache_hit([], 100) == (["pages"], 0)
