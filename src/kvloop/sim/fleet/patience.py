"""Waits that all last as long: whoever began first is due first, so a queue is all that it takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvloop.sim.loop import Loop


class Patience:
    """Sees to it that no wait is longer than `limit_ns`."""

    def __init__(self, loop: Loop, limit_ns: int) -> None:
        self._loop = loop
        self._limit_ns = limit_ns
        self._waits: deque[tuple[int, Callable[[], bool], Callable[[], None]]] = deque()
        self._is_looking = False

    def wait(self, is_waiting: Callable[[], bool], give_up: Callable[[], None]) -> None:
        """Something began; `give_up` is called at its limit if it is still waited for then."""
        self._forget()
        due_ns = self._loop.now_ns + self._limit_ns
        self._waits.append((due_ns, is_waiting, give_up))
        if not self._is_looking:
            self._is_looking = True
            self._loop.at(due_ns, self._look)

    def _forget(self) -> None:
        """What is not waited for any more, up to the first that is."""
        while self._waits and not self._waits[0][1]():
            self._waits.popleft()

    def _look(self) -> None:
        self._forget()
        while self._waits and self._waits[0][0] <= self._loop.now_ns:
            self._waits.popleft()[2]()
            self._forget()
        self._is_looking = bool(self._waits)
        if self._waits:
            self._loop.at(self._waits[0][0], self._look)
