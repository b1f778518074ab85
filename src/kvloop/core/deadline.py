"""Deadlines by key: the next one in O(1), set, moved and dropped in O(log n).

A binary heap with lazy deletion (Sedgewick and Wayne, Algorithms, 2.4): an entry is live while the table
of deadlines still says the same; the others are skipped when they come to the top, and swept out when
they outnumber the live ones. Ties break by order of insertion, never by hash.
"""

import heapq

_SWEEP_FLOOR_ENTRIES = 64  # a heap this small is not worth sweeping


class Deadlines:
    """One deadline in nanoseconds per key."""

    def __init__(self) -> None:
        self._deadline_ns: dict[str, int] = {}
        self._heap: list[tuple[int, int, str]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._deadline_ns)

    def __contains__(self, key: str) -> bool:
        return key in self._deadline_ns

    def set(self, key: str, deadline_ns: int) -> None:
        """Give `key` this deadline, in place of any that it has."""
        self._deadline_ns[key] = deadline_ns
        self._sequence += 1
        heapq.heappush(self._heap, (deadline_ns, self._sequence, key))
        if len(self._heap) > 2 * len(self._deadline_ns) + _SWEEP_FLOOR_ENTRIES:
            self._sweep()

    def discard(self, key: str) -> None:
        """Forget `key`, if it is there."""
        self._deadline_ns.pop(key, None)

    def next_ns(self) -> int | None:
        """The earliest deadline, or None."""
        while self._heap:
            deadline_ns, _, key = self._heap[0]
            if self._deadline_ns.get(key) == deadline_ns:
                return deadline_ns
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now_ns: int) -> str | None:
        """Take out the earliest key whose deadline is `now_ns` or before; None if there is none."""
        earliest_ns = self.next_ns()
        if earliest_ns is None or earliest_ns > now_ns:
            return None
        _, _, key = heapq.heappop(self._heap)
        del self._deadline_ns[key]
        return key

    def check_integrity(self) -> None:
        """Every key has an entry for its deadline, and dead entries are bounded."""
        entries = {(key, deadline_ns) for deadline_ns, _, key in self._heap}
        assert entries >= set(self._deadline_ns.items()), "a deadline without an entry would never fall due"
        assert len(self._heap) <= 2 * len(self._deadline_ns) + 2 * _SWEEP_FLOOR_ENTRIES or self._sequence == 0

    def _sweep(self) -> None:
        self._heap = [entry for entry in self._heap if self._deadline_ns.get(entry[2]) == entry[0]]
        heapq.heapify(self._heap)
