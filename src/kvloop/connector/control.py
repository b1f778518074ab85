"""The control channel: claims out, claims in, on one thread of the scheduler process.

Answering a claim must not wait for a model step, and asking one must not block the scheduler, so both
live on a thread of their own that sleeps in poll(2) and wakes for a frame or for an outgoing message. One
ROUTER socket serves peers; one DEALER socket per peer asks them. Every frame is sealed (see `wire.seal`);
one that does not open is dropped without an answer. Bounds: peers, frame size, messages waiting to go
out, questions without an answer.
"""

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from kvloop.errors import UserError, WireError
from kvloop.wire.control import Failed, Message
from kvloop.wire.seal import MAX_FRAME_BYTES, NONCE_BYTES, Seal

MAX_PEERS = 256
"""DEALER sockets kept open; the longest unused goes first. More prefill-decode pairs than any fleet's
engine has."""
MAX_OUTGOING_MESSAGES = 10_000
MAX_OPEN_QUESTIONS = 10_000

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


class ControlChannel:
    """Sends and answers control messages. `send` is for one thread only, the scheduler's.

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
            self._router.bind(endpoint_of(address))
        except zmq.ZMQError as error:
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
        """End the thread and close every socket. Safe to call twice."""
        if self._stopping:
            return
        self._stopping = True
        self._wake_here.send(b"")
        if self._thread.is_alive():
            self._thread.join()
        self._context.destroy(linger=0)

    def send(self, address: Address, message: Message, tag: object = None) -> bool:
        """Queue a message for `address`. False where too many wait already: a peer or this thread is
        stuck."""
        if len(self._outgoing) >= MAX_OUTGOING_MESSAGES:
            return False
        self._outgoing.append(Outgoing(address, message, tag))
        self._wake_here.send(b"", zmq.NOBLOCK)
        return True

    def _open(self, kind: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.SNDHWM, 1000)
        socket.setsockopt(zmq.RCVHWM, 1000)
        return socket

    def _run(self) -> None:
        while not self._stopping:
            for socket, _ in self._poller.poll():
                if socket is self._wake_there:
                    self._drain_wake()
                elif socket is self._router:
                    self._answer()
                else:
                    self._hear(socket)
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
            reply = self._serve(opened.message)
            frame = self._seal.seal(reply, _now_ms(), os.urandom(NONCE_BYTES), opened.nonce)
            self._router.send_multipart((identity, frame), zmq.NOBLOCK)
        except (WireError, zmq.ZMQError):
            return

    def _hear(self, socket: "zmq.Socket[bytes]") -> None:
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
            if len(frames) != 1:
                return
            opened = self._seal.open(frames[0], _now_ms())
        except (WireError, zmq.ZMQError):
            return
        tag = self._questions.pop(opened.reply_to, None)
        if tag is not None:
            self._on_reply(tag, opened.message)

    def _emit(self, outgoing: Outgoing) -> None:
        nonce = os.urandom(NONCE_BYTES)
        try:
            frame = self._seal.seal(outgoing.message, _now_ms(), nonce)
            self._peer(outgoing.address).send(frame, zmq.NOBLOCK)
        except (WireError, zmq.ZMQError) as error:
            if outgoing.tag is not None:
                self._on_reply(outgoing.tag, Failed(str(error)[:200]))
            return
        if outgoing.tag is not None:
            self._questions[nonce] = outgoing.tag
            if len(self._questions) > MAX_OPEN_QUESTIONS:
                self._questions.popitem(last=False)

    def _peer(self, address: Address) -> "zmq.Socket[bytes]":
        socket = self._peers.pop(address, None)
        if socket is None:
            socket = self._open(zmq.DEALER)
            socket.connect(endpoint_of(address))
            self._poller.register(socket, zmq.POLLIN)
            if len(self._peers) >= MAX_PEERS:
                _, oldest = self._peers.popitem(last=False)
                self._poller.unregister(oldest)
                oldest.close()
        self._peers[address] = socket
        return socket


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
