"""What a keeper knows of a lease, what it sends, and what it counts.

The table is the machine: a pair that is not in it is an illegal move. A lease is held while it is WAITING or
USED: it is renewed. LET_GO is watched only, for it may return after all. ENDING has to be held until the
turns in flight are through with it.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvloop.core.returns import Ending

NS_PER_S = 1_000_000_000


class KeptState(StrEnum):
    """Where a filed lease stands with its router. FORGOTTEN is final."""

    WAITING = "waiting"
    USED = "used"
    LET_GO = "let_go"
    ENDING = "ending"
    FORGOTTEN = "forgotten"


class KeptEvent(StrEnum):
    """What can happen to it. DONE: the last turn that uses it is through; FORGET: too old, gone, no room."""

    USE = "use"
    DONE = "done"
    LET_GO = "let_go"
    LOSE = "lose"
    END = "end"
    FORGET = "forget"


TRANSITIONS: dict[tuple[KeptState, KeptEvent], KeptState] = {
    (KeptState.WAITING, KeptEvent.USE): KeptState.USED,
    (KeptState.WAITING, KeptEvent.LET_GO): KeptState.LET_GO,
    (KeptState.WAITING, KeptEvent.LOSE): KeptState.LET_GO,
    (KeptState.WAITING, KeptEvent.END): KeptState.FORGOTTEN,
    (KeptState.WAITING, KeptEvent.FORGET): KeptState.FORGOTTEN,
    (KeptState.LET_GO, KeptEvent.USE): KeptState.USED,
    (KeptState.LET_GO, KeptEvent.END): KeptState.FORGOTTEN,
    (KeptState.LET_GO, KeptEvent.FORGET): KeptState.FORGOTTEN,
    (KeptState.USED, KeptEvent.USE): KeptState.USED,
    (KeptState.USED, KeptEvent.DONE): KeptState.WAITING,
    (KeptState.USED, KeptEvent.END): KeptState.ENDING,
    (KeptState.USED, KeptEvent.FORGET): KeptState.FORGOTTEN,
    (KeptState.ENDING, KeptEvent.USE): KeptState.ENDING,
    (KeptState.ENDING, KeptEvent.DONE): KeptState.FORGOTTEN,
    (KeptState.ENDING, KeptEvent.FORGET): KeptState.FORGOTTEN,
}
INITIAL = KeptState.WAITING
FINAL = frozenset({KeptState.FORGOTTEN})
HELD = frozenset({KeptState.WAITING, KeptState.USED, KeptState.ENDING})
AWAY = frozenset(
    {KeptState.WAITING, KeptState.LET_GO}
)  # no turn of ours uses it: its conversation is waited for


@dataclass(frozen=True, slots=True)
class KeeperTimes:
    """How long leases are kept, in nanoseconds.

    interval: between two renewals. term: how long each lets a lease last, several intervals, so that one may
    be lost. ttl: the longest that a lease is kept since its last use. drop_every: how long drops are
    gathered into one message.
    """

    interval_ns: int = 20 * NS_PER_S
    term_ns: int = 60 * NS_PER_S
    ttl_ns: int = 480 * NS_PER_S
    drop_every_ns: int = NS_PER_S

    def __post_init__(self) -> None:
        if min(self.interval_ns, self.term_ns, self.ttl_ns, self.drop_every_ns) <= 0:
            raise ValueError("times must be positive")
        if self.term_ns <= self.interval_ns:
            raise ValueError("a term has to outlast the interval between two renewals")

    def next_renewal_ns(self, now_ns: int, deadline_ns: int) -> int:
        """The first tick after `now_ns`, or sooner for a lease that will not last until then."""
        tick_ns = (now_ns // self.interval_ns + 1) * self.interval_ns
        return min(tick_ns, now_ns + max(0, deadline_ns - now_ns) // 2)


@dataclass(frozen=True, slots=True)
class SendRenew:
    """Ask the engine at `address` to renew: (lease id, term in ns, chance of return in permille) for each."""

    address: tuple[str, int]
    leases: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class SendDrop:
    """Tell the engine at `address` that it need not hold these leases. `is_over`: nobody will ask again."""

    address: tuple[str, int]
    lease_ids: tuple[str, ...]
    is_over: bool = False


@dataclass(slots=True)
class KeeperCounts:
    """Leases since the keeper was made; renewed counts each renewal."""

    filed: int = 0
    returned: int = 0
    renewed: int = 0
    let_go: int = 0
    dropped: int = 0
    superseded: int = 0
    lost: int = 0
    expired: int = 0
    evicted: int = 0


@dataclass(slots=True)
class Entry:
    """A filed lease. `since_ns` is its last use, and where its wait began; `seen_ns` is the age up to which
    the model knows of that wait. `deadline_ns`: when decode will let it expire, as far as is known.
    `renew_ns`: not to be renewed sooner. `wish_until_ns`: the client's. `waits`: its conversation is not
    back, whatever forked off from it. `row`: where the entry is kept.
    """

    lease_id: str
    address: tuple[str, int]
    term_ms: int
    caller: str
    ending: Ending
    since_ns: int
    deadline_ns: int
    wish_until_ns: int | None
    renew_ns: int = 0
    state: KeptState = INITIAL
    seen_ns: int = 0
    in_flight: int = 0
    waits: bool = True
    row: int = 0

    def age_ns(self, now_ns: int) -> int:
        """How long it has waited."""
        return max(0, now_ns - self.since_ns)

    def move(self, event: KeptEvent) -> None:
        """The table's move."""
        self.state = TRANSITIONS[self.state, event]

    def check_integrity(self) -> None:
        """AssertionError where it contradicts itself."""
        assert self.state not in FINAL, "a forgotten lease is still known"
        assert (self.state in AWAY) is (self.in_flight == 0), "a turn in flight is miscounted"
        assert self.waits or self.state not in AWAY, "a conversation that is away, and not waited for"
