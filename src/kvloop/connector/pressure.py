"""Live work first: leases give way inside the very allocation that would otherwise fail.

vLLM's scheduler asks its KV cache manager for a request's blocks; where the answer is None, a running
request is preempted and a waiting one waits. Both would be the price of retention, so the question is asked
again in the same breath, after just so many leases have been reclaimed as are missing blocks. Only when no
unclaimed lease is left does vLLM hear None: then it does what it would have done without retention.

How many are missing is taken from vLLM's own count (`KVCacheCoordinator.get_num_blocks_to_allocate`), which
is listened to only while an allocation fails. Nothing is added to one that succeeds.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.request import Request


class Pressure:
    """Makes room in one KV cache manager. `reclaim(blocks)` frees that many blocks more, or all that leases
    can give; it says whether it freed any."""

    def __init__(self, reclaim: Callable[[int], bool]) -> None:
        self.relieved_total = 0
        """Allocations that succeeded because leases gave way."""
        self.refused_total = 0
        """Allocations that failed with no unclaimed lease left: vLLM preempts, or lets the request wait."""
        self._reclaim = reclaim
        self._needed_blocks = 0

    def relieve(self, manager: "KVCacheManager") -> None:
        """From now on leases give way to `manager`'s allocations."""
        allocate_slots = manager.allocate_slots

        def relieved(request: "Request", *args: Any, **kwargs: Any) -> "KVCacheBlocks | None":
            blocks = allocate_slots(request, *args, **kwargs)
            if blocks is None:
                margin = kwargs.get("reserved_blocks", 0) + manager.watermark_blocks
                blocks = self._retry(manager, lambda: allocate_slots(request, *args, **kwargs), margin)
            return blocks

        manager.allocate_slots = relieved  # type: ignore[method-assign]

    def _retry(
        self, manager: "KVCacheManager", allocate: "Callable[[], KVCacheBlocks | None]", margin_blocks: int
    ) -> "KVCacheBlocks | None":
        with self._listening(manager):
            blocks = allocate()
            while blocks is None and self._reclaim(self._missing_blocks(manager, margin_blocks)):
                blocks = allocate()
        if blocks is None:
            self.refused_total += 1
        else:
            self.relieved_total += 1
        return blocks

    def _missing_blocks(self, manager: "KVCacheManager", margin_blocks: int) -> int:
        """What the request itself lacks; where it lacks nothing, what vLLM wants free beside it."""
        missing = self._needed_blocks - manager.block_pool.get_num_free_blocks()
        return max(1, missing if missing > 0 else missing + margin_blocks)

    @contextmanager
    def _listening(self, manager: "KVCacheManager") -> Iterator[None]:
        coordinator = manager.coordinator
        count = coordinator.get_num_blocks_to_allocate

        def heard(*args: Any, **kwargs: Any) -> int:
            self._needed_blocks = count(*args, **kwargs)
            return self._needed_blocks

        coordinator.get_num_blocks_to_allocate = heard  # type: ignore[method-assign]
        try:
            yield
        finally:
            coordinator.get_num_blocks_to_allocate = count  # type: ignore[method-assign]
