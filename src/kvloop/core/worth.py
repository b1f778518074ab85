"""Which lease live work takes first: the one whose blocks save least, block for block.

Worth of an unclaimed lease: chance that its conversation returns x tokens that a return saves / blocks that
it holds. It is the density by which a greedy choice fills a knapsack: to free the least dense first gives so
many blocks up for the least expected loss. Among equals the least recently used goes first, among those the
one granted first.
"""

from kvloop.core.heap import KeyHeap
from kvloop.core.lease_state import Lease

MAX_CHANCE = 1000  # permille
UNRATED_CHANCE = 500  # of a lease of which no router has said anything yet


def checked_chance(chance: int) -> int:
    """`chance` itself, if it is 0 to 1000 permille; else ValueError."""
    if not 0 <= chance <= MAX_CHANCE:
        raise ValueError(f"a chance of {chance} permille")
    return chance


def worth(lease: Lease) -> int:
    """Permille x tokens per block, rounded down."""
    return lease.chance * lease.chain.token_count // max(1, lease.block_count)


class WorthOrder:
    """Unclaimed leases, the one of least worth first."""

    def __init__(self) -> None:
        self._heap = KeyHeap[tuple[int, ...]]()
        self._unranked: dict[str, Lease] = {}

    def __len__(self) -> int:
        unranked = sum(lease_id not in self._heap for lease_id in self._unranked)
        return len(self._heap) + unranked

    def put(self, lease: Lease) -> None:
        """Take in a lease that nobody claims, or one whose chance has changed.

        It is ranked when somebody asks: a router's message changes thousands, and most are never asked about.
        """
        self._unranked[lease.lease_id] = lease

    def drop(self, lease_id: str) -> None:
        """Leave a lease out: it is claimed, or has ended."""
        self._unranked.pop(lease_id, None)
        self._heap.discard(lease_id)

    def least(self) -> str | None:
        """The lease to reclaim first, or None."""
        if self._unranked:
            self._heap.set_many({lease_id: _rank(lease) for lease_id, lease in self._unranked.items()})
            self._unranked.clear()
        least = self._heap.least()
        return None if least is None else least[1]

    def check_integrity(self, unclaimed: dict[str, Lease]) -> None:
        """AssertionError where the order is not that of these leases as they are."""
        self._heap.check_integrity()
        assert unclaimed.keys() == set(self._heap) | self._unranked.keys(), "claimed or ended, or left out"
        for lease_id, lease in unclaimed.items():
            ranked = lease_id in self._unranked or self._heap.rank(lease_id) == _rank(lease)
            assert ranked, "a lease is not where it belongs"


def _rank(lease: Lease) -> tuple[int, ...]:
    return worth(lease), lease.last_use_ns, lease.serial
