"""The engines as one router knows them: what it has there, and which it leaves out for a while.

An engine that could not be reached, or did not answer in time, is left out for half a second, twice as long
each time, up to eight; an answer clears it. Which of the others is asked is `core.placement`'s to say.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from kvloop.core.placement import Candidate, choose
from kvloop.sim.fleet.node import EngineNode
from kvloop.sim.fleet.plan import MS, S

BACKOFF_FIRST_NS = 500 * MS
BACKOFF_MAX_NS = 8 * S


@dataclass(slots=True)
class Known:
    """One engine."""

    node: EngineNode
    in_flight: int = 0
    backoff_ns: int = 0
    avoid_until_ns: int = 0

    def answered(self) -> None:
        """It did answer."""
        self.backoff_ns = self.avoid_until_ns = 0

    def failed(self, now_ns: int) -> None:
        """It could not be reached; failures of one outage count once."""
        if now_ns >= self.avoid_until_ns:
            self.backoff_ns = min(max(2 * self.backoff_ns, BACKOFF_FIRST_NS), BACKOFF_MAX_NS)
            self.avoid_until_ns = now_ns + self.backoff_ns


class KnownEngines:
    """All engines of one role."""

    def __init__(self, nodes: Iterable[EngineNode], now_ns: Callable[[], int]) -> None:
        self._by_name = {node.name: Known(node) for node in nodes}
        self._now_ns = now_ns
        self._chosen = 0

    def __getitem__(self, name: str) -> Known:
        return self._by_name[name]

    def choose(
        self, excluded: Collection[str], preferred: str | None = None, *, last_resort: bool = False
    ) -> str | None:
        """The engine to ask; as a last resort one that has just failed."""
        self._chosen += 1
        now_ns = self._now_ns()
        known = self._by_name.values()
        chosen = choose(
            [Candidate(one.node.name, one.in_flight, now_ns >= one.avoid_until_ns) for one in known],
            self._chosen,
            preferred,
            excluded,
        )
        if chosen is None and last_resort:
            everyone = [Candidate(one.node.name, one.in_flight) for one in known]
            chosen = choose(everyone, self._chosen, preferred, excluded)
        return chosen
