"""Whose leases are, who reads them, and how long they last."""

from typing import TYPE_CHECKING

from kvloop.core.deadline import Deadlines
from kvloop.core.lease import LeaseState
from kvloop.core.lineage import Match
from kvloop.sim.config import NS_PER_MS
from kvloop.sim.fleet.plan import MS
from kvloop.sim.fleet.watch import Act, Asking, Checker, Grant, Kept, Reading, Service
from kvloop.wire.control import Claim, Renew, Renewed

if TYPE_CHECKING:
    from kvloop.sim.fleet.filing import Ask
    from kvloop.sim.fleet.node import EngineNode
    from kvloop.sim.fleet.world import World


class TenantsAreApart(Checker):
    """Nobody is lent a block that was computed for another tenant, and no router finds him another's turn."""

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}
        self._askers: dict[tuple[str, bytes], str] = {}

    def found(self, ask: "Ask", match: Match) -> None:
        """The router's table keeps them apart."""
        if match.turn.tenant != ask.tenant:
            self.fail(f"a turn of tenant {match.turn.tenant} was found for tenant {ask.tenant}")

    def retained(self, kept: Kept) -> None:
        """Whose a lease is."""
        self._owners[kept.lease_id] = kept.salt

    def claimed(self, asking: Asking) -> None:
        """Whose request asks."""
        self._askers[asking.node.name, asking.nonce] = asking.salt

    def granted(self, grant: Grant) -> None:
        """They are the same."""
        lease_id = grant.claim.lease_id
        owner, reader = self._owners.get(lease_id), self._askers.get(grant.asker)
        if owner is None or owner != reader:
            self.fail(f"{grant.node.name} lent {lease_id} of tenant {owner} to tenant {reader}")


class TensorsGoDirectly(Checker):
    """KV goes from engine to engine: whoever is lent blocks, and whoever they are read from, is an engine."""

    def granted(self, grant: Grant) -> None:
        """No router reads."""
        if grant.asker[0] not in grant.node.around.engines:
            self.fail(f"{grant.node.name} lent blocks to {grant.asker[0]}, which is no engine")

    def read_began(self, reading: Reading) -> None:
        """Nor is one read from."""
        source, name = reading.read.engine_id, reading.node.name
        if source not in reading.node.around.engines or source == name:
            self.fail(f"{name} reads from {source}")


class TermsEnd(Checker):
    """An unclaimed lease holds its blocks no longer than its term since it was granted, renewed or last read,
    and never longer than its TTL since its last use.
    """

    def __init__(self) -> None:
        self._ends: dict[str, Deadlines] = {}
        self._known_ns: dict[str, int] = {}
        self._used_ns: dict[str, int] = {}

    def begin(self, world: "World") -> None:
        """The terms of this run."""
        plan = world.plan
        self._ttl_ns, self._claim_ns = plan.lease_ttl_ms * MS, plan.claim_term_ms * MS
        self._term_ns = min(plan.lease_term_ms * MS, self._ttl_ns)

    def retained(self, kept: Kept) -> None:
        """A lease begins."""
        now_ns = kept.node.now_ns()
        self._used_ns[kept.lease_id] = now_ns
        self._extend(kept.node, kept.lease_id, now_ns + self._term_ns)

    def granted(self, grant: Grant) -> None:
        """A claim is a use: until its end it may hold the lease."""
        lease_id, now_ns = grant.claim.lease_id, grant.node.now_ns()
        self._used_ns[lease_id] = now_ns + self._claim_ns
        self._extend(grant.node, lease_id, now_ns + self._claim_ns)

    def served(self, service: Service) -> None:
        """A claim, granted or not, may begin a lease anew that had ended; a renewal lasts so long from now,
        and not beyond the TTL."""
        message, answer = service.message, service.answer
        if isinstance(message, Claim):
            self._used_ns[message.lease_id] = max(
                self._used_ns.get(message.lease_id, 0), service.node.now_ns()
            )
            self._extend(service.node, message.lease_id, service.node.now_ns() + self._term_ns)
        if not isinstance(message, Renew) or not isinstance(answer, Renewed):
            return
        now_ns, lost = service.node.now_ns(), {*answer.gone, *answer.soft}
        for lease_id, term_ms, _ in message.leases:
            if lease_id not in lost:
                last_ns = self._used_ns.get(lease_id, now_ns) + self._ttl_ns
                self._extend(service.node, lease_id, min(now_ns + term_ms * NS_PER_MS, last_ns))

    def acted(self, act: Act) -> None:
        """What should have ended has."""
        ends, engine = self._ends.get(act.node.name), act.node.engine
        if ends is None or engine is None:
            return
        while (lease_id := ends.pop_due(act.node.now_ns())) is not None:
            if engine.leases.table.state(lease_id) is LeaseState.GRANTED:
                self.fail(f"{lease_id} is held on {act.node.name} after its term")

    def _extend(self, node: "EngineNode", lease_id: str, end_ns: int) -> None:
        if end_ns > self._known_ns.get(lease_id, 0):
            self._known_ns[lease_id] = end_ns
            self._ends.setdefault(node.name, Deadlines()).set(lease_id, end_ns)
