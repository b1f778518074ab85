"""The memory: what it calls right and wrong, beside a naive one that keeps every token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.errors import UserError
from kvloop.sim.memory import EMPTY, Memory, cell_size, torn
from kvloop.sim.text import Text, origin
from tests.sim.pair import tokens

ORIGIN = origin("m", "")


def text(count: int, kind: int = 0) -> Text:
    """So many tokens of a kind."""
    return Text(tokens(count, kind), ORIGIN, 16)


def filled(memory: Memory, tokens_of: Text, blocks: list[int], *ends: int) -> Memory:
    """Compute a text into `blocks`, in steps that end at `ends`."""
    start = 0
    for end in ends:
        memory.compute(tokens_of, blocks, start, end, memory.seen(tokens_of, blocks, start))
        start = end
    return memory


@settings(deadline=None)
@given(count=st.integers(1, 100), cuts=st.sets(st.integers(1, 99)))
def test_the_way_a_text_was_cut_does_not_matter(count: int, cuts: set[int]) -> None:
    """Computed in any steps, memory holds the same, and that is right."""
    blocks = [6, 2, 5, 1, 4, 0, 3]
    ends = [*sorted(cut for cut in cuts if cut < count), count]
    stepwise = filled(Memory(7, 16), text(count), blocks, *ends)
    at_once = filled(Memory(7, 16), text(count), blocks, count)
    assert stepwise.read(blocks) == at_once.read(blocks)
    assert stepwise.seen(text(count), blocks, count) == 0


@settings(deadline=None)
@given(data=st.data())
def test_it_sees_what_a_memory_of_tokens_sees(data: st.DataObject) -> None:
    """Blocks of several texts, computed, copied and mixed up: right exactly where every block holds the
    tokens, and all before them, that a reader expects."""
    texts = [text(64), text(64, 1), Text(tokens(32) + tokens(32, 1), ORIGIN, 16)]
    memory, naive = Memory(8, 16), [()] * 8
    for _ in range(data.draw(st.integers(1, 5))):
        written = data.draw(st.sampled_from(texts))
        blocks = data.draw(st.permutations(range(8)))[:4]
        filled(memory, written, blocks, 64)
        for place, block in enumerate(blocks):
            naive[block] = tuple(written.data(0, 16 * (place + 1)))
        source, target = data.draw(st.integers(0, 7)), data.draw(st.integers(0, 7))
        memory.write([target], memory.read([source]))
        naive[target] = naive[source]
    reader, blocks = data.draw(st.sampled_from(texts)), data.draw(st.permutations(range(8)))[:4]
    expected = [tuple(reader.data(0, 16 * (place + 1))) for place in range(4)]
    right = [naive[block] for block in blocks] == expected
    assert (memory.seen(reader, blocks, 64) == 0) is right


def test_what_is_computed_from_wrong_kv_is_wrong() -> None:
    """A right block behind a wrong one is computed wrongly, and stays so when the wrong one is put right."""
    memory, mine = Memory(4, 16), text(48)
    filled(memory, text(16, 9), [0], 16)
    seen = memory.seen(mine, [0, 1, 2], 16)
    assert seen
    memory.compute(mine, [0, 1, 2], 16, 48, seen)
    filled(memory, mine, [0], 16)
    assert memory.seen(mine, [0, 1, 2], 16) == 0
    assert memory.seen(mine, [0, 1, 2], 32)


def test_a_long_block_is_proven_in_segments() -> None:
    """Of a block of 128 tokens the first 64 can be right for a reader that goes on differently."""
    long = Memory(2, 128)
    assert long.cell_tokens == 64
    held = Text(tokens(128), ORIGIN, 64)
    filled(long, held, [0], 128)
    fork = Text(tokens(64) + tokens(64, 1), ORIGIN, 64)
    assert long.seen(fork, [0], 64) == 0
    assert long.seen(fork, [0], 128)
    long.compute(fork, [0], 64, 128, 0)
    assert long.seen(fork, [0], 128) == 0
    assert long.seen(held, [0], 128)


def test_an_unfilled_block_is_right_for_nobody() -> None:
    """Memory that nothing was written to holds no text's state, and neither does a torn transfer."""
    memory = Memory(2, 16)
    assert memory.read([0, 1]) == [EMPTY, EMPTY]
    assert memory.seen(text(16), [1], 16)
    ours, theirs = text(16).states(1), text(16, 1).states(1)
    assert torn(ours, ours) == ours
    assert torn(ours, theirs) not in (ours, theirs)
    with pytest.raises(IndexError):
        memory.read([2])


@pytest.mark.parametrize(("size", "cell"), [(1, 1), (16, 16), (32, 32), (64, 64), (128, 64), (192, 64)])
def test_cells(size: int, cell: int) -> None:
    """A cell is a block, or a segment where blocks are longer."""
    assert cell_size(size) == cell


@pytest.mark.parametrize("size", [0, -16, 48, 96, 100])
def test_blocks_that_do_not_line_up_are_refused(size: int) -> None:
    """Where proofs end inside a cell nothing could be said of it."""
    with pytest.raises(UserError):
        cell_size(size)
