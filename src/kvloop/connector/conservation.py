"""The books of all block references: whoever holds one is known, and every block is free or held.

Retention adds holders that vLLM does not know of to a pool whose blocks are lost for ever when one reference
too many is taken, and shared by strangers when one too many is given back. So the engine compares, block by
block, the pool's counts with those of all holders: requests, the blocks of finished ones that a step in
flight may still write to, leases, and late reads. Whatever is left over is a bug of somebody's.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from kvloop.connector.blocks import PoolBlocks
from kvloop.connector.settings import NS_PER_S

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

logger = init_logger("vllm.kvloop.conservation")

CHECK_EVERY_NS = 10 * NS_PER_S
"""A check looks at every block: some milliseconds for 100,000 of them."""


class Conservation:
    """Checks one engine's books, at most every `every_ns`. `holders`: those that vLLM does not know."""

    def __init__(self, holders: Iterable[Callable[[], Iterator[tuple[int, ...]]]], every_ns: int) -> None:
        self.worst_unbalanced = 0
        """The most references that were too many or too few, in all checks so far."""
        self.checks_total = 0
        self._holders = tuple(holders)
        self._every_ns = every_ns
        self._due_ns = 0
        self._blocks: PoolBlocks | None = None
        self._managers: Iterable[Any] = ()
        self._freed_later: Callable[[], Iterator[list[Any]]] = lambda: iter(())

    def bind(self, manager: "KVCacheManager", blocks: PoolBlocks) -> None:
        """Take the pool, and those who know which request holds what of it."""
        self._blocks = blocks
        self._managers = manager.coordinator.single_type_managers

    def count_freed_later(self, listed: Callable[[], Iterator[list[Any]]]) -> None:
        """Take what lists the blocks of finished requests that vLLM has not given back yet."""
        self._freed_later = listed

    def check_when_due(self) -> None:
        """Compare, unless the last check is too recent. For the scheduler's thread, between two steps."""
        now_ns = time.monotonic_ns()
        if self._blocks is None or now_ns < self._due_ns:
            return
        self._due_ns = now_ns + self._every_ns
        self.checks_total += 1
        unbalanced = self._blocks.unbalanced(self._all_holders())
        if unbalanced > self.worst_unbalanced:
            self.worst_unbalanced = unbalanced
            logger.error(
                "%d block references are not accounted for: this is a bug, please report it", unbalanced
            )

    def _all_holders(self) -> Iterator[Iterable[int]]:
        for one_type in self._managers:
            for blocks in one_type.req_to_blocks.values():
                yield [block.block_id for block in blocks if not block.is_null]
        for blocks in self._freed_later():
            yield [block.block_id for block in blocks if not block.is_null]
        for holder in self._holders:
            yield from holder()
