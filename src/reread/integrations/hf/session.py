"""A model attached to reread: hooks around its forward and a wrapper around its `generate`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import StoppingCriteriaList
from transformers.cache_utils import Cache

from ... import ops
from ...attention import StepPlan, decode_step
from ...config import Config
from ...errors import InputError, UnsupportedError
from ...policy.trigger import entropy
from ...stats import Stats
from . import guard, interface
from .cache import sparse_layers
from .conversation import Conversation, Conversations, queries_that_exist
from .recorder import Observer, Recorder, end_tokens

NO_LAYERS = (
    "the model has no full-attention layer, so there is nothing to make sparse: it decodes as "
    "without reread"
)
Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Call:
    """The forward pass that is running.

    Attributes:
        plan: of a decode step; None in a prefill.
        exist: bool [B, T] of a prefill's queries, False for padding; None: no padding.
    """

    conversation: Conversation
    plan: StepPlan | None
    exist: Tensor | None = None
    intercepted: set[int] = field(default_factory=set)


class Session:
    """Made by `reread.attach`; see there. Use it as a context manager.

    Attributes:
        stats: `Stats` of the latest `generate` (or `decoding()` block).
        notes: what the user should know; they go into every `stats`.
    """

    def __init__(
        self, model: Any, config: Config, boundary: Tensor | None, progress: Progress | None
    ) -> None:
        self.model = model
        self.config = config
        self.stats = Stats()
        self._progress = progress
        self._text_config = model.config.get_text_config(decoder=True)
        self._layers = sparse_layers(self._text_config)
        self.notes = [] if self._layers else [NO_LAYERS]
        self._conversations = Conversations(config, self._text_config, self._layers, boundary)
        self._recorder = Recorder(0, 0, frozenset())
        self._call: Call | None = None
        self._undo: list[Callable[[], object]] = []
        self._signature = inspect.signature(model.forward)
        self._backend = ops.resolve_backend(config.backend)

    def __enter__(self) -> Session:
        name = type(self.model).__name__
        if any(module in interface.SESSIONS for module in self.model.modules()):
            raise InputError(f"{name} is attached already: leave that session first")
        try:
            self._attach()
        except BaseException:
            self._detach()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._detach()

    def _attach(self) -> None:
        config, model = self._text_config, self.model
        interface.claim(config)
        self._undo.append(functools.partial(interface.release, config))
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                interface.SESSIONS[module] = self
                self._undo.append(functools.partial(interface.SESSIONS.pop, module, None))
        before = model.register_forward_pre_hook(self._before, with_kwargs=True)
        self._undo.append(before.remove)
        after = model.register_forward_hook(self._after, with_kwargs=True)
        self._undo.append(after.remove)
        own, generate = "generate" in vars(model), model.generate
        model.generate = functools.wraps(generate)(functools.partial(self._generate, generate))
        self._undo.append(
            lambda: setattr(model, "generate", generate) if own else delattr(model, "generate")
        )

    def _detach(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._call = None

    # -- generate and manual loops

    def _generate(
        self,
        generate: Callable[..., Any],
        inputs: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """`model.generate`, with its arguments checked and each chosen token observed."""
        bound = inspect.signature(generate).bind(inputs, *args, **kwargs)
        given = _flat(bound)
        guard.check_generation(self.model, given)
        ids = inputs if inputs is not None else given.get("input_ids")
        cache = given.get("cache", given.get("past_key_values"))
        past = cache.get_seq_length() if isinstance(cache, Cache) else 0
        guard.check_inputs(self.model, ids, given.get("attention_mask"), past)
        stopping = [Observer(self._on_token), *(given.get("stopping_criteria") or [])]
        _put(bound, "stopping_criteria", StoppingCriteriaList(stopping))
        prompt = 0 if ids is None else ids.shape[1]
        wanted = given.get("max_new_tokens") or 0
        self._recorder = Recorder(prompt, wanted, end_tokens(self.model, given))
        try:
            return generate(*bound.args, **bound.kwargs)
        finally:
            self._finish()

    @contextmanager
    def decoding(self) -> Iterator[Session]:
        """Inside it, a forward of one token per row on a filled cache is a decode step.

        For loops of one's own, whose forwards count as prefill otherwise:
        `with session.decoding(): model(token, past_key_values=cache)`. Afterwards `stats` describes
        the block.
        """
        self._recorder = Recorder(0, 0, frozenset())
        self._recorder.start_decoding()
        try:
            yield self
        finally:
            self._finish()

    def _finish(self) -> None:
        self.stats = self._recorder.stats(
            self.config,
            self._backend,
            len(self._layers),
            self._text_config.num_hidden_layers,
            list(self.notes),
        )
        self._recorder = Recorder(0, 0, frozenset())
        self._call = None

    def _on_token(self, tokens: Tensor) -> None:
        self._recorder.token(tokens)
        if self._progress is not None:
            self._progress("decode", self._recorder.new_tokens, self._recorder.wanted)

    # -- around each forward

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = _flat(self._signature.bind_partial(*args, **kwargs))
        cache = given.get("cache", given.get("past_key_values"))
        ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
        tokens = ids if ids is not None else embeds
        self._call = None
        if cache is None or tokens is None:
            return
        rows, new = tokens.shape[:2]
        if not self._layers:
            self._recorder.full_step(rows, new)
            return
        conversation, recorder = self._conversations.of(cache, rows), self._recorder
        if recorder.decoding and new == 1 and conversation.length:
            counted = recorder.begin_step(conversation.controller, rows)
            plan = conversation.plan(ids, given.get("attention_mask"), counted)
            self._call = Call(conversation, plan)
            return
        known = recorder.prompt + recorder.wanted if recorder.wanted else 0
        conversation.prepare_prefill(max(known, conversation.length + new))
        self._call = Call(conversation, None, queries_that_exist(given.get("attention_mask"), new))

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kwargs: dict[str, Any],
    ) -> Tensor | None:
        """One layer's attention [B, T, H, Dv], or None where the model's own has to run."""
        call, layer = self._call, getattr(module, "layer_idx", None)
        state = None if call is None else call.conversation.states.get(layer)  # type: ignore[arg-type]
        if call is None or state is None or not state.kv.length:
            return None
        name = type(module).__name__
        guard.check_attention_call(name, kwargs)
        for what, given, cached in (
            ("keys", key, state.kv.keys),
            ("values", value, state.kv.values),
        ):
            if given.data_ptr() != cached.data_ptr() or given.shape != cached.shape:
                raise UnsupportedError(f"{name} changes its {what} after caching them: unsupported")
        call.intercepted.add(int(layer))  # type: ignore[arg-type]
        if call.plan is None:
            state.remember_tail(query, self.config.selector.tail_queries, call.exist)
            return None
        scaling = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        meter = self._recorder.meter
        out = decode_step(state, query[:, :, 0], call.plan, self.config, scale, meter)
        return out.unsqueeze(1)

    def _after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        missed = call.conversation.states.keys() - call.intercepted
        if missed:
            raise UnsupportedError(
                f"{type(module).__name__}: the attention of layers {sorted(missed)} does not go "
                "through transformers' attention interface, so reread cannot serve this model"
            )
        if getattr(output, "logits", None) is not None:
            logits = output.logits[:, -1]
            guard.check_logits(logits)
            if self.config.triggers.uncertainty is not None:
                call.conversation.controller.observe_entropy(entropy(logits).tolist())
        if call.plan is not None:
            self._recorder.steps += 1
        elif self._progress is not None:
            done = call.conversation.length
            self._progress("prefill", done, max(done, self._recorder.prompt))


def _catch_all(signature: inspect.Signature) -> str | None:
    """The name of the `**kwargs` parameter, if there is one."""
    kinds = ((p.name, p.kind) for p in signature.parameters.values())
    return next((name for name, kind in kinds if kind is inspect.Parameter.VAR_KEYWORD), None)


def _flat(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Bound arguments with those of `**kwargs` beside the named ones."""
    named = dict(bound.arguments)
    return {**named, **named.pop(_catch_all(bound.signature) or "", {})}


def _put(bound: inspect.BoundArguments, name: str, value: Any) -> None:
    """Set one argument, wherever the signature takes it."""
    rest = _catch_all(bound.signature)
    if name in bound.signature.parameters or rest is None:
        bound.arguments[name] = value
    else:
        bound.arguments[rest] = {**bound.arguments.get(rest, {}), name: value}
