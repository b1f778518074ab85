"""Parties on the control channel that are no engines: one asks decode as prefill would, one stands between.

They hold the deployment's secret, so their frames open. A claim for real tokens can only be made by an engine
(the chain's root covers the engine's whole configuration), so a real one is had by minting a handle that
names the middleman and giving it to a prefill engine. What the middleman answers is up to its user: benches
refuse what they have overheard, tests make the faults that only timing can make (stop decode between its
grant and the read, wait, forget, lie).
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import zmq

from kvloop.control.transport import Transport, cut, joined
from kvloop.errors import UserError
from kvloop.wire.control import Claim, Message
from kvloop.wire.handle import decode_handle, encode_handle
from kvloop.wire.seal import NONCE_BYTES, Seal

ANSWER_TIMEOUT_MS = 5_000
CLAIM_TIMEOUT_S = 30.0
HOST = "127.0.0.1"

Relay = Callable[[Message, Callable[[Message], Message]], Message | None]
"""Gets prefill's message and a function that asks decode; answers prefill, or None for silence."""


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class ControlClient:
    """Asks one engine's control port. A context manager; for one thread."""

    def __init__(self, key: bytes, host: str, port: int) -> None:
        self._seal = Seal(key, "asker")
        self._context = zmq.Context()
        self._socket = Transport(self._context, self._seal.transport_secret()).open(zmq.DEALER)
        self._socket.connect(f"tcp://{host}:{port}")

    def __enter__(self) -> Self:
        """Nothing to do: ZMQ connects by itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)

    def ask(self, message: Message) -> Message:
        """The engine's answer. Raises `UserError` where none comes in `ANSWER_TIMEOUT_MS`."""
        self._socket.send_multipart(cut(self._seal.seal(message, _now_ms(), os.urandom(NONCE_BYTES))))
        if not self._socket.poll(ANSWER_TIMEOUT_MS):
            raise UserError("the decode engine's control port does not answer")
        return self._seal.open(joined(self._socket.recv_multipart()), _now_ms()).message

    def timed_ask(self, message: Message) -> tuple[Message, float]:
        """The answer, and milliseconds from before sealing the question to after opening the answer."""
        began_ns = time.perf_counter_ns()
        answer = self.ask(message)
        return answer, (time.perf_counter_ns() - began_ns) / 1e6


class Middleman:
    """Answers at a port of its own, as `relay` says, and keeps what it hears. A context manager."""

    def __init__(self, key: bytes, relay: Relay) -> None:
        self.heard: list[Message] = []
        self._key = key
        self._relay = relay
        self._seal = Seal(key, "middleman")
        self._context = zmq.Context()
        self._socket = Transport(self._context, self._seal.transport_secret()).open(zmq.ROUTER)
        self._port = self._socket.bind_to_random_port(f"tcp://{HOST}")
        self._behind = (HOST, 0)
        self._claimed = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        """Begin to answer."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close everything."""
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def take_over(self, filed: dict[str, Any]) -> dict[str, Any]:
        """The same handle, but naming this party as the one to ask."""
        handle = decode_handle(str(filed["kvloop_handle"]), self._key)
        self._behind = handle.control_host, handle.control_port
        mine = replace(handle, control_host=HOST, control_port=self._port)
        return {"kvloop_handle": encode_handle(mine, self._key)}

    def claim(self) -> Claim:
        """The last claim heard. Raises `UserError` if there is none within `CLAIM_TIMEOUT_S`."""
        if not self._claimed.wait(CLAIM_TIMEOUT_S):
            raise UserError("prefill sent no claim to the address in its handle")
        return [message for message in self.heard if isinstance(message, Claim)][-1]

    def _ask(self, message: Message) -> Message:
        with ControlClient(self._key, *self._behind) as client:
            return client.ask(message)

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(50):
                continue
            identity, *parts = self._socket.recv_multipart()
            opened = self._seal.open(joined(parts), _now_ms())
            self.heard.append(opened.message)
            if isinstance(opened.message, Claim):
                self._claimed.set()
            answer = self._relay(opened.message, self._ask)
            if answer is not None:
                sealed = self._seal.seal(answer, _now_ms(), os.urandom(NONCE_BYTES), opened.nonce)
                self._socket.send_multipart((identity, *cut(sealed)))
