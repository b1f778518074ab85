"""What decode keeps for the next turn: leases on blocks, and the claims of those who read them.

A lease owns one reference to each of its blocks, from `grant` until it comes out of `take_freed`, once.
It ends when its term passes (never later than `ttl_ns` after its last use), when it is dropped, or when
live work reclaims it. A claim lends the blocks of a proven prefix to one reader until it is released or
its deadline passes; a lease may have any number of claims at a time, and while it has one its blocks do
not come out, whatever happens (Gray and Cheriton, Leases, SOSP 1989: both sides count a term, nobody has
to be reached). Deadlines are half-open: at the deadline it is over.

The table is not thread-safe; its caller holds a lock around each call.
"""

from kvloop.core.chain import Chain, matched_tokens
from kvloop.core.deadline import Deadlines
from kvloop.core.lease_state import FINAL, Claim, Lease
from kvloop.core.lease_state import TRANSITIONS as TRANSITIONS
from kvloop.core.lease_state import Blocks as Blocks
from kvloop.core.lease_state import ClaimGranted as ClaimGranted
from kvloop.core.lease_state import ClaimRefused as ClaimRefused
from kvloop.core.lease_state import FreedLease as FreedLease
from kvloop.core.lease_state import LeaseEvent as LeaseEvent
from kvloop.core.lease_state import LeaseState as LeaseState
from kvloop.core.lease_state import RefusalReason as RefusalReason


