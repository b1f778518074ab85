"""vLLM's KV cache blocks as kvloop holds them: references taken and given back, and proof of what is in them.

A block gets a new owner, who may write to it, in one way only: the pool hands it out
(`BlockPool.get_new_blocks`). So a block that was freed still holds what it held if it has not been handed
out since, which is counted here, and if its hash is the one that it had. Neither alone would do. vLLM hashes
a block when it schedules the step that will fill it, so a block handed out since may have the old hash again
before its KV is there; and a block keeps its owner but loses its hash where vLLM finds its content invalid.

All of it is for the scheduler's thread, whose the pool is.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


Proof = tuple[int, Any]
"""What a block was: how often it had been handed out, and its hash (None where it has none)."""


class PoolBlocks:
    """One pool's blocks, by block id."""

    def __init__(self, pool: "BlockPool") -> None:
        self._pool = pool
        self._handed_out = [0] * pool.num_gpu_blocks
        get_new_blocks = pool.get_new_blocks
        counts = self._handed_out

        def counted(num_blocks: int) -> "list[KVCacheBlock]":
            blocks = get_new_blocks(num_blocks)
            for block in blocks:
                counts[block.block_id] += 1
            return blocks

        pool.get_new_blocks = counted  # type: ignore[method-assign]

    @property
    def total(self) -> int:
        """Blocks in the pool."""
        return self._pool.num_gpu_blocks

    @property
    def free(self) -> int:
        """Blocks that nobody has a reference to."""
        return self._pool.get_num_free_blocks()

    def touch(self, block_ids: Iterable[int]) -> None:
        """Take one reference to each."""
        self._pool.touch([self._pool.blocks[block] for block in block_ids])

    def give_back(self, *holders: Sequence[int]) -> None:
        """Give one reference to each holder's blocks back. What they hold stays readable for as long as
        nobody needs the blocks: they are handed out again after all that is free already, holder by holder,
        the last block of each first."""
        blocks = self._pool.blocks
        released = (blocks[block] for block_ids in holders for block in reversed(block_ids))
        self._pool.unpin_blocks(released, _nobody_reads)

    def discard(self, block_ids: Sequence[int]) -> None:
        """Give one reference to each back; what they hold is of no use."""
        self._pool.free_blocks(self._pool.blocks[block] for block in reversed(block_ids))

    def proof(self, block_id: int) -> Proof:
        """What the block holds now."""
        return self._handed_out[block_id], self._pool.blocks[block_id].block_hash

    def proofs(self, block_ids: Iterable[int]) -> tuple[Proof, ...]:
        """What each block holds now."""
        counts, blocks = self._handed_out, self._pool.blocks
        return tuple([(counts[block], blocks[block].block_hash) for block in block_ids])

    def unchanged(self, block_id: int, proof: object) -> bool:
        """Whether the block still holds what it did when `proof` was taken."""
        return self.proof(block_id) == proof

    def unbalanced(self, holders: Iterable[Iterable[int]]) -> int:
        """How many references there are too many or too few, where `holders` hold one to each of their
        blocks and nobody else holds any; plus blocks that are neither free nor held. 0, or there is a bug.
        O(blocks)."""
        expected = [0] * self._pool.num_gpu_blocks
        for block_ids in holders:
            for block_id in block_ids:
                expected[block_id] += 1
        wrong = used = 0
        for block in self._pool.blocks:
            if block.is_null:
                used += 1  # is never free, and its references are not counted
                continue
            wrong += abs(block.ref_cnt - expected[block.block_id])
            used += block.ref_cnt > 0
        return wrong + abs(self.total - self.free - used)


def _nobody_reads(_: "KVCacheBlock") -> None:
    """Whoever claims a freed block looks at its proof first; nobody has to be told that it is gone."""
