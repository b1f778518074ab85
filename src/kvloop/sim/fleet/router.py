"""A router in the fleet: turns on their way through engines, and a process that can die.

What to do next is the router's own turn machine's to say (see `turns`); what a turn goes on from, `core`'s
(see `filing`). A hop is a connection: it can be refused, break, or not end in time. What a router knows dies
with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import Struct

from kvloop.sim.fleet.around import Around, Correspondent
from kvloop.sim.fleet.chance import Chance
from kvloop.sim.fleet.clocks import Clocks
from kvloop.sim.fleet.filing import Ask, Filing, Found, LeaseUse
from kvloop.sim.fleet.known import Known, KnownEngines
from kvloop.sim.fleet.node import Hop
from kvloop.sim.fleet.plan import MS, Plan, S
from kvloop.sim.fleet.talk import is_taken, passed_on
from kvloop.sim.fleet.turns import Decode, MakeTurn, Prefill, Step, Trouble, TurnMachine
from kvloop.sim.request import Finished, Handover, Reason, Request
from kvloop.sim.request import Hop as Kind

PREFILL_TIMEOUT_NS = 60 * S


class Reply(Struct, frozen=True):
    """What a client gets: the answer's tokens, and why there are no more, if there should be.

    `body`: the bytes that the answer comes in. `turn`: prefill's account. `first_ns`: when the first token
    was there, 0 if that is not known.
    """

    data: bytes
    why: str = ""
    body: bytes = b""
    turn: dict[str, object] | None = None
    first_ns: int = 0


@dataclass(slots=True, eq=False)
class _Run:
    """A turn on its way. `hops`: how many were sent; only the last one's end is listened to."""

    name: str
    ask: Ask
    found: Found
    use: LeaseUse
    machine: TurnMachine
    reply: Callable[[Reply], None]
    hops: int = 0
    engine: Known | None = None
    request_id: str = ""
    handover: Handover | None = None
    turn: dict[str, object] | None = None
    first_ns: int = 0
    is_over: bool = False

    def waits_for(self, hop: int) -> bool:
        """Whether this hop is under way."""
        return not self.is_over and self.hops == hop and self.engine is not None


