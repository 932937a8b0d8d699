"""What cannot be right is refused before weights load, by name; what is not asked for is stock."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reread.config import Config
from reread.errors import ConfigError, UnsupportedError
from reread.integrations.vllm.compat import check_release
from reread.integrations.vllm.options import check_engine, check_platform, parse
from reread.integrations.vllm.serve import serve_command

Start = Callable[..., Any]


@pytest.fixture
def no_weights(tiny: str, tmp_path: Path) -> Path:
    """The tiny model without its weights: whatever is refused here is refused before they load."""
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


@pytest.mark.parametrize(
    ("ask", "arguments", "named"),
    [
        ({"kk": 1}, {}, "kk"),
        ({"k": 0}, {}, "k=0"),
        ({"preset": "fast"}, {}, "'fast'"),
        ({"triggers": {"t_maxx": 3}}, {}, "t_maxx"),
        ("default", {}, "'default'"),
        ({"mode": "exact"}, {}, "'exact'"),
        ({"prefill": "oracle"}, {}, "prefill"),
        ({"preset": "indexed"}, {}, "'indexed'"),
        ({"backend": "triton"}, {}, "triton"),
        ({"runner": "graph"}, {}, "graph"),
        ({}, {"kv_cache_dtype": "fp8"}, "fp8"),
        ({}, {"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}, "worker_cls"),
        ({}, {"async_scheduling": True}, "async_scheduling"),
        ({"preset": "paper"}, {"tensor_parallel_size": 2}, "alpha_cross"),
        ({"uncertainty": 1.0}, {"tensor_parallel_size": 2}, "uncertainty"),
        ({}, {"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        (
            {},
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative",
        ),
    ],
)
def test_bad_values_are_named(
    ask: Any, arguments: Any, named: str, no_weights: Path, engine: Start
) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=named):
        engine(str(no_weights), ask, **arguments)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64},
         "no full-attention layer"),
        ({"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2",
          "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 32}, "softcapping"),
    ],
    ids=["sliding", "softcap"],
)  # fmt: skip
def test_models_it_does_not_cover(
    changes: Any, named: str, no_weights: Path, engine: Start
) -> None:
    path = no_weights / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UnsupportedError, match=named):
        engine(str(no_weights), {})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_mla": True}, "latent attention"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"is_mm_prefix_lm": True}, "see later ones"),
        ({"is_attention_free": True}, "no full-attention layer"),
        ({"runner_type": "pooling"}, "'pooling'"),
    ],
)
def test_kinds_of_model_it_does_not_cover(changes: Any, named: str) -> None:
    model = {
        "model": "m",
        "runner_type": "generate",
        "is_encoder_decoder": False,
        "use_mla": False,
        "is_mm_prefix_lm": False,
        "is_attention_free": False,
        "hf_text_config": SimpleNamespace(),
    }
    config = SimpleNamespace(
        model_config=SimpleNamespace(**(model | changes)),
        cache_config=SimpleNamespace(sliding_window=None),
    )
    with pytest.raises(UnsupportedError, match=named):
        check_engine(config, Config(), "cpu")


@pytest.mark.parametrize(
    ("platform", "changes", "named"),
    [
        ("cpu", {"backend": "triton"}, "backend='triton'"),
        ("cpu", {"runner": "graph"}, "runner='graph'"),
        ("cuda", {"backend": "reference"}, "backend='reference'"),
        ("cuda", {"runner": "eager"}, "enforce_eager"),
        ("cuda", {"lambda_clip": 0.1}, "lambda_clip=0.1"),
        ("cuda", {"first_step": False}, "first_step=False"),
    ],
)
def test_what_a_platform_lacks_is_named(platform: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        check_platform(Config().updated(changes), platform)
    check_platform(Config(), platform)


def test_another_release_names_the_tested_ones() -> None:
    check_release("0.32.0+cpu", "cpu")
    check_release("0.25.1", "cuda")
    for version, platform in (("0.31.0", "cpu"), ("0.32.0", "cuda"), ("0.25.1", "cpu")):
        with pytest.raises(UnsupportedError, match=r"0\.32\.0 on cpu"):
            check_release(version, platform)


def test_a_small_pool_names_the_number_that_fits(tiny: str, engine: Start) -> None:
    small = {"kv_cache_memory_bytes": 12 * 2**20, "max_num_seqs": 64, "max_model_len": 1024}
    with pytest.raises(ConfigError, match=r"max_num_seqs=\d+ would fit") as refused:
        engine(tiny, {"k": 64}, **small)
    fits = int(str(refused.value).rsplit("max_num_seqs=", 1)[1].split()[0])
    engine(tiny, {"k": 64}, **(small | {"max_num_seqs": fits}))
    with pytest.raises(ConfigError, match=f"max_num_seqs={fits} would fit"):
        engine(tiny, {"k": 64}, **(small | {"max_num_seqs": fits + 1}))


def test_not_asked_for_is_stock(tiny: str, engine: Start) -> None:
    engine(tiny, {})
    llm = engine(tiny)
    config = llm.llm_engine.vllm_config
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert config.scheduler_config.scheduler_cls is None
    (classes,) = llm.collective_rpc(_classes)
    assert classes == {"CPUAttentionBackendImpl"}


def _classes(worker: Any) -> set[str]:
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    return {type(layer.impl).__name__ for layer in layers}


def test_asked_values_are_config_values() -> None:
    assert parse({}) == Config.preset("default")
    assert parse({"preset": "paper", "K": 9}) == Config.preset("paper").updated({"k": 9})
    config = Config.preset("paper").updated({"t_max": 7, "refine": "span"})
    assert parse(config.to_dict()) == config


def test_serve_asks_for_what_differs() -> None:
    config = Config.preset("paper").updated({"k": 9})
    extra = ["--port", "1", "--additional_config", '{"a": 1}']
    command = serve_command("m", config, extra)
    assert command[:4] == ["vllm", "serve", "m", "--additional-config"]
    assert command[5:] == ["--port", "1"]
    asked = json.loads(command[4])
    assert asked["a"] == 1
    assert parse(asked["reread"]) == config
    with pytest.raises(ConfigError, match="reread"):
        serve_command("m", config, ['--additional-config={"reread": {}}'])
    with pytest.raises(UnsupportedError, match="exact"):
        serve_command("m", Config.preset("exact"))
