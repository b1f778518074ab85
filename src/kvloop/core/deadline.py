"""Deadlines by key: the next one, and set, move and drop (see `heap`). Ties break by order of insertion."""

import heapq

from kvloop.core.heap import KeyHeap


class Deadlines(KeyHeap[int]):
    """One deadline in nanoseconds per key."""

    def next_ns(self) -> int | None:
        """The earliest deadline, or None."""
        heap = self._heap
        if not heap:
            return None
        if self._entries.get(heap[0][2]) is heap[0]:  # asked far more often than anything changes
            return heap[0][0]
        least = self.least()
        return None if least is None else least[0]

    def pop_due(self, now_ns: int) -> str | None:
        """Take out the earliest key whose deadline is `now_ns` or before; None if there is none."""
        heap = self._heap
        if not heap or heap[0][0] > now_ns:  # no entry is due, dead or alive
            return None
        least = self.least()
        if least is None or least[0] > now_ns:
            return None
        heapq.heappop(self._heap)
        self.discard(least[1])
        return least[1]