class RouterNode:
    """One router's machine."""

    def __init__(self, around: Around, name: str, plan: Plan, make_turn: MakeTurn, clocks: Clocks) -> None:
        self.around = around
        self.name = name
        self.is_up = False
        self.runs: dict[str, _Run] = {}
        self._plan = plan
        self._make_turn = make_turn
        self._clocks = clocks
        self._link = Correspondent(around, name, clocks)
        self._chance = Chance(plan.seed, name)
        self._starts = 0
        self._watched: deque[tuple[int, _Run, int]] = deque()
        self._is_watching = False
        self.start()

    def start(self) -> None:
        """A new process, which knows nothing."""
        self._starts += 1
        self.is_up = True
        self._link.begin(str(self._starts))
        self.filing = Filing(self.around, self.name, self._plan, self._link, self._clocks)
        engines = self.around.engines.values()
        self.prefill = KnownEngines([node for node in engines if node.name[0] == "p"], self.now_ns)
        self.decode = KnownEngines([node for node in engines if node.name[0] == "d"], self.now_ns)
        self.around.note(self.name, "starts")

    def crash(self) -> None:
        """Everything that it knew is gone; so are its connections, both ways."""
        self.around.note(self.name, "crashes")
        self.is_up = False
        self.filing.close()
        runs, self.runs = self.runs, {}
        for run in runs.values():
            run.is_over = True
            self._hang_up(run)
            self._tell(run, Reply(b"", "the router is gone"))

    def now_ns(self) -> int:
        """Its monotonic clock."""
        return self._clocks.monotonic_ns(self.around.loop.now_ns)

    def ask(self, name: str, ask: Ask, reply: Callable[[Reply], None]) -> None:
        """A client's turn has come; `reply` is called once, unless it is given up before."""
        if not self.is_up:
            self.around.loop.after(MS, lambda: reply(Reply(b"", "the router is gone")))
            return

        def begin() -> None:
            if not is_taken(ask.smuggles):
                self.around.loop.after(MS, lambda: reply(Reply(b"", "400")))
                return
            found = self.filing.look_up(ask)
            preferred = None if found.match is None else found.match.turn.engine
            machine = self._make_turn(
                self.prefill.choose,
                lambda excluded, last: self.decode.choose(excluded, preferred, last_resort=last),
                found.match is not None,
            )
            run = self.runs[name] = _Run(name, ask, found, self.filing.use(found), machine, reply)
            self.around.note(
                self.name, "takes", name, len(ask.text), found.match.by if found.match else "new"
            )
            self._take(run, machine.start())

        self._guarded(begin)

    def give_up(self, name: str) -> None:
        """The client has left."""
        run = self.runs.pop(name, None)
        if run is not None:
            self.around.note(self.name, "is told to give up", name)
            self._over(run)
            self._hang_up(run)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever the code under test raises is a finding
            self.around.failed(self.name, error)

    def _take(self, run: _Run, step: Step) -> None:
        match = run.found.match
        if isinstance(step, Prefill):
            handle = match.turn.handle.decode() if step.with_handle and match is not None else None
            if self.around.handles and self._chance.permille(self._plan.confused):
                handle = self._chance.pick(self.around.handles)
            self._send(run, self.prefill[step.engine], Kind.PREFILL, handle)
        elif isinstance(step, Decode):
            with_handover = step.with_handover and run.handover is not None
            self._send(run, self.decode[step.engine], Kind.DECODE if with_handover else Kind.ALONE, None)
        else:
            self._end(run, Reply(b"", step.why))

    def _send(self, run: _Run, known: Known, kind: Kind, handle: str | None) -> None:
        ask, network, engine = run.ask, self.around.network, known.node
        run.hops += 1
        run.engine, run.request_id = known, f"{run.name}/{self.name}.{self._starts}.{run.hops}"
        known.in_flight += 1
        number, is_prefill = run.hops, kind is Kind.PREFILL
        request = Request(
            request_id=run.request_id,
            text=ask.text,
            max_tokens=1 if is_prefill else ask.max_tokens,
            salt=ask.salt,
            hop=kind,
            handle=handle,
            handover=run.handover if kind is Kind.DECODE else None,
            retain=ask.keep_ms != 0,
            ends_at=None if is_prefill else ask.ends_at,
        )

        def if_current(action: Callable[[], None]) -> Callable[[], None]:
            """Only while this router runs and this hop is the turn's last."""

            def guarded() -> None:
                if run.waits_for(number):
                    self._guarded(action)

            return guarded

        def first() -> None:
            if not is_prefill:
                network.hop(engine.name, self.name, if_current(lambda: self._first(run)), _nothing)

        def ended(event: Finished | None, said: bytes) -> None:
            if_current(lambda: self._ended(run, kind, event, said))()

        hop = Hop(self.name, request, first, ended)
        unreached = if_current(lambda: self._failed(run, kind, Trouble.UNREACHED))
        self.around.note(self.name, "sends", run.request_id, engine.name, "handle" if handle else "")
        network.hop(self.name, engine.name, if_current(lambda: engine.ask(hop, unreached)), unreached)
        if is_prefill:
            self._watch(run)

    def _watch(self, run: _Run) -> None:
        """See to it that this hop does not last for ever: all last as long, so the first is due first."""
        self._forget_watched()
        due_ns = self.around.loop.now_ns + PREFILL_TIMEOUT_NS
        self._watched.append((due_ns, run, run.hops))
        if not self._is_watching:
            self._is_watching = True
            self.around.loop.at(due_ns, self._look_at_watched)

    def _forget_watched(self) -> None:
        """Hops that are over, up to the first one that is not."""
        watched = self._watched
        while watched and not watched[0][1].waits_for(watched[0][2]):
            watched.popleft()

    def _look_at_watched(self) -> None:
        self._forget_watched()
        while self._watched and self._watched[0][0] <= self.around.loop.now_ns:
            run = self._watched.popleft()[1]
            self._guarded(lambda run=run: self._timed_out(run))  # type: ignore[misc]
            self._forget_watched()
        self._is_watching = bool(self._watched)
        if self._watched:
            self.around.loop.at(self._watched[0][0], self._look_at_watched)

    def _first(self, run: _Run) -> None:
        run.first_ns = run.first_ns or self.around.loop.now_ns
        if run.ask.stream:  # decode computes, so it has all that it could take over
            run.use.end()

    def _timed_out(self, run: _Run) -> None:
        known = run.engine
        assert known is not None
        known.failed(self.now_ns())
        node, request_id = known.node, run.request_id
        self.around.network.hop(self.name, node.name, lambda: node.abort(request_id), _nothing)
        self._failed(run, Kind.PREFILL, Trouble.BROKEN)

    def _ended(self, run: _Run, kind: Kind, event: Finished | None, said: bytes) -> None:
        if event is None or event.reason is Reason.ABORT:
            self._failed(run, kind, Trouble.BROKEN, said)
            return
        known = run.engine
        assert known is not None
        known.answered()
        self._leave(run)
        if kind is Kind.PREFILL:
            run.handover, run.turn = event.handover, event.turn
            returned = None if event.turn is None else int(str(event.turn["returned_tokens"]))
            self._take(run, run.machine.prefilled(returned))
            return
        body, handle = passed_on(said, event.handle, stream=run.ask.stream)
        if handle is not None:
            self.filing.file(run.ask, run.found, handle, known.node.name)
            self.around.handles.append(handle)
        self._end(run, Reply(said, "", body, run.turn, run.first_ns))

    def _failed(self, run: _Run, kind: Kind, trouble: Trouble, said: bytes = b"") -> None:
        self.around.note(self.name, "fails", run.request_id, trouble.value)
        if run.engine is not None and trouble is Trouble.UNREACHED:
            run.engine.failed(self.now_ns())
        self._leave(run)
        if kind is Kind.PREFILL:
            self._take(run, run.machine.prefill_failed(trouble))
        elif said and run.ask.stream:  # bytes have reached the client: nothing is tried again
            self._end(run, Reply(said, "the engine broke off its answer"))
        else:
            self._take(run, run.machine.decode_failed())

    def _end(self, run: _Run, reply: Reply) -> None:
        if self.runs.pop(run.name, None) is not None:
            self._over(run)
            self._tell(run, reply)

    def _tell(self, run: _Run, reply: Reply) -> None:
        self.around.loop.after(self.around.network.latency_ns(), lambda: run.reply(reply))

    def _over(self, run: _Run) -> None:
        run.is_over = True
        run.use.end()

    def _hang_up(self, run: _Run) -> None:
        """Close the connection of the hop under way."""
        if run.engine is not None:
            node, request_id = run.engine.node, run.request_id
            self._leave(run)
            self.around.network.hop(self.name, node.name, lambda: node.abort(request_id), _nothing)

    def _leave(self, run: _Run) -> None:
        if run.engine is not None:
            run.engine.in_flight -= 1
            run.engine = None


def _nothing() -> None:
    return None
