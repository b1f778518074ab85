"""What engines hold: every block has its holders, live work comes first, and idle is idle."""

from collections import Counter
from typing import TYPE_CHECKING

from kvloop.sim.fleet.watch import Act, Checker, End, Hunger, Kept, Service
from kvloop.wire.control import Claim, Renew

if TYPE_CHECKING:
    from kvloop.sim.fleet.world import World


class RetentionYields(Checker):
    """No request waits or is preempted while an unclaimed lease holds memory."""

    def starved(self, hunger: Hunger) -> None:
        """Whoever waits has nobody to take from."""
        event = hunger.event
        if event.unclaimed_leases:
            what = f"while {event.unclaimed_leases} unclaimed leases hold blocks"
            self.fail(f"{event.request_id} waits on {hunger.node.name} {what}")


class IdleIsIdle(Checker):
    """A retained conversation uses no CPU: an engine without work is woken only where something ends, and
    everything that has a term ends once for each time that it was set.
    """

    def __init__(self) -> None:
        self._terms: Counter[str] = Counter()

    def retained(self, kept: Kept) -> None:
        """A lease will end."""
        self._terms[kept.node.name] += 1

    def served(self, service: Service) -> None:
        """What is renewed will end at another time; a claim will, and so may a lease that it begins anew."""
        if isinstance(service.message, Renew):
            self._terms[service.node.name] += len(service.message.leases)
        elif isinstance(service.message, Claim):
            self._terms[service.node.name] += 2

    def finished(self, end: End) -> None:
        """A prompt waits to be pulled, and not for ever."""
        self._terms[end.node.name] += end.event.handover is not None

    def acted(self, act: Act) -> None:
        """A term has passed."""
        name = act.node.name
        if act.woken and act.was_idle:
            self._terms[name] -= 1
            if self._terms[name] < 0:
                self.fail(f"{name} is idle, and is woken for nothing")


class BlocksBalance(Checker):
    """Blocks held are those of requests, leases, handovers and late reads, no more and no less; and when all
    is over, every block has come home.
    """

    def acted(self, act: Act) -> None:
        """The books of the engine balance."""
        if act.node.engine is not None:
            try:
                act.node.engine.check_integrity()
            except AssertionError as error:
                self.fail(f"{act.node.name}: {error}")

    def drained(self, world: "World") -> None:
        """Nothing is held by anybody, and nobody remembers anything."""
        for node in world.around.engines.values():
            engine = node.engine
            assert engine is not None
            if engine.pool.references or not engine.is_idle or len(engine.leases.table):
                self.fail(f"{node.name} still holds {engine.pool.references} block references")
        for router in world.routers:
            try:
                router.filing.check_integrity()
            except AssertionError as error:
                self.fail(f"{router.name}: {error}")
            if router.runs or len(router.filing.keeper):
                self.fail(f"{router.name} still keeps {len(router.filing.keeper)} leases")
            if len(router.filing.lineage):
                self.fail(f"{router.name} still remembers {len(router.filing.lineage)} turns")
