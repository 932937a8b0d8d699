"""`reread distill` on models: the teacher, that KL falls, kills, refusals, exit codes."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from reread.cli import app
from reread.errors import InputError, NumericalError, UnsupportedError
from reread.evaluation import distilling
from reread.evaluation.corpus import needle_corpus
from reread.evaluation.distilling import Interrupted, Request, distil
from reread.indexer import checkpoint
from reread.indexer.distill import Context, Distiller, Schedule, assess, mean_of
from reread.indexer.loss import LayerCall
from reread.indexer.model import WEIGHTS, Indexer
from reread.integrations.hf.indexers import backbone_identity, init_notes, new_indexer, rope_theta
from reread.integrations.hf.load import load
from reread.integrations.hf.teacher import Teacher

from ..unit import tiny_checkpoint
from . import tiny

CONTEXT = 32
TEXT = "".join(random.Random(0).choices("the quick brown fox.\n", k=40 * CONTEXT))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def request_(folder: Path, tmp_path: Path) -> Request:
    data = tmp_path / "data.txt"
    data.write_text(TEXT)
    return Request(
        model=str(folder), data=str(data), tokens=8 * CONTEXT, out=tmp_path / "out",
        context=CONTEXT, width=8, queries=16, lr=3e-3, checkpoint_every=2, device="cpu",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3", "llama", "llama-gqa4", "qwen3.5", "gemma3"])
def test_the_teacher_shows_the_models_own_probabilities(name: str) -> None:
    """Against what eager attention returns."""
    net = tiny.build(tiny.MATRIX[name])
    ids = tiny.prompt(24)
    net.set_attn_implementation("eager")
    with torch.no_grad():
        out = net(ids, use_cache=False, output_attentions=True)
    found: dict[int, torch.Tensor] = {}

    def on_layer(call: LayerCall) -> None:
        assert call.x.shape == (24, 64)
        found[call.layer] = call.mass(torch.tensor([0, 5, 23]), 24)

    with Teacher(net) as teacher:
        teacher.read(ids[0], on_layer)
    assert tuple(found) == tiny.MATRIX[name].full
    # hybrid models return attentions of their full layers only
    own = [a for a in out.attentions if a is not None]
    for at, (layer, mass) in enumerate(found.items()):
        want = own[layer if len(own) == net.config.num_hidden_layers else at][0].mean(0)
        torch.testing.assert_close(mass, want[[0, 5, 23]], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3.5"])
@pytest.mark.parametrize("heads", [1, 2])
def test_kl_falls_and_the_model_is_left_as_it_was(name: str, heads: int) -> None:
    net = tiny.build(tiny.MATRIX[name])
    before = [p.clone() for p in net.parameters()]
    held = [Context(tiny.prompt(64, seed=99)[0])]
    distiller = Distiller(new_indexer(net, 16, heads), Schedule(steps=25, lr=1e-2, queries=64))
    with Teacher(net) as teacher:
        distiller.calibrate(held[0], teacher)
        start = assess(distiller.indexer, teacher, held, queries=64)
        while not distiller.done:
            distiller.step(lambda n: Context(tiny.prompt(64, seed=n)[0]), teacher)
        end = assess(distiller.indexer, teacher, held, queries=64)
    assert tuple(end) == tiny.MATRIX[name].full
    assert (mean_of(end, "kl") or 9) < 0.95 * (mean_of(start, "kl") or 0)
    for p, old in zip(net.parameters(), before, strict=True):
        assert torch.equal(p, old)
        assert p.grad is None


def test_a_model_that_is_attached_or_hides_its_attention_is_refused() -> None:
    net = tiny.build(tiny.MATRIX["llama"])
    with Teacher(net), pytest.raises(InputError, match="attached already"), Teacher(net):
        raise AssertionError
    with Teacher(net) as teacher:
        net.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
        with pytest.raises(UnsupportedError, match=r"layers \[1\]"):
            teacher.read(tiny.prompt(8)[0], lambda call: None)


def test_an_indexer_starts_from_plain_projections() -> None:
    for name, random_layers in (("qwen3", []), ("qwen3.5", []), ("phi3", [0, 1])):
        net = tiny.build(tiny.MATRIX[name])
        indexer = new_indexer(net, 8)
        assert indexer.card.record["random_layers"] == random_layers, name
        assert bool(init_notes(indexer.card.record)) == bool(random_layers)
        assert indexer.card.layers == tiny.MATRIX[name].full
        assert indexer.card.backbone == backbone_identity(net)
        same = new_indexer(net, 8)
        for a, b in zip(indexer.parameters(), same.parameters(), strict=True):
            assert torch.equal(a, b)
    net = tiny.build(tiny.MATRIX["gemma3"])
    assert rope_theta(net.config) == net.config.rope_parameters["full_attention"]["rope_theta"]
    for wrong, said in (({"heads": 3}, "divisor of the model's 4"), ({"init": "x"}, "svd, random")):
        with pytest.raises(InputError, match=said):
            new_indexer(net, **{"width": 8, **wrong})  # type: ignore[arg-type]  # on purpose
    with pytest.raises(UnsupportedError, match="nothing to index"):
        new_indexer(tiny.build(tiny.MISTRAL_WINDOWED), 8)


def test_gates_between_the_queries_are_left_out() -> None:
    """Qwen3.5: each head's rows are D of the query, then D of the gate."""
    net = tiny.build(tiny.MATRIX["qwen3.5"])
    plain = new_indexer(net, 8)
    with torch.no_grad():
        for layer in (1, 3):
            net.model.layers[layer].self_attn.q_proj.weight.view(4, 2, 16, 64)[:, 1] *= 7
    for a, b in zip(plain.parameters(), new_indexer(net, 8).parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_finished_run_leaves_an_indexer_and_a_record(request_: Request) -> None:
    outcome = distil(request_)
    out, record = request_.out, outcome.record
    assert sorted(p.name for p in out.iterdir()) == [WEIGHTS, "record.json"]
    assert json.loads((out / "record.json").read_text()) == json.loads(json.dumps(record))
    net = load(request_.model, device="cpu").model
    indexer = Indexer.load(out, backbone=backbone_identity(net))
    assert indexer.card.record["after"]["kl"] == record["after"]["kl"]
    assert record["steps"] == 8
    assert record["tokens_read"] == 8 * CONTEXT
    assert record["after"]["kl"] < record["before"]["kl"]
    assert set(record["after"]["layers"]) == {"0", "1"}
    assert record["k"] == CONTEXT // 16
    assert {"versions", "device", "commit", "history", "seconds"} <= set(record)
    stamp = (out / WEIGHTS).stat().st_mtime_ns
    again = distil(request_)
    assert again.already
    assert again.record == json.loads(json.dumps(record))
    assert (out / WEIGHTS).stat().st_mtime_ns == stamp
    with pytest.raises(InputError, match=r"lr=0\.003 there, 0\.01 now"):
        distil(replace(request_, lr=0.01))


def stop_after(steps: int, error: BaseException) -> Any:
    def report(progress: Any, total: int) -> None:
        if progress.step == steps:
            raise error

    return report


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / WEIGHTS)


