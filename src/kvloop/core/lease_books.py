"""What a lease table keeps, and what can be seen of it without changing it.

Each lease is in one table by its id, in the order of worth while nobody claims it, and among the deadlines
until it is known how it will end. What has ended comes out once.
"""

from kvloop.core.deadline import Deadlines
from kvloop.core.lease_claims import LiveClaims
from kvloop.core.lease_state import FINAL, FreedLease, Lease, LeaseState
from kvloop.core.lease_totals import HeldBlocks, LeaseTotals
from kvloop.core.worth import WorthOrder

UNLIMITED = 1 << 62


class LeaseBooks:
    """The books of a `LeaseTable`, which alone changes them."""

    def __init__(
        self,
        block_size: int,
        ttl_ns: int,
        claim_term_ns: int,
        max_leases: int,
        max_claims: int,
        *,
        incarnation: str = "",
        max_expiries: int = UNLIMITED,
    ) -> None:
        """`block_size` in tokens; `incarnation` is what claims must name (see `claim`); `max_expiries`: how
        many leases one call lets expire, beside the one that it names. Others that are due wait for the next
        call (`is_behind`), and count as held until then; but none of them is granted, renewed or given away.
        """
        if min(block_size, ttl_ns, claim_term_ns, max_leases, max_claims, max_expiries) <= 0:
            raise ValueError("block size, terms and bounds must be positive")
        self.block_size = block_size
        self.ttl_ns = ttl_ns
        self.claim_term_ns = claim_term_ns
        self.max_leases = max_leases
        self.incarnation = incarnation
        self.is_behind = False
        self._max_expiries = max_expiries
        self._leases: dict[str, Lease] = {}
        self._claims = LiveClaims(max_claims)
        self._lease_deadlines = Deadlines()
        self._freed: list[FreedLease] = []
        self._ended_total = {state: 0 for state in LeaseState if state in FINAL}
        self._unclaimed = WorthOrder()
        self._held = HeldBlocks()
        self._now_ns = 0
        self.totals = LeaseTotals()

    def __len__(self) -> int:
        """Leases that hold blocks."""
        return len(self._leases)

    def next_deadline_ns(self) -> int | None:
        """When `advance` will next have something to do, or None."""
        lease_ns, claim_ns = self._lease_deadlines.next_ns(), self._claims.next_ns()
        if lease_ns is None or (claim_ns is not None and claim_ns < lease_ns):
            return claim_ns
        return lease_ns

    def counts(self) -> dict[LeaseState, int]:
        """Leases now granted and claimed; of the final states, how many leases ever ended so."""
        granted = len(self._unclaimed)
        live = {LeaseState.GRANTED: granted, LeaseState.CLAIMED: len(self._leases) - granted}
        return live | self._ended_total

    def claim_count(self) -> int:
        """Live claims."""
        return len(self._claims)

    @property
    def held_blocks(self) -> int:
        """Block references held by leases; a block that two leases share counts twice."""
        return self._held.count

    def block_ids(self) -> set[int]:
        """The blocks that leases hold, each once, of all KV cache groups."""
        return {block for lease in self._leases.values() for group in lease.blocks for block in group}

    def least_worth(self) -> str | None:
        """The lease that could be reclaimed at the least expected loss (see `worth`), or None."""
        return self._unclaimed.least()

    def check_integrity(self) -> None:
        """AssertionError where the table contradicts itself."""
        due_ns = self._lease_deadlines.next_ns()
        assert self.is_behind or due_ns is None or due_ns > self._now_ns, "a lease outlives its term"
        self._lease_deadlines.check_integrity()
        self._claims.check_integrity(self._leases)
        for lease_id, lease in self._leases.items():
            assert lease.state is (LeaseState.CLAIMED if lease.claim_ids else LeaseState.GRANTED)
            assert lease.claim_ids or lease.ending is None, "a lease that should have ended is still there"
            assert (lease_id in self._lease_deadlines) is (lease.ending is None)
            assert lease.deadline_ns <= lease.last_use_ns + self.ttl_ns
        self._unclaimed.check_integrity({key: one for key, one in self._leases.items() if not one.claim_ids})
        assert self._held.count == sum(lease.block_count for lease in self._leases.values())
        assert sum(self._ended_total.values()) + len(self._leases) == self.totals.granted
        assert len(self._leases) <= self.max_leases
