"""What waiting requests will find in the prefix cache: leases give way before that does.

vLLM's pool hands out the block that was freed longest ago, whatever it holds. Where leases hold a part of the
blocks the others come round sooner, and a request that stands in vLLM's queue may find less when its turn
comes than was there when it arrived. So a block that a waiting request's prompt would hit is passed over:
others are handed out in its place, and where those run out, the blocks of leases.

Blocks are known by the hashes of the prompts that wait, so what others compute meanwhile counts, too. The
pool itself is asked nothing, and touched only while there are leases.
"""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import get_block_hash

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
    from vllm.v1.request import Request

MAX_HASHES = 200_000
"""Of prompts that wait, some 25 MB: those of a request that comes when there are so many are not kept."""
MAX_PASSED_OVER = 1_000
"""In one allocation: some 0.5 ms. More that lie in a row are handed out as vLLM would."""


class WaitingHits:
    """Guards one pool's blocks. `reclaim(blocks)` frees that many blocks of leases, or all that there are; it
    says whether it freed any. For the scheduler's thread."""

    def __init__(self, reclaim: Callable[[int], bool], has_leases: Callable[[], bool]) -> None:
        self._reclaim = reclaim
        self._has_leases = has_leases
        self._hashes_of: dict[str, tuple[BlockHash, ...]] = {}
        self._wanted: Counter[BlockHash] = Counter()
        self._hash_count = 0

    def guard(self, pool: "BlockPool") -> None:
        """From now on `pool` passes over what waiting requests would hit."""
        get_new_blocks = pool.get_new_blocks

        def guarded(num_blocks: int) -> "list[KVCacheBlock]":
            if self._wanted and self._has_leases():
                self._pass_over(pool.free_block_queue, num_blocks)
            return get_new_blocks(num_blocks)

        pool.get_new_blocks = guarded  # type: ignore[method-assign]

    def arrive(self, request: "Request") -> None:
        """A request begins to wait."""
        hashes = tuple(request.block_hashes)
        if request.request_id in self._hashes_of or self._hash_count + len(hashes) > MAX_HASHES:
            return
        self._hashes_of[request.request_id] = hashes
        self._wanted.update(hashes)
        self._hash_count += len(hashes)

    def leave(self, request_id: str) -> None:
        """It has its blocks, or is gone."""
        hashes = self._hashes_of.pop(request_id, ())
        self._hash_count -= len(hashes)
        for block_hash in hashes:
            self._wanted[block_hash] -= 1
            if not self._wanted[block_hash]:
                del self._wanted[block_hash]

    def _pass_over(self, queue: Any, num_blocks: int) -> None:
        """Move what waiting requests would hit from the queue's front to its end, until so many other blocks
        are in front. Just so many blocks of leases are freed as there are too few others."""
        end = queue.fake_free_list_tail
        block = queue.fake_free_list_head.next_free_block
        passed_over: list[KVCacheBlock] = []
        others = 0
        while others < num_blocks and len(passed_over) < MAX_PASSED_OVER:
            if block is end:
                last = end.prev_free_block
                if not self._reclaim(num_blocks - others):
                    break
                block = last.next_free_block
                continue
            if block.block_hash is not None and get_block_hash(block.block_hash) in self._wanted:
                passed_over.append(block)
            else:
                others += 1
            block = block.next_free_block
        for block in passed_over:
            queue.remove(block)
        queue.append_n(passed_over)

    def check_integrity(self) -> None:
        """AssertionError where the counts contradict what is remembered."""
        counted = Counter(block_hash for hashes in self._hashes_of.values() for block_hash in hashes)
        assert counted == self._wanted
        assert self._hash_count == sum(map(len, self._hashes_of.values())) <= MAX_HASHES
