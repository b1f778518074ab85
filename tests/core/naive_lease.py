"""A lease table that a child could check: it keeps every lease and claim for ever and scans them all."""

from dataclasses import dataclass

SEGMENT_TOKENS = 64


@dataclass
class NaiveLease:
    """Tokens and a tenant in place of digests."""

    lease_id: str
    tenant: str
    tokens: list[int]
    blocks: tuple[tuple[int, ...], ...]
    exact_only: bool
    deadline: int
    last_use: int
    chance: int = 500
    doom: str = ""
    is_out: bool = False


@dataclass
class NaiveClaim:
    """Live until it is released or `deadline` is there."""

    claim_id: str
    lease: NaiveLease
    deadline: int
    is_released: bool = False


class NaiveTable:
    """The same answers as LeaseTable's, from full scans."""

    def __init__(self, block_size: int, ttl: int, claim_term: int, max_leases: int, max_claims: int) -> None:
        self.block_size, self.ttl, self.claim_term = block_size, ttl, claim_term
        self.max_leases, self.max_claims = max_leases, max_claims
        self.leases: list[NaiveLease] = []
        self.claims: list[NaiveClaim] = []
        self.out: list[tuple[str, str, tuple[tuple[int, ...], ...]]] = []
        self.now = 0
        self.block_ns = 0

    def live_claims(self, lease: NaiveLease | None = None) -> list[NaiveClaim]:
        """Claims neither released nor past their deadline, of one lease or of all."""
        mine = [claim for claim in self.claims if lease is None or claim.lease is lease]
        return [claim for claim in mine if not claim.is_released and self.now < claim.deadline]

    def find(self, lease_id: str) -> NaiveLease | None:
        """The lease that still holds its blocks under this id."""
        found = [lease for lease in self.leases if lease.lease_id == lease_id and not lease.is_out]
        return found[0] if found else None

    def settle(self, now: int) -> None:
        """Doom what is due, and let out what is doomed and unclaimed."""
        held = sum(len(group) for lease in self.leases if not lease.is_out for group in lease.blocks)
        self.block_ns += held * max(0, now - self.now)
        self.now = max(self.now, now)
        for lease in self.leases:
            if not lease.is_out and not lease.doom and self.now >= lease.deadline:
                lease.doom = "expired"
            if not lease.is_out and lease.doom and not self.live_claims(lease):
                lease.is_out = True
                self.out.append((lease.lease_id, lease.doom, lease.blocks))

    def grant(self, lease: NaiveLease) -> bool:
        """Whether there was room."""
        self.settle(self.now)
        has_room = len([held for held in self.leases if not held.is_out]) < self.max_leases
        if not has_room:
            lease.doom = "reclaimed"
        self.leases.append(lease)
        self.settle(self.now)
        return has_room

    def claim(self, lease_id: str, claim_id: str, tenant: str, wanted: list[int]) -> tuple[int, object] | str:
        """(matched tokens, blocks), or the reason for a refusal."""
        lease = self.find(lease_id)
        if lease is None:
            return "unknown_lease"
        if lease.doom:
            return lease.doom
        if claim_id in [claim.claim_id for claim in self.live_claims()]:
            return "duplicate_claim"
        if len(self.live_claims()) >= self.max_claims:
            return "too_many_claims"
        if lease.tenant != tenant:
            return "wrong_root"
        matched = self.match(lease.tokens, wanted)
        if matched == 0:
            return "no_match"
        if lease.exact_only and matched < len(lease.tokens):
            return "not_exact"
        lease.last_use = self.now
        self.claims.append(NaiveClaim(claim_id, lease, self.now + self.claim_term))
        needed = (matched + self.block_size - 1) // self.block_size
        return matched, lease.blocks if lease.exact_only else tuple(group[:needed] for group in lease.blocks)

    def release(self, claim_id: str) -> bool:
        """Whether the claim was live."""
        found = [claim for claim in self.live_claims() if claim.claim_id == claim_id]
        for claim in found:
            claim.is_released = True
            claim.lease.last_use = self.now
        self.settle(self.now)
        return bool(found)

    def renew(self, lease_id: str, term: int, chance: int | None) -> bool:
        """Whether the lease was there and is to stay."""
        lease = self.find(lease_id)
        if lease is None or lease.doom:
            return False
        lease.chance = lease.chance if chance is None else chance
        lease.deadline = max(lease.deadline, min(self.now + term, lease.last_use + self.ttl))
        return True

    def end(self, lease_id: str, doom: str) -> bool:
        """Drop or reclaim a lease."""
        lease = self.find(lease_id)
        if lease is None or lease.doom or (doom == "reclaimed" and self.live_claims(lease)):
            return False
        lease.doom = doom
        self.settle(self.now)
        return True

    def least_worth(self) -> str | None:
        """The unclaimed lease of least worth; of equals the one used, then granted, first."""
        unclaimed = [lease for lease in self.leases if not lease.is_out and not self.live_claims(lease)]

        def worth(lease: NaiveLease) -> int:
            return lease.chance * len(lease.tokens) // sum(len(group) for group in lease.blocks)

        ranked = sorted(unclaimed, key=lambda lease: (worth(lease), lease.last_use))
        return ranked[0].lease_id if ranked else None

    @staticmethod
    def match(held: list[int], wanted: list[int]) -> int:
        """Token by token."""
        common = 0
        while common < min(len(held), len(wanted)) and held[common] == wanted[common]:
            common += 1
        is_exact = common == len(held) == len(wanted)
        return common if is_exact else common // SEGMENT_TOKENS * SEGMENT_TOKENS
