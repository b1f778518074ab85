"""The leases of one decode engine and the blocks that they hold, between two threads.

The lease table is shared: the control thread answers claims from it, under a lock, without waiting for a
model step. The blocks belong to the scheduler's thread. So a lease that ends on the control thread gives its
blocks back on the scheduler's next call, or where many end at once in one of the next (see `ended`), and a
lease that has ended can be had again only there.

A lease that has ended is *soft*: its blocks are free, and what they hold is remembered by proof. Until vLLM
hands them out they are as good as ever, and a claim on the lease takes them up again: as many from the first
on as still hold what they held. Where everything was dropped because weights or memory are not what they
were, nothing stays soft.
"""

import secrets
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvloop.connector.blocks import PoolBlocks
from kvloop.connector.ended import EndedLeases
from kvloop.connector.settings import NS_PER_S, Settings
from kvloop.core.chain import Chain
from kvloop.core.lease import FreedLease, LeaseTable
from kvloop.core.soft import SoftTable

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

logger = init_logger("vllm.kvloop.leases")

MAX_LEASES = 100_000
MAX_CLAIMS = 10_000
MAX_EXPIRIES = 500
"""In one call: some 4 ms. Those of a router that is gone end together."""
STEP_COST_BLOCKS = 2_000
"""What one step gives back: some 3 ms of the scheduler's thread, whose steps take ten and more under load. So
45,000 blocks of 9,000 leases are free within 45 steps."""
LOG_EVERY_NS = 10 * NS_PER_S
"""Leases give way in bursts; an operator wants to know that they do, not each of them."""


