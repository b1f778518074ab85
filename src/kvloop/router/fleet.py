"""All engines, and what the router's choices go by: `core.placement`, with the engines' state of health.

Whoever changes the fleet (`router.membership`) does so between awaits; whoever asks an engine that was chosen
before an await looks it up again, and may find that it has left. An engine that leaves is in no choice any
more, but finishes what it has.
"""

from collections.abc import Callable, Collection, Sequence
from enum import StrEnum

from kvloop.core.decision import DECODE, PREFILL, AppendLimits, Ask, Option
from kvloop.core.placement import Eligible, Holds, Placement
from kvloop.core.policy import Policy
from kvloop.core.progress import Progress
from kvloop.router.engine import Engine
from kvloop.router.shares import Shares
from kvloop.router.target import Role, Target
from kvloop.router.turn import ChooseDecode, ChoosePrefill

_NS_PER_S = 1_000_000_000


class FleetEvent(StrEnum):
    """What can happen to an engine of the fleet. RESTARTED: it is another process than it was."""

    JOINED = "joined"
    LEAVING = "leaving"
    LEFT = "left"
    RESTARTED = "restarted"


Listener = Callable[[FleetEvent, Engine], None]


def _any(_: str) -> bool:
    return True


class Fleet:
    """All engines, by name. `clock_ns`: monotonic.

    `prefill` and `decode`: those that take new requests; an engine of both roles is in both. `leaving`: those
    that only finish what they have. `listeners` hear of every event, at once. `suits`, in each choice:
    whether an engine can serve the turn at all.
    """

    def __init__(
        self,
        prefill: Sequence[Engine],
        decode: Sequence[Engine],
        clock_ns: Callable[[], int],
        policy: Policy,
        limits: AppendLimits,
    ) -> None:
        self.prefill: dict[str, Engine] = {}
        self.decode: dict[str, Engine] = {}
        self.leaving: dict[str, Engine] = {}
        self.stopping = False  # the router is about to end: no health check may say otherwise
        self.listeners: list[Listener] = []
        self.placement = Placement(policy, limits)
        self.clock_ns = clock_ns
        self._shares = Shares()
        for engine in (*prefill, *decode):
            self.add(engine)

    @property
    def now_s(self) -> float:
        """The clock, in seconds."""
        return self.clock_ns() / _NS_PER_S

    def engines(self) -> list[Engine]:
        """Every engine that takes requests, once, prefill first."""
        return [*{**self.prefill, **self.decode}.values()]

    def servers(self) -> list[Engine]:
        """One engine per server: of several ranks, the first."""
        return [*{engine.url: engine for engine in reversed(self.engines())}.values()][::-1]

    def find(self, name: str) -> Engine | None:
        """An engine that takes requests, or is leaving."""
        return self.prefill.get(name) or self.decode.get(name) or self.leaving.get(name)

    def add(self, engine: Engine) -> None:
        """Let an engine take requests. One of its name must not be there."""
        assert self.find(engine.name) is None, "two engines of one name"
        self._file(engine)
        self._tell(FleetEvent.JOINED, engine)

    def update(self, engine: Engine, target: Target) -> None:
        """An engine's role, weight or labels have changed."""
        assert target.name == engine.name
        had, engine.target = engine.role, target
        self._shares.changed()
        if engine.name not in self.leaving and engine.role is not had:
            self._unfile(engine.name)
            self._file(engine)

    def remove(self, name: str) -> None:
        """Let an engine take nothing new, and go when it has finished what it has."""
        engine = self.find(name)
        if engine is None or name in self.leaving:
            return
        self._unfile(name)
        self.leaving[name] = engine
        self._tell(FleetEvent.LEAVING, engine)
        engine.leave(self._gone)

    def restore(self, name: str) -> bool:
        """Let an engine that is leaving take requests again. False if it has left."""
        engine = self.leaving.pop(name, None)
        if engine is None:
            return False
        engine.stay()
        self._file(engine)
        self._tell(FleetEvent.JOINED, engine)
        return True

    def restarted(self, engine: Engine) -> None:
        """An engine is another process than it was: nothing that was learned of it holds."""
        self.placement.costs.forget(engine.name)
        self._shares.changed()
        self._tell(FleetEvent.RESTARTED, engine)

    def saw_incarnation(self, name: str, incarnation: str) -> None:
        """An engine's own word on which run of it answered."""
        engine = self.find(name)
        if engine is not None and engine.incarnation != incarnation:
            known, engine.incarnation = engine.incarnation, incarnation
            if known is not None:
                self.restarted(engine)

    def progress(self, ask: Ask) -> Progress:
        """The books of one turn."""
        return Progress(self.placement, ask)

    def choose(self, ask: Ask, suits: Holds = _any) -> list[Option]:
        """The ways that a turn may go, the best first; none without a decode engine that suits it."""
        self._shares.turns += 1
        return self.placement.choose(ask, self.clock_ns(), self._eligible(ask, suits))

    def choose_prefill(self, ask: Ask, excluded: Collection[str], suits: Holds = _any) -> str | None:
        """Another prefill engine, one that has not just failed."""
        eligible = self._eligible(ask, suits)
        return self.placement.choose_prefill(ask, self.clock_ns(), eligible, excluded)

    def choose_decode(
        self, ask: Ask, prefill: str | None, excluded: Collection[str], last_resort: bool, suits: Holds = _any
    ) -> str | None:
        """A decode engine to go on from what `prefill` has computed; as a last resort one that has just
        failed."""
        eligible = self._eligible(ask, suits)
        return self.placement.choose_decode(
            ask, self.clock_ns(), eligible, excluded, prefill=prefill, last_resort=last_resort
        )

    def choosers(self, progress: Progress, suits: Holds) -> tuple[ChoosePrefill, ChooseDecode]:
        """The same two for all of one turn, as far as it has come each time."""

        def choose_prefill(excluded: Collection[str]) -> str | None:
            return self.choose_prefill(progress.ask, excluded, suits)

        def choose_decode(prefill: str | None, excluded: Collection[str], last_resort: bool) -> str | None:
            return self.choose_decode(progress.ask, prefill, excluded, last_resort, suits)

        return choose_prefill, choose_decode

    def is_available(self, engine: Engine) -> bool:
        """Whether an engine is worth trying."""
        return engine.available(self.now_s)

    def healthy(self) -> bool:
        """Whether some decode engine is worth trying: without one nothing can be served."""
        return not self.stopping and any(self.is_available(engine) for engine in self.decode.values())

    def close(self) -> None:
        """Abort every connection."""
        for engine in [*self.engines(), *self.leaving.values()]:
            engine.close()

    def check_integrity(self) -> None:
        """AssertionError where an engine is not where its role and state say, or stays for nothing."""
        for name, engine in {**self.prefill, **self.decode, **self.leaving}.items():
            assert name == engine.name == engine.target.name
            assert engine.leaving == (name in self.leaving)
            serves = not engine.leaving
            assert (self.prefill.get(name) is engine) == (serves and engine.role is not Role.DECODE)
            assert (self.decode.get(name) is engine) == (serves and engine.role is not Role.PREFILL)
            assert serves or engine.in_flight or engine.held, "nothing left to do, and still here"
            engine.breaker.check_integrity()
        self.placement.check_integrity()

    def _eligible(self, ask: Ask, suits: Holds) -> Eligible:
        """Those worth trying. Of an engine with a part of the others' share, in so many turns of all; a turn
        that goes on from it is always one of them, and so is every turn if there is nobody else."""
        now_s, shares = self.now_s, self._shares
        is_even = shares.is_even(self.engines, now_s)
        anybody: dict[int, bool] = {}  # by role: whether this turn is anybody's; asked at most once

        def is_usable(name: str) -> bool:
            engine = self.prefill.get(name) or self.decode[name]
            if not engine.available(now_s):
                return False
            if is_even or name in (ask.holder, ask.computed_at) or shares.take_part(engine, now_s):
                return True
            others = self.prefill if name in self.prefill else self.decode
            if id(others) not in anybody:
                anybody[id(others)] = any(
                    one.available(now_s) and shares.take_part(one, now_s) for one in others.values()
                )
            return not anybody[id(others)]

        return Eligible(suits, is_usable)

    def _file(self, engine: Engine) -> None:
        self._shares.changed()
        if engine.role is not Role.DECODE:
            self.prefill[engine.name] = engine
            self.placement.add(engine.name, PREFILL)
        if engine.role is not Role.PREFILL:
            self.decode[engine.name] = engine
            self.placement.add(engine.name, DECODE)

    def _unfile(self, name: str) -> None:
        self.prefill.pop(name, None)
        self.decode.pop(name, None)
        self.placement.remove(name)
        self._shares.changed()

    def _gone(self, engine: Engine) -> None:
        self.leaving.pop(engine.name, None)
        engine.close()
        self._tell(FleetEvent.LEFT, engine)

    def _tell(self, event: FleetEvent, engine: Engine) -> None:
        for listener in self.listeners:
            listener(event, engine)
