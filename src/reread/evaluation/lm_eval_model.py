"""reread as a model of lm-eval (0.4.13 or later): its tasks, decoded under a config of ours.

    python -m reread.evaluation.lm_eval_model --model reread --tasks ifeval \\
        --model_args pretrained=FOLDER,preset=default,k=256,dtype=bfloat16

This takes every argument of the command `lm_eval`. The command itself knows only the models that
lm-eval ships: it reads no entry points, and --include_path finds tasks, not models. In Python,
importing this module is enough: `lm_eval.simple_evaluate(model="reread", model_args=...)`.

Of model_args: pretrained (a builtin name, folder, GGUF file or hub id), preset, indexer, dtype,
device, trust_remote_code, max_length, prefill_chunk, and every key that `Config.updated` takes,
such as k, recent, mode or triggers.t_max. Any other is refused by its name.

Requests run one by one: batch_size is 1. Log-likelihoods are those of decode steps: the context is
read as a prompt, and each token of the continuation is then fed under the config, so that what
sparse decoding leaves out counts. A context that several continuations share is read once. The
first step is slow where `triggers.first_step` says so, as in the default preset: continuations of a
single token, such as " A", are then scored as by dense decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from ..config import Config
from ..errors import ConfigError, InputError
from ..integrations.hf.attach import attach
from ..integrations.hf.load import load
from ..integrations.hf.prompt import decode
from ..integrations.hf.session import Session
from .lm_eval_runs import Reader, Totals
from .stopping import Until, cut

try:
    from lm_eval.api.model import TemplateLM  # type: ignore[import-untyped]  # no types
    from lm_eval.api.registry import register_model  # type: ignore[import-untyped]  # no types
    from lm_eval.utils import (  # type: ignore[import-untyped]  # no types
        get_rolling_token_windows,
        make_disjoint_window,
    )
    from tqdm import tqdm  # type: ignore[import-untyped]  # no types
except ImportError as error:
    raise InputError(f"lm-eval is needed ({error}): pip install 'reread[eval]'") from error

NAME = "reread"
OWN = (
    "pretrained", "preset", "indexer", "dtype", "device", "trust_remote_code", "max_length",
    "prefill_chunk",
)  # fmt: skip
NEW_TOKENS = 256  # where a task says nothing, as lm-eval


def make_config(preset: str, indexer: str | None, changes: Mapping[str, Any]) -> Config:
    """A preset with changes, as model_args give them.

    Raises:
        InputError: an unknown preset or key, or a value that cannot be right.
    """
    given = {**changes, **({} if indexer is None else {"indexer": indexer})}
    try:
        return Config.preset(preset).updated(given)
    except ConfigError as error:
        raise InputError(f"model_args: {error}; besides: {', '.join(OWN)}") from error


@register_model(NAME)
class RereadLM(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """A checkpoint that decodes under a `Config`.

    Args:
        pretrained: as for `load`.
        preset, indexer: the config, changed by `changes`.
        max_length: positions of prompt and answer; None: the model's.
        prefill_chunk: tokens of a prompt in one pass; in a sparse prefill a multiple of its b_sel.
        batch_size, max_batch_size: given by lm-eval; 1 or "auto".
        changes: keys of `Config.updated`.

    Attributes:
        totals: what ran so far; `get_model_info` gives it to lm-eval's results.

    Raises:
        InputError: an unknown argument, a batch size above 1, or no such model.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        preset: str = "default",
        indexer: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        trust_remote_code: bool = False,
        max_length: int | None = None,
        prefill_chunk: int = 1024,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        **changes: Any,
    ) -> None:
        super().__init__()
        if not pretrained:
            raise InputError("model_args: pretrained is missing, the model's folder or name")
        if str(batch_size) not in ("1", "auto"):
            raise InputError(f"batch_size={batch_size!r}: requests run one by one, leave it at 1")
        if not isinstance(prefill_chunk, int) or prefill_chunk < 2:
            raise InputError(f"prefill_chunk={prefill_chunk!r} is not possible: at least 2")
        self.config = make_config(preset, indexer, changes)
        loaded = load(
            str(pretrained), dtype=dtype, device=device or "auto",
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        self._loaded = loaded
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.prefill_chunk = prefill_chunk
        self.max_length = self._positions(max_length)
        self._device = self.model.device
        self.totals = Totals()

    def _positions(self, asked: int | None) -> int:
        config = self.model.config.get_text_config(decoder=True)
        own: Any = getattr(config, "max_position_embeddings", None)
        if asked is None and own is None:
            raise InputError(f"{self._loaded.name!r} states no positions: give max_length=")
        if asked is not None and (asked < 2 or (own is not None and asked > own)):
            raise InputError(f"max_length={asked!r} is not possible: 2 to {own or 'any'}")
        return int(own if asked is None else asked)

    # -- what lm-eval asks about the tokenizer and for its results

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text, or what stands in for it."""
        end = self.tokenizer.eos_token_id
        return self.prefix_token_id if end is None else int(end)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise InputError("the tokenizer has neither a first nor a last token of a text")

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids; special tokens are added unless the text begins with one."""
        if add_special_tokens is None:
            first = self.tokenizer.bos_token
            add_special_tokens = not (first and string.startswith(first))
        ids: list[int] = self.tokenizer(
            string, add_special_tokens=add_special_tokens, verbose=False
        )["input_ids"]
        return ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Turns as the tokenizer's chat template writes them."""
        text: str = self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )  # fmt: skip
        return text

    def get_model_info(self) -> dict[str, Any]:
        """Goes into the "config" of lm-eval's results."""
        return {
            "model_dtype": str(self.model.dtype),
            "reread": {
                "model": self._loaded.name,
                "device": str(self.model.device),
                "max_length": self.max_length,
                "config": self.config.to_dict(),
                **self.totals.to_dict(),
            },
        }

    # -- log-likelihoods

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = []
        with self._attached() as session:
            reader = self._reader(session)
            for texts, context, continuation in tqdm(requests, disable=disable_tqdm):
                told = reader.likelihood(context, continuation)
                found.append((told.logprob, told.greedy))
                self.cache_hook.add_partial("loglikelihood", texts, found[-1])
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of whole texts, in windows of `max_length` tokens."""
        found: list[float] = []
        with self._attached() as session:
            reader = self._reader(session)
            for (text,) in tqdm([request.args for request in requests], disable=disable_tqdm):
                windows = get_rolling_token_windows(
                    token_list=self.tok_encode(text, add_special_tokens=False),
                    prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1,
                )  # fmt: skip
                told = [reader.likelihood(*make_disjoint_window(window)) for window in windows]
                found.append(sum(each.logprob for each in told))
                self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        return found

    def _reader(self, session: Session) -> Reader:
        return Reader(session, self.max_length, self.prefill_chunk, self.totals)

    def _attached(self) -> Session:
        return attach(self.model, self.config, tokenizer=self.tokenizer)

    # -- generation

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """An answer to each request, greedy unless it says do_sample."""
        found: list[str] = []
        with self._attached() as session:
            for text, options in tqdm([request.args for request in requests], disable=disable_tqdm):
                found.append(self._answer(session, text, dict(options)))
                self.cache_hook.add_partial("generate_until", (text, options), found[-1])
        return found

    def _answer(self, session: Session, text: str, options: dict[str, Any]) -> str:
        until = options.pop("until", None) or []
        until = [until] if isinstance(until, str) else list(until)
        new = int(options.pop("max_gen_toks", NEW_TOKENS))
        if not options.setdefault("do_sample", False):
            for name in ("temperature", "top_p", "top_k"):  # of sampling only
                options.pop(name, None)
        if new >= self.max_length:
            raise InputError(f"max_gen_toks={new} leaves no room in {self.max_length} positions")
        ids = self.totals.cut(self.tok_encode(text), self.max_length - new)
        prompt = torch.tensor([ids], dtype=torch.long, device=self.model.device)
        if len(ids) > self.prefill_chunk:
            options["prefill_chunk_size"] = self.prefill_chunk
        pad = self.tokenizer.pad_token_id
        output: Tensor = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new,
            stopping_criteria=StoppingCriteriaList([Until(self._loaded, until, len(ids))]),
            pad_token_id=self.tokenizer.eos_token_id if pad is None else pad,
            **options,
        )  # fmt: skip
        self.totals.add(session.stats, len(ids) + 1)
        return cut(decode(self._loaded, output[0, len(ids) :].tolist()), until)


def main() -> None:
    """lm-eval's own command with reread among its models."""
    from lm_eval.__main__ import cli_evaluate  # type: ignore[import-untyped]  # has no types

    cli_evaluate()


if __name__ == "__main__":
    main()
