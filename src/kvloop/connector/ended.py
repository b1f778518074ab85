"""Leases that have ended and still hold their blocks, until the scheduler's thread comes to give them back.

Thousands can end at once: a router drops them in one message, or dies, and all that it renewed expires. To
give a block back takes a microsecond or two, and the step that did it for all of them would be felt by every
request. So they wait here in the order in which they ended, and each step takes some. Whoever needs blocks,
or one of these leases, takes what it needs out of turn.
"""

from collections import OrderedDict
from dataclasses import replace

from kvloop.core.lease import FreedLease

LEASE_COST_BLOCKS = 5
"""What giving a lease back takes beside its blocks, in blocks' worth of time."""


class EndedLeases:
    """The queue. Not thread-safe. Bounded as lease tables are: each has its blocks still, or had some."""

    def __init__(self) -> None:
        self.block_count = 0
        """References that these leases hold."""
        self._leases: OrderedDict[str, FreedLease] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def cost(self) -> int:
        """What it takes to give all of them back, in blocks' worth of time."""
        return self.block_count + LEASE_COST_BLOCKS * len(self._leases)

    def add(self, freed: FreedLease) -> None:
        """One more has ended."""
        assert freed.lease_id not in self._leases, "a lease ends twice"
        self._leases[freed.lease_id] = freed
        self.block_count += _blocks(freed)

    def get(self, lease_id: str) -> FreedLease | None:
        """The lease, if it waits here."""
        return self._leases.get(lease_id)

    def void(self, lease_id: str) -> None:
        """If it waits here, nobody will ask for it again."""
        if (freed := self._leases.get(lease_id)) is not None:
            self._leases[lease_id] = replace(freed, is_void=True)

    def take(self, lease_id: str) -> FreedLease | None:
        """Out of turn, if it waits here."""
        freed = self._leases.pop(lease_id, None)
        self.block_count -= 0 if freed is None else _blocks(freed)
        return freed

    def take_some(self, max_cost: int) -> list[FreedLease]:
        """Those that ended first: what comes to `max_cost` blocks' worth of time, and one in any case."""
        taken: list[FreedLease] = []
        cost = 0
        while self._leases:
            first = next(iter(self._leases.values()))
            cost += LEASE_COST_BLOCKS + _blocks(first)
            if taken and cost > max_cost:
                break
            self._leases.popitem(last=False)
            self.block_count -= _blocks(first)
            taken.append(first)
        return taken

    def take_all(self) -> list[FreedLease]:
        """All of them."""
        taken = list(self._leases.values())
        self._leases.clear()
        self.block_count = 0
        return taken

    def check_integrity(self) -> None:
        """AssertionError where the count is wrong."""
        assert self.block_count == sum(_blocks(freed) for freed in self._leases.values())
        assert all(lease_id == freed.lease_id for lease_id, freed in self._leases.items())


def _blocks(freed: FreedLease) -> int:
    return len(freed.blocks[0])
