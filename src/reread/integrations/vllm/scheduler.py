"""vLLM's scheduler, with prefix caching that cannot change a text."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from .options import config_of


class _PromptsOnly:
    """Caches pages of prompts only, and recomputes the queries that the first selection needs.

    A generated token's keys come from sparse steps, a prompt token's from dense attention. Were a
    generated page found again as part of another prompt, or of this request after a preemption,
    the text would depend on what is cached; so such pages are not offered to others.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = config_of(self.vllm_config)  # type: ignore[attr-defined]  # the Scheduler's
        if config.mode == "dense":
            return
        manager = self.kv_cache_manager  # type: ignore[attr-defined]  # the Scheduler's
        coordinator = manager.coordinator
        coordinator.cache_blocks = functools.partial(_prompt_only, coordinator.cache_blocks)
        if not config.triggers.first_step:
            spare = config.selector.tail_queries
            limit_hits(manager, spare)


class RereadScheduler(_PromptsOnly, Scheduler):  # type: ignore[misc]  # vLLM is absent where types are checked
    """For engines that wait for each step's tokens."""


class RereadAsyncScheduler(_PromptsOnly, AsyncScheduler):  # type: ignore[misc]  # vLLM is absent where types are checked
    """For engines that prepare the next step before they know this one's tokens."""


def _prompt_only(original: Callable[[Any, int], None], request: Any, tokens: int) -> None:
    original(request, min(tokens, request.num_prompt_tokens))


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
