"""Deadlines by key: the next one, and set, move and drop (see `heap`). Ties break by order of insertion."""

import heapq

from kvloop.core.heap import KeyHeap


class Deadlines(KeyHeap[int]):
    """One deadline in nanoseconds per key."""

    def next_ns(self) -> int | None:
        """The earliest deadline, or None."""
        least = self.least()
        return None if least is None else least[0]

    def pop_due(self, now_ns: int) -> str | None:
        """Take out the earliest key whose deadline is `now_ns` or before; None if there is none."""
        least = self.least()
        if least is None or least[0] > now_ns:
            return None
        heapq.heappop(self._heap)
        self.discard(least[1])
        return least[1]
