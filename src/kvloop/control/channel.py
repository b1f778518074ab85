"""The control channel: questions out, questions in, on one thread of an engine's scheduler or of a router.

Answering a claim must not wait for a model step, and asking one must not block the scheduler, so both
live on a thread of their own that sleeps in poll(2) and wakes for a frame or for an outgoing message. One
ROUTER socket serves peers; one DEALER socket per peer asks them. Who is never asked anything, as a router,
listens nowhere. Who has not the deployment's secret gets no connection (see `transport`). Every frame is
sealed (see `wire.seal`); one that does not open is dropped without an answer, and counted. Bounds: peers,
frame size, frames queued to a peer and from it, messages waiting to go out, questions without an answer, each
way.

Nothing ends the thread but `stop`: what goes wrong with one message costs that message its answer.
"""

import logging
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import zmq

from kvloop.control.address import Address, endpoint_of, listen
from kvloop.control.deferred import Answer, Asker, DeferredAnswers
from kvloop.control.handshake import REFUSED, Failures, Monitor
from kvloop.control.peers import Hear, Peers
from kvloop.control.transport import Socket, Transport, cut, joined
from kvloop.errors import UserError, WireError
from kvloop.wire.control import Failed, Message
from kvloop.wire.seal import NONCE_BYTES, Opened, Seal

logger = logging.getLogger("vllm.kvloop.control")

MAX_OUTGOING_MESSAGES = 10_000
MAX_OPEN_QUESTIONS = 10_000
MAX_DEFERRED_ANSWERS = 10_000
"""As many questions as one peer may have open."""
STOP_TIMEOUT_S = 2.0
"""An answer takes microseconds; a thread that is stuck in one is a daemon, and ends with the process."""

