"""A model attached to reread: hooks around its forward, a wrapper around its `generate`, state per conversation."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import Cache

from ... import ops
from ...attention import LayerState, Meter, StepPlan, decode_step
from ...config import Config
from ...errors import InputError, UnsupportedError
from ...policy.controller import Controller
from ...policy.trigger import entropy
from ...stats import Stats
from ...types import StepKind
from . import guard, interface
from .cache import adopt, sparse_layers

Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Conversation:
    """What belongs to one cache: its layers' states and its rows' controller."""

    states: dict[int, LayerState]
    controller: Controller


@dataclass(slots=True)
class Call:
    """The forward pass that is running. plan is None in a prefill."""

    conversation: Conversation
    plan: StepPlan | None
    intercepted: set[int]


class Session:
    """Made by `reread.attach`; see there. Use it as a context manager.

    Attributes:
        stats: `Stats` of the latest `generate` (or `decoding()` block).
    """

    def __init__(self, model: Any, config: Config, boundary: Tensor | None, progress: Progress | None) -> None:
        self.model = model
        self.config = config
        self.stats = Stats()
        self.notes: list[str] = []
        self._boundary = boundary
        self._progress = progress
        self._text_config = model.config.get_text_config(decoder=True)
        self._layers = sparse_layers(self._text_config)
        self._conversations: WeakKeyDictionary[Cache, Conversation] = WeakKeyDictionary()
        self._call: Call | None = None
        self._decoding = False
        self._meter = Meter.of(0)
        self._reasons: list[Controller] = []
        self._finished: list[bool] = []
        self._undo: list[Callable[[], object]] = []
        self._signature = inspect.signature(model.forward)
        self._total = (0, 0)
        self._backend = ops.resolve_backend(config.backend)

    # -- attaching ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        if self._undo:
            raise InputError("this session is attached already")
        if any(module in interface.SESSIONS for module in self.model.modules()):
            raise InputError(f"{type(self.model).__name__} is attached already: leave that session first")
        if not self._layers:
            raise UnsupportedError(f"{type(self.model).__name__} has no full-attention layer that reread could speed up")
        try:
            self._attach()
        except BaseException:
            self._detach()
            raise
        return self

    def _attach(self) -> None:
        config, model = self._text_config, self.model
        original = config._attn_implementation
        name = interface.register(original or "sdpa")
        self._undo.append(lambda: interface.unregister(name))
        config._attn_implementation_internal = name
        self._undo.append(lambda: setattr(config, "_attn_implementation_internal", original))
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                interface.SESSIONS[module] = self
                self._undo.append(functools.partial(interface.SESSIONS.pop, module, None))
        before = model.register_forward_pre_hook(self._before, with_kwargs=True)
        self._undo.append(before.remove)
        after = model.register_forward_hook(self._after, with_kwargs=True)
        self._undo.append(after.remove)
        had_own = "generate" in vars(model)
        generate = model.generate
        model.generate = functools.wraps(generate)(functools.partial(self._generate, generate))
        self._undo.append(lambda: setattr(model, "generate", generate) if had_own else delattr(model, "generate"))

    def __exit__(self, *exc: object) -> None:
        self._detach()

    def _detach(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._call = None

    # -- generate and manual loops -----------------------------------------------------------------------------

    def _generate(self, generate: Callable[..., Any], inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """`model.generate`, with its arguments checked and each chosen token observed."""
        given = inspect.signature(generate).bind(inputs, *args, **kwargs).arguments
        given = {**given, **given.pop("kwargs", {})}
        guard.check_generation(self.model, given)
        ids = inputs if inputs is not None else kwargs.get("input_ids")
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        past = cache.get_seq_length() if isinstance(cache, Cache) else 0
        guard.check_inputs(self.model, ids, kwargs.get("attention_mask"), past)
        stopping = StoppingCriteriaList([_Observer(self, _ends(self.model, given))])
        stopping.extend(given.get("stopping_criteria") or [])
        kwargs["stopping_criteria"] = stopping
        self._start(0 if ids is None else ids.shape[1], given.get("max_new_tokens") or 0)
        began = time.perf_counter()
        try:
            return generate(inputs, *args, **kwargs)
        finally:
            self._finish(began, time.perf_counter())

    @contextmanager
    def decoding(self) -> Iterator[Session]:
        """Inside it, a forward of one token per row on a filled cache is a decode step; outside, forwards are prefill.

        For loops of one's own: `with session.decoding(): model(token, past_key_values=cache)`. Afterwards `stats`
        describes the block.
        """
        self._start(0, 0)
        began = time.perf_counter()
        self._decoding = True
        self._first_token_at = began
        try:
            yield self
        finally:
            self._finish(began, time.perf_counter())

    def _start(self, prompt: int, new: int) -> None:
        self._total = (prompt, new)
        self._decoding = False
        self._meter = Meter.of(0)
        self._reasons = []
        self._finished = []
        self._steps = 0
        self._new_tokens = 0
        self._first_token_at = 0.0

    def _finish(self, began: float, ended: float) -> None:
        first = self._first_token_at or ended
        layers = len(self._layers)
        by_kind = {kind: [runs[kind] // layers for runs in self._meter.runs] for kind in StepKind}
        self.stats = Stats(
            slow_steps=by_kind[StepKind.SLOW],
            fast_steps=by_kind[StepKind.FAST],
            full_steps=by_kind[StepKind.FULL],
            keys_read_share=self._meter.keys_read / self._meter.keys_cached if self._meter.keys_cached else 1.0,
            slow_reasons=dict(sum((c.reasons for c in self._reasons), start=type(self._reasons[0].reasons)()))
            if self._reasons
            else {},
            decode_steps=self._steps,
            new_tokens=self._new_tokens,
            prefill_s=first - began,
            decode_s=ended - first,
            backend=self._backend,
            sparse_layers=layers,
            total_layers=self._text_config.num_hidden_layers,
            config=self.config.to_dict(),
            notes=list(self.notes),
        )
        self._decoding = False
        self._call = None

    def observe_tokens(self, tokens: Tensor, ends: frozenset[int]) -> None:
        """A token was chosen for every row ([B]): from here on, forwards are decode steps."""
        if not self._decoding:
            self._decoding = True
            self._first_token_at = time.perf_counter()
            self._finished = [False] * tokens.shape[0]
        self._new_tokens += 1
        if ends:
            self._finished = [
                done or token in ends for done, token in zip(self._finished, tokens.tolist(), strict=True)
            ]
        if self._progress is not None:
            self._progress("decode", self._new_tokens, self._total[1])

    # -- around each forward -----------------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = self._signature.bind_partial(*args, **kwargs).arguments
        given = {**given, **given.pop("kwargs", {})}
        cache = given.get("cache", given.get("past_key_values"))
        ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
        tokens = ids if ids is not None else embeds
        self._call = None
        if cache is None or tokens is None:
            return
        rows, new = tokens.shape[:2]
        conversation = self._conversation(cache, rows)
        past = next(iter(conversation.states.values())).kv.length
        plan = None
        if self._decoding and new == 1 and past > 0:
            plan = self._plan(conversation, ids, given.get("attention_mask"), rows, past + 1)
        else:
            self._prepare_prefill(conversation, past + new)
        self._call = Call(conversation, plan, set())

    def _conversation(self, cache: Cache, rows: int) -> Conversation:
        conversation = self._conversations.get(cache)
        states = adopt(cache, self._text_config, self._layers)
        if conversation is None or conversation.states.keys() != states.keys() or len(conversation.controller.rows) != rows:
            conversation = Conversation(states, Controller(self.config, self._boundary, rows))
            self._conversations[cache] = conversation
        conversation.states = states
        for state in states.values():
            if state.kv.length and state.kv.keys.shape[0] != rows:
                raise InputError(f"the cache has {state.kv.keys.shape[0]} rows, the input {rows}: they must match")
        if self.config.selector.lambda_clip > 0:
            for state in states.values():
                state.kv.track_norms()
        return conversation

    def _prepare_prefill(self, conversation: Conversation, length: int) -> None:
        conversation.controller.prefilled()
        for state in conversation.states.values():
            state.compact = [None] * len(state.compact)
            state.kv.reserve(self._total[0] + self._total[1] if self._total[1] else length)

    def _plan(self, conversation: Conversation, ids: Tensor | None, mask: Any, rows: int, length: int) -> StepPlan:
        starts, valid = _spans(mask, rows, length)
        keys = [length - start for start in starts] if valid is None else valid.sum(dim=1).tolist()
        states = conversation.states.values()
        has_selection = [all(state.can_select(b) for state in states) for b in range(rows)]
        tokens = None if ids is None else ids[:, 0].tolist()
        kinds = conversation.controller.plan(tokens, keys, has_selection)
        if not self._meter.runs:
            self._meter = Meter.of(rows)
        if conversation.controller not in self._reasons:
            self._reasons.append(conversation.controller)
        counted = tuple(not done for done in self._finished) or (True,) * rows
        return StepPlan(kinds, starts, length, valid, counted)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]
    ) -> Tensor | None:
        """One layer's attention, [B, T, H, Dv], or None where the model's own attention has to run."""
        call = self._call
        state = None if call is None else call.conversation.states.get(int(module.layer_idx))  # type: ignore[arg-type]
        if call is None or state is None or not state.kv.length:
            return None
        guard.check_attention_call(type(module).__name__, kwargs)
        if key.data_ptr() != state.kv.keys.data_ptr():
            raise UnsupportedError(f"{type(module).__name__} changes its keys between cache and attention: not supported")
        call.intercepted.add(int(module.layer_idx))  # type: ignore[arg-type]
        if call.plan is None:
            state.remember_tail(query, self.config.selector.tail_queries)
            return None
        scaling = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        return decode_step(state, query[:, :, 0], call.plan, self.config, scale, self._meter).unsqueeze(1)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        missed = call.conversation.states.keys() - call.intercepted
        if missed:
            raise UnsupportedError(
                f"{type(module).__name__}: the attention of layers {sorted(missed)} does not go through transformers' "
                "attention interface, so reread cannot serve this model"
            )
        logits = output.logits[:, -1] if getattr(output, "logits", None) is not None else None
        if logits is not None:
            guard.check_logits(logits)
            if self.config.triggers.uncertainty is not None:
                call.conversation.controller.observe_entropy(entropy(logits).tolist())
        if call.plan is not None:
            self._steps += 1
        elif self._progress is not None:
            done = next(iter(call.conversation.states.values())).kv.length
            self._progress("prefill", done, max(done, self._total[0]))


class _Observer(StoppingCriteria):
    """Never stops anything; tells the session that tokens were chosen."""

    def __init__(self, session: Session, ends: frozenset[int]) -> None:
        self.session = session
        self.ends = ends

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.session.observe_tokens(input_ids[:, -1], self.ends)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _ends(model: Any, given: dict[str, Any]) -> frozenset[int]:
    """Token ids after which a row is over: end of sequence, and the padding that follows it."""
    configs = [given.get("generation_config"), model.generation_config]
    ids: set[int] = set()
    for name in ("eos_token_id", "pad_token_id"):
        value = given.get(name)
        for config in configs:
            value = getattr(config, name, None) if value is None else value
        if value is None and name == "eos_token_id":
            return frozenset()
        values = value.tolist() if isinstance(value, Tensor) else value
        ids.update(values if isinstance(values, list | tuple) else [] if values is None else [values])
    return frozenset(ids)


def _spans(mask: Any, rows: int, length: int) -> tuple[tuple[int, ...], Tensor | None]:
    """Per row the first valid cache position; and the full validity [B, length] if some row has holes after it."""
    if mask is None:
        return (0,) * rows, None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise UnsupportedError("reread needs a 2D attention_mask [batch, tokens] in decode steps")
    if mask.shape != (rows, length):
        raise InputError(f"attention_mask has shape {tuple(mask.shape)}, cache and input need {(rows, length)}")
    valid = mask != 0
    starts = valid.int().argmax(dim=1)
    filled = valid.sum(dim=1) == length - starts
    return tuple(starts.tolist()), None if bool(filled.all()) else valid
