"""A router in the fleet: turns on their way through engines, and a process that can die.

What to do next is the router's own turn machine's to say (see `turns`); what a turn goes on from, `core`'s
(see `filing`). A hop is a connection: it can be refused, break, or not end in time. What a router knows dies
with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from kvloop.core.progress import Progress
from kvloop.core.report import TurnReport
from kvloop.sim.fleet.around import Around, Correspondent
from kvloop.sim.fleet.chance import Chance
from kvloop.sim.fleet.clocks import Clocks
from kvloop.sim.fleet.filing import Ask, Filing, Found, LeaseUse
from kvloop.sim.fleet.known import Known, KnownEngines
from kvloop.sim.fleet.node import Hop
from kvloop.sim.fleet.patience import Patience
from kvloop.sim.fleet.plan import MS, Plan, S
from kvloop.sim.fleet.talk import is_taken, passed_on
from kvloop.sim.fleet.turns import Decode, MakeTurn, Prefill, Step, Trouble, TurnMachine
from kvloop.sim.request import Finished, Handover, Reason, Request
from kvloop.sim.request import Hop as Kind

PREFILL_TIMEOUT_NS = 60 * S


class Reply(Struct, frozen=True):
    """What a client gets: the answer's tokens, and why there are no more, if there should be.

    `body`: the bytes that the answer comes in. `turn`: prefill's account, `decoded`: that of a decode engine
    that computed the prompt alone. `first_ns`: when the first token was there, 0 if that is not known.
    """

    data: bytes
    why: str = ""
    body: bytes = b""
    turn: dict[str, object] | None = None
    first_ns: int = 0
    decoded: dict[str, object] | None = None


@dataclass(slots=True, eq=False)
class _Run:
    """A turn on its way. `hops`: how many were sent; only the last one's end is listened to."""

    name: str
    ask: Ask
    found: Found
    use: LeaseUse
    machine: TurnMachine
    reply: Callable[[Reply], None]
    progress: Progress
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
        self._patience = Patience(around.loop, PREFILL_TIMEOUT_NS)
        self.start()

    def start(self) -> None:
        """A new process, which knows nothing."""
        self._starts += 1
        self.is_up = True
        self._link.begin(str(self._starts))
        self.filing = Filing(self.around, self.name, self._plan, self._link, self._clocks)
        self.known = KnownEngines(self.around.engines.values(), self.now_ns, self._plan)
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
            run = self.runs[name] = self._run(name, ask, found, reply)
            self.around.note(
                self.name, "takes", name, len(ask.text), found.match.by if found.match else "new"
            )
            self._take(run, run.machine.start())

        self._guarded(begin)

    def _run(self, name: str, ask: Ask, found: Found, reply: Callable[[Reply], None]) -> _Run:
        known, believed = self.known, self.filing.believe(ask, found)
        ways, progress = known.choose(believed), known.progress(believed)
        machine = self._make_turn(
            lambda excluded: known.choose_prefill(progress.ask, excluded),
            lambda prefill, excluded, last: known.choose_decode(progress.ask, prefill, excluded, last),
            found.match is not None,
            ways[0] if ways else None,
        )
        return _Run(name, ask, found, self.filing.use(found), machine, reply, progress)

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
            self._send(run, self.known[step.engine], Kind.PREFILL, handle)
        elif isinstance(step, Decode):
            with_handover = step.with_handover and run.handover is not None
            self._send(run, self.known[step.engine], Kind.DECODE if with_handover else Kind.ALONE, None)
        else:
            self._end(run, Reply(b"", step.why))

    def _send(self, run: _Run, known: Known, kind: Kind, handle: str | None) -> None:
        ask, network, engine = run.ask, self.around.network, known.node
        run.hops += 1
        run.engine, run.request_id = known, f"{run.name}/{self.name}.{self._starts}.{run.hops}"
        number, is_prefill, now_ns = run.hops, kind is Kind.PREFILL, self.now_ns()
        if is_prefill:
            run.progress.sent_prefill(engine.name, with_handle=handle is not None, now_ns=now_ns)
        else:
            run.progress.sent_decode(engine.name, whole=kind is Kind.ALONE, now_ns=now_ns)
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
            self._patience.wait(
                lambda: run.waits_for(number), lambda: self._guarded(lambda: self._timed_out(run))
            )

    def _first(self, run: _Run) -> None:
        run.first_ns = run.first_ns or self.around.loop.now_ns
        run.progress.began(self.now_ns())
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
        said_turn = event.turn or event.decoded
        report = None if said_turn is None else msgspec.convert(said_turn, TurnReport)
        if kind is Kind.PREFILL:
            run.handover, run.turn = event.handover, event.turn
            run.progress.prefilled(report, self.now_ns())
            self._leave(run)
            self._take(run, run.machine.prefilled(None if report is None else report.returned_tokens))
            return
        run.progress.reported(report)
        run.progress.ended(self.now_ns())
        self._leave(run)
        body, handle = passed_on(said, event.handle, stream=run.ask.stream)
        if handle is not None:
            self.filing.file(run.ask, run.found, handle, known.node.name, run.progress.prompt)
            self.around.handles.append(handle)
        decoded = event.decoded if kind is Kind.ALONE else None
        self._end(run, Reply(said, "", body, run.turn, run.first_ns, decoded))

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
            self._take(run, run.machine.decode_failed(trouble))

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
        run.progress.close(self.now_ns())
        run.engine = None


def _nothing() -> None:
    return None