class LeaseTable:
    """All leases of one decode engine. Times are nanoseconds of one monotonic clock."""

    def __init__(
        self,
        block_size: int,
        ttl_ns: int,
        claim_term_ns: int,
        max_leases: int,
        max_claims: int,
        *,
        incarnation: str = "",
    ) -> None:
        """`block_size` in tokens; `incarnation` is what claims must name (see `claim`)."""
        if min(block_size, ttl_ns, claim_term_ns, max_leases, max_claims) <= 0:
            raise ValueError("block size, terms and bounds must be positive")
        self.block_size = block_size
        self.ttl_ns = ttl_ns
        self.claim_term_ns = claim_term_ns
        self.max_leases = max_leases
        self.max_claims = max_claims
        self.incarnation = incarnation
        self._leases: dict[str, Lease] = {}
        self._claims: dict[str, Claim] = {}
        self._lease_deadlines = Deadlines()
        self._claim_deadlines = Deadlines()
        self._freed: list[FreedLease] = []
        self._ended_total = {state: 0 for state in LeaseState if state in FINAL}
        self._unclaimed: dict[str, None] = {}  # in order of last use
        self._held_blocks = 0
        self._now_ns = 0

    def __len__(self) -> int:
        """Leases that hold blocks."""
        return len(self._leases)

    def grant(
        self,
        lease_id: str,
        chain: Chain,
        blocks: Blocks,
        now_ns: int,
        term_ns: int,
        exact_only: bool = False,
    ) -> bool:
        """Take over one reference to each of `blocks`, which hold the KV of `chain`'s tokens.

        The references come back through `take_freed` in every case, also when the table is full: then
        the answer is False and they come back at once. `exact_only`: a hybrid model's groups, of which
        nothing less than everything can be used. ValueError for a lease id in use, or too few blocks.
        """
        self.advance(now_ns)
        if lease_id in self._leases:
            raise ValueError(f"lease {lease_id!r} is there already")
        needed = -(-chain.token_count // self.block_size)
        if not blocks or (not exact_only and min(len(group) for group in blocks) < needed):
            raise ValueError(f"{chain.token_count} tokens need {needed} blocks in each group")
        if term_ns <= 0:
            raise ValueError("a term must be positive")
        deadline_ns = self._now_ns + min(term_ns, self.ttl_ns)
        lease = Lease(lease_id, chain, blocks, exact_only, deadline_ns, self._now_ns)
        self._leases[lease_id] = lease
        self._unclaimed[lease_id] = None
        self._held_blocks += _count(blocks)
        if len(self._leases) > self.max_leases:
            self._end(lease, LeaseEvent.RECLAIM)
            return False
        self._lease_deadlines.set(lease_id, deadline_ns)
        return True

    def claim(
        self,
        lease_id: str,
        claim_id: str,
        wanted: Chain,
        reader: str,
        now_ns: int,
        *,
        incarnation: str = "",
    ) -> ClaimGranted | ClaimRefused:
        """Lend `reader` the blocks of the longest prefix of `wanted` that the lease proves.

        `claim_id` must never have been used before, by this engine or the one before it at its address:
        a stray release of an earlier claim must not end this one.
        """
        self.advance(now_ns)
        refusal = self._refusal(lease_id, claim_id, incarnation)
        if refusal is not None:
            return ClaimRefused(refusal)
        lease = self._leases[lease_id]
        if lease.chain.root != wanted.root:
            return ClaimRefused(RefusalReason.WRONG_ROOT)
        matched = matched_tokens(lease.chain, wanted)
        if matched == 0:
            return ClaimRefused(RefusalReason.NO_MATCH)
        if lease.exact_only and matched != lease.chain.token_count:
            return ClaimRefused(RefusalReason.NOT_EXACT)
        lease.state = TRANSITIONS[lease.state, LeaseEvent.CLAIM]
        lease.claim_ids.add(claim_id)
        self._unclaimed.pop(lease_id, None)
        lease.last_use_ns = self._now_ns
        self._claims[claim_id] = Claim(claim_id, lease, reader)
        self._claim_deadlines.set(claim_id, self._now_ns + self.claim_term_ns)
        return ClaimGranted(claim_id, matched, self._lent(lease, matched), self.claim_term_ns)

    def release(self, claim_id: str, now_ns: int) -> bool:
        """End a claim. False if it has ended already, or never was: harmless."""
        self.advance(now_ns)
        claim = self._claims.get(claim_id)
        if claim is None:
            return False
        claim.lease.last_use_ns = self._now_ns
        self._claim_deadlines.discard(claim_id)
        self._end_claim(claim)
        return True

    def renew(self, lease_id: str, now_ns: int, term_ns: int) -> bool:
        """Let a lease last `term_ns` from now, within its TTL; never shorten it. False if it is gone."""
        self.advance(now_ns)
        lease = self._leases.get(lease_id)
        if lease is None or lease.ending is not None:
            return False
        lease.state = TRANSITIONS[lease.state, LeaseEvent.RENEW]
        capped_ns = min(self._now_ns + term_ns, lease.last_use_ns + self.ttl_ns)
        if capped_ns > lease.deadline_ns:
            lease.deadline_ns = capped_ns
            self._lease_deadlines.set(lease_id, capped_ns)
        return True

    def drop(self, lease_id: str, now_ns: int) -> bool:
        """End a lease: its conversation is over. A claimed one ends with its last claim. False if gone."""
        self.advance(now_ns)
        lease = self._leases.get(lease_id)
        return lease is not None and self._end(lease, LeaseEvent.DROP)

    def drop_all(self, now_ns: int) -> int:
        """Drop every lease; how many that were."""
        self.advance(now_ns)
        return sum(self._end(lease, LeaseEvent.DROP) for lease in list(self._leases.values()))

    def reclaim(self, lease_id: str, now_ns: int) -> bool:
        """End a lease because live work needs its memory. False if it is gone, or claimed."""
        self.advance(now_ns)
        lease = self._leases.get(lease_id)
        if lease is None or (lease.state, LeaseEvent.RECLAIM) not in TRANSITIONS:
            return False
        return self._end(lease, LeaseEvent.RECLAIM)

    def advance(self, now_ns: int) -> None:
        """Let deadlines up to `now_ns` pass. A time before one already seen counts as that one."""
        self._now_ns = max(self._now_ns, now_ns)
        while (claim_id := self._claim_deadlines.pop_due(self._now_ns)) is not None:
            self._end_claim(self._claims[claim_id])
        while (lease_id := self._lease_deadlines.pop_due(self._now_ns)) is not None:
            self._end(self._leases[lease_id], LeaseEvent.EXPIRE)

    def take_freed(self) -> list[FreedLease]:
        """The leases that have ended since the last call, each once: give their blocks back."""
        freed, self._freed = self._freed, []
        return freed

    def next_deadline_ns(self) -> int | None:
        """When `advance` will next have something to do, or None."""
        pending = (self._lease_deadlines.next_ns(), self._claim_deadlines.next_ns())
        return min((deadline_ns for deadline_ns in pending if deadline_ns is not None), default=None)

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
        return self._held_blocks

    def oldest_unclaimed(self) -> str | None:
        """The lease that could be reclaimed and was used least recently, or None."""
        return next(iter(self._unclaimed), None)

    def state(self, lease_id: str) -> LeaseState | None:
        """GRANTED, CLAIMED, or None for a lease that is gone."""
        lease = self._leases.get(lease_id)
        return None if lease is None else lease.state

    def deadline_ns(self, lease_id: str) -> int | None:
        """When the lease's term ends unless it is renewed, or None for a lease that is gone."""
        lease = self._leases.get(lease_id)
        return None if lease is None else lease.deadline_ns

    def check_integrity(self) -> None:
        """AssertionError where the table contradicts itself."""
        self._lease_deadlines.check_integrity()
        self._claim_deadlines.check_integrity()
        by_lease: dict[str, set[str]] = {}
        for claim_id, claim in self._claims.items():
            by_lease.setdefault(claim.lease.lease_id, set()).add(claim_id)
            assert claim_id in self._claim_deadlines, "a claim without a deadline would pin for ever"
        assert by_lease.keys() <= self._leases.keys(), "a claim on a lease that is gone"
        for lease_id, lease in self._leases.items():
            claimed = bool(lease.claim_ids)
            assert lease.claim_ids == by_lease.get(lease_id, set())
            assert lease.state is (LeaseState.CLAIMED if claimed else LeaseState.GRANTED)
            assert claimed or lease.ending is None, "a lease that should have ended is still there"
            assert (lease_id in self._lease_deadlines) is (lease.ending is None)
            assert (lease_id in self._unclaimed) is not claimed
            assert lease.deadline_ns <= lease.last_use_ns + self.ttl_ns
        assert self._held_blocks == sum(_count(lease.blocks) for lease in self._leases.values())
        assert len(self._leases) <= self.max_leases
        assert len(self._claims) <= self.max_claims

    def _refusal(self, lease_id: str, claim_id: str, incarnation: str) -> RefusalReason | None:
        lease = self._leases.get(lease_id)
        if incarnation != self.incarnation:
            return RefusalReason.WRONG_INCARNATION
        if lease is None:
            return RefusalReason.UNKNOWN_LEASE
        if lease.ending is not None:
            expiring = lease.ending is LeaseEvent.EXPIRE
            return RefusalReason.EXPIRED if expiring else RefusalReason.RELEASED
        if claim_id in self._claims:
            return RefusalReason.DUPLICATE_CLAIM
        if len(self._claims) >= self.max_claims:
            return RefusalReason.TOO_MANY_CLAIMS
        return None

    def _lent(self, lease: Lease, matched: int) -> Blocks:
        if lease.exact_only:
            return lease.blocks
        needed = -(-matched // self.block_size)
        return tuple(group[:needed] for group in lease.blocks)

    def _end_claim(self, claim: Claim) -> None:
        del self._claims[claim.claim_id]
        lease = claim.lease
        lease.claim_ids.remove(claim.claim_id)
        if lease.claim_ids:
            return
        lease.state = TRANSITIONS[lease.state, LeaseEvent.UNCLAIM]
        self._unclaimed[lease.lease_id] = None
        if lease.ending is not None:
            ending, lease.ending = lease.ending, None
            self._end(lease, ending)

    def _end(self, lease: Lease, event: LeaseEvent) -> bool:
        if lease.ending is not None:
            return False
        lease.state = TRANSITIONS[lease.state, event]
        self._lease_deadlines.discard(lease.lease_id)
        if lease.state not in FINAL:
            lease.ending = event
            return True
        del self._leases[lease.lease_id]
        del self._unclaimed[lease.lease_id]
        self._held_blocks -= _count(lease.blocks)
        self._ended_total[lease.state] += 1
        self._freed.append(FreedLease(lease.lease_id, lease.state, lease.blocks))
        return True


def _count(blocks: Blocks) -> int:
    return sum(len(group) for group in blocks)
