"""The control channel: claims out, claims in, on one thread of the scheduler process.

Answering a claim must not wait for a model step, and asking one must not block the scheduler, so both
live on a thread of their own that sleeps in poll(2) and wakes for a frame or for an outgoing message. One
ROUTER socket serves peers; one DEALER socket per peer asks them. Every frame is sealed (see `wire.seal`);
one that does not open is dropped without an answer. Bounds: peers, frame size, frames queued to a peer
and from it, messages waiting to go out, questions without an answer.

Nothing ends the thread but `stop`: what goes wrong with one message costs that message its answer.
"""

import errno
import logging
import os
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import zmq

from kvloop.errors import UserError, WireError
from kvloop.wire.control import Failed, Message
from kvloop.wire.seal import MAX_FRAME_BYTES, NONCE_BYTES, Seal

logger = logging.getLogger("vllm.kvloop.control")

MAX_PEERS = 256
"""DEALER sockets kept open; the longest unused goes first. More prefill-decode pairs than any fleet's
engine has."""
MAX_OUTGOING_MESSAGES = 10_000
MAX_OPEN_QUESTIONS = 10_000
MAX_QUEUED_FRAMES = 1000
"""In each socket, each way: to a peer that does not answer, a claim a second for a quarter of an hour."""
STOP_TIMEOUT_S = 2.0
"""An answer takes microseconds; a thread that is stuck in one is a daemon, and ends with the process."""

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message for the peer at `address`; `tag` comes back with the answer, None wants none."""

    address: Address
    message: Message
    tag: object


def endpoint_of(address: Address) -> str:
    """The ZMQ endpoint of a host and port, IPv6 literals in brackets."""
    host, port = address
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def require_free(address: Address, setting: str) -> None:
    """UserError where something listens on `address` already; `setting` names what to change."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
        try:
            probe.bind(endpoint_of(address))
        except zmq.ZMQError as error:
            raise UserError(
                f"cannot listen on {endpoint_of(address)} ({error.strerror}): set {setting}"
            ) from error


class ControlChannel:
    """Sends and answers control messages. `send` and `stop` are for one thread only, the scheduler's.

    `serve(message)` answers a peer's message, on this channel's thread. `on_reply(tag, message)` delivers
    the answer to a message of ours, on this channel's thread; `Failed` where it could not be sent.
    """

    def __init__(
        self,
        address: Address,
        seal: Seal,
        *,
        serve: Callable[[Message], Message],
        on_reply: Callable[[object, Message], None],
    ) -> None:
        self._address = address
        self._seal = seal
        self._serve = serve
        self._on_reply = on_reply
        self._outgoing: deque[Outgoing] = deque()
        self._questions: OrderedDict[bytes, object] = OrderedDict()
        self._peers: OrderedDict[Address, zmq.Socket[bytes]] = OrderedDict()
        self._stopping = False
        self._context = zmq.Context()
        self._wake_here = self._context.socket(zmq.PAIR)
        self._wake_here.bind("inproc://kvloop-wake")
        self._wake_there = self._context.socket(zmq.PAIR)
        self._wake_there.connect("inproc://kvloop-wake")
        self._router = self._open(zmq.ROUTER)
        try:
            _bind(self._router, address)
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            raise UserError(
                f"the control channel cannot listen on {endpoint_of(address)} ({error.strerror}): "
                "set kvloop_control_host and kvloop_control_port"
            ) from error
        self._poller = zmq.Poller()
        self._poller.register(self._wake_there, zmq.POLLIN)
        self._poller.register(self._router, zmq.POLLIN)
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
            self._context.destroy(linger=0)

    def send(self, address: Address, message: Message, tag: object = None) -> bool:
        """Queue a message for `address`, and return at once. False where that is pointless: the channel
        is stopped, or so many wait already that its thread must be stuck."""
        if self._stopping or len(self._outgoing) >= MAX_OUTGOING_MESSAGES:
            return False
        self._outgoing.append(Outgoing(address, message, tag))
        self._wake()
        return True

    def _wake(self) -> None:
        with suppress(zmq.Again):  # so many wake-ups are under way that one more says nothing new
            self._wake_here.send(b"", zmq.NOBLOCK)

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
            for ready, _ in self._poller.poll():
                if ready is self._wake_there:
                    self._drain_wake()
                elif ready is self._router:
                    self._answer()
                else:
                    self._hear(ready)
            while self._outgoing and not self._stopping:
                self._emit(self._outgoing.popleft())

    def _drain_wake(self) -> None:
        while True:
            try:
                self._wake_there.recv(zmq.NOBLOCK)
            except zmq.Again:
                return

    def _answer(self) -> None:
        try:
            identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            if len(frames) != 1:
                return
            opened = self._seal.open(frames[0], _now_ms())
            if opened.reply_to:
                return
            reply = self._reply_to(opened.message)
            frame = self._seal.seal(reply, _now_ms(), os.urandom(NONCE_BYTES), opened.nonce)
            self._router.send_multipart((identity, frame), zmq.NOBLOCK)
        except (WireError, zmq.ZMQError) as error:
            logger.debug("a control frame was dropped: %s", error)

    def _reply_to(self, message: Message) -> Message:
        try:
            return self._serve(message)
        except Exception:
            logger.exception("a %s could not be answered", type(message).__name__)
            return Failed("internal error")

    def _hear(self, peer: "zmq.Socket[bytes]") -> None:
        try:
            frames = peer.recv_multipart(zmq.NOBLOCK)
            if len(frames) != 1:
                return
            opened = self._seal.open(frames[0], _now_ms())
        except (WireError, zmq.ZMQError) as error:
            logger.debug("an answer was dropped: %s", error)
            return
        self._deliver(self._questions.pop(opened.reply_to, None), opened.message)

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
            peer = self._open(zmq.DEALER)
            try:
                peer.connect(endpoint_of(address))
            except zmq.ZMQError:
                peer.close()
                raise
            self._poller.register(peer, zmq.POLLIN)
            if len(self._peers) >= MAX_PEERS:
                _, oldest = self._peers.popitem(last=False)
                self._poller.unregister(oldest)
                oldest.close()
        self._peers[address] = peer
        return peer


def _bind(router: "zmq.Socket[bytes]", address: Address) -> None:
    """Listen on `address`. ZMQ takes addresses and interfaces here, so a host name is looked up, as ZMQ
    does it for those who connect."""
    try:
        router.bind(endpoint_of(address))
    except zmq.ZMQError as error:
        if error.errno != errno.ENODEV:
            raise
        host, port = address
        found = socket.getaddrinfo(host, port, socket.AF_INET6, socket.SOCK_STREAM, 0, socket.AI_V4MAPPED)
        router.bind(endpoint_of((str(found[0][4][0]), port)))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
