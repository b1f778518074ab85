"""Which slot each of many digests leads to, in some twenty bytes a digest.

A hash table with chains (Knuth, The Art of Computer Programming, 6.4, algorithm C with separate lists) over
flat arrays, where a dictionary of bytes would take a hundred bytes a key and a pointer for the collector to
follow. A digest is its own hash: it is keyed, so nobody can choose where it falls. The chains' heads are made
once, for the bound that the owner sets, so nothing is ever moved: no insertion is much slower than another.
Nothing is marked as deleted, either: a node leaves its chain and is used again.
"""

from array import array
from collections.abc import Iterator

MAX_HEADS = 1 << 23  # 32 MiB; with more digests than that, chains grow
GROWTH = 256  # nodes at a time


class DigestIndex:
    """Unsigned 64-bit digests to slots, which are positive."""

    def __init__(self, bound: int) -> None:
        """`bound`: how many digests there may be."""
        heads = 1 << (min(bound, MAX_HEADS) - 1).bit_length()
        self._mask = heads - 1
        self._heads = array("I", bytes(4 * heads))
        self._digests = array("Q", (0,))
        self._slots = array("I", (0,))
        self._next = array("I", (0,))  # in a chain; of an unused node, the next unused one
        self._unused = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Each digest and its slot, in no order that means anything."""
        for node in self._used():
            yield self._digests[node], self._slots[node]

    def deepest(self, digests: "array[int]") -> tuple[int, int]:
        """How many digests there are up to the last one that is known, and its slot; zeros for none."""
        mask, heads = self._mask, self._heads
        depth = len(digests)
        for digest in reversed(digests):
            node = heads[digest & mask]
            while node:
                if self._digests[node] == digest:
                    return depth, self._slots[node]
                node = self._next[node]
            depth -= 1
        return 0, 0

    def find(self, digest: int) -> int:
        """Its slot; 0 for none."""
        node = self._heads[digest & self._mask]
        while node:
            if self._digests[node] == digest:
                return self._slots[node]
            node = self._next[node]
        return 0

    def add(self, digests: "array[int]", slot: int) -> None:
        """Let digests that lead nowhere lead to `slot`. One that comes twice counts twice."""
        mask, heads, following, unused = self._mask, self._heads, self._next, self._unused
        keys, slots = self._digests, self._slots
        for digest in digests:
            node = unused or self._more()
            unused = following[node]
            place = digest & mask
            keys[node], slots[node], following[node] = digest, slot, heads[place]
            heads[place] = node
        self._unused = unused
        self._count += len(digests)

    def put(self, digest: int, slot: int) -> int:
        """Let a digest lead to `slot`; the slot that it led to before, 0 for none."""
        node = self._heads[digest & self._mask]
        while node:
            if self._digests[node] == digest:
                before = self._slots[node]
                self._slots[node] = slot
                return before
            node = self._next[node]
        self.add(array("Q", (digest,)), slot)
        return 0

    def drop(self, digests: "array[int]", slot: int) -> None:
        """Forget those of these digests that lead to `slot`."""
        mask, heads, following = self._mask, self._heads, self._next
        keys, slots, unused, dropped = self._digests, self._slots, self._unused, 0
        for digest in digests:
            place = digest & mask
            before, node = 0, heads[place]
            while node and (keys[node] != digest or slots[node] != slot):
                before, node = node, following[node]
            if not node:
                continue
            if before:
                following[before] = following[node]
            else:
                heads[place] = following[node]
            following[node], unused = unused, node
            dropped += 1
        self._unused = unused
        self._count -= dropped

    def check_integrity(self) -> None:
        """AssertionError where a node is in no chain, or both in use and not."""
        used = self._used()
        assert len(used) == self._count, "a node that is lost"
        for number in used:
            node = self._heads[self._digests[number] & self._mask]
            steps = 0
            while node != number:
                assert node, "a node that is not in its digest's chain"
                assert steps <= self._count, "a chain without an end"
                node, steps = self._next[node], steps + 1

    def _used(self) -> list[int]:
        used = bytearray(b"\1") * len(self._digests)
        used[0], node = 0, self._unused
        while node:
            assert used[node], "a node that is to be used again twice"
            used[node], node = 0, self._next[node]
        return [node for node, is_used in enumerate(used) if is_used]

    def _more(self) -> int:
        """The first of many new nodes, each of which leads to the one behind it."""
        first = len(self._digests)
        self._digests.frombytes(bytes(8 * GROWTH))
        self._slots.frombytes(bytes(4 * GROWTH))
        self._next.extend(range(first + 1, first + GROWTH))
        self._next.append(0)
        return first
