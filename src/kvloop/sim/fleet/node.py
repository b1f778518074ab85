"""An engine in the fleet: the machine, its clocks, and its process, which can die, stop and start again.

While a process is stopped its clocks run, what is sent to it waits, and its memory can be read: a network
card asks no process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvloop.sim.config import EngineConfig
from kvloop.sim.engine import Engine
from kvloop.sim.fleet.around import Answer, Around, Correspondent, Frame, named
from kvloop.sim.fleet.clocks import Clocks
from kvloop.sim.fleet.network import REFUSED_NS
from kvloop.sim.fleet.watch import Act, Asking, End, Grant, Hunger, Kept, Reading, Service
from kvloop.sim.memory import torn
from kvloop.sim.profile import Profile
from kvloop.sim.reads import Question
from kvloop.sim.request import Event, Finished, ReadDone, Request, Sampled, Send, StartRead, Starved
from kvloop.wire.control import Claim, Granted
from kvloop.wire.handle import decode_handle

Ended = Callable[[Finished | None, bytes], None]


@dataclass(slots=True, eq=False)
class Hop:
    """A request on an engine: who sent it, and how to tell him of the first token and the end; of None
    where the connection broke."""

    source: str
    request: Request
    first: Callable[[], None]
    ended: Ended
    said: bytes = b""


class EngineNode:
    """One engine's machine. Its name is its host on both channels."""

    def __init__(self, around: Around, config: EngineConfig, profile: Profile, clocks: Clocks) -> None:
        self.around = around
        self.clocks = clocks
        self.name = config.engine_id
        self.profile = profile
        self.is_stopped = False
        self.engine: Engine | None = None
        self.hops: dict[str, Hop] = {}
        self.link = Correspondent(around, self.name, clocks)
        self._config = config
        self._starts = 0
        self._waiting: list[Callable[[], None]] = []
        self._wakes_ns = -1
        self.start()

    # The process.

    def start(self) -> None:
        """A new process at the old address, with nothing of the old one's."""
        self._starts += 1
        incarnation = f"{self.name}.{self._starts}"
        self.engine = Engine(replace(self._config, incarnation=incarnation), self.profile)
        self.link.begin(incarnation)
        self._wakes_ns = -1
        self.around.note(self.name, "starts as", incarnation)

    def crash(self) -> None:
        """The process dies: connections break, its memory is gone."""
        self.around.note(self.name, "crashes")
        self.engine, self.is_stopped = None, False
        self._waiting.clear()
        hops, self.hops = self.hops, {}
        for hop in hops.values():
            self._tell(hop, None)

    def stop(self) -> None:
        """SIGSTOP: it answers nothing, and keeps everything."""
        if self.engine is not None:
            self.is_stopped = True
            self.around.note(self.name, "stops")

    def resume(self) -> None:
        """SIGCONT: what was sent meanwhile is there at once."""
        if not self.is_stopped:
            return
        self.is_stopped = False
        self.around.note(self.name, "goes on")
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            action()
        self._wake()

    @property
    def incarnation(self) -> str | None:
        """The process's, None where there is none."""
        return None if self.engine is None else self.engine.config.incarnation

    def now_ns(self) -> int:
        """Its monotonic clock."""
        return self.clocks.monotonic_ns(self.around.loop.now_ns)

    # What comes in.

    def ask(self, hop: Hop, refused: Callable[[], None]) -> None:
        """A request has come. `refused`: nobody listens."""
        if self.engine is None:
            self.around.loop.after(REFUSED_NS, refused)
            return
        request = hop.request
        self.hops[request.request_id] = hop

        def submit(engine: Engine) -> None:
            if self.hops.get(request.request_id) is hop:
                engine.submit(request, self.now_ns())

        self._do(submit)

    def abort(self, request_id: str) -> None:
        """The connection of a request was closed."""
        if self.hops.pop(request_id, None) is not None:
            self.around.note(self.name, "is told to give up", request_id)
            self._do(lambda engine: engine.abort(request_id, self.now_ns()))

    def receive(self, source: str, frame: Frame, answer: Answer) -> None:
        """A question has come on the control channel."""
        self._do(lambda engine: self._serve(engine, source, frame, answer))

    def reset(self) -> None:
        """Its weights change: nothing that it holds is worth anything."""
        self.around.note(self.name, "forgets its cache")
        self._do(lambda engine: engine.reset_prefix_cache(self.now_ns()))

    def lend(self, incarnation: str, request_id: str | None, blocks: tuple[int, ...]) -> list[int] | None:
        """What a transfer finds here now."""
        if self.engine is None or self.incarnation != incarnation:
            return None
        return self.engine.lend(blocks, request_id)

    def _serve(self, engine: Engine, source: str, frame: Frame, answer: Answer) -> None:
        opened = self.link.opened(frame)
        if opened is None or opened.reply_to:
            return
        message = opened.message
        reply = engine.serve(message, self.now_ns())
        if self.around.trace.is_on:
            self.around.note(self.name, "answers", source, named(message), named(reply))
        for checker in self.around.checkers:
            checker.served(Service(self, message, reply))
            if isinstance(message, Claim) and isinstance(reply, Granted):
                checker.granted(Grant(self, message, reply, (source, opened.nonce)))
        answer(self.link.sealed(reply, opened.nonce)[0])

    # The machine.

    def _do(self, action: Callable[[Engine], None], *, woken: bool = False) -> None:
        """Let the process do something, now or when it goes on; nothing, if it is gone."""
        engine = self.engine
        if engine is None:
            return
        if self.is_stopped:
            self._waiting.append(lambda: self._do(action))
            return
        checkers = self.around.checkers
        was_idle = bool(checkers) and engine.is_idle
        try:
            engine.advance(self.clocks.monotonic_ns(self.around.loop.now_ns))
            action(engine)
        except Exception as error:  # whatever the code under test raises is a finding
            self.around.failed(self.name, error)
            return
        for event in engine.take_events():
            self._carry_out(engine, event)
        for checker in checkers:
            checker.acted(Act(self, was_idle, woken))
        self._plan_to_wake(engine)

    def _plan_to_wake(self, engine: Engine) -> None:
        due_ns = engine.next_ns()
        if due_ns is None:
            return
        true_ns, now_ns = self.clocks.true_ns(due_ns), self.around.loop.now_ns
        if true_ns < now_ns:
            true_ns = now_ns
        if true_ns != self._wakes_ns:
            self._wakes_ns = true_ns
            self.around.loop.at(true_ns, self._wake)

    def _wake(self) -> None:
        engine = self.engine
        if engine is None or self.is_stopped or self.around.loop.now_ns < self._wakes_ns:
            return  # in the last case the plan has changed since, and another event stands for it
        due_ns = engine.next_ns()
        if due_ns is not None and due_ns <= self.now_ns():
            self._wakes_ns = -1
            self._do(lambda _: None, woken=True)
        elif due_ns is not None and self._wakes_ns <= self.around.loop.now_ns:
            self._plan_to_wake(engine)

    def _carry_out(self, engine: Engine, event: Event) -> None:
        match event:
            case Sampled():
                hop = self.hops.get(event.request_id)
                if hop is not None:
                    if not hop.said:
                        hop.first()
                    hop.said += event.data
            case Finished():
                self._finish(event)
            case Send():
                self._send(engine, event)
            case StartRead():
                self._read(engine, event)
            case ReadDone():
                self._read_done(event)
            case Starved():
                self.around.note(self.name, "starves", event.request_id, event.missing_blocks)
                for checker in self.around.checkers:
                    checker.starved(Hunger(self, event))

    def _finish(self, event: Finished) -> None:
        self.around.note(self.name, "ends", event.request_id, event.reason, event.wrong, event.turn or "")
        hop = self.hops.pop(event.request_id, None)
        for checker in self.around.checkers:
            checker.finished(End(self, event, None if hop is None else hop.request))
        if hop is None:
            return
        if event.handle is not None and self.around.checkers:
            lease_id = decode_handle(event.handle, self.around.key).lease_id
            for checker in self.around.checkers:
                checker.retained(Kept(self, lease_id, hop.request.salt))
        self._tell(hop, event)

    def _tell(self, hop: Hop, event: Finished | None) -> None:
        """The end of a request; over a link that is cut, when it is mended (TCP sends again)."""
        self.around.network.hop(
            self.name, hop.source, lambda: hop.ended(event, hop.said), lambda: self._tell(hop, event)
        )

    def _send(self, engine: Engine, event: Send) -> None:
        target = event.address[0]
        if self.around.trace.is_on:
            self.around.note(self.name, "asks", target, named(event.message))

        def hear(frame: Frame) -> None:
            def take(running: Engine) -> None:
                answer = self.link.taken(frame)
                if answer is not None and running is engine:
                    running.hear(answer[0], answer[1], self.now_ns())

            self._do(take)

        waits = isinstance(event.tag, Question)
        nonce = self.link.ask(target, event.message, event.tag, hear if waits else None)
        if isinstance(event.tag, Question):
            request_id = event.tag.request_id
            hop = self.hops.get(request_id)
            for checker in self.around.checkers:
                checker.claimed(Asking(self, request_id, nonce, hop.request.salt if hop else ""))

    def _read(self, engine: Engine, event: StartRead) -> None:
        source, network = self.around.engines.get(event.engine_id), self.around.network
        takes_ns = network.read_ns(event.takes_ns)
        self.around.note(self.name, "reads", event.read_id, event.engine_id, len(event.blocks), takes_ns)
        for checker in self.around.checkers:
            checker.read_began(Reading(self, event))

        def look() -> list[int] | None:
            if source is None or network.is_cut(self.name, source.name):
                return None
            return source.lend(event.incarnation, event.request_id, event.blocks)

        before = look()

        def land() -> None:
            after = look()
            contents = None if before is None or after is None else torn(before, after)

            def end(running: Engine) -> None:
                if running is engine:
                    for checker in self.around.checkers:
                        checker.read_landed(Reading(self, event, contents))
                    running.read_ended(event.read_id, contents, self.now_ns())

            self._do(end)

        self.around.loop.after(takes_ns, land)

    def _read_done(self, event: ReadDone) -> None:
        target = self.around.engines.get(event.engine_id)
        if target is not None:
            self.around.network.hop(
                self.name, target.name, lambda: target.release(event.request_id), lambda: None
            )

    def release(self, request_id: str) -> None:
        """Another engine has read a handover of this one's, or does not want it."""
        self._do(lambda engine: engine.release_handover(request_id, self.now_ns()))
