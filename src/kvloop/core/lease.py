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
from kvloop.core.lease_books import UNLIMITED as UNLIMITED
from kvloop.core.lease_books import LeaseBooks
from kvloop.core.lease_state import ENDING_REFUSALS, FINAL, Claim, Lease
from kvloop.core.lease_state import TRANSITIONS as TRANSITIONS
from kvloop.core.lease_state import Blocks as Blocks
from kvloop.core.lease_state import ClaimGranted as ClaimGranted
from kvloop.core.lease_state import ClaimRefused as ClaimRefused
from kvloop.core.lease_state import FreedLease as FreedLease
from kvloop.core.lease_state import LeaseEvent as LeaseEvent
from kvloop.core.lease_state import LeaseState as LeaseState
from kvloop.core.lease_state import RefusalReason as RefusalReason
from kvloop.core.lease_totals import GRANTED
from kvloop.core.worth import UNRATED_CHANCE, checked_chance


class LeaseTable(LeaseBooks):
    """All leases of one decode engine. Times are nanoseconds of one monotonic clock."""

    def grant(
        self,
        lease_id: str,
        chain: Chain,
        blocks: Blocks,
        now_ns: int,
        term_ns: int,
        exact_only: bool = False,
        chance: int = UNRATED_CHANCE,
    ) -> bool:
        """Take over one reference to each of `blocks`, which hold the KV of `chain`'s tokens.

        The references come back through `take_freed` in every case, also when the table is full: then
        the answer is False and they come back at once. `exact_only`: a hybrid model's groups, of which
        nothing less than everything can be used. `chance`: permille that the conversation returns. An id may
        be granted again once its lease has ended. ValueError for one in use, or too few blocks.
        """
        self.advance(now_ns)
        if self._find(lease_id) is not None:
            raise ValueError(f"lease {lease_id!r} is there already")
        needed = -(-chain.token_count // self.block_size)
        if not blocks or (not exact_only and min(map(len, blocks)) < needed):
            raise ValueError(f"{chain.token_count} tokens need {needed} blocks in each group")
        checked_chance(chance)
        if term_ns <= 0:
            raise ValueError("a term must be positive")
        deadline_ns = self._now_ns + min(term_ns, self.ttl_ns)
        self.totals.granted += 1
        serial = self.totals.granted
        lease = Lease(lease_id, chain, blocks, exact_only, deadline_ns, self._now_ns, chance, serial)
        self._leases[lease_id] = lease
        self._unclaimed.put(lease)
        self._held.change(lease.block_count, self._now_ns)
        while self.is_behind and len(self._leases) > self.max_leases:
            self._expire()
        if len(self._leases) > self.max_leases:
            self.totals.not_held += 1
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
            return self.totals.refused(refusal)
        lease = self._leases[lease_id]
        if lease.chain.root != wanted.root:
            return self.totals.refused(RefusalReason.WRONG_ROOT)
        matched = matched_tokens(lease.chain, wanted)
        if matched == 0:
            return self.totals.refused(RefusalReason.NO_MATCH)
        if lease.exact_only and matched != lease.chain.token_count:
            return self.totals.refused(RefusalReason.NOT_EXACT)
        self.totals.claims[GRANTED] += 1
        lease.state = TRANSITIONS[lease.state, LeaseEvent.CLAIM]
        self._unclaimed.drop(lease_id)
        lease.last_use_ns = self._now_ns
        self._claims.add(Claim(claim_id, lease, reader), self._now_ns + self.claim_term_ns)
        return ClaimGranted(claim_id, matched, lease.lent(matched, self.block_size), self.claim_term_ns)

    def release(self, claim_id: str, now_ns: int) -> bool:
        """End a claim. False if it has ended already, or never was: harmless."""
        self.advance(now_ns)
        lease = self._claims.end(claim_id)
        if lease is None:
            return False
        lease.last_use_ns = self._now_ns
        self._unclaim(lease)
        return True

    def renew(self, lease_id: str, now_ns: int, term_ns: int, chance: int | None = None) -> bool:
        """Let a lease last `term_ns` from now, within its TTL; never shorten it. False if it is gone.

        `chance`: what is thought of its return now, in permille; None leaves it.
        """
        self.advance(now_ns)
        lease = self._find(lease_id)
        if lease is None or lease.ending is not None:
            self.totals.renewals_lost += 1
            return False
        lease.state = TRANSITIONS[lease.state, LeaseEvent.RENEW]
        if chance is not None and chance != lease.chance:
            lease.chance = checked_chance(chance)
            if lease.state is LeaseState.GRANTED:
                self._unclaimed.put(lease)
        self.totals.renewed += 1
        capped_ns = min(self._now_ns + term_ns, lease.last_use_ns + self.ttl_ns)
        if capped_ns > lease.deadline_ns:
            lease.deadline_ns = capped_ns
            self._lease_deadlines.set(lease_id, capped_ns)
        return True

    def drop(self, lease_id: str, now_ns: int, is_over: bool = False) -> bool:
        """End a lease; `is_over`: nobody will ask for it again. A claimed one ends with its last claim.

        False for one that is gone, or has been dropped.
        """
        self.advance(now_ns)
        if (lease := self._find(lease_id)) is None:
            return False
        lease.is_void |= is_over
        return self._end(lease, LeaseEvent.DROP)

    def drop_all(self, now_ns: int) -> int:
        """Drop every lease, for what their blocks hold is void; how many that were."""
        self.advance(now_ns)
        while self.is_behind:
            self._expire()
        for lease in self._leases.values():
            lease.is_void = True
        return sum(self._end(lease, LeaseEvent.DROP) for lease in list(self._leases.values()))

    def reclaim(self, lease_id: str, now_ns: int) -> bool:
        """End a lease because live work needs its memory. False if it is gone, or claimed."""
        self.advance(now_ns)
        lease = self._find(lease_id)
        if lease is None or (lease.state, LeaseEvent.RECLAIM) not in TRANSITIONS:
            return False
        return self._end(lease, LeaseEvent.RECLAIM)

    def advance(self, now_ns: int) -> None:
        """Let deadlines up to `now_ns` pass. A time before one already seen counts as that one."""
        if now_ns <= self._now_ns and not self.is_behind:  # all that came since is due later
            return
        self._now_ns = max(self._now_ns, now_ns)
        while (lease := self._claims.end_due(self._now_ns)) is not None:
            self._unclaim(lease)
        self._expire()

    def take_freed(self) -> list[FreedLease]:
        """The leases that have ended since the last call, each once: give their blocks back."""
        if not self._freed:  # asked far more often than anything has ended
            return []
        freed, self._freed = self._freed, []
        return freed

    def held_block_ns(self, now_ns: int) -> int:
        """Block references held, times for how many nanoseconds, since the table was made."""
        self.advance(now_ns)
        return self._held.block_ns(self._now_ns)

    def state(self, lease_id: str) -> LeaseState | None:
        """GRANTED, CLAIMED, or None for a lease that is gone."""
        return None if (lease := self._find(lease_id)) is None else lease.state

    def deadline_ns(self, lease_id: str) -> int | None:
        """When the lease's term ends unless it is renewed, or None for a lease that is gone."""
        return None if (lease := self._find(lease_id)) is None else lease.deadline_ns

    def _refusal(self, lease_id: str, claim_id: str, incarnation: str) -> RefusalReason | None:
        if incarnation != self.incarnation:
            return RefusalReason.WRONG_INCARNATION
        if (lease := self._find(lease_id)) is None:
            return RefusalReason.UNKNOWN_LEASE
        if lease.ending is not None:
            return ENDING_REFUSALS[lease.ending]
        if claim_id in self._claims:
            return RefusalReason.DUPLICATE_CLAIM
        if self._claims.is_full:
            return RefusalReason.TOO_MANY_CLAIMS
        return None

    def _find(self, lease_id: str) -> Lease | None:
        lease = self._leases.get(lease_id)
        if lease is not None and lease.ending is None and lease.deadline_ns <= self._now_ns:
            self._end(lease, LeaseEvent.EXPIRE)
            return self._leases.get(lease_id)
        return lease

    def _expire(self) -> None:
        for _ in range(self._max_expiries):
            lease_id = self._lease_deadlines.pop_due(self._now_ns)
            if lease_id is None:
                self.is_behind = False
                return
            self._end(self._leases[lease_id], LeaseEvent.EXPIRE)
        self.is_behind = True

    def _unclaim(self, lease: Lease) -> None:
        if lease.claim_ids:
            return
        lease.state = TRANSITIONS[lease.state, LeaseEvent.UNCLAIM]
        self._unclaimed.put(lease)
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
        self._unclaimed.drop(lease.lease_id)
        self._held.change(-lease.block_count, self._now_ns)
        self._ended_total[lease.state] += 1
        self._freed.append(lease.freed())
        return True
