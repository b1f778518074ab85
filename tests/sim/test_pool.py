"""The block pool beside a naive one: a list of holders for each block."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvloop.sim.pool import BlockPool

BLOCKS = 6


class PoolMachine(RuleBasedStateMachine):
    """Take, touch, free and look up, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.held: list[list[int]] = []
        self.names: dict[int, int] = {}

    @rule(count=st.integers(0, BLOCKS + 1))
    def take(self, count: int) -> None:
        """Blocks come that nobody holds, and lose their names; or none, where there are too few."""
        before = {block for blocks in self.held for block in blocks}
        taken = self.pool.take(count)
        assert (taken is None) is (count > BLOCKS - len(before))
        if taken is not None:
            assert not before & set(taken)
            assert len(set(taken)) == count
            self.names = {name: block for name, block in self.names.items() if block not in taken}
            self.held.append(taken)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """A holder gives all its blocks back."""
        self.pool.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), name=st.integers(0, 9))
    def name(self, data: st.DataObject, name: int) -> None:
        """A block gets a name, unless it has one, or the name is another's."""
        blocks = data.draw(st.sampled_from(self.held))
        if blocks:
            self.pool.cache(blocks[0], name)
            if name not in self.names and blocks[0] not in self.names.values():
                self.names[name] = blocks[0]

    @rule(names=st.lists(st.integers(0, 9), max_size=4))
    def touch(self, names: list[int]) -> None:
        """What is found is what was named, up to the first that is not; it can be held."""
        expected = []
        for name in names:
            if name not in self.names:
                break
            expected.append(self.names[name])
        found = self.pool.cached_prefix(names)
        assert found == expected
        if len(set(found)) == len(found):
            self.pool.touch(found)
            self.held.append(found)

    @rule()
    def reset(self) -> None:
        """Nothing is found any more."""
        self.pool.reset_cache()
        self.names.clear()

    @invariant()
    def balanced(self) -> None:
        """Free and held make the whole; each hold is counted."""
        self.pool.check_integrity()
        assert self.pool.references == sum(map(len, self.held))
        assert self.pool.free_count == BLOCKS - len({block for blocks in self.held for block in blocks})


PoolMachine.TestCase.settings = settings(deadline=None, max_examples=60)
TestPool = PoolMachine.TestCase


def test_the_cache_forgets_the_longest_unused_first() -> None:
    """New blocks are taken before old ones, old ones in the order in which they were given back, and of one
    request's blocks the last first: its prefix is found longest."""
    pool = BlockPool(5)
    first, second = pool.take(2), pool.take(2)
    assert first == [0, 1]
    assert second == [2, 3]
    for name, block in enumerate([0, 1, 2, 3]):
        pool.cache(block, name)
    pool.free([2, 3])
    pool.free([0, 1])
    assert pool.take(2) == [4, 3]
    assert pool.cached_prefix([2]) == [2]
    assert pool.take(2) == [2, 1]
    assert pool.cached_prefix([0, 1]) == [0]


def test_a_block_is_given_back_once() -> None:
    """A second give-back of the same hold is an error, not a free block too many."""
    pool = BlockPool(2)
    blocks = pool.take(1)
    assert blocks is not None
    pool.free(blocks)
    with pytest.raises(KeyError):
        pool.free(blocks)
