"""The readers' holds on leases: each with a deadline at which it is over, whoever forgot to release it."""

from kvloop.core.deadline import Deadlines
from kvloop.core.lease_state import Claim, Lease


class LiveClaims:
    """Claims that are neither released nor past their deadline, `max_claims` at most."""

    def __init__(self, max_claims: int) -> None:
        self.max_claims = max_claims
        self._claims: dict[str, Claim] = {}
        self._deadlines = Deadlines()

    def __len__(self) -> int:
        return len(self._claims)

    def __contains__(self, claim_id: str) -> bool:
        return claim_id in self._claims

    @property
    def is_full(self) -> bool:
        """Whether one more would be too many."""
        return len(self._claims) >= self.max_claims

    def add(self, claim: Claim, deadline_ns: int) -> None:
        """A claim begins."""
        self._claims[claim.claim_id] = claim
        self._deadlines.set(claim.claim_id, deadline_ns)
        claim.lease.claim_ids.add(claim.claim_id)

    def end(self, claim_id: str) -> Lease | None:
        """End a claim: the lease that it was on, or None where there is no such claim."""
        claim = self._claims.pop(claim_id, None)
        if claim is None:
            return None
        self._deadlines.discard(claim_id)
        claim.lease.claim_ids.remove(claim_id)
        return claim.lease

    def end_due(self, now_ns: int) -> Lease | None:
        """End the earliest claim whose deadline has come: the lease that it was on; None if there is none."""
        claim_id = self._deadlines.pop_due(now_ns)
        return None if claim_id is None else self.end(claim_id)

    def next_ns(self) -> int | None:
        """The earliest deadline, or None."""
        return self._deadlines.next_ns()

    def check_integrity(self, leases: dict[str, Lease]) -> None:
        """AssertionError where claims and leases do not know each other, or a claim would pin for ever."""
        self._deadlines.check_integrity()
        assert self._claims.keys() == set(self._deadlines), "a claim without a deadline"
        by_lease: dict[str, set[str]] = {lease_id: set() for lease_id in leases}
        for claim_id, claim in self._claims.items():
            assert leases.get(claim.lease.lease_id) is claim.lease, "a claim on a lease that is gone"
            by_lease[claim.lease.lease_id].add(claim_id)
        assert all(lease.claim_ids == by_lease[lease_id] for lease_id, lease in leases.items())
        assert len(self._claims) <= self.max_claims
