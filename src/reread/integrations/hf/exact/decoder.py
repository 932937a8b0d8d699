"""Mode "exact" inside transformers' `generate`: it prepares prompts, logits processors and stopping
criteria, and calls this in place of its own loop.

transformers' assisted decoding is not the way in: it takes one row at a time, and its candidate
generators keep a cache of their own (ADR 0016).
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ....config import Config
from ....errors import InputError, UnsupportedError
from ....policy.draft import DraftLength
from ..arguments import put
from ..cache import cache_keyword
from ..conversation import Conversation, Conversations, spans
from ..indexed import Reader
from ..recorder import Recorder
from ..runner import Runner
from .device_passes import DevicePasses
from .loop import Loop
from .passes import Passes
from .rows import Chooser, Row

Progress = Callable[[str, int, int], None]
OLD_CACHE = "past_key_values"  # before transformers 5.24
REFUSED = (
    "output_scores", "output_logits", "output_hidden_states", "custom_generate", "synced_gpus",
)  # fmt: skip


class Decoder:
    """Made by a session in mode "exact".

    Attributes:
        passes: of the call that is running; None between calls.
        goes_on: whether the caller keeps the cache of the call.
    """

    def __init__(
        self,
        model: Any,
        config: Config,
        conversations: Conversations,
        runner: Runner | None,
        reader: Reader | None = None,
    ) -> None:
        """reader: of the indexer that chooses what drafts read, if any."""
        self._model, self._config, self._conversations = model, config, conversations
        self._runner, self._reader = runner, reader
        self.passes: Passes | None = None
        self.goes_on = False

    @property
    def running(self) -> bool:
        """Whether a pass of this decoder is running, so that its attention comes here."""
        return self.passes is not None and self.passes.running is not None

    def attend(
        self, module: Any, layer: int, tensors: tuple[Tensor, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        """One layer's attention in a pass of this decoder; tensors: query, key, value."""
        assert self.passes is not None
        return self.passes.attend(module, layer, tensors, kwargs)

    def join(
        self,
        bound: inspect.BoundArguments,
        given: Mapping[str, Any],
        recorder: Recorder,
        progress: Progress | None,
    ) -> None:
        """Change the arguments of a call of `generate` so that it comes here.

        Raises:
            UnsupportedError: an output that drafts have no counterpart of, or another method.
        """
        configs = (given.get("generation_config"), self._model.generation_config)
        for name in REFUSED:
            if _option(name, given, configs):
                raise UnsupportedError(f"{name} is not supported in mode 'exact': leave it unset")
        stopping = list(given.get("stopping_criteria") or [])
        # transformers hands neither a tokenizer nor a streamer to a method that is not its own
        strings = _option("stop_strings", given, configs)
        if strings is not None:
            stopping.append(_stop_strings(strings, given.get("tokenizer")))
            put(bound, "generation_config", _without_stop_strings(configs))
            bound.arguments.get("kwargs", {}).pop("stop_strings", None)
        if stopping:
            put(bound, "stopping_criteria", StoppingCriteriaList(stopping))
        self.goes_on = given.get("cache", given.get("past_key_values")) is not None

        def told(width: int) -> None:
            if progress is not None:
                progress("decode", width - recorder.prompt, recorder.wanted)

        decode = functools.partial(self.decode, recorder, given.get("streamer"), told)
        put(bound, "custom_generate", decode)

    def _passes(
        self,
        cache: Any,
        conversation: Conversation,
        mask: Tensor | None,
        valid: Tensor | None,
        rows: Sequence[Row],
    ) -> Passes:
        of = self._model, self._config, cache
        if self._runner is None:
            return Passes(*of, conversation.states, mask, valid, self._reader)
        self._runner.recheck()
        return DevicePasses(*of, conversation, mask, rows, self._runner, self._reader)

    def decode(
        self,
        recorder: Recorder,
        streamer: Any,
        progress: Callable[[int], None],
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """The decoding method: everything from `input_ids` on is as transformers calls it."""
        _check_streamer(streamer, input_ids.shape[0])
        logits = _prefilled(model, input_ids, generation_config, model_kwargs)
        cache = model_kwargs[cache_keyword(model)]
        conversation = self._conversations.of(cache, input_ids.shape[0])
        mask, columns = model_kwargs.get("attention_mask"), conversation.length
        starts, valid = spans(mask, input_ids.shape[0], columns)
        rows = _rows(starts, mask, columns, input_ids.shape[1], self._config)
        texts = _texts(input_ids, generation_config)
        self.passes = self._passes(cache, conversation, mask, valid, rows)
        chooser = Chooser(logits_processor, bool(generation_config.do_sample), texts)
        of_texts = texts, chooser, stopping_criteria, _pad(generation_config)
        loop = Loop(self._config, self.passes, rows, *of_texts)
        if streamer is not None:
            loop.put = lambda token: streamer.put(torch.tensor([token]))
        returns = bool(generation_config.return_dict_in_generate)
        try:
            loop.begin(logits)
            recorder.start_decoding()
            loop.run(progress)
            sequences: Any = loop.close(fill=returns or self.goes_on)
        finally:
            self.passes = None
            conversation.forget()
        if streamer is not None:
            streamer.end()
        ran, new = loop.drafter, loop.width - loop.prompt
        recorder.drafted(ran.meter, ran.steps, loop.drafts, new)
        return _output(sequences, cache) if returns else sequences


def _prefilled(model: Any, input_ids: Tensor, config: Any, kwargs: dict[str, Any]) -> Tensor:
    """Logits behind each prompt, fp32 [B, V]; not a view, which would keep those of all tokens."""
    output = model._prefill(input_ids, config, kwargs)
    logits: Tensor = output.logits[:, -1].to(torch.float32, copy=True)
    return logits


def _check_streamer(streamer: Any, rows: int) -> None:
    if streamer is not None and rows > 1:
        raise UnsupportedError(
            f"a streamer for {rows} rows is not supported in mode 'exact': rows get their tokens "
            "at different times"
        )


def _output(sequences: Any, cache: Any) -> GenerateDecoderOnlyOutput:
    name = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else OLD_CACHE
    return GenerateDecoderOnlyOutput(sequences=sequences, **{name: cache})


def _rows(
    starts: Sequence[int], mask: Tensor | None, columns: int, tokens: int, config: Config
) -> list[Row]:
    """The rows behind a prefill of so many columns; tokens: of the prompt, padding included."""
    gaps = [0] * len(starts) if mask is None else (mask == 0).sum(dim=1).tolist()
    return [
        Row(b, start, gap, columns, tokens, DraftLength(config.draft))
        for b, (start, gap) in enumerate(zip(starts, gaps, strict=True))
    ]


def _option(name: str, given: Mapping[str, Any], configs: Sequence[Any]) -> Any:
    """An option of `generate`, from wherever it is set first; None if nowhere."""
    value = given.get(name)
    for config in configs:
        value = getattr(config, name, None) if value is None else value
    return value


def _stop_strings(strings: Any, tokenizer: Any) -> StopStringCriteria:
    if tokenizer is None:
        raise InputError(f"stop_strings={strings!r} need the model's tokenizer: pass tokenizer=")
    wanted = [strings] if isinstance(strings, str) else list(strings)
    return StopStringCriteria(tokenizer=tokenizer, stop_strings=wanted)


def _without_stop_strings(configs: Sequence[Any]) -> Any:
    config = copy.deepcopy(next(config for config in configs if config is not None))
    config.stop_strings = None
    return config


def _texts(input_ids: Tensor, generation_config: Any) -> Tensor:
    """The prompts with room for what may follow, padding in it."""
    room = generation_config.max_length - input_ids.shape[1]
    return torch.nn.functional.pad(input_ids, (0, max(1, room)), value=_pad(generation_config))


def _pad(generation_config: Any) -> int:
    pad = generation_config._pad_token_tensor
    return 0 if pad is None else int(pad)
