"""A model attached to reread: hooks around its forward and a wrapper around its `generate`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from ... import ops
from ...attention import decode_step
from ...config import Config
from ...indexer.model import Indexer
from ...layer import LayerState
from ...policy.trigger import entropy
from ...prefill import prefill_step, resolved
from ...stats import Stats
from . import guard, interface
from .arguments import flat
from .cache import sparse_layers
from .call import Call, decode_call, prompt_call
from .conversation import Conversations
from .exact.decoder import Decoder
from .indexed import reader_of
from .prompt_layers import PromptLayers
from .recorder import Recorder, observe, recorder_of
from .runner import Runner

NO_LAYERS = (
    "the model has no full-attention layer, so there is nothing to make sparse: it decodes as "
    "without reread"
)
Progress = Callable[[str, int, int], None]


class Session:
    """Made by `reread.attach`; see there. Use it as a context manager.

    Attributes:
        stats: `Stats` of the latest `generate` (or `decoding()` block).
        notes: what the user should know; they go into every `stats`.
    """

    def __init__(
        self,
        model: Any,
        config: Config,
        boundary: Tensor | None,
        progress: Progress | None,
        indexer: Indexer | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.stats = Stats()
        self._progress = progress
        self._text_config = model.config.get_text_config(decoder=True)
        self._layers = sparse_layers(self._text_config)
        self.notes = [] if self._layers else [NO_LAYERS]
        self._recorder = Recorder(0, 0, frozenset())
        self._call: Call | None = None
        self._undo: list[Callable[[], object]] = []
        self._signature = inspect.signature(model.forward)
        self._forward = model.forward
        self._backend = ops.resolve_backend(config.backend, model.device)
        self._reader = reader_of(model, config, self._layers, indexer, self._backend)
        known = config, self._text_config, self._layers, boundary
        self._conversations = Conversations(*known, getattr(self._reader, "digest", ""))
        self._prefill = None if config.prefill is None else resolved(config.prefill, self._backend)
        self._runner: Runner | None = None
        if self._backend == "triton" and self._layers:
            self._runner = Runner(model, config, self._layers, self._reader)
        exact = config.mode == "exact" and bool(self._layers)
        of_exact = model, config, self._conversations, self._runner, self._reader
        self._exact = Decoder(*of_exact) if exact else None
        self._prompts: PromptLayers | None = None
        if self._runner is not None and self._prefill is not None:
            of = self._runner, self._prefill, self._reader
            self._prompts = PromptLayers(model, *of, self._read)

    def __enter__(self) -> Session:
        interface.require_free(self.model)
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
        self._replace("generate", functools.partial(self._generate, model.generate))
        if self._runner is not None:
            self._undo.append(self._runner.close)
            self._runner.recheck()
            self._replace("forward", self._run)

    def _replace(self, name: str, function: Callable[..., Any]) -> None:
        """Put `function` in the place of the model's method `name` until `_detach`."""
        model, own, method = self.model, name in vars(self.model), getattr(self.model, name)
        setattr(model, name, functools.wraps(method)(functools.partial(function)))
        self._undo.append(lambda: setattr(model, name, method) if own else delattr(model, name))

    def _detach(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._call = None
        if self._reader is not None:
            self._reader.stop()

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
        given = flat(bound)
        guard.check_generation(self.model, given)
        ids = inputs if inputs is not None else given.get("input_ids")
        cache = given.get("cache", given.get("past_key_values"))
        past = cache.get_seq_length() if isinstance(cache, Cache) else 0
        guard.check_inputs(self.model, ids, given.get("attention_mask"), past)
        self._recorder = recorder_of(self.model, ids, given)
        if self._exact is not None:
            self._exact.join(bound, given, self._recorder, self._progress)
        else:
            observe(bound, given, self._on_token)
        try:
            return generate(*bound.args, **bound.kwargs)
        finally:
            self._finish()

    @contextmanager
    def decoding(self) -> Iterator[Session]:
        """Inside it, a forward of one token per row on a filled cache is a decode step.

        For loops of one's own, whose forwards count as prefill otherwise:
        `with session.decoding(): model(token, past_key_values=cache)`. Afterwards `stats` describes
        the block. In mode "exact", whose drafts are `generate`'s, each step reads everything.
        """
        if self._runner is not None:
            self._runner.recheck()
        self._recorder = Recorder(0, 0, frozenset())
        self._recorder.start_decoding()
        try:
            yield self
        finally:
            self._finish()

    def _finish(self) -> None:
        self.stats = self._recorder.stats(
            self.config,
            (self._backend, self._runner.ran if self._runner else "eager"),
            len(self._layers),
            self._text_config.num_hidden_layers,
            [*self.notes, *(self._runner.told if self._runner else []), *self._recorder.told],
        )
        self._recorder = Recorder(0, 0, frozenset())
        self._call = None

    def _on_token(self, tokens: Tensor) -> None:
        self._recorder.token(tokens)
        if self._progress is not None:
            self._progress("decode", self._recorder.new_tokens, self._recorder.wanted)

    # -- around each forward

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._exact is not None and self._exact.running:
            return  # it plans its own passes
        given = flat(self._signature.bind_partial(*args, **kwargs))
        cache = given.get("cache", given.get("past_key_values"))
        if self._reader is not None:
            self._reader.stop()  # a forward that failed left its hooks
        ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
        tokens = ids if ids is not None else embeds
        self._call = None
        if cache is None or tokens is None:
            return
        rows, new = tokens.shape[:2]
        if not self._layers:
            self._recorder.full_step(rows, new)
            return
        conversation, mask = self._conversations.of(cache, rows), given.get("attention_mask")
        if self._recorder.decoding and new == 1 and conversation.length:
            self._call = decode_call(conversation, self._recorder, self._runner, ids, mask)
        else:
            needs = self._prefill is not None, self._reader is not None
            of = conversation, self._recorder, self._runner
            self._call = prompt_call(*of, new, mask, needs)
        if self._reader is not None and self._runner is None:
            self._reader.listen()

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, or in its place a captured decode step or compiled layers."""
        call, output = self._call, None
        if call is not None and self._runner is not None:
            given = flat(self._signature.bind(*args, **kwargs))
            if call.step is not None:
                output = self._runner.run(call.step, given)
            elif self._prompts is not None:
                output = self._prompts.run(call, given, self._recorder.prefill)
            if output is not None:
                call.intercepted.update(call.conversation.states)
                return output
            if self._reader is not None:
                self._reader.listen()
        return self._forward(*args, **kwargs)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]
    ) -> Tensor | None:
        """One layer's attention [B, T, H, Dv], or None where the model's own has to run."""
        call, layer = self._call, int(getattr(module, "layer_idx", -1))
        if self._exact is not None and self._exact.running:
            return self._exact.attend(module, layer, (query, key, value), kwargs)
        state = None if call is None else call.conversation.states.get(layer)
        if call is None or state is None or not state.kv.length:
            return None
        name = type(module).__name__
        guard.check_attention_call(name, kwargs)
        if self._prefill is not None and not call.intercepted:
            guard.check_causal(name, kwargs["attention_mask"])
        guard.check_cached(name, "keys", key, state.kv.keys)
        guard.check_cached(name, "values", value, state.kv.values)
        call.intercepted.add(layer)
        scaling = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        iq = (
            None
            if self._reader is None
            else self._reader.read(module, layer, state.kv, call.starts)
        )
        if call.plan is None:
            return self._read(call, state, query, scale, iq)
        q = query[:, :, 0]
        if call.step is not None:
            index = None if iq is None else iq[:, 0, 0].contiguous()
            arena, shape = call.step.arena, call.step.shape
            return arena.attend(layer, q, shape, scale, index=index).unsqueeze(1)
        meter = self._recorder.meter
        return decode_step(state, q, call.plan, self.config, scale, meter, iq).unsqueeze(1)

    def _read(
        self, call: Call, state: LayerState, query: Tensor, scale: float, iq: Tensor | None
    ) -> Tensor | None:
        """One layer's attention in a prefill, None where the model's own has to run."""
        state.scale = scale
        state.remember_tail(query, self.config.selector.tail_queries, call.exist)
        if self._prefill is None:
            return None
        return prefill_step(
            state, query, call.starts, self._prefill, scale, self._recorder.prefill, iq,
            self._backend,
        )  # fmt: skip

    def _after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        call, self._call = self._call, None
        if self._reader is not None:
            self._reader.stop()
        if call is None:
            return
        guard.check_layers(type(module).__name__, call.conversation.states, call.intercepted)
        if getattr(output, "logits", None) is not None:
            logits = output.logits[:, -1]
            guard.check_logits(logits)
            if self.config.triggers.uncertainty is not None:
                call.conversation.controller.observe_entropy(entropy(logits).tolist())
        if call.plan is not None:
            if call.step is not None:
                call.step.finish(self._recorder.meter)
            self._recorder.steps += 1
        elif self._progress is not None:
            done = call.conversation.length
            self._progress("prefill", done, max(done, self._recorder.prompt))