Serve = Callable[[Message, Answer], Message | None]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message for the peer at `address`; `tag` comes back with the answer, None wants none."""

    address: Address
    message: Message
    tag: object


class ControlChannel:
    """Sends and answers control messages. `send` and `stop` are for one thread only, the one that made it.

    `serve(message, answer)` answers a peer's message, on this channel's thread: it returns the answer, or
    None and calls `answer` with it later, from any thread. `on_reply(tag, message)` delivers the answer to a
    message of ours, on this channel's thread; `Failed` where it could not be sent. `address` is where to
    listen; without one, and `serve`, the channel only asks.
    """

    def __init__(
        self,
        address: Address | None,
        seal: Seal,
        *,
        on_reply: Callable[[object, Message], None],
        serve: Serve | None = None,
    ) -> None:
        """UserError where `address` cannot be listened on."""
        if (address is None) != (serve is None):
            raise ValueError("whoever listens answers")
        self._seal = seal
        self._serve = serve
        self._on_reply = on_reply
        self._outgoing: deque[Outgoing] = deque()
        self._questions: OrderedDict[bytes, object] = OrderedDict()
        self._deferred = DeferredAnswers(MAX_DEFERRED_ANSWERS, self._wake)
        self._dropped: Counter[str] = Counter()
        self._stopping = False
        self._failures = Failures(lambda: self._dropped.update(("handshake",)))
        self._context = zmq.Context()
        transport = Transport(self._context, seal.transport_secret())
        self._wake_lock = threading.Lock()
        self._wake_here = self._context.socket(zmq.PAIR)
        self._wake_here.bind("inproc://kvloop-wake")
        self._wake_there = self._context.socket(zmq.PAIR)
        self._wake_there.connect("inproc://kvloop-wake")
        self._poller = zmq.Poller()
        self._hearers: dict[Socket, Hear] = {}
        self._watch(self._wake_there, lambda _: self._drain_wake())
        self._peers = Peers(
            transport, self._failures, watch=self._watch, unwatch=self._unwatch, hear=self._hear_answer
        )
        self._router = None if address is None else self._listening(transport, address)
        self._thread = threading.Thread(target=self._run, name="kvloop-control", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close every socket, within `STOP_TIMEOUT_S`. Safe to call twice."""
        if self._stopping:
            return
        self._stopping = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            with self._wake_lock:
                self._context.destroy(linger=0)

    def send(self, address: Address, message: Message, tag: object = None) -> bool:
        """Queue a message for `address`, and return at once. False where that is pointless: the channel
        is stopped, or so many wait already that its thread must be stuck."""
        if self._stopping or len(self._outgoing) >= MAX_OUTGOING_MESSAGES:
            return False
        self._outgoing.append(Outgoing(address, message, tag))
        self._wake()
        return True

    def frames_dropped(self) -> dict[str, int]:
        """How many frames were dropped, by reason: those of `wire.seal`, `transport`, `unasked` for an answer
        where only questions may come in, and `handshake` for what began a connection that was refused."""
        return dict(self._dropped)

    def _wake(self) -> None:
        with self._wake_lock, suppress(zmq.Again):  # enough wake-ups are under way: one more says nothing new
            if not self._wake_here.closed:
                self._wake_here.send(b"", zmq.NOBLOCK)

    def _listening(self, transport: Transport, address: Address) -> Socket:
        router = transport.open(zmq.ROUTER)
        monitor = Monitor(router, REFUSED)
        try:
            listen(router, address)
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            raise UserError(
                f"the control channel cannot listen on {endpoint_of(address)} ({error.strerror}): "
                "set another (kvloop_control_host and kvloop_control_port; --control-host and --control-port)"
            ) from error
        self._watch(router, self._hear_question)
        self._watch(monitor.socket, lambda _: self._hear_strangers(monitor, endpoint_of(address)))
        return router

    def _watch(self, socket: Socket, hear: Hear) -> None:
        self._poller.register(socket, zmq.POLLIN)
        self._hearers[socket] = hear

    def _unwatch(self, socket: Socket) -> None:
        self._poller.unregister(socket)
        del self._hearers[socket]

    def _run(self) -> None:
        while not self._stopping:
            for ready, _ in self._poller.poll(self._peers.close_idle()):
                self._hearers[ready](ready)
            for asker, reply in self._deferred.take():
                self._answer(asker, reply)
            while self._outgoing and not self._stopping:
                self._emit(self._outgoing.popleft())

    def _hear_strangers(self, monitor: Monitor, endpoint: str) -> None:
        for _ in monitor.take():
            self._failures.client(endpoint)

    def _drain_wake(self) -> None:
        while True:
            try:
                self._wake_there.recv(zmq.NOBLOCK)
            except zmq.Again:
                return

    def _hear_question(self, router: Socket) -> None:
        try:
            identity, *frames = router.recv_multipart(zmq.NOBLOCK)
            opened = self._opened(frames)
        except (WireError, zmq.ZMQError) as error:
            self._drop(error)
            return
        if opened.reply_to:
            self._dropped["unasked"] += 1
            return
        asker = Asker(identity, opened.nonce)
        reply = self._reply_to(opened.message, self._deferred.open(asker))
        if reply is not None and self._deferred.close(asker):
            self._answer(asker, reply)

    def _reply_to(self, message: Message, answer: Answer) -> Message | None:
        assert self._serve is not None
        try:
            return self._serve(message, answer)
        except Exception:
            logger.exception("a %s could not be answered", type(message).__name__)
            return Failed("internal error")

    def _answer(self, asker: Asker, reply: Message) -> None:
        assert self._router is not None
        try:
            frame = self._seal.seal(reply, _now_ms(), os.urandom(NONCE_BYTES), asker.nonce)
            self._router.send_multipart((asker.identity, *cut(frame)), zmq.NOBLOCK)
        except (WireError, zmq.ZMQError) as error:
            self._drop(error)

    def _hear_answer(self, peer: Socket) -> None:
        try:
            opened = self._opened(peer.recv_multipart(zmq.NOBLOCK))
        except (WireError, zmq.ZMQError) as error:
            self._drop(error)
            return
        self._deliver(self._questions.pop(opened.reply_to, None), opened.message)

    def _opened(self, frames: list[bytes]) -> Opened:
        return self._seal.open(joined(frames), _now_ms(), time.monotonic_ns() // 1_000_000)

    def _drop(self, error: WireError | zmq.ZMQError) -> None:
        self._dropped[error.reason if isinstance(error, WireError) else "transport"] += 1
        logger.debug("a control frame was dropped: %s", error)

    def _deliver(self, tag: object, message: Message) -> None:
        if tag is None:
            return
        try:
            self._on_reply(tag, message)
        except Exception:
            logger.exception("a %s could not be delivered", type(message).__name__)

    def _emit(self, outgoing: Outgoing) -> None:
        nonce = os.urandom(NONCE_BYTES)
        try:
            frame = self._seal.seal(outgoing.message, _now_ms(), nonce)
            self._peers.socket(outgoing.address).send_multipart(cut(frame), zmq.NOBLOCK)
        except (WireError, zmq.ZMQError) as error:
            self._deliver(outgoing.tag, Failed(str(error)[:200]))
            return
        if outgoing.tag is not None:
            self._questions[nonce] = outgoing.tag
            if len(self._questions) > MAX_OPEN_QUESTIONS:
                self._questions.popitem(last=False)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
