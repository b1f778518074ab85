"""Deadlines by slot, in some 60 bytes each: the next one, and set, move and drop.

The same heap with lazy deletion as `heap`, of integers: deadline, the order in which it was set, and slot, in
that order from the highest bit, so that integers compare as deadlines do and ties come out in the order in
which they were set. A slot's deadline is live while the slot still has that very integer.
"""

import heapq

_SWEEP_FLOOR_ENTRIES = 64  # a heap this small is not worth sweeping
_SLOT_BITS = 32
_SEQUENCE_BITS = 64
_LOW_BITS = _SLOT_BITS + _SEQUENCE_BITS
_SLOT_MASK = (1 << _SLOT_BITS) - 1


class SlotDeadlines:
    """One deadline in nanoseconds, not negative, per slot, which is positive."""

    def __init__(self) -> None:
        self._heap: list[int] = []
        self._of_slot: list[int] = [0]
        self._live = 0
        self._sequence = 0

    def __len__(self) -> int:
        return self._live

    def __contains__(self, slot: int) -> bool:
        return slot < len(self._of_slot) and self._of_slot[slot] != 0

    def set(self, slot: int, deadline_ns: int) -> None:
        """Give `slot` this deadline, in place of any that it has."""
        self._sequence += 1
        entry = (deadline_ns << _SEQUENCE_BITS | self._sequence) << _SLOT_BITS | slot
        of_slot, heap = self._of_slot, self._heap
        if slot >= len(of_slot):
            of_slot.extend([0] * (slot + 1 - len(of_slot)))
        if not of_slot[slot]:
            self._live += 1
        of_slot[slot] = entry
        heapq.heappush(heap, entry)
        if len(heap) > 2 * self._live + _SWEEP_FLOOR_ENTRIES:
            self._sweep()

    def discard(self, slot: int) -> None:
        """Forget the deadline of `slot`, if it has one."""
        if slot in self:
            self._of_slot[slot] = 0
            self._live -= 1
            if len(self._heap) > 2 * self._live + _SWEEP_FLOOR_ENTRIES:
                self._sweep()

    def next_ns(self) -> int | None:
        """The earliest deadline, or None."""
        heap, of_slot = self._heap, self._of_slot
        while heap:
            entry = heap[0]
            if of_slot[entry & _SLOT_MASK] == entry:
                return entry >> _LOW_BITS
            heapq.heappop(heap)
        return None

    def pop_due(self, now_ns: int) -> int:
        """Take out the earliest slot whose deadline is `now_ns` or before; 0 if there is none."""
        heap, of_slot = self._heap, self._of_slot
        while heap:
            entry = heap[0]
            slot = entry & _SLOT_MASK
            is_live = of_slot[slot] == entry
            if is_live and entry >> _LOW_BITS > now_ns:
                return 0
            heapq.heappop(heap)
            if is_live:
                of_slot[slot] = 0
                self._live -= 1
                return slot
        return 0

    def check_integrity(self) -> None:
        """AssertionError where a slot would never come out, or dead entries pile up."""
        live = {entry for entry in self._of_slot if entry}
        assert live <= set(self._heap), "a slot without an entry in the heap"
        assert len(live) == self._live
        assert all(entry & _SLOT_MASK == slot for slot, entry in enumerate(self._of_slot) if entry)
        assert len(self._heap) <= 2 * self._live + _SWEEP_FLOOR_ENTRIES, "the heap outgrows its slots"

    def _sweep(self) -> None:
        self._heap = [entry for entry in self._of_slot if entry]
        heapq.heapify(self._heap)
