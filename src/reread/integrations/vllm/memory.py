"""What the state of requests takes, and that vLLM's pool of pages leaves room for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ...attention import DEFAULT_ROOM
from ...config import Config
from ...errors import ConfigError

GIB = 2**30


def row_bytes(config: Config, heads: int, kv_heads: int, dim: int, size: int, longest: int) -> int:
    """The most bytes that one layer remembers of one request.

    Args:
        heads, kv_heads, dim: of the layer, in this process.
        size: bytes of a number in the cache.
        longest: tokens of the longest request.
    """
    if config.mode == "dense" or (config.dense_below_budget and config.budget >= longest):
        return 0
    interval = config.triggers.t_max
    room = interval or DEFAULT_ROOM
    # without an interval the recent part may grow to the end of the text
    steps = longest if interval is None else interval
    keys = min(config.budget + steps, longest) + room
    chosen = min(config.k, longest) * kv_heads * 8
    tail = 0 if config.triggers.first_step else config.selector.tail_queries * heads * dim * size
    return 2 * keys * kv_heads * dim * size + chosen + tail


def state_bytes(config: Config, layers: Sequence[Any], vllm_config: Any) -> tuple[int, int]:
    """Bytes of the state of `max_num_seqs` requests, and of one.

    Args:
        layers: implementations of the sparse layers.
    """
    longest = vllm_config.model_config.max_model_len
    size = vllm_config.model_config.dtype.itemsize
    one = sum(
        row_bytes(config, i.num_heads, i.num_kv_heads, i.head_size, size, longest) for i in layers
    )
    # while one layer chooses again, its old copy is still there
    spare = one // max(1, len(layers))
    most = int(vllm_config.scheduler_config.max_num_seqs)
    return most * one + spare, one


def page_bytes(specs: Mapping[str, Any]) -> int:
    """The least bytes of vLLM's pool that one of its pages takes.

    Args:
        specs: vLLM's cache specs of all layers, by name.
    """
    # a page is one group's at a time, and has a part for each layer of the group
    kinds: Counter[Any] = Counter(specs.values())
    return int(min(spec.page_size_bytes * n for spec, n in kinds.items()))


def room_for_pages(
    available: int,
    total: int,
    one: int,
    vllm_config: Any,
    specs: Mapping[str, Any],
    index: tuple[int, int] = (0, 0),
) -> int:
    """What vLLM may give to pages, of the bytes that are there.

    Args:
        available: bytes that pages and all that is ours share.
        total: bytes of the state of `max_num_seqs` requests; one: of one of them.
        specs: vLLM's cache specs of all layers, by name.
        index: of an indexer, bytes of the keys that lie beside each page, and of scratch.

    Raises:
        ConfigError: one request of the greatest length would not fit beside it; names the number of
            requests that would.
    """
    longest = vllm_config.model_config.max_model_len
    most = int(vllm_config.scheduler_config.max_num_seqs)
    beside = 1 + index[0] / page_bytes(specs)
    own = sum(int(spec.max_memory_usage_bytes(vllm_config)) for spec in specs.values())
    pages, available = int(own * beside), available - index[1]
    # without state of ours it is vLLM's to say what does not fit, or to choose a shorter length
    if available - total >= pages or not one:
        return int((available - total) / beside)
    spare = total - most * one
    fits = max(0, (available - pages - spare) // one)
    least = (pages + one + spare) / GIB
    advice = f"max_num_seqs={fits} would fit" if fits else f"one needs {least:.2f} GiB"
    raise ConfigError(
        f"max_num_seqs={most} is not possible: reread's state of so many requests takes "
        f"{total / GIB:.2f} GiB ({one / 2**20:.1f} MiB each), one request of {longest} tokens "
        f"{pages / GIB:.2f} GiB of pages, and there are {available / GIB:.2f} GiB; {advice}"
    )
