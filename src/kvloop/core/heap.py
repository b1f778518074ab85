"""The least of many keys whose ranks change: set, drop and take out in O(log n) amortised.

A binary heap with lazy deletion (Sedgewick and Wayne, Algorithms, 2.4): an entry is live while the table
of keys still points at it; a dead one is taken out when it comes to the top, alone or with all others if they
are many, and all are swept out when they outnumber the live. Two keys of equal rank come out in the order in
which they were set, never by hash.
"""

import heapq
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

_SWEEP_FLOOR_ENTRIES = 64  # a heap this small is not worth sweeping
_BULK_SHARE = 8  # from an eighth of the entries on, building the heap anew is cheaper than one by one

Rank = TypeVar("Rank", int, tuple[int, ...])


class KeyHeap(Generic[Rank]):
    """One rank per key."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Rank, int, str]] = {}
        self._heap: list[tuple[Rank, int, str]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def set(self, key: str, rank: Rank) -> None:
        """Give `key` this rank, in place of any that it has."""
        self._sequence += 1
        entry = (rank, self._sequence, key)
        heap, entries = self._heap, self._entries
        entries[key] = entry
        heapq.heappush(heap, entry)
        if len(heap) > 2 * len(entries) + _SWEEP_FLOOR_ENTRIES:
            self._rebuild()

    def set_many(self, ranks: Mapping[str, Rank]) -> None:
        """Give each of many keys its rank: of a good part of all keys, in one pass."""
        if len(ranks) * _BULK_SHARE < len(self._entries):
            for key, rank in ranks.items():
                self.set(key, rank)
            return
        for sequence, (key, rank) in enumerate(ranks.items(), self._sequence + 1):
            self._entries[key] = (rank, sequence, key)
        self._sequence += len(ranks)
        self._rebuild()

    def discard(self, key: str) -> None:
        """Forget `key`, if it is there."""
        if self._entries.pop(key, None) is not None and self._is_sparse():
            self._rebuild()

    def rank(self, key: str) -> Rank | None:
        """The key's rank, or None."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def least(self) -> tuple[Rank, str] | None:
        """The least rank and its key, or None."""
        while self._heap:
            top = self._heap[0]
            rank, _, key = top
            if self._entries.get(key) is top:
                return rank, key
            if (len(self._heap) - len(self._entries)) * _BULK_SHARE > len(self._heap):
                self._rebuild()
            else:
                heapq.heappop(self._heap)
        return None

    def check_integrity(self) -> None:
        """AssertionError where a key would never come out, or dead entries pile up."""
        assert set(self._heap) >= set(self._entries.values()), "a key without an entry in the heap"
        assert all(key == entry[2] for key, entry in self._entries.items())
        assert not self._is_sparse(), "the heap outgrows its keys"

    def _is_sparse(self) -> bool:
        return len(self._heap) > 2 * len(self._entries) + _SWEEP_FLOOR_ENTRIES

    def _rebuild(self) -> None:
        self._heap = list(self._entries.values())
        heapq.heapify(self._heap)
