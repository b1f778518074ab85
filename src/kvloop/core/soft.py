"""What ended leases may still be good for: their blocks are free, but not yet overwritten.

An engine that gives a block back does not clear it; its content stays until the block is handed out again.
It is what VMS called a soft page fault: a page on the free list that is wanted back before anybody else was
given its frame costs next to nothing. So an ended lease is remembered with a *proof* per block: what its
owner knew of the content when the lease ended, and can compare later. A claim on it is granted again over the
longest prefix whose blocks are all unchanged, and memory that was given back early costs a reader nothing as
long as nobody needed it.

A proof that fails once fails for ever, for its owner counts how often a block was handed out. The table owns
no references: what it forgets costs a reader time, and nobody memory.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from kvloop.core.chain import SEGMENT_TOKENS, Chain, cut_chain, matched_tokens
from kvloop.core.lease_state import Blocks, FreedLease

MAX_SOFT_LEASES = 10_000  # as many as a router renews in one message
MAX_SOFT_BYTES = 64 * 1024 * 1024  # digests, block ids and proofs: what they take of the process's memory
LEASE_COST_BYTES = 1000  # a lease's own objects
BLOCK_COST_BYTES = 150  # a block id, a proof of a digest and a count, and their places in tuples

Proofs = tuple[tuple[Hashable, ...], ...]  # shaped as Blocks
Unchanged = Callable[[int, Hashable], bool]


@dataclass(frozen=True, slots=True)
class SoftLease:
    """A lease that has ended. `proofs` has one for each of `blocks`, from when it ended."""

    lease_id: str
    chain: Chain
    blocks: Blocks
    proofs: Proofs
    exact_only: bool
    cost_bytes: int  # what remembering it takes, by estimate


class SoftTable:
    """Ended leases, the one that ended longest ago out first. Not thread-safe."""

    def __init__(
        self, block_size: int, max_leases: int = MAX_SOFT_LEASES, max_bytes: int = MAX_SOFT_BYTES
    ) -> None:
        """`block_size` in tokens. `max_bytes` bounds an estimate of the memory that the table takes."""
        if min(block_size, max_leases, max_bytes) <= 0:
            raise ValueError("block size and bounds must be positive")
        self.block_size = block_size
        self.max_leases = max_leases
        self.max_bytes = max_bytes
        self._leases: OrderedDict[str, SoftLease] = OrderedDict()  # in the order in which they ended
        self._used_bytes = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def used_bytes(self) -> int:
        """The estimate that `max_bytes` bounds."""
        return self._used_bytes

    def keep(self, freed: FreedLease, proofs: Proofs) -> bool:
        """Remember a lease that has ended just now. False for one that is void, or larger than the table.

        ValueError for proofs that are not one for each block.
        """
        lengths = [len(group) for group in freed.blocks]
        if [len(group) for group in proofs] != lengths:
            raise ValueError("not one proof for each block")
        self.forget(freed.lease_id)
        cost_bytes = LEASE_COST_BYTES + len(freed.chain.segments) + BLOCK_COST_BYTES * sum(lengths)
        if freed.is_void or cost_bytes > self.max_bytes:
            return False
        self._leases[freed.lease_id] = SoftLease(
            freed.lease_id, freed.chain, freed.blocks, proofs, freed.exact_only, cost_bytes
        )
        self._used_bytes += cost_bytes
        while len(self._leases) > self.max_leases or self._used_bytes > self.max_bytes:
            self.forget(next(iter(self._leases)))
        return True

    def get(self, lease_id: str) -> SoftLease | None:
        """The lease, if it is remembered. Whether anything is left of it is another question."""
        return self._leases.get(lease_id)

    def surviving(self, lease_id: str, wanted: Chain, unchanged: Unchanged) -> tuple[Chain, Blocks] | None:
        """What the lease still holds of `wanted`: a chain, and the blocks that hold its tokens.

        The longest prefix that its chain proves and whose blocks are all `unchanged(block_id, proof)`: all
        that was asked for, or whole segments of it. None for nothing. The lease stays as it is; whoever
        takes references to these blocks and grants it again forgets it here.
        """
        soft = self._leases.get(lease_id)
        if soft is None:
            return None
        proven = matched_tokens(soft.chain, wanted)
        if soft.exact_only:
            whole = proven == soft.chain.token_count and _first_changed(soft, None, unchanged) is None
            return (soft.chain, soft.blocks) if whole else None
        changed = _first_changed(soft, -(-proven // self.block_size), unchanged)
        if changed is not None:
            proven = changed * self.block_size // SEGMENT_TOKENS * SEGMENT_TOKENS
        if not proven:
            return None
        kept = -(-proven // self.block_size)
        return cut_chain(soft.chain, proven), tuple(group[:kept] for group in soft.blocks)

    def forget(self, lease_id: str) -> None:
        """The lease is held again, or nobody will ask for it."""
        soft = self._leases.pop(lease_id, None)
        if soft is not None:
            self._used_bytes -= soft.cost_bytes

    def clear(self) -> None:
        """Forget everything: the memory is not what it was."""
        self._leases.clear()
        self._used_bytes = 0

    def check_integrity(self) -> None:
        """AssertionError where the bounds or the books do not hold."""
        assert self._used_bytes == sum(soft.cost_bytes for soft in self._leases.values())
        assert len(self._leases) <= self.max_leases
        assert self._used_bytes <= self.max_bytes
        assert all(lease_id == soft.lease_id for lease_id, soft in self._leases.items())


def _first_changed(soft: SoftLease, until: int | None, unchanged: Unchanged) -> int | None:
    """The first place, of all groups, before `until` at which a block is not what it was; None if none."""
    first = until
    for blocks, proofs in zip(soft.blocks, soft.proofs, strict=True):
        for place, (block, proof) in enumerate(zip(blocks[:first], proofs, strict=False)):
            if not unchanged(block, proof):
                first = place
                break
    return None if first == until else first
