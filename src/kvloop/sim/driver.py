"""A simulated engine in real time: its clock, its control channel, its transfers, and those who wait for it.

The engine is a machine that somebody has to call. Requests and timers call it on the event loop, peers on the
control channel's thread; a lock is held around each call, so a claim is answered without waiting for the
loop. What the engine wants done is done on the loop.

A transfer looks at the peer's memory when it begins and again when it ends: what was rewritten in between
arrives torn.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine

from kvloop.control.channel import ControlChannel
from kvloop.control.deferred import Answer
from kvloop.sim.engine import Engine
from kvloop.sim.memory import torn
from kvloop.sim.request import Event, Finished, ReadDone, Request, Sampled, Send, StartRead
from kvloop.sim.sidechannel import SideChannel
from kvloop.wire.control import Failed, Message
from kvloop.wire.seal import Seal

NS_PER_S = 1_000_000_000
Listener = Callable[[Sampled | Finished], None]


class Driver:
    """Runs one engine on the running loop. `listen(events)` of a request is called on the loop."""

    def __init__(self, engine: Engine) -> None:
        """UserError where the control channel cannot listen."""
        config = engine.config
        self.engine = engine
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._listeners: dict[str, Listener] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due_ns: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._side = SideChannel(config.side_channel, self._lend, self._handover_done)
        self._control = ControlChannel(
            config.control,
            Seal(config.key, f"{config.engine_id}/{config.incarnation}"),
            on_reply=self._hear,
            serve=self._serve,
        )

    async def start(self) -> None:
        """Begin to serve peers. OSError where the side channel cannot listen."""
        await self._side.start()
        self._control.start()

    def stop(self) -> None:
        """End everything."""
        self._control.stop()
        self._side.close()
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()

    def submit(self, request: Request, listener: Listener) -> None:
        """Hand a request in. ValueError where the engine does not take it."""
        with self._lock:
            self.engine.submit(request, self._now_ns())
        self._listeners[request.request_id] = listener
        self._carry_out()

    def abort(self, request_id: str) -> None:
        """Nobody waits for the answer any more."""
        if self._listeners.pop(request_id, None) is not None:
            with self._lock:
                self.engine.abort(request_id, self._now_ns())
            self._carry_out()

    def reset_prefix_cache(self) -> None:
        """Forget everything that could be found."""
        with self._lock:
            self.engine.reset_prefix_cache(self._now_ns())
        self._carry_out()

    def _now_ns(self) -> int:
        """The time, with everything before it done. For whoever holds the lock."""
        now_ns = time.monotonic_ns()
        self.engine.advance(now_ns)
        return now_ns

    # On the control channel's thread.

    def _serve(self, message: Message, _: Answer) -> Message:
        with self._lock:
            answer = self.engine.serve(message, self._now_ns())
        self._loop.call_soon_threadsafe(self._carry_out)
        return answer

    def _hear(self, tag: object, message: Message) -> None:
        with self._lock:
            self.engine.hear(tag, message, self._now_ns())
        self._loop.call_soon_threadsafe(self._carry_out)

    # On the loop.

    def _carry_out(self) -> None:
        """Let what is due happen, do what the engine wants, and come back when there is more."""
        with self._lock:
            self._now_ns()
            events = self.engine.take_events()
            due_ns = self.engine.next_ns()
        for event in events:
            self._do(event)
        if due_ns != self._due_ns or self._timer is None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._due_ns = None, due_ns
            if due_ns is not None:
                delay_s = max(0, due_ns - time.monotonic_ns()) / NS_PER_S
                self._timer = self._loop.call_later(delay_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._carry_out()

    def _do(self, event: Event) -> None:
        match event:
            case Sampled():
                listener = self._listeners.get(event.request_id)
                if listener is not None:
                    listener(event)
            case Finished():
                listener = self._listeners.pop(event.request_id, None)
                if listener is not None:
                    listener(event)
            case Send():
                if not self._control.send(event.address, event.message, event.tag):
                    self._hear(event.tag, Failed("unreachable"))
            case StartRead():
                self._run(self._read(event))
            case ReadDone():
                self._run(self._side.done(event.address, event.request_id))

    def _run(self, work: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, event: StartRead) -> None:
        began_ns = time.monotonic_ns()
        where = (event.address, event.incarnation, event.request_id, event.blocks)
        contents = await self._side.read(*where)
        left_ns = event.takes_ns - (time.monotonic_ns() - began_ns)
        if contents is not None and left_ns > 0:
            await asyncio.sleep(left_ns / NS_PER_S)
            after = await self._side.read(*where)
            contents = None if after is None else torn(contents, after)
        with self._lock:
            self.engine.read_ended(event.read_id, contents, self._now_ns())
        self._carry_out()

    def _lend(self, incarnation: str, request_id: str | None, blocks: tuple[int, ...]) -> list[int] | None:
        if incarnation != self.engine.config.incarnation:
            return None
        with self._lock:
            return self.engine.lend(blocks, request_id)

    def _handover_done(self, request_id: str) -> None:
        with self._lock:
            self.engine.release_handover(request_id, self._now_ns())
        self._carry_out()
