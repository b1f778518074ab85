"""The links between engines and routers, and what goes wrong on them.

Frames of the control channel may be lost, doubled, overtaken; a hop is a TCP connection and is either there
or not; a transfer needs its link for as long as it takes. A cut takes everything between two parties,
whatever is under way, and nothing else.
"""

from collections.abc import Callable

from kvloop.sim.fleet.chance import Chance
from kvloop.sim.fleet.plan import MS, Plan
from kvloop.sim.loop import Loop

CONNECT_TIMEOUT_NS = 5000 * MS  # the router's own
REFUSED_NS = 1 * MS
Action = Callable[[], None]


class Network:
    """Carries things between parties, by their names. `faulty` False: only latency is left."""

    def __init__(self, loop: Loop, plan: Plan, chance: Chance) -> None:
        self.faulty = True
        self.frames = 0
        self._loop = loop
        self._low_ns = plan.latency_us * 1000
        self._plan = plan
        self._chance = chance
        self._cuts: dict[frozenset[str], int] = {}

    def latency_ns(self) -> int:
        """How long something small is on its way."""
        return self._chance.within(self._low_ns, 2 * self._low_ns)

    def frame(self, source: str, target: str, deliver: Action) -> None:
        """A control frame: it comes once, late, twice, or not at all."""
        self.frames += 1
        plan, chance = self._plan, self._chance
        if self._cuts and self.is_cut(source, target):
            return
        if self.faulty and chance.permille(plan.loss):
            return
        copies = 1 + (self.faulty and chance.permille(plan.duplicate))
        for _ in range(copies):
            delay_ns = self.latency_ns()
            if self.faulty and chance.permille(plan.reorder):
                # The interesting ones come just before, or after, nobody waits for them any more.
                near = chance.within(1, plan.claim_timeout_ms * 5 // 4)
                delay_ns += (near if chance.permille(600) else chance.spread(1, plan.claim_term_ms)) * MS
            self._loop.after(delay_ns, deliver)

    def hop(self, source: str, target: str, deliver: Action, fail: Action) -> None:
        """A request or an answer over a connection: it arrives, or the connection cannot be made."""
        if self._cuts and self.is_cut(source, target):
            self._loop.after(CONNECT_TIMEOUT_NS, fail)
        else:
            self._loop.after(self.latency_ns(), deliver)

    def read_ns(self, takes_ns: int) -> int:
        """How long a transfer that would take so long takes today."""
        chance, term_ms = self._chance, self._plan.claim_term_ms
        if not self.faulty or not chance.permille(self._plan.slow_reads):
            return takes_ns
        # The interesting ones end just before or after their claim does.
        near = chance.within(term_ms * 2 // 3, term_ms * 6 // 5)
        return takes_ns + (near if chance.permille(600) else chance.spread(1, 3 * term_ms)) * MS

    def is_cut(self, one: str, other: str) -> bool:
        """Whether nothing passes between two parties."""
        return bool(self._cuts) and frozenset((one, other)) in self._cuts

    def cut(self, one: str, other: str) -> None:
        """Let nothing pass, until it is mended as often as it was cut."""
        pair = frozenset((one, other))
        self._cuts[pair] = self._cuts.get(pair, 0) + 1

    def mend(self, one: str, other: str) -> None:
        """Take one cut back."""
        pair = frozenset((one, other))
        left = self._cuts.get(pair, 0) - 1
        if left > 0:
            self._cuts[pair] = left
        else:
            self._cuts.pop(pair, None)

    def heal(self) -> None:
        """No faults any more."""
        self.faulty = False
        self._cuts.clear()
