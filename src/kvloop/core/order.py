"""An order of many slots that changes: append, take out and walk, each step in constant time.

A doubly linked list (Knuth, The Art of Computer Programming, 2.2.5) whose links are two arrays, eight bytes
for each slot, instead of an object for each. Slots are small positive numbers; slot 0 is the list's head and
stands on both ends.
"""

from array import array
from collections.abc import Iterator

GROWTH = 256  # slots at a time


class SlotOrder:
    """Slots from the first to the last. To take out what is not in it, or put in what is, is a mistake."""

    def __init__(self) -> None:
        self._before = array("I", (0,))
        self._after = array("I", (0,))

    @property
    def first(self) -> int:
        """The slot that was appended before all others; 0 where there is none."""
        return self._after[0]

    @property
    def last(self) -> int:
        """The slot that was appended last; 0 where there is none."""
        return self._before[0]

    def before(self, slot: int) -> int:
        """The slot in front of this one; 0 for the first."""
        return self._before[slot]

    def append(self, slot: int) -> None:
        """Put `slot` at the end."""
        self.insert(slot, 0)

    def insert(self, slot: int, after: int) -> None:
        """Put `slot` in front of `after`, which is in the order; 0: at the end."""
        backward, forward = self._before, self._after
        if slot >= len(forward):
            missing = bytes(4 * (slot + GROWTH - len(forward)))
            backward.frombytes(missing)
            forward.frombytes(missing)
        before = backward[after]
        backward[slot], forward[slot] = before, after
        forward[before] = backward[after] = slot

    def remove(self, slot: int) -> None:
        """Take `slot` out."""
        before, after = self._before[slot], self._after[slot]
        self._after[before], self._before[after] = after, before

    def to_end(self, slot: int) -> None:
        """Make `slot` the last one."""
        backward, forward = self._before, self._after
        after = forward[slot]
        if after:
            before, last = backward[slot], backward[0]
            forward[before], backward[after] = after, before
            forward[last] = backward[0] = slot
            backward[slot], forward[slot] = last, 0

    def __iter__(self) -> Iterator[int]:
        slot = self._after[0]
        while slot:
            yield slot
            slot = self._after[slot]

    def __reversed__(self) -> Iterator[int]:
        slot = self._before[0]
        while slot:
            yield slot
            slot = self._before[slot]

    def check_integrity(self) -> None:
        """AssertionError where a link leads one way only."""
        slot = 0
        while True:
            after = self._after[slot]
            assert self._before[after] == slot, "a link leads one way only"
            slot = after
            if not slot:
                return
