"""What runs have reached: so that a promise that held was also put to the test.

A census is a checker that never complains. Its counts, over many seeds, say which outcomes of claims, which
ends of leases and which faults came up; a test demands that all of them do.
"""

from collections import Counter
from typing import TYPE_CHECKING

from kvloop.core.claim import MAX_QUESTIONS
from kvloop.core.lease import LeaseState
from kvloop.sim.fleet.watch import Asking, Checker, End, Grant, Hunger, Reading, Service
from kvloop.sim.request import Reason
from kvloop.wire.control import Claim, Refused

if TYPE_CHECKING:
    from kvloop.sim.fleet.people import Turn
    from kvloop.sim.fleet.world import World


class Census(Checker):
    """Counts what happened, by name."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._questions: Counter[str] = Counter()

    def claimed(self, asking: Asking) -> None:
        """Who asks more than once."""
        self._questions[asking.request_id] += 1
        asked = self._questions[asking.request_id]
        if asked > 1:
            self.counts["asked again" if asked < MAX_QUESTIONS else "asked for the last time"] += 1

    def granted(self, grant: Grant) -> None:
        """How much of what was asked for."""
        matched, wanted = grant.answer.matched_tokens, grant.claim.token_count
        self.counts["granted whole" if matched == wanted else "granted in part"] += 1
        table = grant.node.engine.leases.table if grant.node.engine is not None else None
        if table is not None and table.claim_count() > 1:
            self.counts["several claims at a time"] += 1

    def served(self, service: Service) -> None:
        """Why not."""
        if isinstance(service.message, Claim) and isinstance(service.answer, Refused):
            self.counts[f"refused {service.answer.reason}"] += 1

    def read_landed(self, reading: Reading) -> None:
        """Transfers that failed, and late ones."""
        kind = "claimed" if reading.read.claim_id else "handed over"
        self.counts[f"{kind} read {'failed' if reading.contents is None else 'ended'}"] += 1

    def starved(self, hunger: Hunger) -> None:
        """Who waited, for how many blocks."""
        self.counts["starved of one block" if hunger.event.missing_blocks == 1 else "starved of more"] += 1

    def finished(self, end: End) -> None:
        """What prompts were made of."""
        turn = end.event.turn
        if turn is not None and end.event.reason is not Reason.ABORT:
            self.counts[f"returned {turn['reason'] or 'something'}"] += 1
            if turn["returned_tokens"] and self._questions[end.event.request_id] > 1:
                self.counts["returned something at last"] += 1
        if end.event.reason is Reason.ABORT:
            self.counts["aborted"] += 1

    def refused(self, turn: "Turn", why: str) -> None:
        """Why clients had to ask again."""
        self.counts[f"{'stream' if turn.ask.stream else 'answer'} refused: {why}"] += 1

    def drained(self, world: "World") -> None:
        """What engines and routers have counted."""
        for node in world.around.engines.values():
            engine = node.engine
            if engine is not None:
                for name in ("late_reads", "preemptions"):
                    self.counts[name] += engine.counters.get(name, 0)
                for state in (LeaseState.EXPIRED, LeaseState.RELEASED, LeaseState.RECLAIMED):
                    self.counts[f"lease {state}"] += engine.leases.table.counts()[state]
                self.counts["lease revived"] += engine.leases.revived
        for router in world.routers:
            counts = router.filing.keeper.counts
            for name in ("returned", "renewed", "let_go", "dropped", "superseded", "lost", "expired"):
                self.counts[f"keeper {name}"] += getattr(counts, name)