def same(a: Path, b: Path) -> None:
    one, two = weights(a), weights(b)
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]), name


def test_a_kill_at_any_step_is_continued_bit_for_bit(request_: Request, tmp_path: Path) -> None:
    straight = distil(request_).record
    for step in (1, random.Random(os.urandom(4)).randint(2, 7)):
        broken = replace(request_, out=tmp_path / f"broken{step}")
        with pytest.raises(MemoryError):  # nothing is saved on the way, as when killed
            distil(broken, stop_after(step, MemoryError()))
        found = checkpoint.load_checkpoint(broken.out)
        assert found is not None
        assert found[1]["step"] == (step - 1) // 2 * 2
        record = distil(broken).record
        same(request_.out, broken.out)
        for name in ("after", "before", "history"):
            assert record[name] == straight[name]


def test_a_killed_process_is_continued_bit_for_bit(request_: Request, tmp_path: Path) -> None:
    request_ = replace(request_, tokens=60 * CONTEXT, checkpoint_every=1)
    distil(request_)
    out = tmp_path / "killed"
    arguments = command(replace(request_, out=out))
    process = subprocess.Popen([sys.executable, "-m", "reread", *arguments], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (out / checkpoint.CHECKPOINT).is_file() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(random.Random(os.urandom(4)).random() * 0.3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    distil(replace(request_, out=out))
    same(request_.out, out)


def test_an_interrupt_saves_and_continues(request_: Request, tmp_path: Path) -> None:
    distil(request_)
    broken = replace(request_, out=tmp_path / "broken")
    with pytest.raises(Interrupted) as caught:
        distil(broken, stop_after(3, KeyboardInterrupt()))
    assert (caught.value.step, caught.value.steps) == (3, 8)
    with pytest.raises(InputError, match="seed=0 there, 1 now"):
        distil(replace(broken, seed=1))
    distil(broken)
    same(request_.out, broken.out)


def test_an_update_that_was_cut_short_is_not_saved(
    request_: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distil(request_)
    broken = replace(request_, out=tmp_path / "broken")
    original, calls = torch.optim.AdamW.step, 0

    def cut(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        result = original(self, *args, **kwargs)
        if calls == 4:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", cut)
        with pytest.raises(Interrupted) as caught:
            distil(broken)
    assert caught.value.step == 2
    distil(broken)
    same(request_.out, broken.out)


def test_a_full_disk_keeps_the_older_checkpoint(
    request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = checkpoint.save_file, 0

    def full(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        with pytest.raises(InputError, match=r"No space left on device.*the older one is whole"):
            distil(request_)
    found = checkpoint.load_checkpoint(request_.out)
    assert found is not None
    assert found[1]["step"] == 2
    assert distil(request_).record["steps"] == 8


def test_a_teacher_that_is_not_a_number_stops_with_its_checkpoint(
    request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = distilling.Teacher.read, 0

    def read(self: Any, ids: Any, on_layer: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 8:
            with torch.no_grad():
                self.model.model.layers[1].self_attn.k_proj.weight.fill_(torch.nan)
        original(self, ids, on_layer)

    monkeypatch.setattr(distilling.Teacher, "read", read)
    with pytest.raises(NumericalError, match=r"layer 1 .* step \d.*checkpoint of step \d stays"):
        distil(request_)
    assert checkpoint.load_checkpoint(request_.out) is not None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"width": 7}, "width=7"),
        ({"heads": 3}, "heads=3 is not possible: a divisor of the model's 4"),
        ({"tokens": 31}, "tokens=31"),
        ({"tokens": 40, "accumulate": 2}, "one step takes 64"),
        ({"context": 4096, "tokens": 8192}, "has 400 positions"),
        ({"queries": 0}, "queries=0"),
        ({"lr": 0.0}, "lr=0"),
        ({"seed": -1}, "seed=-1"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"init": "zeros"}, "svd, random"),
        ({"data": "needle"}, "vocabulary"),
    ],
)
def test_what_cannot_be_right_is_refused(
    request_: Request, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        distil(replace(request_, **change))


def command(request: Request) -> list[str]:
    fields = ("model", "data", "tokens", "out", "context", "width", "queries", "lr")
    arguments = ["distill", "--device", request.device]
    for name in (*fields, "checkpoint_every"):
        arguments += [f"--{name.replace('_', '-')}", str(getattr(request, name))]
    return arguments


def test_the_command_prints_a_table_or_json(request_: Request, tmp_path: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(app, command(request_))
    assert done.exit_code == 0, done.output
    assert "KL before" in done.stdout
    assert "step 8/8, mean KL" in done.stderr
    again = runner.invoke(app, [*command(request_), "--json"])
    assert again.exit_code == 0
    assert json.loads(again.stdout)["steps"] == 8
    assert "nothing was done" in again.stderr


def test_the_command_tells_bad_input_in_one_line(
    request_: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as where it is not installed
    runner = CliRunner()
    for changed, said in (
        (replace(request_, width=5), "width=5"),
        (replace(request_, data="someone/texts"), "install datasets"),
        (replace(request_, out=tmp_path / "data.txt" / "out"), "cannot be written"),
        (replace(request_, context=64 * CONTEXT, tokens=64 * CONTEXT), "positions at most"),
    ):
        done = runner.invoke(app, command(changed))
        assert done.exit_code == 2
        assert done.stderr.count("error:") == 1
        assert said in done.stderr


def test_the_command_ends_with_130_on_ctrl_c(
    request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: Any, *args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(distilling.Distiller, "step", interrupt)
    done = CliRunner().invoke(app, command(request_))
    assert done.exit_code == 130
    assert "holds step 0 of 8; run the same command to continue" in " ".join(done.stderr.split())


def test_needle_27m_learns(needle_dir: Path) -> None:
    loaded = load(str(needle_dir), dtype="float32", device="cpu")
    texts = needle_corpus(loaded.tokenizer, context=512, seed=0, held_out=1)
    distiller = Distiller(new_indexer(loaded.model, 32), Schedule(steps=3, lr=3e-3, queries=64))
    with Teacher(loaded.model) as teacher:
        distiller.calibrate(texts.training(0), teacher)
        before = assess(distiller.indexer, teacher, texts.held_out, queries=64)
        while not distiller.done:
            distiller.step(texts.training, teacher)
        after = assess(distiller.indexer, teacher, texts.held_out, queries=64)
    assert (mean_of(after, "kl") or 9) < 0.9 * (mean_of(before, "kl") or 0)
