"""A party on the control channel: asks a decode engine as prefill would, and can overhear what prefill asks.

It holds the deployment's secret, so its frames open. A claim for real tokens can only be made by an engine
(the chain's root covers the engine's whole configuration), so a real one is had by minting a handle that
names this party, giving it to a prefill engine, and refusing what comes.
"""

import os
import threading
import time
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import zmq

from kvloop.errors import UserError
from kvloop.wire.control import Claim, Message, Refused
from kvloop.wire.handle import decode_handle, encode_handle
from kvloop.wire.seal import NONCE_BYTES, Seal

ANSWER_TIMEOUT_MS = 5_000
CLAIM_TIMEOUT_S = 30.0


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class ControlClient:
    """Asks one engine's control port. A context manager; for one thread."""

    def __init__(self, key: bytes, host: str, port: int) -> None:
        self._seal = Seal(key, "bench")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
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
        self._socket.send(self._seal.seal(message, _now_ms(), os.urandom(NONCE_BYTES)))
        if not self._socket.poll(ANSWER_TIMEOUT_MS):
            raise UserError("the decode engine's control port does not answer")
        return self._seal.open(self._socket.recv(), _now_ms()).message

    def timed_ask(self, message: Message) -> tuple[Message, float]:
        """The answer, and milliseconds from before sealing the question to after opening the answer."""
        began_ns = time.perf_counter_ns()
        answer = self.ask(message)
        return answer, (time.perf_counter_ns() - began_ns) / 1e6


class Eavesdropper:
    """Listens at a port of its own and refuses every claim, keeping it. A context manager."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._seal = Seal(key, "bench")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._claims: list[Claim] = []
        self._heard = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        """Begin to listen."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close everything."""
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def name_in(self, filed: dict[str, Any]) -> dict[str, Any]:
        """The same handle, but naming this party as the one to ask."""
        handle = decode_handle(str(filed["kvloop_handle"]), self._key)
        mine = replace(handle, control_host="127.0.0.1", control_port=self._port)
        return {"kvloop_handle": encode_handle(mine, self._key)}

    def claim(self) -> Claim:
        """The last claim heard. Raises `UserError` if there is none within `CLAIM_TIMEOUT_S`."""
        if not self._heard.wait(CLAIM_TIMEOUT_S):
            raise UserError("prefill sent no claim to the address in its handle")
        return self._claims[-1]

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(50):
                continue
            identity, frame = self._socket.recv_multipart()
            opened = self._seal.open(frame, _now_ms())
            answer = self._seal.seal(Refused("bench"), _now_ms(), os.urandom(NONCE_BYTES), opened.nonce)
            self._socket.send_multipart((identity, answer))
            if isinstance(opened.message, Claim):
                self._claims.append(opened.message)
                self._heard.set()
