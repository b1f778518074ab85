"""Reads of other engines' blocks under way, and the memory that they write to.

The bytes of a read land when it ends, whether or not anybody still waits for them. So a read holds its target
blocks itself from the moment on when its request went away or stopped waiting, until it has ended: the fence.
Reads of one engine share its link, one after the other.
"""

from collections.abc import Sequence as Blocks
from dataclasses import dataclass

from kvloop.sim.memory import Memory
from kvloop.sim.pool import BlockPool
from kvloop.sim.profile import Transfer
from kvloop.sim.sequence import Sequence


@dataclass(slots=True)
class Load:
    """A read into `targets`. `tokens`: what its request has when it ends well; `sequence` None: an orphan.

    `claimed`: of blocks under a claim, not of a handover.
    """

    sequence: Sequence | None
    request_id: str
    targets: list[int]
    tokens: int
    claimed: bool


class Loads:
    """The reads under way of one engine, by read id."""

    def __init__(self, memory: Memory, pool: BlockPool, transfer: Transfer, block_tokens: int) -> None:
        self._memory = memory
        self._pool = pool
        self._transfer = transfer
        self._block_tokens = block_tokens
        self._loads: dict[str, Load] = {}
        self._by_request: dict[str, str] = {}
        self._link_free_ns = 0
        self._begun = 0

    def __len__(self) -> int:
        """Reads under way."""
        return len(self._loads)

    def begin(self, load: Load, now_ns: int) -> tuple[str, int]:
        """Enter a read: its id, and how long it takes from now."""
        self._begun += 1
        read_id = f"read{self._begun}"
        self._loads[read_id] = load
        self._by_request[load.request_id] = read_id
        begins_ns = max(now_ns, self._link_free_ns)
        self._link_free_ns = begins_ns + self._transfer.busy_ns(len(load.targets), self._block_tokens)
        return read_id, self._link_free_ns + self._transfer.setup_ns - now_ns

    def orphan(self, request_id: str) -> None:
        """The request waits no longer: its read holds the blocks that it writes to by itself."""
        load = self._loads[self._by_request[request_id]]
        load.sequence = None
        self._pool.touch(load.targets)

    def end(self, read_id: str, contents: Blocks[int] | None) -> Load | None:
        """A read has ended, and brought `contents` (None: nothing). None for one that is not known."""
        load = self._loads.pop(read_id, None)
        if load is None:
            return None
        del self._by_request[load.request_id]
        if contents is not None:
            self._memory.write(load.targets, contents)
        if load.sequence is None:
            self._pool.free(load.targets)
        return load

    def targets(self, read_id: str) -> frozenset[int]:
        """The blocks that a read under way writes to."""
        load = self._loads.get(read_id)
        return frozenset() if load is None else frozenset(load.targets)

    def orphaned_references(self) -> int:
        """Holds on blocks by reads that nobody waits for."""
        return sum(len(load.targets) for load in self._loads.values() if load.sequence is None)
