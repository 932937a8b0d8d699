"""vLLM's scheduler, with prefix caching that cannot change a text."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from .options import config_of
from .prefill_checks import whole_blocks


class _PromptsOnly:
    """Caches pages of prompts only, recomputes the queries that the first selection needs, and
    cuts prompts where blocks of a sparse prefill end.

    A generated token's keys come from sparse steps, a prompt token's from dense attention. Were a
    generated page found again as part of another prompt, or of this request after a preemption,
    the text would depend on what is cached; so such pages are not offered to others. Nor does what
    a block of a sparse prefill chooses depend on where chunks end.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = config_of(self.vllm_config)  # type: ignore[attr-defined]  # the Scheduler's
        if config.mode == "dense" and config.prefill is None:
            return
        manager = self.kv_cache_manager  # type: ignore[attr-defined]  # the Scheduler's
        if config.prefill is not None:
            block = whole_blocks(config.prefill)
            align_hits(manager, block)
            self._align_chunks(block)
        coordinator = manager.coordinator
        coordinator.cache_blocks = functools.partial(_prompt_only, coordinator.cache_blocks)
        if not config.triggers.first_step:
            spare = config.selector.tail_queries
            limit_hits(manager, spare)

    def _align_chunks(self, block: int) -> None:
        """Have chunks of a prompt end with a block of a sparse prefill, as vLLM's own have to end
        with a block of a recurrent layer's state."""
        split = self._mamba_block_aligned_split  # type: ignore[has-type]  # the Scheduler's
        original = split if self.need_mamba_block_aligned_split else None  # type: ignore[has-type]  # likewise
        self._mamba_block_aligned_split = functools.partial(aligned_chunk, block, original)
        self.need_mamba_block_aligned_split = True


class RereadScheduler(_PromptsOnly, Scheduler):  # type: ignore[misc]  # vLLM is absent where types are checked
    """For engines that wait for each step's tokens."""


class RereadAsyncScheduler(_PromptsOnly, AsyncScheduler):  # type: ignore[misc]  # vLLM is absent where types are checked
    """For engines that prepare the next step before they know this one's tokens."""


def _prompt_only(original: Callable[[Any, int], None], request: Any, tokens: int) -> None:
    original(request, min(tokens, request.num_prompt_tokens))


def aligned_chunk(
    block: int, original: Callable[..., int] | None, request: Any, new: int, *computed: int
) -> int:
    """How many of `new` tokens of a request's prompt a pass takes so that it ends with a block or
    with the prompt; 0: it waits.

    Args:
        original: what else cuts chunks; computed: tokens behind the request's own count that are
            there already, locally and elsewhere; what follows them concerns `original`.
    """
    if original is not None:
        new = original(request, new, *computed)
    start = int(request.num_computed_tokens) + sum(computed[:2])
    end = start + new
    if end >= request.num_prompt_tokens:
        return new
    return max(0, end // block * block - start)


def align_hits(manager: Any, block: int) -> None:
    """Make the manager's prefix hits whole blocks of a sparse prefill."""
    coordinator = manager.coordinator
    find = coordinator.find_longest_cache_hit

    def find_longest(hashes: Any, longest: int) -> Any:
        found = find(hashes, longest)
        # pages may be of any size: a shorter hit need not be whole blocks either
        while found[1] % block:
            found = find(hashes, found[1] // block * block)
        return found

    coordinator.find_longest_cache_hit = find_longest


def limit_hits(manager: Any, spare: int) -> None:
    """Make the manager's prefix hits end at least `spare` tokens before the prompt's end."""
    coordinator = manager.coordinator
    find, computed = coordinator.find_longest_cache_hit, manager.get_computed_blocks
    limits: list[int] = []

    def find_longest(hashes: Any, longest: int) -> Any:
        return find(hashes, min([longest, *limits]))

    def get_computed_blocks(request: Any) -> Any:
        limits[:] = [max(0, request.num_prompt_tokens - spare)]
        try:
            return computed(request)
        finally:
            limits.clear()

    coordinator.find_longest_cache_hit = find_longest
    manager.get_computed_blocks = get_computed_blocks
