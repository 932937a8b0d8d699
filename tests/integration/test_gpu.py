"""On a GPU: captured steps against the reference, overlap against none, what a step may not do.

Run by hand, `pytest -m gpu`; the same meanings run interpreted in test_device.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import reread
from reread import Config, InputError
from reread.device import Arena
from reread.integrations.hf.runner import Runner
from reread.lanes import Overlap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NEW = 48
SPARSE = Config(k=64, recent=32).updated({"triggers.boundary": False, "t_max": 6})


@pytest.fixture(scope="module")
def net() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=512,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config).eval().cuda()


@pytest.fixture
def prompt() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 512, (3, 700), generator=g)
    mask = torch.ones_like(ids)
    mask[1, :123] = 0
    mask[2, :400] = 0
    return {"input_ids": ids.cuda(), "attention_mask": mask.cuda()}


def tokens(net: Any, prompt: dict[str, torch.Tensor], config: Config, new: int = NEW) -> Any:
    return reread.generate(net, **prompt, config=config, max_new_tokens=new, do_sample=False)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"first_step": False},
        {"k": 2048},
        {"mode": "dense"},
        {"lambda_clip": 0.2, "alpha_cross": 0.35, "refine": "soft_nms"},
    ],
    ids=str,
)
@pytest.mark.parametrize("runner", ["graph", "eager"])
def test_tokens_are_the_references(
    net: Any, prompt: dict[str, torch.Tensor], runner: str, changes: dict[str, Any]
) -> None:
    config = SPARSE.updated(changes)
    got = tokens(net, prompt, config.updated({"runner": runner}))
    want = tokens(net, prompt, config.updated({"backend": "reference"}))
    assert got.stats.backend == "triton"
    assert got.stats.runner.startswith(runner)
    assert got.sequences.tolist() == want.sequences.tolist()
    assert got.stats.slow_steps == want.stats.slow_steps
    assert got.stats.keys_read_share == want.stats.keys_read_share


def test_auto_is_a_graph_with_compiled_layers(net: Any, prompt: dict[str, torch.Tensor]) -> None:
    assert tokens(net, prompt, SPARSE).stats.runner == "graph, compiled layers"


@pytest.fixture
def overlaps(monkeypatch: pytest.MonkeyPatch) -> Any:
    import reread.integrations.hf.runner as module

    def use(overlap: Overlap) -> None:
        def arena(*args: Any, **kwargs: Any) -> Arena:
            return Arena(*args, **kwargs, overlap=overlap)

        monkeypatch.setattr(module, "Arena", arena)

    return use


def test_overlap_changes_nothing(net: Any, prompt: dict[str, torch.Tensor], overlaps: Any) -> None:
    found = []
    for overlap in ("none", "refresh", "rows"):
        overlaps(overlap)
        found.append(tokens(net, prompt, SPARSE).sequences.tolist())
    assert found[0] == found[1] == found[2]


def test_a_second_call_reuses_memory_and_graphs(
    net: Any, prompt: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Runner] = []
    original = Runner.__init__

    def note(self: Runner, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(Runner, "__init__", note)
    with reread.attach(net, SPARSE):
        first = net.generate(**prompt, max_new_tokens=NEW, do_sample=False)
        arenas = list(made[0]._arenas)
        held = torch.cuda.memory_allocated()
        again = net.generate(**prompt, max_new_tokens=NEW, do_sample=False)
        assert list(made[0]._arenas) == arenas
        assert torch.cuda.memory_allocated() <= held + (1 << 20)
    assert first.tolist() == again.tolist()


def test_a_step_does_not_wait_for_the_device(
    net: Any, prompt: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither telling the device what the step is nor a captured step reads anything back."""
    checked = []

    def quietly(name: str, ready: Any) -> None:
        original = getattr(Runner, name)

        def call(self: Runner, first: Any, *rest: Any) -> Any:
            warm = ready(self, first)
            checked.append(warm)
            torch.cuda.set_sync_debug_mode("error" if warm else "default")
            try:
                return original(self, first, *rest)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(Runner, name, call)

    def captured(self: Runner, step: Any) -> bool:
        graphs = self._graphs.get(step.arena)
        return graphs is not None and (step.shape, 1) in graphs._graphs

    quietly("begin", lambda self, conversation: conversation.arena is not None)
    quietly("run", captured)
    assert tokens(net, prompt, SPARSE).stats.runner == "graph, compiled layers"
    assert sum(checked) > NEW


def test_what_does_not_fit_is_refused_with_what_would(net: Any) -> None:
    ids = torch.ones(64, 64, dtype=torch.long, device="cuda")
    filler = torch.empty(torch.cuda.mem_get_info()[0] - (8 << 30), dtype=torch.uint8, device="cuda")
    with pytest.raises(InputError, match=r"GiB are free: about \d+ positions would fit"):
        reread.generate(net, ids, config=SPARSE, max_new_tokens=250_000)
    del filler


def test_memory_beside_the_caches(net: Any) -> None:
    """At most 3 % of the keys and values of a model with usual proportions."""
    from reread.bench.model import random_caches
    from reread.shapes import Shape

    for name, heads in (("qwen3-0.6b", 16), ("qwen3-4b", 32)):
        shape = Shape.named(name)
        states = random_caches(shape, 2, 16384, torch.device("cuda"), torch.bfloat16)
        arena = Arena(states, heads, Config())
        keys = 2 * 16384 * shape.kv_bytes_per_token()
        assert arena.nbytes <= 0.03 * keys, (name, arena.nbytes / keys)
        held = sum(state.kv.nbytes for state in states.values())
        assert held == keys
        del states, arena


def test_sampling_gives_the_same_draws(net: Any, prompt: dict[str, torch.Tensor]) -> None:
    found = []
    for changes in ({}, {"backend": "reference"}):
        torch.manual_seed(5)
        out = reread.generate(
            net, **prompt, config=SPARSE.updated(changes), max_new_tokens=16, do_sample=True
        )
        found.append(out.sequences.tolist())
    assert found[0] == found[1]
