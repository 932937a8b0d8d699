"""What users of vLLM rely on works as before: n > 1, stop strings, logprobs, the OpenAI API; and
/metrics shows that fast steps ran."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .engines import SMALL, greedy, save_indexer, stats, text_ids

Start = Callable[..., Any]


def test_samples_stops_and_logprobs(tiny: str, engine: Start) -> None:
    from vllm import SamplingParams

    llm = engine(tiny, SMALL)
    tokenizer = llm.get_tokenizer()
    prompt = {"prompt_token_ids": text_ids(tokenizer, 200, 5)}
    (plain,) = greedy(llm, [prompt["prompt_token_ids"]], 40)

    def ask(**options: Any) -> Any:
        params = SamplingParams(**({"max_tokens": 40, "ignore_eos": True} | options))
        return llm.generate([prompt], params, use_tqdm=False)[0].outputs

    # several samples of one request are rows of their own
    assert [list(o.token_ids) for o in ask(n=3, temperature=1.0, top_k=1)] == [plain] * 3
    sampled = [list(o.token_ids) for o in ask(n=4, temperature=1.0, seed=3)]
    assert len({tuple(ids) for ids in sampled}) > 1
    assert [list(o.token_ids) for o in ask(n=4, temperature=1.0, seed=3)] == sampled
    text = tokenizer.decode(plain)
    word = text[len(text) // 2 :][:4]
    (stopped,) = ask(temperature=0.0, stop=[word])
    assert stopped.finish_reason == "stop"
    assert text.startswith(stopped.text)
    assert word not in stopped.text
    (scored,) = ask(temperature=0.0, logprobs=2)
    assert list(scored.token_ids) == plain
    for token, found in zip(plain, scored.logprobs, strict=True):
        assert max(found.values(), key=lambda entry: entry.logprob).rank == 1
        assert found[token].rank == 1
    assert stats(llm)["fast_steps"] > 300


@pytest.fixture(scope="module")
def server(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`vllm serve` with the plug-in, on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (tmp_path_factory.mktemp("server") / "log").open("w+")
    from reread.integrations.vllm.options import parse
    from reread.integrations.vllm.serve import program, serve_command

    words = serve_command(tiny, parse(SMALL), [
        "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024",
        "--max-num-seqs", "4", "--block-size", "32", "--kv-cache-memory-bytes", str(2**28),
    ])  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    process = subprocess.Popen(
        program(words), env=environment, stdout=log, stderr=log, start_new_session=True
    )
    try:
        _wait(process, f"http://127.0.0.1:{port}/health", Path(log.name))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    for _ in range(240):
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(address, timeout=2)
            return
        except OSError:
            time.sleep(1)
    raise AssertionError(f"no server after 240 s: {log.read_text()[-4000:]}")


def test_the_openai_api_streams(server: str, tiny: str) -> None:
    openai = pytest.importorskip("openai")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)
    asked = {
        "model": "tiny",
        "prompt": tokenizer.decode(text_ids(tokenizer, 250, 5)),
        "max_tokens": 40,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**asked)
    parts = list(client.completions.create(**asked, stream=True))
    assert whole.usage.completion_tokens == 40
    assert len(parts) > 20
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    greedy = {"temperature": 1, "extra_body": {"ignore_eos": True, "top_k": 1}}
    several = client.completions.create(**(asked | greedy), n=2, logprobs=1)
    assert {choice.text for choice in several.choices} == {whole.choices[0].text}
    assert len(several.choices[0].logprobs.tokens) == 40
    # four answers of 40 tokens; the first of each comes from the prefill
    metrics = _metrics(server)
    assert metrics["reread_fast_steps_total"] > 100
    assert metrics["reread_slow_steps_total"] > 8
    steps = sum(metrics[f"reread_{kind}_steps_total"] for kind in ("fast", "slow", "full"))
    assert steps == 4 * 39
    assert 0 < metrics["reread_keys_read_share"] < 0.8
    assert metrics["reread_refresh_seconds_sum"] > 0
    assert metrics["reread_refresh_seconds_count"] == 2 * metrics["reread_slow_steps_total"]
    assert metrics["reread_state_bytes"] == 0


def _metrics(server: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{server}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    found = (line.rsplit(" ", 1) for line in lines if line.startswith("reread_"))
    return {name: float(value) for name, value in found}


@pytest.mark.slow
@pytest.mark.parametrize("prompts", ["dense", "by an indexer"])
def test_two_processes_are_one(prompts: str, tiny: str, tmp_path: Path) -> None:
    """Tensor parallelism: the same tokens, the same steps, the same positions."""
    ask: dict[str, Any] = dict(SMALL)
    if prompts != "dense":
        folder = save_indexer(tiny, tmp_path / "indexer", width=16)
        ask["prefill"] = {"indexer": folder, "k": 24, "b_sel": 16, "local": 16}
    results = []
    for size in (1, 2):
        out = tmp_path / f"{size}.json"
        # the engine stays in the program's own process, so that its passes can be counted
        environment = os.environ | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        words = [
            sys.executable,
            "-m",
            "tests.vllm.parallel",
            tiny,
            str(size),
            str(out),
            json.dumps(ask),
        ]
        subprocess.run(words, env=environment, check=True, timeout=300, capture_output=True)
        results.append(json.loads(out.read_text()))
    one, two = results
    assert two["tokens"] == one["tokens"]
    assert len(two["stats"]) == 2
    for rank in two["stats"]:
        assert rank["fast_steps"] == one["stats"][0]["fast_steps"] > 100
        assert rank["slow_steps"] == one["stats"][0]["slow_steps"]
        share = rank["prompt_keys_read_share"]
        assert share == one["stats"][0]["prompt_keys_read_share"]
        assert (share < 1) == (prompts != "dense")
    chosen = [part for rank in two["chosen"] for part in rank]
    assert sorted(chosen) == sorted(one["chosen"][0])
