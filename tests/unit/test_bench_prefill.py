"""`reread bench prefill`: bad input, counts, checks on sampled blocks, and tables. On the CPU the
reference stands in for the kernels, and the clock for events."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.nn.attention import SDPBackend
from transformers import AutoConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typer.testing import CliRunner

from reread import ops
from reread.bench import crossover, prefill, prefill_arms, prefill_checks, probes, spans, ttft
from reread.bench.model import random_model
from reread.bench.prefill_arms import PrefillArm, sdpa
from reread.bench.prefill_checks import Row, agreement, check_sparse
from reread.cli import app
from reread.cli.bench_prefill import PARTS, tables
from reread.errors import InputError, NumericalError, UnsupportedError
from reread.integrations.hf.indexers import new_indexer
from reread.prefill import PrefillMeter
from reread.prefilling import SparsePrefill
from reread.shapes import Shape, hf_config
from reread.types import BlockSelection

CPU = torch.device("cpu")
SHAPE = Shape(
    name="tiny", layers=2, total_layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16,
    intermediate=96, vocabulary=128, tied=True,
)  # fmt: skip
CONFIG = SparsePrefill(chooser="indexer", k=16, b_sel=16, sink=4, local=16, dense_below=64)
LENGTH = 200
MATH = PrefillArm("math", sdpa(SDPBackend.MATH))
ABSENT = PrefillArm("absent", None, "absent is not installed")
BAD = [
    (["--context", "0"], "--context '0' is not possible: whole numbers"),
    (["--context", "32K"], "--context '32K' is not possible"),
    (["--context", "32768,262145"], "context 262145 is not possible: the kernels cover 262144"),
    (["--context", "2048"], "context 2048 leaves nothing out with k=2048"),
    (["--k", "0"], "prefill.k=0 is not possible"),
    (["--b-sel", "0"], "prefill.b_sel=0 is not possible"),
    (["--chunk", "-1"], "--chunk -1 is not possible"),
    (["--parts", "layer,step"], "part 'step' is unknown: some of layer, crossover, ttft"),
    (["--arms", "cudnn,fa9"], "arm 'fa9' is unknown: all, or some of cudnn, flash"),
    (["--shape", "gpt"], "shape 'gpt' is unknown"),
]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "prefill", *arguments], env={"COLUMNS": "200"})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times by the clock, few repeats."""

    def milliseconds(work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        return (time.perf_counter() - begin) * 1e3

    for module in (prefill, prefill_arms):
        monkeypatch.setattr(module, "milliseconds", milliseconds)
    monkeypatch.setattr(prefill_arms, "REPEATS", 2)


@pytest.fixture
def float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in float32."""
    random = partial(Row.random, dtype=torch.float32)
    monkeypatch.setattr(Row, "random", random)


def row(length: int = LENGTH, queries: int | None = None) -> Row:
    return Row.random(
        SHAPE, length, CPU, torch.float32, queries=queries, backend="reference"
    )  # fmt: skip


# -- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert re.fullmatch(r"error: [^\n]*\n", result.stderr)


def test_without_a_gpu_it_says_so_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build(*_: object) -> None:
        pytest.fail("something was built")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(ttft, "random_model", build)
    result = run()
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.fullmatch(r"error: this benchmark needs a CUDA GPU[^\n]*\n", result.stderr)


def test_options_become_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[prefill.Plan, str]] = []

    def measure(plan: prefill.Plan, *, commit: str, progress: Any) -> dict[str, Any]:
        progress("here")
        asked.append((plan, commit))
        return RESULT

    monkeypatch.setattr(prefill, "measure", measure)
    given = ["--shape", "Qwen3.5-9B", "--context", "8192, 16384", "--k", "512", "--b-sel", "32"]
    given += ["--parts", "ttft,layer", "--arms", "flash", "--chunk", "4096", "--commit", "abc"]
    told, as_json = run(*given), run(*given, "--json")
    assert told.exit_code == as_json.exit_code == 0, told.output + as_json.output
    plan, commit = asked[0]
    assert (plan.shape, plan.contexts, plan.chunk, commit) == (
        ttft.HYBRID, (8192, 16384), 4096, "abc",
    )  # fmt: skip
    assert plan.config == SparsePrefill(chooser="indexer", k=512, b_sel=32)
    assert (plan.parts, [arm.name for arm in plan.arms]) == (("ttft", "layer"), ["flash"])
    assert json.loads(as_json.stdout) == RESULT
    assert "quality not claimed" in told.stdout
    assert "here" in told.stderr
    assert PARTS == prefill.PARTS


def test_the_hybrid_shape_is_what_transformers_builds_by_default() -> None:
    ours = AutoConfig.for_model(**hf_config(ttft.HYBRID))
    default = AutoConfig.for_model("qwen3_5_text", max_position_embeddings=262_144)
    assert ours.to_dict() == default.to_dict()
    shape = ttft.HYBRID
    assert ours.layer_types.count("full_attention") == shape.layers
    assert (ours.num_attention_heads, ours.num_key_value_heads) == (shape.heads, shape.kv_heads)


# -- counts ------------------------------------------------------------------------------------


def test_dense_flops_by_hand() -> None:
    assert prefill_arms.causal_pairs(4) == 1 + 2 + 3 + 4
    # two queries: the first sees one key, the second two; D multiplications and additions each,
    # for the logit and for the output
    assert prefill_arms.dense_flops(3, 5, 2) == 3 * (1 + 2) * (2 * 5 + 2 * 5)
    tokens = 131_072
    assert prefill_arms.dense_flops(32, 128, tokens) == 4 * 32 * 128 * tokens * (tokens + 1) // 2


def test_the_floor_counts_what_is_read(clock: None) -> None:
    whole, meter = row(), PrefillMeter()
    whole.attend(CONFIG, meter)
    found = prefill.needed(whole, meter, CONFIG, bandwidth=1e30, ceiling=1e9)
    pairs = prefill_arms.causal_pairs(LENGTH) * meter.share
    assert found["attention_flops"] == pytest.approx(4 * 4 * 16 * pairs)
    assert found["index_flops"] == 2 * 64 * prefill_arms.causal_pairs(LENGTH)
    flops = found["attention_flops"] + found["index_flops"]
    assert found["floor_ms"] == pytest.approx(flops / 1e9 * 1e3)
    by_bytes = prefill.needed(whole, meter, CONFIG, bandwidth=1e6, ceiling=1e30)
    moved = 4 * (2 * 4 * 16 + 2 * 2 * 16 + 2 * 64) * LENGTH
    assert by_bytes["floor_ms"] == pytest.approx(moved / 1e6 * 1e3)


# -- checks ------------------------------------------------------------------------------------


def test_sampled_blocks_of_the_reference_agree(clock: None) -> None:
    found = check_sparse(row(), CONFIG)
    assert (found["overlap"], found["swapped"]) == (1.0, 0.0)
    assert found["error"] < 1e-5
    assert len(found["blocks"]) == 4
    assert (found["blocks"][0], found["blocks"][-1]) == (64, 192)
    assert check_sparse(row(queries=50), CONFIG)["blocks"][0] == LENGTH - 50


@pytest.mark.parametrize("op", ["indexer_topk", "prefill_sparse"])
def test_a_wrong_block_is_an_error(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(ops, op)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out = right(*args, **kwargs)
        if isinstance(out, BlockSelection):
            shifted = torch.where(out.indices >= 0, out.indices + 1, -1)
            return BlockSelection(shifted, out.sizes)
        return out.mul_(1.1)

    monkeypatch.setattr(ops, op, wrong)
    monkeypatch.setattr(f"reread.prefill.{op}", wrong)
    with pytest.raises(NumericalError, match=r"block of queries 64 to 79"):
        check_sparse(row(), CONFIG)


def test_only_scores_that_hardly_differ_may_be_swapped() -> None:
    scores = torch.linspace(2, 1, 1000)
    want = torch.arange(400)
    assert agreement(want.flip(0), want, scores, "a block") == (1.0, 0.0)
    near = want.clone()
    near[399] = 401
    overlap, swapped = agreement(near, want, scores, "a block")
    assert overlap == 399 / 400
    assert 0 < swapped < 2e-3
    far = want.clone()
    far[0] = 900
    with pytest.raises(NumericalError, match="swapped"):
        agreement(far, want, scores, "a block")
    with pytest.raises(NumericalError, match=r"0\.9875 of the positions"):
        agreement(torch.arange(5, 405), want, scores, "a block")
    with pytest.raises(NumericalError, match="399 distinct positions"):
        agreement(want.clamp(max=398), want, scores, "a block")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [("leaks", "math is not causal"), ("scaled", "math: relative error"), ("fails", "no kernel")],
)
def test_a_wrong_dense_arm_says_so_and_is_not_timed(
    wrong: str, message: str, clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Callable[[], Tensor]:
        if wrong == "fails":
            raise RuntimeError("no kernel\nfor this shape")
        right = sdpa(SDPBackend.MATH)(q, k, v, scale)
        if wrong == "leaks":
            return lambda: right() + v.mean()
        return lambda: right() * 1.1

    monkeypatch.setattr(prefill_arms, "timed", lambda _: pytest.fail("it was timed"))
    whole = row()
    arm = PrefillArm("math", make)
    found = prefill_arms.measure_dense(arm, whole.q, whole.k, whole.v, whole.scale, 1e12)
    assert found["arm"] == "math"
    assert message in found["not_run"]


# -- records -----------------------------------------------------------------------------------


def test_a_record_of_one_layer(clock: None, float32: None) -> None:
    plan = prefill.Plan(SHAPE, (LENGTH,), CONFIG, ("layer",), (MATH, ABSENT))
    found = prefill.layer(
        plan, LENGTH, CPU, bandwidth=1e9, ceiling=1e9, backend="reference"
    )  # fmt: skip
    dense, absent = found["dense"]
    assert absent == {"arm": "absent", "not_run": "absent is not installed"}
    assert dense["tflops"] == pytest.approx(dense["flops"] / dense["ms"] / 1e9)
    assert dense["share_of_matmul"] == pytest.approx(dense["tflops"] * 1e3)
    ours = found["sparse"]
    assert ours["parts"]["calls"] == {"selection": 1, "attention": 1}
    assert ours["share_of_floor"] == pytest.approx(ours["floor_ms"] / ours["ms"])
    assert 0 < ours["share_read"] < 1
    assert found["fastest_dense"] == "math"
    assert found["speedup"] == pytest.approx(dense["ms"] / ours["ms"])
    json.dumps(found)


def test_a_layer_that_fails_is_a_record(clock: None) -> None:
    plan = prefill.Plan(SHAPE, (LENGTH,), CONFIG, ("layer",), (ABSENT,))
    found = prefill.layer(plan, LENGTH, CPU, bandwidth=1e9, ceiling=1e9)
    assert "UnsupportedError" in found["sparse"]["failed"]
    assert "speedup" not in found


def test_the_crossover_is_where_sparse_stays_faster() -> None:
    rows = [
        {"length": n, "a": a, "b": b, "sparse": 3.0}
        for n, a, b in ((1, 4, 4), (2, 4, 2), (4, 4, 5), (8, 9, 8))
    ]
    assert crossover.position(rows, ("a",)) == 1
    assert crossover.position(rows, ("a", "b")) == 4
    assert crossover.position(rows, ("missing",)) is None
    assert crossover.position([*rows, {"length": 16, "a": 1}], ("a",)) is None


def test_a_chunk_is_timed_in_every_way(
    clock: None, float32: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crossover, "CHUNK", 32)
    monkeypatch.setattr(crossover, "dense_arms", lambda: [MATH, ABSENT])
    for length in (32, 96):
        found = crossover.at_length(SHAPE, CONFIG, length, CPU, "reference")
        # PyTorch's lower-right bias covers grouped heads only on some devices
        assert found["failed"].keys() <= {"lower_right"}
        assert {"difference", "own", "sparse"} <= found.keys()


def hybrid() -> Shape:
    """A tiny model with linear-attention layers."""
    small = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "layer_types": [*["linear_attention"] * 3, "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    }  # fmt: skip
    return Shape(
        name="hybrid", layers=1, total_layers=4, hidden=64, heads=4, kv_heads=2, head_dim=32,
        intermediate=96, vocabulary=128, tied=False, source={**hf_config(ttft.HYBRID), **small},
    )  # fmt: skip


@pytest.fixture(params=["plain", "hybrid"])
def prompts(request: pytest.FixtureRequest) -> Iterator[ttft.Prompts]:
    shape = SHAPE if request.param == "plain" else hybrid()
    model = random_model(shape, CPU, torch.float32)
    indexer = new_indexer(model, 16, 1, "random")
    backends = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}
    yield ttft.Prompts(shape, CONFIG, CPU, model, indexer, backends=backends, warm_tokens=32)
    assert model.config._attn_implementation == "sdpa"
    assert probes.NO_ATTENTION not in ALL_ATTENTION_FUNCTIONS


def test_a_record_of_a_whole_model(prompts: ttft.Prompts) -> None:
    found = ttft.at_length(prompts, LENGTH)
    math, flash = found["dense"]
    for arm in (math, flash):
        assert arm["sdpa"] == [{"attn_mask": False, "is_causal": True, "enable_gqa": True}]
    assert flash["against_first"] < 1e-4
    assert found["speedup"] == pytest.approx(min(math["ms"], flash["ms"]) / found["sparse"]["ms"])
    parts = found["sparse"]["parts"]
    layers = prompts.shape.layers
    assert parts["calls"] == {"projections": layers, "selection": layers, "attention": layers}
    assert 0 < parts["rest_ms"] < parts["total_ms"]
    assert found["no_attention"]["ms"] > 0
    assert bool(found["linear_layers"]) == (prompts.shape.name == "hybrid")
    # what is much slower is left out of longer prompts
    prompts.slow["math"] = "left out: slow"
    assert ttft.at_length(prompts, LENGTH)["dense"][0] == {
        "arm": "math", "not_run": "left out: slow",
    }  # fmt: skip
    json.dumps(found)


def test_chunks_give_the_same_logits_as_one_forward(prompts: ttft.Prompts) -> None:
    with prompts.attached():
        whole, chunked = prompts.seconds(LENGTH)[1], prompts.seconds(LENGTH, 48)[1]
    assert ttft.difference(chunked, whole) < 1e-4


def test_a_model_that_cannot_be_built_is_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object) -> None:
        raise InputError("the weights take 900 GiB")

    monkeypatch.setattr(ttft, "random_model", build)
    told: list[dict[str, Any]] = []
    rows = ttft.measure(SHAPE, [64, 128], CONFIG, CPU, on_row=told.append)
    assert told == rows
    assert [row["failed"] for row in rows] == ["InputError: the weights take 900 GiB"] * 2


@pytest.mark.parametrize("by_name", [True, False])
def test_a_mask_in_memory_is_refused(by_name: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(*_: Any) -> tuple[dict[str, Any], Tensor]:
        q, mask = torch.randn(1, 1, 4, 8), torch.ones(4, 4, dtype=torch.bool)
        attend = torch.nn.functional.scaled_dot_product_attention
        out = attend(q, q, q, attn_mask=mask) if by_name else attend(q, q, q, mask)
        return {"ms": 1.0}, out

    before = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(ttft.Prompts, "timed", timed)
    backends = {"math": SDPBackend.MATH}
    found, logits = ttft.dense_arm(
        ttft.Prompts(SHAPE, CONFIG, CPU, None, None, backends=backends), "math", 4, None
    )
    assert "not called causally without a mask" in found["not_run"]
    assert logits is None
    assert torch.nn.functional.scaled_dot_product_attention is before


def test_spans_leave_everything_as_it_was() -> None:
    before = ops.reference.indexer_topk, prefill_checks.prefill_row
    found = spans.Spans(CPU)
    with spans.watched(found):
        row().attend(CONFIG)
    assert found.totals()["calls"] == {"selection": 1, "attention": 1}
    row().attend(CONFIG)
    assert found.totals()["calls"] == {"selection": 1, "attention": 1}
    assert before == (ops.reference.indexer_topk, prefill_checks.prefill_row)


def test_no_cuda_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="CUDA GPU"):
        prefill.measure(prefill.Plan(SHAPE, (LENGTH,), CONFIG, PARTS, (MATH,)))


# -- tables ------------------------------------------------------------------------------------

_DENSE = {"arm": "cudnn", "ms": 50.0, "p20": 49.0, "p80": 51.0, "tflops": 600.0,
          "share_of_matmul": 0.8}  # fmt: skip
_MISSING = {"arm": "flash_attn_3", "not_run": "flash_attn_interface is not installed"}
RESULT: dict[str, Any] = {
    "device": {"name": "a GPU"},
    "matmul_tflops": 750.0,
    "layer": [
        {
            "context": 65536, "dense": [_DENSE, _MISSING],
            "sparse": {
                "ms": 10.0, "p20": 9.5, "p80": 10.5, "attention_tflops": 400.0,
                "share_of_floor": 0.5, "parts": {"attention_ms": 6.25, "calls": {"attention": 1}},
            },
        },
        {"context": 131072, "dense": [_MISSING], "sparse": {"failed": "NumericalError: a block"}},
        {"context": 262144, "failed": "OutOfMemoryError: 3 GiB"},
    ],
    "crossover": {
        "chunk": 2048, "position": 6144, "position_against_own": None,
        "rows": [{"length": 2048, "difference": 0.125, "sparse": 0.5,
                  "failed": {"lower_right": "RuntimeError: no kernel"}}],
    },
    "ttft": [
        {
            "shape": "qwen3-4b", "context": 65536, "dense": [{"arm": "cudnn", "ms": 3000.0}],
            "sparse": {"ms": 1500.0, "parts": {"rest_ms": 900.0, "total_ms": 1600.0}},
            "no_attention": {"ms": 850.0},
            "linear_layers": {"fast_kernels": {"torch_chunk_gated_delta_rule": False}},
        },
        {"shape": "qwen3.5-9b", "context": 262144, "failed": "InputError: 18 GiB are free"},
    ],
}  # fmt: skip


def test_tables_have_a_line_for_everything() -> None:
    console = Console(width=200)
    with console.capture() as captured:
        for table in tables(RESULT):
            console.print(table)
    told = captured.get()
    lines = [" ".join(line.replace("│", " ").split()) for line in told.splitlines()]
    for wanted in (
        "65536 cudnn 50.00 49.00 51.00 600 80% 1.00",
        "65536 flash_attn_3: flash_attn_interface is not installed",
        "65536 sparse 10.00 9.50 10.50 400 50% 5.00",
        "attention 6.25",
        "131072 sparse: failed: NumericalError: a block",
        "262144 sparse: failed: OutOfMemoryError: 3 GiB",
        "2048 0.125 0.500 lower_right: RuntimeError: no kernel",
        "qwen3-4b 65536 cudnn 3000 1.00",
        "qwen3-4b 65536 sparse 1500 2.00",
        "rest 900",
        "qwen3-4b 65536 no_attention 850 3.53",
        "qwen3-4b 65536 its linear layers on PyTorch, without their fast kernels",
        "qwen3.5-9b 262144 sparse: failed: InputError: 18 GiB are free",
    ):
        assert wanted in lines, told
    assert "sparse is faster from 6144 tokens on" in " ".join(lines)
    assert tables({"device": {"name": "a GPU"}}) == []


def test_a_part_that_fails_keeps_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import prefill_gpu

    path = tmp_path / "found.json"
    prefill_gpu.write(path, "crossover", {"position": 6144})
    prefill_gpu.write(path, "layer", {"old": 1})

    def process(command: list[str], **_: Any) -> Any:
        prefill_gpu.write(path, "layer", {"layer": [1]})
        return type("Done", (), {"returncode": 1})()

    monkeypatch.setattr("subprocess.run", process)
    monkeypatch.setattr("sys.argv", ["prefill_gpu", "--json", str(path), "--parts", "layer"])
    assert prefill_gpu.main() == 1
    assert json.loads(path.read_text()) == {
        "crossover": {"position": 6144}, "layer": {"layer": [1], "failed": "exit code 1"},
    }  # fmt: skip
