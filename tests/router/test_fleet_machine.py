"""A fleet under every schedule of sources, operators, requests and failures: its books always balance."""

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvloop.core.decision import AppendLimits, Ask
from kvloop.core.policy import Kv
from kvloop.router.engine import Engine, EngineRules
from kvloop.router.fleet import Fleet, FleetEvent
from kvloop.router.membership import Membership
from kvloop.router.target import Role, Target

TARGETS = st.builds(
    Target,
    st.sampled_from(["http://a:1", "http://b:1", "http://c:1"]),
    st.sampled_from([*Role]),
    st.sampled_from([None, 0, 1]),
    st.sampled_from([1.0, 2.0]),
)


class FleetMachine(RuleBasedStateMachine):
    """Sources change their word, operators drain, requests begin and end, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.now_s = 1000.0
        self.fleet = Fleet([], [], lambda: int(self.now_s * 1e9), Kv(), AppendLimits())
        self.membership = Membership(self.fleet, EngineRules(slow_start_s=30.0))
        self.fleet.listeners.append(self._hear)
        self.requests: list[tuple[Engine, object]] = []
        self.holds: list[Engine] = []
        self.here: set[str] = set()

    def _hear(self, event: FleetEvent, engine: Engine) -> None:
        if event is FleetEvent.JOINED:
            assert engine.name not in self.here, "it joined twice"
            self.here.add(engine.name)
        elif event is FleetEvent.LEAVING:
            self.here.remove(engine.name)
        elif event is FleetEvent.LEFT:
            assert engine not in [one for one, _ in self.requests], "it left with a request"
            assert engine not in self.holds, "it left while somebody reads from it"

    @rule(source=st.sampled_from("xyz"), named=st.lists(TARGETS, max_size=4))
    def says(self, source: str, named: list[Target]) -> None:
        """A source says which engines there are."""
        self.membership.set(source, named)

    @rule(url=st.sampled_from(["http://a:1", "http://b:1", "http://a:1#0"]), drains=st.booleans())
    def orders(self, url: str, drains: bool) -> None:
        """An operator drains a server or a rank, or takes that back."""
        names = self.membership.drain(url) if drains else self.membership.undrain(url)
        if drains:
            assert not names or not self.here & set(names)

    @rule(prefill=st.booleans())
    def begins(self, prefill: bool) -> None:
        """A request begins at whoever is chosen."""
        ways = self.fleet.choose(Ask(100))
        assert bool(ways) == bool(self.fleet.decode)
        chosen = ways and (ways[0].prefill if prefill else ways[0].decode)
        if not chosen:
            return
        engine = self.fleet.find(chosen)
        assert engine is not None
        assert not engine.leaving
        slot = engine.slot()
        self.loop.run_until_complete(_enter(slot))
        self.requests.append((engine, slot))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), holds=st.booleans(), outcome=st.sampled_from(["answered", "failed", "erred", ""]))
    def ends(self, data: st.DataObject, holds: bool, outcome: str) -> None:
        """A request ends, and somebody may have to read what it left."""
        index = data.draw(st.integers(0, len(self.requests) - 1))
        engine, slot = self.requests[index]
        if outcome == "answered":
            engine.answered()
        elif outcome:
            getattr(engine, outcome)(self.now_s)
        if holds:
            engine.hold()
            self.holds.append(engine)
        del self.requests[index]
        slot.__exit__(None, None, None)  # type: ignore[attr-defined]

    @precondition(lambda self: self.holds)
    @rule()
    def reads(self) -> None:
        """Who had to read something has."""
        self.holds.pop().let_go()

    @rule(seconds=st.floats(0, 20))
    def passes(self, seconds: float) -> None:
        """Time."""
        self.now_s += seconds

    @invariant()
    def balanced(self) -> None:
        """Who serves, leaves and is held is who should, by the fleet's books and by ours."""
        self.membership.check_integrity()
        assert self.here == {engine.name for engine in self.fleet.engines()}
        flights = [one for one, _ in self.requests]
        for engine in [*self.fleet.engines(), *self.fleet.leaving.values()]:
            assert (engine.in_flight, engine.held) == (flights.count(engine), self.holds.count(engine))

    def teardown(self) -> None:
        """Let everything end: nobody who was to leave is left."""
        while self.requests:
            _, slot = self.requests.pop()
            slot.__exit__(None, None, None)  # type: ignore[attr-defined]
        while self.holds:
            self.holds.pop().let_go()
        assert not self.fleet.leaving
        self.loop.close()


async def _enter(slot: object) -> None:
    slot.__enter__()  # type: ignore[attr-defined]


FleetMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestFleet = FleetMachine.TestCase
