"""Blocks that a late read may still write to: out of use until the transfer has ended on every worker.

A read that was given up goes on in NIXL for as long as its peer sleeps, and its bytes land in the blocks that
it was ordered into. The request has gone on in others meanwhile; these are held by a reference of their own.
"""

from collections.abc import Iterable, Iterator

from kvloop.connector.blocks import PoolBlocks


class LateReads:
    """The blocks of late reads, by request id. For the scheduler's thread."""

    def __init__(self) -> None:
        self._blocks: PoolBlocks | None = None
        self._held: dict[str, tuple[int, ...]] = {}
        self._workers: dict[str, int] = {}

    def bind(self, blocks: PoolBlocks) -> None:
        """Take the pool."""
        self._blocks = blocks

    def set_aside(self, request_id: str, workers: int, block_ids: Iterable[int]) -> None:
        """So many workers more had to give up this read into `block_ids`."""
        if self._blocks is None:
            return
        self._workers[request_id] = self._workers.get(request_id, 0) + workers
        if request_id not in self._held:
            self._held[request_id] = tuple(block_ids)
            self._blocks.touch(self._held[request_id])

    def take_back(self, request_id: str, workers: int) -> None:
        """On so many workers the transfer has ended; with the last of them the blocks are free."""
        left = self._workers.get(request_id, 0) - workers
        self._workers[request_id] = left
        if left > 0 or self._blocks is None:
            return
        del self._workers[request_id]
        self._blocks.discard(self._held.pop(request_id, ()))

    def held(self) -> Iterator[tuple[int, ...]]:
        """The blocks to which each late read holds a reference."""
        return iter(self._held.values())

    def __len__(self) -> int:
        return len(self._held)
