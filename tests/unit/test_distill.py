"""Distillation: the loss and its gradient, the queries that are drawn, steps, files and data."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from reread.errors import InputError, NumericalError
from reread.evaluation import corpus
from reread.indexer import checkpoint, loss, workers
from reread.indexer.distill import Context, Distiller, Schedule, assess, mean_of, metrics
from reread.indexer.loss import SUMS, LayerCall, chunks, draw_queries, layer_loss
from reread.indexer.model import WEIGHTS, Indexer, IndexerCard, predicted_mass
from reread.oracle import attention_mass

from . import tiny_checkpoint

T, HIDDEN, HEADS, DIM = 40, 12, 4, 8


def make_indexer(heads: int = 1, layers: tuple[int, ...] = (0,), seed: int = 0) -> Indexer:
    torch.manual_seed(seed)
    return Indexer(IndexerCard(
        layers=layers, hidden=HIDDEN, width=6, theta=1e4, backbone="b", heads=heads,
    ))  # fmt: skip


class Fake:
    """A teacher made of random queries and keys that depend on the context."""

    def __init__(self, layers: tuple[int, ...] = (0,)) -> None:
        self.layers = layers

    def call(self, ids: Tensor, layer: int) -> LayerCall:
        generator = torch.Generator().manual_seed(int(ids.sum()) + layer)
        x = torch.randn(len(ids), HIDDEN, generator=generator)
        mix = torch.Generator().manual_seed(100 + layer)
        w_q, w_k = torch.randn(2, HEADS * DIM, HIDDEN, generator=mix)
        q, k = ((x @ w.T).view(len(ids), HEADS, DIM).transpose(0, 1) for w in (w_q, w_k))

        def mass(positions: Tensor, keys: int) -> Tensor:
            return attention_mass(q[:, positions], k[:, :keys], positions, 0, 0.2)

        return LayerCall(layer, x, HEADS, mass)

    def read(self, ids: Tensor, on_layer: Any) -> None:
        for layer in self.layers:
            on_layer(self.call(ids, layer))


def contexts(number: int) -> Context:
    return Context(torch.arange(T) + number)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("positions", [list(range(T)), [0, 3, 17, 39]])
def test_streamed_gradients_are_those_of_the_whole_matrix(
    heads: int, positions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "ROUND", 8)
    indexer, call = make_indexer(heads), Fake().call(torch.arange(T), 0)
    at = torch.arange(T)
    asked = torch.tensor(positions)
    p = call.mass(at, T)[asked]
    iq, ik = indexer.queries(0, call.x, at)[:, asked], indexer.keys(0, call.x, at)
    prediction = predicted_mass(iq, ik, asked, 0)
    past = at <= asked[:, None]
    whole = (p[past] * (p[past].log() - prediction[past].log())).sum()
    want = torch.autograd.grad(whole / 7, list(indexer.parameters()))
    budget = 3 * 4 * (2 * HEADS + 4 * heads + 4) * T  # a few queries at a time
    assert len(list(chunks(positions, T, HEADS, heads, budget))) > 1
    sums = layer_loss(indexer, call, positions, weight=1 / 7, budget=budget)
    found = dict(zip(SUMS, sums.tolist(), strict=True))
    assert found["kl"] == pytest.approx(float(whole.detach()), rel=1e-5)
    assert found["queries"] == found["teacher"] == pytest.approx(len(positions))
    for parameter, gradient in zip(indexer.parameters(), want, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_recall_and_mass_by_hand() -> None:
    p = torch.tensor([[0.5, 0.3, 0.1, 0.1]])
    log_s = torch.tensor([[0.4, 0.1, 0.3, 0.2]]).log()
    recall, mass = loss.overlap(p, log_s, 2)
    assert recall.tolist() == [0.5]
    assert mass.item() == pytest.approx((0.5 + 0.1) / (0.5 + 0.3))
    assert loss.divergence(p, p.log()).item() == pytest.approx(0, abs=1e-6)


def test_the_oracle_as_indexer_recalls_everything() -> None:
    """Recall is over queries with more than k past tokens; here the prediction is P itself."""
    assert loss.top_of(16384) == 256
    assert loss.top_of(1024) == 64
    p = torch.softmax(torch.randn(5, 40), -1)
    recall, mass = loss.overlap(p, p.log(), 8)
    assert recall.tolist() == [1.0] * 5
    assert mass.tolist() == pytest.approx([1.0] * 5)


def test_drawn_queries_are_sorted_distinct_and_repeatable() -> None:
    drawn = draw_queries(1000, 100, 0, 5, 3)
    assert drawn == sorted(set(drawn))
    assert len(drawn) == 100
    assert drawn == draw_queries(1000, 100, 0, 5, 3)
    assert drawn != draw_queries(1000, 100, 0, 5, 4)
    assert drawn != draw_queries(1000, 100, 0, 6, 3)
    assert draw_queries(50, 50, 0, 0, 0) == list(range(50))


@pytest.mark.parametrize(("focus", "late"), [(800, 50), (990, 10), (20, 80)])
def test_half_of_the_queries_stand_in_the_focus_where_it_has_so_many(focus: int, late: int) -> None:
    drawn = draw_queries(1000, 100, focus, 0, 0)
    assert len(set(drawn)) == 100
    assert sum(p >= focus for p in drawn) == late


def test_chunks_cover_every_query_once_and_their_keys() -> None:
    positions = sorted(torch.randperm(5000)[:700].tolist())
    found = list(chunks(positions, 5000, 16, 1, 1 << 22))
    assert sorted(i for c in found for i in range(c.first, c.last)) == list(range(700))
    assert all(positions[c.last - 1] < c.keys <= 5000 for c in found)
    assert all((c.last - c.first) * c.keys * 4 * 40 <= 1 << 22 for c in found)


def test_the_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    schedule = Schedule(steps=100, lr=1.0)
    rates = [schedule.lr_at(step) for step in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    assert Schedule(steps=1, lr=1.0).lr_at(0) == 1.0


def test_kl_falls_and_held_out_metrics_are_finite() -> None:
    distiller = Distiller(make_indexer(layers=(0, 2)), Schedule(steps=60, lr=3e-2, queries=20))
    teacher, held = Fake((0, 2)), [Context(torch.arange(T) + 999)]
    distiller.calibrate(contexts(0), teacher)
    before = assess(distiller.indexer, teacher, held, queries=T)
    while not distiller.done:
        distiller.step(contexts, teacher)
    after = assess(distiller.indexer, teacher, held, queries=T)
    for layer in (0, 2):
        assert after[layer]["kl"] < 0.8 * before[layer]["kl"]  # type: ignore[operator]  # not None
    assert distiller.progress.history[-1][0] == 60
    assert 0 < (mean_of(after, "mass") or 0) <= 1


def test_accumulated_contexts_give_the_mean_gradient() -> None:
    both = Distiller(make_indexer(), Schedule(steps=1, accumulate=2, queries=T))
    assert both.numbers(3) == [6, 7]
    want: list[Tensor] = []
    for number in (0, 1):
        one = make_indexer()
        call = Fake().call(contexts(number).ids, 0)
        layer_loss(one, call, list(range(T)), weight=1 / T)
        want.append(one.key["0"].weight.grad / 2)  # type: ignore[operator,arg-type]  # a tensor
    for number in (0, 1):
        sums: dict[int, Tensor] = {}
        both._learn(contexts(number), number, Fake(), sums)
    found = both.indexer.key["0"].weight.grad
    torch.testing.assert_close(found, want[0] + want[1])


def test_a_restored_state_continues_bit_for_bit(tmp_path: Path) -> None:
    schedule = Schedule(steps=6, lr=1e-2, queries=10)
    straight = Distiller(make_indexer(), schedule)
    for _ in range(6):
        straight.step(contexts, Fake())
    first = Distiller(make_indexer(), schedule)
    for _ in range(2):
        first.step(contexts, Fake())
    checkpoint.save_checkpoint(tmp_path, *first.state())
    found = checkpoint.load_checkpoint(tmp_path)
    assert found is not None
    second = Distiller(make_indexer(seed=9), schedule)
    second.restore(*found)
    while not second.done:
        second.step(contexts, Fake())
    assert second.progress == straight.progress
    for a, b in zip(second.indexer.parameters(), straight.indexer.parameters(), strict=True):
        assert torch.equal(a, b)


def test_not_a_number_is_told_with_layer_and_step_before_anything_changes() -> None:
    class Broken(Fake):
        def call(self, ids: Tensor, layer: int) -> LayerCall:
            call = super().call(ids, layer)
            nan = torch.full((1,), math.nan)
            return call if layer == 0 else LayerCall(
                layer, call.x, HEADS, lambda positions, keys: call.mass(positions, keys) * nan
            )  # fmt: skip

    distiller = Distiller(make_indexer(layers=(0, 2)), Schedule(steps=3))
    before = [p.clone() for p in distiller.indexer.parameters()]
    with pytest.raises(NumericalError, match=r"attention in layer 2 .* at step 1"):
        distiller.step(contexts, Broken((0, 2)))
    assert distiller.progress.step == 0
    assert not distiller.updating
    for p, old in zip(distiller.indexer.parameters(), before, strict=True):
        assert torch.equal(p, old)
    with pytest.raises(NumericalError, match="KL of layer 3"):
        metrics((3,), torch.tensor([[1.0, math.inf, 1, 0, 0, 0]]), "now")
    assert metrics((3,), torch.tensor([[2.0, 1, 2, 0, 0, 0]]), "now") == {
        3: {"kl": 0.5, "recall": None, "mass": None}
    }


def full_disk(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    indexer = make_indexer()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full_disk)
        with pytest.raises(InputError, match=r"No space left on device\); there was none"):
            indexer.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    path = indexer.save(tmp_path)
    saved = path.read_bytes()
    monkeypatch.setattr(checkpoint.os, "fsync", full_disk)
    with pytest.raises(InputError, match=f"{WEIGHTS} cannot be written .* the older one is whole"):
        make_indexer(seed=3).save(tmp_path)
    assert path.read_bytes() == saved
    assert [p.name for p in tmp_path.iterdir()] == [WEIGHTS]


def test_broken_files_are_told(tmp_path: Path) -> None:
    assert checkpoint.load_checkpoint(tmp_path) is None
    assert checkpoint.read_json(tmp_path / "record.json") is None
    (tmp_path / checkpoint.CHECKPOINT).write_bytes(b"no")
    with pytest.raises(InputError, match="cannot be read"):
        checkpoint.load_checkpoint(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / checkpoint.CHECKPOINT)
    with pytest.raises(InputError, match="cannot be read"):
        checkpoint.load_checkpoint(tmp_path)
    (tmp_path / "record.json").write_text("[1]")
    with pytest.raises(InputError, match="no JSON object"):
        checkpoint.read_json(tmp_path / "record.json")
    with pytest.raises(InputError, match="lr=1 there, 2 now"):
        checkpoint.check_same(tmp_path, {"lr": 1, "a": 0}, {"lr": 2, "a": 0})
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        checkpoint.check_writable(blocked / "inside")


def test_several_processes_need_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(workers.WORLD, raising=False)
    assert workers.find_workers().count == 1
    monkeypatch.setenv(workers.WORLD, "2")
    monkeypatch.setitem(workers.importlib.__dict__["sys"].modules, "accelerate", None)
    with pytest.raises(InputError, match="pip install accelerate"):
        workers.find_workers()


def test_processes_read_different_contexts_and_average() -> None:
    class Accelerator:
        process_index, num_processes, waited = 1, 2, 0

        def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
            assert reduction == "mean"
            return tensor / 2

        def wait_for_everyone(self) -> None:
            self.waited += 1

    accelerator = Accelerator()
    second = workers._Accelerated(accelerator)
    second.wait()
    assert accelerator.waited == 1
    values = torch.ones(3)
    second.average([values])
    assert values.tolist() == [0.5] * 3
    schedule = Schedule(steps=4, accumulate=2)
    first = Distiller(make_indexer(), replace(schedule, accumulate=4))
    other = Distiller(make_indexer(), schedule, second)
    assert [first.numbers(1), other.numbers(1)] == [[4, 5, 6, 7], [6, 7]]


def opened(data: Path | str, *, context: int = 10, tokens: int = 40, seed: int = 0) -> Any:
    return corpus.open_corpus(
        str(data), tiny_checkpoint.tokenizer(), context=context, tokens=tokens, seed=seed
    )


def test_a_file_is_cut_into_contexts_and_the_last_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("0123456789abcdefghijABCDEFGHIJ.....")
    found = opened(path)
    decode = tiny_checkpoint.tokenizer().decode
    assert [decode(c.ids) for c in found.held_out] == ["ABCDEFGHIJ"]
    epochs = [[decode(found.training(2 * e + i).ids) for i in (0, 1)] for e in range(8)]
    assert all(sorted(e) == ["0123456789", "abcdefghij"] for e in epochs)
    assert len({tuple(e) for e in epochs}) == 2
    assert "repeated 2.0 times" in found.notes[0]
    assert opened(path, tokens=20).notes == ()


def test_too_little_data_is_told_with_its_size(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text("0123456789abc")
    with pytest.raises(InputError, match="has 13 tokens: at least 20"):
        opened(path)
    path.write_text("")
    with pytest.raises(InputError, match="has 0 tokens"):
        opened(path)


def test_a_folder_is_read_in_order_without_its_binary_files(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("bbbbbbbbbb")
    (tmp_path / "a.txt").write_text("aaaaaaaaaa")
    (tmp_path / "z.bin").write_bytes(b"\x00\x01")
    (tmp_path / "y.txt").write_bytes(b"\xff\xfe")
    found = opened(tmp_path, tokens=10)
    decode = tiny_checkpoint.tokenizer().decode
    assert decode(found.training(0).ids) == "aaaaaaaaaa"
    assert decode(found.held_out[0].ids) == "bbbbbbbbbb"
    assert found.notes == ("2 binary files of 4 were skipped",)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match="no UTF-8 text file"):
        opened(empty)


def test_jsonl_lines_have_a_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "0123456789"}) + "\n\n" + json.dumps({"text": "x" * 10}))
    assert len(opened(path).held_out) == 1
    path.write_text('{"text": "a"}\n{"other": 1}\n')
    with pytest.raises(InputError, match="line 2"):
        opened(path)
    path.write_bytes(b"\xff")
    with pytest.raises(InputError, match="not UTF-8"):
        opened(path)


def test_a_missing_hub_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(corpus.importlib.__dict__["sys"].modules, "datasets", None)
    with pytest.raises(InputError, match="install datasets"):
        opened("someone/texts")


def test_needle_texts_need_their_vocabulary() -> None:
    with pytest.raises(InputError, match="needle-27m's vocabulary"):
        opened("needle")


def test_needle_contexts_are_full_repeatable_and_end_in_questions(needle_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(needle_dir)
    found = corpus.needle_corpus(tokenizer, context=1024, seed=0)
    one, again, other = found.training(5), found.training(5), found.training(6)
    assert torch.equal(one.ids, again.ids)
    assert not torch.equal(one.ids, other.ids)
    assert all(len(c.ids) == 1024 for c in (one, other, *found.held_out))
    words = tokenizer.convert_ids_to_tokens(one.ids.tolist())
    assert tokenizer.unk_token_id not in one.ids.tolist() or tokenizer.unk_token is None
    assert words[one.focus] == "?"
    assert "?" not in words[: one.focus]
    assert 0.1 < 1 - one.focus / 1024 < 0.2
    # the answer of a code is in the text, and stands after its question
    at = next(i for i in range(one.focus, 1000) if words[i : i + 2] == ["?", "code"])
    key, answer = words[at + 3 : at + 5], words[at + 6 : at + 10]
    record = next(i for i in range(one.focus) if words[i : i + 5] == ["The", "code", "of", *key])
    assert words[record + 6 : record + 10] == answer
    with pytest.raises(InputError, match="too short"):
        corpus.needle_corpus(tokenizer, context=256, seed=0)
