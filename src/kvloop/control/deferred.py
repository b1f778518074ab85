"""Answers that come later than their question's turn on the channel's thread, and from another thread.

Some questions only another thread can answer (whether a block still holds what it held is the scheduler's to
say). Their askers wait here, each for one answer: the first counts, whoever gives it. An asker gives up by
its own clock, so of too many the oldest are forgotten: theirs is the question that nobody waits for any more.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvloop.wire.control import Message

Answer = Callable[[Message], None]
"""Answers one question, from any thread. Only the first call has an effect; none has one after the channel
is stopped."""


@dataclass(frozen=True, slots=True, eq=False)
class Asker:
    """Where an answer goes: the peer's identity on our socket, and the nonce of its question."""

    identity: bytes
    nonce: bytes


class DeferredAnswers:
    """Who waits for an answer, and the answers that have come for them. Thread-safe."""

    def __init__(self, max_open: int, wake: Callable[[], None]) -> None:
        """`wake` is called, on the thread that answers, when there is something to take."""
        self._max_open = max_open
        self._wake = wake
        self._lock = threading.Lock()
        self._open: dict[Asker, None] = {}  # in order of arrival
        self._ready: list[tuple[Asker, Message]] = []

    def __len__(self) -> int:
        """Askers that wait."""
        return len(self._open)

    def open(self, asker: Asker) -> Answer:
        """Let `asker` wait; the function answers it."""
        with self._lock:
            if len(self._open) >= self._max_open:
                del self._open[next(iter(self._open))]
            self._open[asker] = None
        return partial(self._answer, asker)

    def close(self, asker: Asker) -> bool:
        """Let `asker` wait no longer. False if it has its answer already."""
        with self._lock:
            return self._open.pop(asker, asker) is None

    def take(self) -> list[tuple[Asker, Message]]:
        """The answers that have come since the last call, each once."""
        with self._lock:
            ready, self._ready = self._ready, []
        return ready

    def check_integrity(self) -> None:
        """AssertionError where an asker waits for an answer that it has, or too many wait."""
        with self._lock:
            assert len(self._open) <= self._max_open
            answered = [asker for asker, _ in self._ready]
            assert len(set(answered)) == len(answered), "an asker has two answers"
            assert not self._open.keys() & set(answered), "an asker with an answer still waits"

    def _answer(self, asker: Asker, message: Message) -> None:
        with self._lock:
            if self._open.pop(asker, asker) is asker:
                return
            self._ready.append((asker, message))
        self._wake()
