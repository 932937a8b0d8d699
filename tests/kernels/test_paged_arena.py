"""Decode steps of paged requests by the kernels against the CPU backend's, request by request: the
same batches, texts and preemptions, and the same kinds, positions and outputs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from reread.config import Config, TriggerConfig
from reread.errors import UnsupportedError

pytest.importorskip("triton", reason="triton is not installed: its kernels cannot run here")

from reread.integrations.vllm.arena import LayerShape, PagedArena
from reread.integrations.vllm.compat import BatchRow
from reread.integrations.vllm.lanes import LaneRegistry
from reread.integrations.vllm.requests import Registry
from reread.integrations.vllm.rows import LayerPass, attend_rows
from reread.ops.triton import trigger

LAYERS = ("first", "second")
HEADS, KV_HEADS, DIM = 4, 2, 64
PAGE, PAGES, LONGEST, VOCABULARY = 16, 64, 160, 30
SCALE = DIM**-0.5


@dataclass
class Text:
    """One request: its tokens, and what each layer's queries, keys and values of them are."""

    name: str
    prompt: int
    tokens: list[int]
    qkv: dict[str, tuple[Tensor, Tensor, Tensor]]
    cached: int = 0
    pages: list[int] = field(default_factory=list)


class Engine:
    """Both backends behind one batch."""

    def __init__(self, config: Config, rows: int, device: torch.device, seed: int) -> None:
        self.draw, self.device = random.Random(seed), device
        self.generator = torch.Generator().manual_seed(seed)
        ends = torch.tensor([i % 6 == 0 for i in range(VOCABULARY)])
        shape = LayerShape(HEADS, KV_HEADS, DIM)
        self.arena = PagedArena(
            dict.fromkeys(LAYERS, shape), config, rows, LONGEST, torch.float32, device, ends
        )
        self.ours, self.reference = LaneRegistry(config, self.arena), Registry(config, ends)
        self.ids = torch.zeros(512, dtype=torch.int32, device=device)
        self.ours.tokens = lambda: self.ids
        shape5 = (PAGES, 2, PAGE, KV_HEADS, DIM)
        self.caches = {n: torch.full(shape5, torch.nan, device=device) for n in LAYERS}
        plain = (PAGES, KV_HEADS, PAGE, 2 * DIM)
        self.plain = {n: torch.full(plain, torch.nan) for n in LAYERS}
        self.free = list(range(PAGES))
        self.draw.shuffle(self.free)

    def text(self, name: str, prompt: int, length: int) -> Text:
        def rand(heads: int) -> Tensor:
            return torch.randn(length, heads, DIM, generator=self.generator)

        qkv = {n: (2 * rand(HEADS), rand(KV_HEADS), rand(KV_HEADS)) for n in LAYERS}
        tokens = [self.draw.randrange(VOCABULARY) for _ in range(length)]
        return Text(name, prompt, tokens, qkv)

    def lose(self, text: Text) -> None:
        """A preemption."""
        self.free += text.pages
        text.pages, text.cached = [], 0

    def step(
        self, batch: list[tuple[Text, int]], ended: set[str] = frozenset(), lost: Any = ()
    ) -> None:
        """One pass over (request, new tokens), in vLLM's order: rows of one token first."""
        batch = sorted(batch, key=lambda item: item[1] > 1)
        rows = []
        for text, new in batch:
            while len(text.pages) * PAGE < text.cached + new:
                text.pages.append(self.free.pop())
            rows.append(BatchRow(text.name, text.tokens, text.prompt, text.cached, new))
        for registry in (self.ours, self.reference):
            registry.drop(ended, lost)
            registry.pending = lambda: list(rows)
        flat = [t for text, n in batch for t in text.tokens[text.cached : text.cached + n]]
        self.ids[: len(flat)] = torch.tensor(flat, dtype=torch.int32)
        tables = torch.full((len(batch), LONGEST // PAGE + 1), 10**6, dtype=torch.int32)
        for b, (text, _) in enumerate(batch):
            tables[b, : len(text.pages)] = torch.tensor(text.pages, dtype=torch.int32)
        served = self.ours.plan()
        self.reference.plan()
        assert served is not None
        for name in LAYERS:
            self.layer(name, batch, tables, served)
        self.ours.done()
        self.reference.plans = ()
        for text, new in batch:
            text.cached += new

    def layer(self, name: str, batch: list[tuple[Text, int]], tables: Tensor, served: Any) -> None:
        spans = [(t, slice(t.cached, t.cached + n)) for t, n in batch]
        q, k, v = (torch.cat([t.qkv[name][i][s] for t, s in spans]) for i in range(3))
        for text, span in spans:
            for position in range(span.start, span.stop):
                page, place = text.pages[position // PAGE], position % PAGE
                key, value = (text.qkv[name][i][position] for i in (1, 2))
                self.caches[name][page, 0, place], self.caches[name][page, 1, place] = key, value
                self.plain[name].view(PAGES, KV_HEADS, 2, PAGE, DIM)[page, :, 0, place] = key
                self.plain[name].view(PAGES, KV_HEADS, 2, PAGE, DIM)[page, :, 1, place] = value
        want = torch.zeros_like(q)
        layer = LayerPass(name, q, k, v, self.plain[name], tables, SCALE)
        attend_rows(self.reference, layer, want)
        got = torch.full(q.shape, torch.nan, device=self.device)
        pages = tuple(t.transpose(1, 2) for t in self.caches[name].unbind(1))
        q, tables, n = q.to(self.device), tables.to(self.device), served.decodes
        checked = list(range(n))
        if n:
            self.arena.attend(name, q[:n], pages, tables[:n], got[:n], SCALE)
        for replay in served.replays:
            first, row = replay.first, slice(replay.row, replay.row + 1)
            for board in replay.boards:
                at, first = slice(first, first + board.rows), first + board.rows
                checked += range(at.start, at.stop)
                own = tables[row].expand(board.rows, -1)
                self.arena.attend(name, q[at], pages, own, got[at], SCALE, board)
        torch.testing.assert_close(got[checked].cpu(), want[checked], rtol=2e-5, atol=2e-5)

    def same_counts(self) -> None:
        self.ours.learn(wait=True)
        assert self.ours.meter == self.reference.meter
        assert self.ours.reasons == self.reference.reasons
        assert self.ours.requests.keys() <= self.reference.requests.keys()


CONFIG = Config(sink=2, recent=6, k=8, triggers=TriggerConfig(t_max=7, t_min=2))
CASES = {
    "default": CONFIG,
    "sparse below the budget": CONFIG.updated({"dense_below_budget": False}),
    "no interval": CONFIG.updated({"t_max": None}),
    "no boundary": CONFIG.updated({"boundary": False}),
    "soft nms": CONFIG.updated({"refine": "soft_nms"}),
    "cross heads": CONFIG.updated({"alpha_cross": 0.3}),
    "dense": CONFIG.updated({"mode": "dense"}),
}


@pytest.mark.parametrize("case", CASES)
def test_batches_of_many_requests(case: str, device: torch.device) -> None:
    """Requests come, decode, are preempted and go, in batches of every mixture."""
    engine = Engine(CASES[case], 3, device, seed=len(case))
    draw = engine.draw
    texts: list[Text] = []
    ended: set[str] = set()
    lost: set[str] = set()
    # interpreting is slow: one case is long
    whole_run = case == "default" or device.type == "cuda"
    for step in range(30 if whole_run else 12):
        if len(texts) < 3 and step < 24 and draw.random() < 0.6:
            prompt = draw.choice([1, 5, 20, 33])
            texts.append(engine.text(f"r{step}", prompt, prompt + draw.randrange(8, 24)))
        if texts and draw.random() < 0.15:
            victim = draw.choice(texts)
            if victim.cached > victim.prompt:
                engine.lose(victim)
                lost.add(victim.name)
        batch = []
        for text in texts:
            whole = text.prompt if text.cached < text.prompt else 1
            known = max((len(r.codes) for n, r in engine.ours.requests.items() if n == text.name),
                        default=0)  # fmt: skip
            if text.cached == 0 and known:
                whole = text.prompt + known + 1  # what was generated is computed again
            batch.append((text, min(whole, len(text.tokens) - text.cached)))
        if not batch:
            continue
        engine.step(batch, ended, lost)
        engine.ours.learn(wait=True)
        lost, ended = set(), {t.name for t in texts if t.cached == len(t.tokens)}
        for text in [t for t in texts if t.name in ended]:
            engine.free += text.pages
            texts.remove(text)
    engine.same_counts()
    kinds = engine.ours.meter.runs[0]
    assert sum(kinds.values()) > 20
    if case == "default":
        assert min(kinds.values()) > 0, kinds
        assert set(engine.ours.reasons) >= {"boundary", "interval"}


def test_a_replay_in_two_chunks(device: torch.device) -> None:
    """A preempted request comes back in chunks that end among its generated tokens."""
    engine = Engine(CONFIG, 2, device, seed=1)
    text, other = engine.text("a", 20, 50), engine.text("b", 24, 60)
    engine.step([(text, 20), (other, 24)])
    for _ in range(14):
        engine.step([(text, 1), (other, 1)])
    engine.lose(text)
    engine.step([(other, 1)], lost={"a"})
    engine.step([(text, 27), (other, 1)])
    engine.step([(text, 8), (other, 1)])
    for _ in range(10):
        engine.step([(text, 1), (other, 1)])
    engine.same_counts()
    assert engine.ours.nbytes == 2 * engine.arena.lane_bytes
    engine.ours.drop({"a", "b"}, ())
    assert not engine.ours.requests
    assert engine.ours.nbytes == 0


def test_a_dense_request_may_resume_behind_its_prompt(device: torch.device) -> None:
    """In mode "dense" generated tokens' pages are offered to others, the request itself too."""
    engine = Engine(CONFIG.updated({"mode": "dense"}), 2, device, seed=4)
    text = engine.text("a", 20, 40)
    engine.step([(text, 20)])
    for _ in range(8):
        engine.step([(text, 1)])
    engine.step([(text, 1)], lost={"a"})
    engine.same_counts()


def test_steps_that_choose_nothing_are_replayed_together(device: torch.device) -> None:
    engine = Engine(CONFIG.updated({"boundary": False}), 4, device, seed=5)
    text = engine.text("a", 40, 80)
    engine.step([(text, 40)])
    for _ in range(17):
        engine.step([(text, 1)])
    engine.lose(text)
    engine.ours.learn(wait=True)
    sizes: list[int] = []
    whole = engine.layer

    def layer(name: str, batch: Any, tables: Tensor, served: Any) -> None:
        sizes[:] = [board.rows for replay in served.replays for board in replay.boards]
        whole(name, batch, tables, served)

    engine.layer = layer  # type: ignore[method-assign]  # to look on
    engine.step([(text, 58)], lost={"a"})
    # slow, six fast ones (at most four at once), slow, ...; the newest step is planned alone
    assert sizes == [1, 4, 2, 1, 4, 2, 1, 2, 1]
    engine.same_counts()


def test_warming_up_leaves_nothing(device: torch.device) -> None:
    engine = Engine(CONFIG, 3, device, seed=6)
    before = engine.arena.state.clone()
    engine.arena.warm_up(PAGE, torch.float32)
    assert torch.equal(engine.arena.state, before)
    assert not any(bool(counts.any()) for counts in engine.arena.counts.values())
    text = engine.text("a", 20, 40)
    engine.step([(text, 20)])
    engine.step([(text, 1)])
    engine.same_counts()


def test_lanes_are_dealt_out_again(device: torch.device) -> None:
    engine = Engine(CONFIG, 2, device, seed=2)
    for i in range(5):
        text = engine.text(f"r{i}", 18, 26)
        engine.step([(text, 18)], {f"r{i - 1}"})
        for _ in range(8):
            engine.step([(text, 1)])
        engine.free += text.pages
    engine.same_counts()


def test_uncertain_outputs_make_the_next_step_slow(device: torch.device) -> None:
    config = CONFIG.updated({"uncertainty": 1.0, "boundary": False, "t_max": None, "t_min": 1})
    engine = Engine(config, 2, device, seed=3)
    text, other = engine.text("a", 20, 40), engine.text("b", 20, 40)
    engine.step([(text, 20), (other, 20)])
    flat, sharp = torch.zeros(VOCABULARY), torch.zeros(VOCABULARY)
    sharp[3] = 30.0
    for i in range(12):
        engine.step([(text, 1), (other, 1)])
        logits = torch.stack([flat if i % 3 == 0 else sharp, sharp])
        engine.ours.observe(logits.to(device))
        for name, row in (("a", 0), ("b", 1)):
            uncertain = [2.0 if row == 0 and i % 3 == 0 else 0.1]
            engine.reference.requests[name].controller.observe_entropy(uncertain)
    engine.same_counts()
    assert engine.ours.reasons["uncertainty"] == 4


def test_shapes_beyond_the_kernels_are_refused(device: torch.device) -> None:
    given = CONFIG, 2, LONGEST, torch.float32, device, None
    with pytest.raises(UnsupportedError, match="head dim 96"):
        PagedArena({"a": LayerShape(4, 2, 96)}, *given)
    with pytest.raises(UnsupportedError, match="several shapes"):
        PagedArena({"a": LayerShape(4, 2, 64), "b": LayerShape(4, 4, 64)}, *given)
    assert len(trigger.REASONS) == trigger.FULL + 1
