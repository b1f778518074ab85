"""Deadlines by key: the next one, and set, move and drop, in O(log n) amortised.

A binary heap with lazy deletion (Sedgewick and Wayne, Algorithms, 2.4): an entry is live while the table
of keys still points at it; a dead one is skipped when it comes to the top, and all are swept out when
they outnumber the live. Ties break by order of insertion, never by hash.
"""

import heapq

_SWEEP_FLOOR_ENTRIES = 64  # a heap this small is not worth sweeping


class Deadlines:
    """One deadline in nanoseconds per key."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[int, int, str]] = {}
        self._heap: list[tuple[int, int, str]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def set(self, key: str, deadline_ns: int) -> None:
        """Give `key` this deadline, in place of any that it has."""
        self._sequence += 1
        entry = (deadline_ns, self._sequence, key)
        self._entries[key] = entry
        heapq.heappush(self._heap, entry)
        self._sweep()

    def discard(self, key: str) -> None:
        """Forget `key`, if it is there."""
        if self._entries.pop(key, None) is not None:
            self._sweep()

    def next_ns(self) -> int | None:
        """The earliest deadline, or None."""
        while self._heap:
            deadline_ns, _, key = self._heap[0]
            if self._entries.get(key) is self._heap[0]:
                return deadline_ns
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now_ns: int) -> str | None:
        """Take out the earliest key whose deadline is `now_ns` or before; None if there is none."""
        earliest_ns = self.next_ns()
        if earliest_ns is None or earliest_ns > now_ns:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._entries[key]
        self._sweep()
        return key

    def check_integrity(self) -> None:
        """AssertionError where a deadline would never fall due, or dead entries pile up."""
        assert set(self._heap) >= set(self._entries.values()), "a deadline without an entry in the heap"
        assert all(key == entry[2] for key, entry in self._entries.items())
        assert not self._is_sparse(), "the heap outgrows its keys"

    def _is_sparse(self) -> bool:
        return len(self._heap) > 2 * len(self._entries) + _SWEEP_FLOOR_ENTRIES

    def _sweep(self) -> None:
        if self._is_sparse():
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)
