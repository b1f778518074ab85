"""Who holds which block: reference counts, the free list, and the prefix cache over both.

As in vLLM's BlockPool: a block that nobody holds stays in the cache until it is handed out again, least
recently freed first; within a request the last block goes first, for a prefix is worth more than its end. A
block is found under the digest of all tokens up to its end.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """The blocks of one engine, by number."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._holders: dict[int, int] = {}
        self._freed: OrderedDict[int, None] = OrderedDict()
        self._never_used = 0  # the first block that was never handed out
        self._handed_out: Counter[int] = Counter()
        self._name_of: dict[int, int] = {}
        self._by_name: dict[int, int] = {}

    @property
    def free_count(self) -> int:
        """Blocks that nobody holds."""
        return len(self._freed) + self.blocks - self._never_used

    @property
    def references(self) -> int:
        """Holds on blocks, one for each holder of each block."""
        return sum(self._holders.values())

    def proof(self, block: int) -> tuple[int, int | None]:
        """What the block is: how often it was handed out, and the name of what it holds."""
        return self._handed_out[block], self._name_of.get(block)

    def proofs(self, blocks: Iterable[int]) -> tuple[tuple[int, int | None], ...]:
        """The proof of each."""
        handed_out, name_of = self._handed_out, self._name_of
        return tuple([(handed_out[block], name_of.get(block)) for block in blocks])

    def is_held(self, block: int) -> bool:
        """Whether anybody holds the block."""
        return block in self._holders

    def take(self, count: int) -> list[int] | None:
        """Hold `count` blocks that nobody holds, and forget what they had; None if there are not so many."""
        if count > self.free_count:
            return None
        fresh = min(count, self.blocks - self._never_used)
        taken = list(range(self._never_used, self._never_used + fresh))
        self._never_used += fresh
        for _ in range(count - fresh):
            block, _ = self._freed.popitem(last=False)
            self._forget(block)
            taken.append(block)
        held, handed_out = self._holders, self._handed_out
        for block in taken:
            held[block] = 1
            handed_out[block] += 1
        return taken

    def touch(self, blocks: Iterable[int]) -> None:
        """Hold each of `blocks` once more."""
        held = self._holders
        for block in blocks:
            holders = held.get(block, 0)
            if not holders:
                del self._freed[block]
            held[block] = holders + 1

    def free(self, blocks: Sequence[int]) -> None:
        """Give one hold on each of `blocks` back, the last one first. KeyError where there is none."""
        held, freed = self._holders, self._freed
        for block in reversed(blocks):
            holders = held[block] - 1
            if holders:
                held[block] = holders
            else:
                del held[block]
                freed[block] = None

    def cache(self, block: int, name: int) -> None:
        """Let a full block be found under `name`, unless another one is."""
        if block not in self._name_of and name not in self._by_name:
            self._name_of[block] = name
            self._by_name[name] = block

    def cached_prefix(self, names: Sequence[int]) -> list[int]:
        """The blocks found under the first names, up to the first that is not known. They are not held."""
        found = []
        for name in names:
            block = self._by_name.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def reset_cache(self) -> None:
        """Find nothing any more, as after a change of weights."""
        self._name_of.clear()
        self._by_name.clear()

    def check_integrity(self) -> None:
        """AssertionError where the books do not balance."""
        assert len(self._holders) + self.free_count == self.blocks, "a block is lost, or there twice"
        assert not self._holders.keys() & self._freed.keys(), "a block is free and held"
        assert all(holders > 0 for holders in self._holders.values())
        assert {name: block for block, name in self._name_of.items()} == self._by_name
        assert all(block < self._never_used for block in (*self._holders, *self._freed, *self._name_of))

    def _forget(self, block: int) -> None:
        name = self._name_of.pop(block, None)
        if name is not None:
            del self._by_name[name]