class Leases:
    """All leases of one engine, soft ones too. `lock` guards `table`, for whoever answers peers; the methods
    take it themselves, and are for the scheduler's thread."""

    def __init__(self, settings: Settings, *, block_size: int, incarnation: str) -> None:
        self.lock = threading.Lock()
        self.table = LeaseTable(
            block_size=block_size,
            ttl_ns=settings.lease_ttl_ns,
            claim_term_ns=settings.claim_term_ns,
            max_leases=MAX_LEASES,
            max_claims=MAX_CLAIMS,
            incarnation=incarnation,
            max_expiries=MAX_EXPIRIES,
        )
        self._term_ns = settings.lease_term_ns
        self._max_share = settings.max_retained_share
        self._soft = SoftTable(block_size)
        self._blocks: PoolBlocks | None = None
        self._ended = EndedLeases()
        self._held: dict[str, tuple[int, ...]] = {}
        self._reclaimed_leases = self._reclaimed_blocks = 0
        self._logged_ns = self._full_logged_ns = -LOG_EVERY_NS

    def bind(self, pool: "BlockPool") -> PoolBlocks:
        """Take the block pool whose references leases hold."""
        self._blocks = PoolBlocks(pool)
        return self._blocks

    @property
    def max_blocks(self) -> int:
        """How many references leases may hold in all: the operator's share of the pool."""
        return 0 if self._blocks is None else int(self._max_share * self._blocks.total)

    def grant(self, chain: Chain, block_ids: tuple[int, ...]) -> str | None:
        """Lease these blocks; the lease's id, or None where there is no room for it."""
        lease_id = secrets.token_hex(8)
        with self.lock:
            if self._take(lease_id, chain, block_ids, time.monotonic_ns()):
                return lease_id
            self._soft.forget(lease_id)
        return None

    def grant_soft(self, chain: Chain, block_ids: tuple[int, ...]) -> str | None:
        """Lease these blocks and let them go at once: live work lacks blocks. What they hold can be had until
        they are handed out, and vLLM frees them when and in the order that it would have anyway."""
        pool_blocks = self._blocks
        lease_id = secrets.token_hex(8)
        if pool_blocks is None:
            return None
        now_ns = time.monotonic_ns()
        with self.lock:
            pool_blocks.touch(block_ids)
            self._held[lease_id] = block_ids
            self.table.grant(lease_id, chain, (block_ids,), now_ns, self._term_ns)
            self.table.reclaim(lease_id, now_ns)
            self._give_back_one(lease_id)
            return lease_id if self.is_soft(lease_id) else None

    def revive(self, lease_id: str, wanted: Chain) -> bool:
        """Lease what a soft lease still holds of `wanted`, under its old id. False where nothing is left."""
        pool_blocks = self._blocks
        with self.lock:
            self._give_back_one(lease_id)
            if pool_blocks is None or self.table.state(lease_id) is not None:
                return False
            found = self._soft.surviving(lease_id, wanted, pool_blocks.unchanged)
            return found is not None and self._take(lease_id, found[0], found[1][0], time.monotonic_ns())

    def _take(self, lease_id: str, chain: Chain, block_ids: tuple[int, ...], now_ns: int) -> bool:
        pool_blocks, limit = self._blocks, self.max_blocks
        if pool_blocks is None or len(block_ids) > limit:
            return False
        self.note_ended()
        while self.table.held_blocks + self._ended.block_count + len(block_ids) > limit:
            if not self._free_one(now_ns):
                return False
        pool_blocks.touch(block_ids)
        self._held[lease_id] = block_ids
        self._soft.forget(lease_id)
        granted = self.table.grant(lease_id, chain, (block_ids,), now_ns, self._term_ns)
        if not granted:
            self._log_full(now_ns)
            self._give_back_one(lease_id)
        return granted

    def make_room(self, blocks_missing: int) -> bool:
        """Give back what has ended, then let unclaimed leases go, those of least expected value first, until
        so many blocks more are free or none is left. Whether any block was freed."""
        pool_blocks = self._blocks
        if pool_blocks is None:
            return False
        free_before = pool_blocks.free
        now_ns = time.monotonic_ns()
        with self.lock:
            self.note_ended()
            while pool_blocks.free < free_before + blocks_missing and self._free_one(now_ns):
                pass
        freed = pool_blocks.free - free_before
        self._log_reclaimed(freed, now_ns)
        return freed > 0

    def drop(self, lease_id: str, now_ns: int, is_over: bool) -> bool:
        """End a lease; `is_over`: nobody will ask for it, held or soft. Whether it was held. For whoever
        holds the lock, on any thread."""
        if is_over:
            self._soft.forget(lease_id)
            self._ended.void(lease_id)
        return self.table.drop(lease_id, now_ns, is_over)

    def _free_one(self, now_ns: int) -> bool:
        """Give the blocks of one lease back: of one that has ended, or else of the one of least worth."""
        while self.table.is_behind and not len(self._ended):
            self.note_ended()
        if not len(self._ended):
            victim = self.table.least_worth()
            if victim is None or not self.table.reclaim(victim, now_ns):
                return False
            self._reclaimed_leases += 1
            self.note_ended()
        self._return(self._ended.take_some(0))
        return True

    def _log_reclaimed(self, blocks: int, now_ns: int) -> None:
        self._reclaimed_blocks += blocks
        if self._reclaimed_leases and now_ns - self._logged_ns >= LOG_EVERY_NS:
            logger.info(
                "live work took %d blocks back from %d leases; %d are left",
                self._reclaimed_blocks,
                self._reclaimed_leases,
                len(self.table),
            )
            self._reclaimed_leases = self._reclaimed_blocks = 0
            self._logged_ns = now_ns

    def _log_full(self, now_ns: int) -> None:
        if now_ns - self._full_logged_ns >= LOG_EVERY_NS:
            logger.warning("the lease table is full (%d leases): turns are not retained", len(self.table))
            self._full_logged_ns = now_ns

    def give_back(self) -> bool:
        """Return blocks of leases that have ended to the pool: a step's worth. Whether more are left."""
        with self.lock:
            self.note_ended()
            self._return(self._ended.take_some(STEP_COST_BLOCKS))
            return len(self._ended) > 0 or self.table.is_behind

    def _give_back_one(self, lease_id: str) -> None:
        self.note_ended()
        freed = self._ended.take(lease_id)
        self._return([] if freed is None else [freed])

    def _return(self, ended: list[FreedLease]) -> None:
        """These leases' blocks are the pool's again; what they hold is remembered."""
        pool_blocks = self._blocks
        if pool_blocks is None or not ended:
            return
        for freed in ended:
            self._soft.keep(freed, (pool_blocks.proofs(freed.blocks[0]),))
            del self._held[freed.lease_id]
        pool_blocks.give_back(*[freed.blocks[0] for freed in ended])

    @property
    def is_behind(self) -> bool:
        """Whether more has ended than a step gives back."""
        return self._ended.cost > STEP_COST_BLOCKS or self.table.is_behind

    def note_ended(self) -> None:
        """Let deadlines pass, and note what has ended. For whoever holds the lock, on any thread."""
        self.table.advance(time.monotonic_ns())
        for freed in self.table.take_freed():
            self._ended.add(freed)

    def is_soft(self, lease_id: str) -> bool:
        """Whether a lease that cannot be claimed may be had again. For whoever holds the lock."""
        if (freed := self._ended.get(lease_id)) is not None:
            return not freed.is_void
        return self._soft.get(lease_id) is not None

    def soft_count(self) -> int:
        """Leases that may be had again. For whoever holds the lock."""
        return len(self._soft) + len(self._ended)

    def drop_all(self, incarnation: str | None = None) -> None:
        """End every lease, soft ones for good: what blocks hold is not worth anything any more. Claimed
        blocks follow when their claims end. A new `incarnation` voids the handles, too."""
        with self.lock:
            self.table.drop_all(time.monotonic_ns())
            self.note_ended()
            self._return(self._ended.take_all())
            self._soft.clear()
            if incarnation is not None:
                self.table.incarnation = incarnation

    def held(self) -> Iterator[tuple[int, ...]]:
        """The blocks to which each lease holds a reference."""
        return iter(self._held.values())

    def holds_blocks(self) -> bool:
        """Whether any lease, claimed or not, holds blocks."""
        return bool(self._held)

    def check_integrity(self) -> None:
        """AssertionError where leases and blocks contradict each other."""
        with self.lock:
            self.note_ended()
            self.table.check_integrity()
            self._soft.check_integrity()
            self._ended.check_integrity()
            held = sum(len(block_ids) for block_ids in self._held.values())
            assert held == self.table.held_blocks + self._ended.block_count, "blocks are held for no lease"
            assert len(self._held) == len(self.table) + len(self._ended)
