"""The control channel: questions out, questions in, on one thread of an engine's scheduler or of a router.

Answering a claim must not wait for a model step, and asking one must not block the scheduler, so both
live on a thread of their own that sleeps in poll(2) and wakes for a frame or for an outgoing message. One
ROUTER socket serves peers; one DEALER socket per peer asks them. Who is never asked anything, as a router,
listens nowhere. Every frame is sealed (see `wire.seal`); one that does not open is dropped without an answer,
and counted. Bounds: peers, frame size, frames queued to a peer and from it, messages waiting to go out,
questions without an answer, each way.

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
from kvloop.errors import FrameMalformedError, UserError, WireError
from kvloop.wire.control import Failed, Message
from kvloop.wire.seal import MAX_FRAME_BYTES, NONCE_BYTES, Opened, Seal

logger = logging.getLogger("vllm.kvloop.control")

MAX_PEERS = 256
"""DEALER sockets kept open; the longest unused goes first. More prefill-decode pairs than any fleet's
engine has."""
PEER_IDLE_S = 600.0
"""An engine that was not asked for longer than any lease lasts has nothing to tell. If it is no more, its
socket would try to reconnect ten times a second for ever."""
MAX_OUTGOING_MESSAGES = 10_000
MAX_OPEN_QUESTIONS = 10_000
MAX_DEFERRED_ANSWERS = 10_000
"""As many questions as one peer may have open."""
MAX_QUEUED_FRAMES = 1000
"""In each socket, each way: to a peer that does not answer, a claim a second for a quarter of an hour."""
STOP_TIMEOUT_S = 2.0
"""An answer takes microseconds; a thread that is stuck in one is a daemon, and ends with the process."""

Serve = Callable[[Message, Answer], Message | None]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message for the peer at `address`; `tag` comes back with the answer, None wants none."""

    address: Address
    message: Message
    tag: object


@dataclass(slots=True)
class _Peer:
    socket: "zmq.Socket[bytes]"
    used_s: float = 0.0


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
        self._peers: OrderedDict[Address, _Peer] = OrderedDict()  # the longest unused first
        self._deferred = DeferredAnswers(MAX_DEFERRED_ANSWERS, self._wake)
        self._dropped: Counter[str] = Counter()
        self._stopping = False
        self._context = zmq.Context()
        self._wake_lock = threading.Lock()
        self._wake_here = self._context.socket(zmq.PAIR)
        self._wake_here.bind("inproc://kvloop-wake")
        self._wake_there = self._context.socket(zmq.PAIR)
        self._wake_there.connect("inproc://kvloop-wake")
        self._poller = zmq.Poller()
        self._poller.register(self._wake_there, zmq.POLLIN)
        self._router = None if address is None else self._listening(address)
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
        """How many frames were dropped, by reason: those of `wire.seal`, `transport`, and `unasked` for an
        answer where only questions may come in."""
        return dict(self._dropped)

    def _wake(self) -> None:
        with self._wake_lock, suppress(zmq.Again):  # enough wake-ups are under way: one more says nothing new
            if not self._wake_here.closed:
                self._wake_here.send(b"", zmq.NOBLOCK)

    def _listening(self, address: Address) -> "zmq.Socket[bytes]":
        router = self._open(zmq.ROUTER)
        try:
            listen(router, address)
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            raise UserError(
                f"the control channel cannot listen on {endpoint_of(address)} ({error.strerror}): "
                "set kvloop_control_host and kvloop_control_port"
            ) from error
        self._poller.register(router, zmq.POLLIN)
        return router

    def _open(self, kind: int) -> "zmq.Socket[bytes]":
        opened: zmq.Socket[bytes] = self._context.socket(kind)
        opened.setsockopt(zmq.IPV6, 1)
        opened.setsockopt(zmq.LINGER, 0)
        opened.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        opened.setsockopt(zmq.SNDHWM, MAX_QUEUED_FRAMES)
        opened.setsockopt(zmq.RCVHWM, MAX_QUEUED_FRAMES)
        return opened

    def _run(self) -> None:
        while not self._stopping:
            for ready, _ in self._poller.poll(self._close_idle()):
                if ready is self._wake_there:
                    self._drain_wake()
                elif self._router is not None and ready is self._router:
                    self._hear_question(self._router)
                else:
                    self._hear_answer(ready)
            for asker, reply in self._deferred.take():
                self._answer(asker, reply)
            while self._outgoing and not self._stopping:
                self._emit(self._outgoing.popleft())

    def _drain_wake(self) -> None:
        while True:
            try:
                self._wake_there.recv(zmq.NOBLOCK)
            except zmq.Again:
                return

    def _hear_question(self, router: "zmq.Socket[bytes]") -> None:
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
            self._router.send_multipart((asker.identity, frame), zmq.NOBLOCK)
        except (WireError, zmq.ZMQError) as error:
            self._drop(error)

    def _hear_answer(self, peer: "zmq.Socket[bytes]") -> None:
        try:
            opened = self._opened(peer.recv_multipart(zmq.NOBLOCK))
        except (WireError, zmq.ZMQError) as error:
            self._drop(error)
            return
        self._deliver(self._questions.pop(opened.reply_to, None), opened.message)

    def _opened(self, frames: list[bytes]) -> Opened:
        if len(frames) != 1:
            raise FrameMalformedError("several parts")
        return self._seal.open(frames[0], _now_ms(), time.monotonic_ns() // 1_000_000)

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
            self._peer(outgoing.address).send(frame, zmq.NOBLOCK)
        except (WireError, zmq.ZMQError) as error:
            self._deliver(outgoing.tag, Failed(str(error)[:200]))
            return
        if outgoing.tag is not None:
            self._questions[nonce] = outgoing.tag
            if len(self._questions) > MAX_OPEN_QUESTIONS:
                self._questions.popitem(last=False)

    def _peer(self, address: Address) -> "zmq.Socket[bytes]":
        peer = self._peers.pop(address, None)
        if peer is None:
            opened = self._open(zmq.DEALER)
            try:
                opened.connect(endpoint_of(address))
            except zmq.ZMQError:
                opened.close()
                raise
            self._poller.register(opened, zmq.POLLIN)
            peer = _Peer(opened)
            if len(self._peers) >= MAX_PEERS:
                self._close_oldest()
        peer.used_s = time.monotonic()
        self._peers[address] = peer
        return peer.socket

    def _close_idle(self) -> int | None:
        """Close the connections that were idle for too long; milliseconds until there are more, if any."""
        now_s = time.monotonic()
        while self._peers:
            left_s = next(iter(self._peers.values())).used_s + PEER_IDLE_S - now_s
            if left_s > 0:
                return int(left_s * 1000) + 1
            self._close_oldest()
        return None

    def _close_oldest(self) -> None:
        _, oldest = self._peers.popitem(last=False)
        self._poller.unregister(oldest.socket)
        oldest.socket.close()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
