"""A party between prefill and decode on the control channel, for the faults that only timing can make.

It holds the deployment's secret, so it can mint handles that name itself, hear prefill's claims, ask
decode in turn, and do something unkind (stop decode, wait, forget, forge) between decode's answer and its
own.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import zmq

from kvloop.local.ports import free_ports
from kvloop.wire.control import Message
from kvloop.wire.handle import decode_handle, encode_handle
from kvloop.wire.seal import Seal

Relay = Callable[[Message, Callable[[Message], Message]], Message | None]
"""Gets prefill's message and a function that asks decode; answers prefill, or None for silence."""


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class Middleman:
    """Answers at a port of its own, as `relay` says, until left."""

    def __init__(self, key: bytes, relay: Relay) -> None:
        self.port = free_ports(1, "127.0.0.1")[0]
        self.heard: list[Message] = []
        self._key = key
        self._relay = relay
        self._seal = Seal(key, "middleman")
        self._context = zmq.Context()
        self._behind: tuple[str, int] = ("", 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Middleman":
        """Begin to answer."""
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(f"tcp://127.0.0.1:{self.port}")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close everything."""
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def take_over(self, filed: dict[str, Any], **changes: Any) -> dict[str, Any]:
        """The same handle, but naming this party; `changes` are further fields of the handle."""
        handle = decode_handle(filed["kvloop_handle"], self._key)
        self._behind = handle.control_host, handle.control_port
        mine = replace(handle, control_host="127.0.0.1", control_port=self.port, **changes)
        return {"kvloop_handle": encode_handle(mine, self._key)}

    def ask(self, message: Message, timeout_ms: int = 5_000) -> Message:
        """Decode's answer."""
        with self._context.socket(zmq.DEALER) as socket:
            socket.connect(f"tcp://{self._behind[0]}:{self._behind[1]}")
            socket.send(self._seal.seal(message, _now_ms(), os.urandom(16)))
            assert socket.poll(timeout_ms), "decode does not answer"
            return self._seal.open(socket.recv(), _now_ms()).message

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(50):
                continue
            identity, frame = self._socket.recv_multipart()
            opened = self._seal.open(frame, _now_ms())
            self.heard.append(opened.message)
            answer = self._relay(opened.message, self.ask)
            if answer is not None:
                sealed = self._seal.seal(answer, _now_ms(), os.urandom(16), opened.nonce)
                self._socket.send_multipart((identity, sealed))
