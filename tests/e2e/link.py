"""A bad link to one decode engine's control port: it loses, delays, repeats and reorders whole frames.

Frames pass as they are, sealed by whoever sent them; the link, which holds the secret, opens them only to see
what they are. What becomes of each is up to `weather`, which says when its copies arrive. A copy that
overtakes another is what reordering is; one that comes after its receiver's patience, what a late answer is.
"""

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import zmq

from kvloop.control.transport import Socket, Transport, joined
from kvloop.errors import WireError
from kvloop.wire.control import Message
from kvloop.wire.handle import decode_handle, encode_handle
from kvloop.wire.seal import Seal

HOST = "127.0.0.1"
STEP_MS = 20


@dataclass(frozen=True)
class Frame:
    """What passes: who sealed it, and what it says."""

    sender: str
    message: Message


Weather = Callable[[Frame], Sequence[float]]
"""When the frame's copies arrive, in seconds from now; none: it is lost. Called on the link's thread."""


def clear(_: Frame) -> Sequence[float]:
    """Every frame arrives once, at once."""
    return (0.0,)


class Link:
    """Between whoever asks and the engine at `control_port`. A context manager; `weather` may be changed at
    any time. `seen` has every frame that came, in order, lost ones too."""

    def __init__(self, key: bytes, control_port: int, weather: Weather = clear) -> None:
        self.weather = weather
        self.seen: list[Frame] = []
        self._key = key
        self._seal = Seal(key, "link")
        self._context: zmq.Context[Socket] = zmq.Context()
        self._transport = Transport(self._context, self._seal.transport_secret())
        self._front = self._transport.open(zmq.ROUTER)
        self.port = self._front.bind_to_random_port(f"tcp://{HOST}")
        self._behind = f"tcp://{HOST}:{control_port}"
        self._backs: dict[bytes, Socket] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._front, zmq.POLLIN)
        self._arrivals: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        """Let frames pass."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close everything; what is still on its way is lost."""
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def through(self, filed: dict[str, Any] | None) -> dict[str, Any]:
        """The same handle, but leading over this link."""
        return {"kvloop_handle": self.rename(str((filed or {})["kvloop_handle"]))}

    def rename(self, handle_text: str) -> str:
        """The handle's text with this link for the engine's address."""
        handle = decode_handle(handle_text, self._key)
        return encode_handle(replace(handle, control_host=HOST, control_port=self.port), self._key)

    def count(self, kind: type[Any]) -> int:
        """How many frames of a kind have come."""
        return sum(isinstance(frame.message, kind) for frame in self.seen)

    def _back(self, identity: bytes) -> Socket:
        back = self._backs.get(identity)
        if back is None:
            back = self._backs[identity] = self._transport.open(zmq.DEALER)
            back.connect(self._behind)
            self._poller.register(back, zmq.POLLIN)
        return back

    def _run(self) -> None:
        while not self._stop.is_set():
            for ready, _ in self._poller.poll(STEP_MS):
                self._take(ready)
            while self._arrivals and self._arrivals[0][0] <= time.monotonic():
                heapq.heappop(self._arrivals)[2]()

    def _take(self, ready: Socket) -> None:
        if ready is self._front:
            identity, *parts = self._front.recv_multipart()
            deliver = partial(self._back(identity).send_multipart, parts, zmq.NOBLOCK)
        else:
            parts = ready.recv_multipart()
            (identity,) = (known for known, back in self._backs.items() if back is ready)
            deliver = partial(self._front.send_multipart, (identity, *parts), zmq.NOBLOCK)
        try:
            frame = joined(parts)
            opened = self._seal.open(frame, time.time_ns() // 1_000_000, time.monotonic_ns() // 1_000_000)
        except WireError:  # not for the link to judge
            deliver()
            return
        seen = Frame(opened.sender, opened.message)
        self.seen.append(seen)
        now = time.monotonic()
        for delay_s in self.weather(seen):
            heapq.heappush(self._arrivals, (now + delay_s, next(self._order), deliver))
