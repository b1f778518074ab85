"""The states of a lease, and the answers to a claim.

The table is the machine: a pair that is not in it is an illegal move. While readers hold claims nothing
ends a lease: expiring or dropping it then only marks how it will end, and the end comes with the last
claim's. Reclaiming a claimed lease is not in the table at all.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from kvloop.core.chain import Chain


class LeaseState(StrEnum):
    """Where a lease stands. EXPIRED, RELEASED and RECLAIMED are final."""

    GRANTED = "granted"
    CLAIMED = "claimed"
    EXPIRED = "expired"
    RELEASED = "released"
    RECLAIMED = "reclaimed"


class LeaseEvent(StrEnum):
    """What can happen to a lease. UNCLAIM is the end of its last claim."""

    RENEW = "renew"
    CLAIM = "claim"
    UNCLAIM = "unclaim"
    EXPIRE = "expire"
    DROP = "drop"
    RECLAIM = "reclaim"


TRANSITIONS: dict[tuple[LeaseState, LeaseEvent], LeaseState] = {
    (LeaseState.GRANTED, LeaseEvent.RENEW): LeaseState.GRANTED,
    (LeaseState.GRANTED, LeaseEvent.CLAIM): LeaseState.CLAIMED,
    (LeaseState.GRANTED, LeaseEvent.EXPIRE): LeaseState.EXPIRED,
    (LeaseState.GRANTED, LeaseEvent.DROP): LeaseState.RELEASED,
    (LeaseState.GRANTED, LeaseEvent.RECLAIM): LeaseState.RECLAIMED,
    (LeaseState.CLAIMED, LeaseEvent.RENEW): LeaseState.CLAIMED,
    (LeaseState.CLAIMED, LeaseEvent.CLAIM): LeaseState.CLAIMED,
    (LeaseState.CLAIMED, LeaseEvent.EXPIRE): LeaseState.CLAIMED,
    (LeaseState.CLAIMED, LeaseEvent.DROP): LeaseState.CLAIMED,
    (LeaseState.CLAIMED, LeaseEvent.UNCLAIM): LeaseState.GRANTED,
}
INITIAL = LeaseState.GRANTED
FINAL = frozenset({LeaseState.EXPIRED, LeaseState.RELEASED, LeaseState.RECLAIMED})


class RefusalReason(StrEnum):
    """Why a claim was not granted."""

    UNKNOWN_LEASE = "unknown_lease"
    EXPIRED = "expired"
    RELEASED = "released"
    WRONG_INCARNATION = "wrong_incarnation"
    WRONG_ROOT = "wrong_root"
    NO_MATCH = "no_match"
    NOT_EXACT = "not_exact"
    TOO_MANY_CLAIMS = "too_many_claims"
    DUPLICATE_CLAIM = "duplicate_claim"
    MALFORMED = "malformed"


ENDING_REFUSALS = {LeaseEvent.EXPIRE: RefusalReason.EXPIRED, LeaseEvent.DROP: RefusalReason.RELEASED}
"""Of a lease that is only there for those who still read it."""

Blocks = tuple[tuple[int, ...], ...]  # block ids, one tuple per KV cache group


@dataclass(frozen=True, slots=True)
class ClaimGranted:
    """`matched_tokens` are proven; `blocks` hold exactly those, per KV cache group, for `term_ns`."""

    claim_id: str
    matched_tokens: int
    blocks: Blocks
    term_ns: int


@dataclass(frozen=True, slots=True)
class ClaimRefused:
    """Nothing is granted: the reader computes its prompt itself."""

    reason: RefusalReason


@dataclass(frozen=True, slots=True)
class FreedLease:
    """A lease that has ended: its block references are the caller's to give back.

    `is_void`: what the blocks hold is of no use to anybody any more, for its conversation is over, or the
    memory or the weights are not what they were.
    """

    lease_id: str
    state: LeaseState
    blocks: Blocks
    chain: Chain
    exact_only: bool = False
    is_void: bool = False


@dataclass(slots=True)
class Lease:
    """A lease that holds its blocks. With claims on it, `ending` says how it will end once they have.

    `chance`: permille that its conversation returns. `serial` counts grants, `block_count` the references
    that it holds over all KV cache groups.
    """

    lease_id: str
    chain: Chain
    blocks: Blocks
    exact_only: bool
    deadline_ns: int
    last_use_ns: int
    chance: int
    serial: int
    state: LeaseState = INITIAL
    ending: LeaseEvent | None = None
    is_void: bool = False
    claim_ids: set[str] = field(default_factory=set)
    block_count: int = field(init=False)

    def __post_init__(self) -> None:
        self.block_count = sum(map(len, self.blocks))

    def lent(self, tokens: int, block_size: int) -> Blocks:
        """The blocks that hold the first `tokens` tokens; all of them if nothing less can be used."""
        if self.exact_only:
            return self.blocks
        needed = -(-tokens // block_size)
        return tuple(group[:needed] for group in self.blocks)

    def freed(self) -> FreedLease:
        """What comes out when it has ended."""
        return FreedLease(self.lease_id, self.state, self.blocks, self.chain, self.exact_only, self.is_void)


@dataclass(frozen=True, slots=True)
class Claim:
    """A reader's hold on a lease."""

    claim_id: str
    lease: Lease
    reader: str
