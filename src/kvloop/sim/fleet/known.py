"""The engines as one router knows them: what it has there, and which it leaves out for a while.

An engine that could not be reached, or did not answer in time, is left out for half a second, twice as long
each time, up to eight; an answer clears it. Which of the others is asked is `core.placement`'s to say.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from kvloop.core.decision import DECODE, PREFILL, AppendLimits, Ask, Option
from kvloop.core.placement import Eligible, Placement
from kvloop.core.policy import POLICIES
from kvloop.core.progress import Progress
from kvloop.sim.fleet.node import EngineNode
from kvloop.sim.fleet.plan import MS, Plan, S

BACKOFF_FIRST_NS = 500 * MS
BACKOFF_MAX_NS = 8 * S


@dataclass(slots=True)
class Known:
    """One engine."""

    node: EngineNode
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
    """All engines, and what the router has under way there."""

    def __init__(self, nodes: Iterable[EngineNode], now_ns: Callable[[], int], plan: Plan) -> None:
        limits = AppendLimits(plan.append_tokens, 2 * plan.append_tokens)
        self.placement = Placement(POLICIES[plan.policy](), limits)
        self._by_name: dict[str, Known] = {}
        self._now_ns = now_ns
        for node in nodes:
            self._by_name[node.name] = Known(node)
            self.placement.add(node.name, PREFILL if node.name.startswith("p") else DECODE)

    def __getitem__(self, name: str) -> Known:
        return self._by_name[name]

    def progress(self, ask: Ask) -> Progress:
        """The books of one turn."""
        return Progress(self.placement, ask)

    def choose(self, ask: Ask) -> list[Option]:
        """The ways that a turn may go, the best first."""
        return self.placement.choose(ask, self._now_ns(), self._eligible())

    def choose_prefill(self, ask: Ask, excluded: Collection[str]) -> str | None:
        """Another prefill engine."""
        return self.placement.choose_prefill(ask, self._now_ns(), self._eligible(), excluded)

    def choose_decode(
        self, ask: Ask, prefill: str | None, excluded: Collection[str], last_resort: bool
    ) -> str | None:
        """A decode engine; as a last resort one that has just failed."""
        return self.placement.choose_decode(
            ask, self._now_ns(), self._eligible(), excluded, prefill=prefill, last_resort=last_resort
        )

    def _eligible(self) -> Eligible:
        now_ns = self._now_ns()
        return Eligible(lambda _: True, lambda name: now_ns >= self._by_name[name].avoid_until_ns)
