"""Dense attention in a prompt whose layers are compiled as those of a sparse prefill are, so that
the two differ in attention alone."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..errors import UnsupportedError
from ..integrations.hf.arguments import flat
from ..integrations.hf.cache import adopt, sparse_layers
from ..integrations.hf.capturable import obstacle
from ..integrations.hf.compiled import Weights, decoder_layers
from ..integrations.hf.prompt_layers import dense, run_compiled


def compilations() -> int:
    """How often torch has compiled something in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@contextmanager
def layers_compiled(model: Any) -> Iterator[None]:
    """Inside it the model reads prompts, each in one forward without padding, with PyTorch's causal
    attention and reread's cache.

    Raises:
        UnsupportedError: a model whose layers are not compiled in a sparse prefill either.
    """
    text, forward = model.config.get_text_config(decoder=True), model.forward
    full = sparse_layers(text)
    layers = decoder_layers(model, text.num_hidden_layers)
    if why := obstacle(model, full) or ("" if layers else "its decoder layers are not found"):
        raise UnsupportedError(why)
    weights, signature = Weights(model, layers), inspect.signature(forward)

    @functools.wraps(forward)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        given = flat(signature.bind(*args, **kwargs))
        cache: Any = given.get("cache", given.get("past_key_values"))
        for state in adopt(cache, text, full).values():
            assert state.kv.length == 0
            state.kv.reserve(given["input_ids"].shape[1])

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, _: Tensor | None
        ) -> Tensor:
            keys, values = cache.update(k, v, layer)
            return dense(q, keys, values, scale)

        return run_compiled(model, forward, weights, given, 0, attend)

    model.forward = compiled
    try:
        yield
    finally:
        del model.forward
        weights.close()
