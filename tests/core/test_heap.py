"""The heap of keys against a dictionary that is searched from end to end."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.core.heap import KeyHeap

keys = st.sampled_from("abcdefghij")
ranks = st.tuples(st.integers(0, 3), st.integers(0, 3))
moves = st.one_of(
    st.tuples(st.just("set"), st.dictionaries(keys, ranks, min_size=1, max_size=1)),
    st.tuples(st.just("set many"), st.dictionaries(keys, ranks)),
    st.tuples(st.just("discard"), st.dictionaries(keys, ranks, min_size=1, max_size=1)),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(moves, max_size=200))
def test_equals_naive(script: list[tuple[str, dict[str, tuple[int, ...]]]]) -> None:
    """Whatever is set, one by one or many at once, and dropped, the least rank comes first; of equals the one
    set first."""
    heap, naive = KeyHeap[tuple[int, ...]](), dict[str, tuple[tuple[int, ...], int]]()
    serial = 0
    for move, changes in script:
        if move == "set many":
            heap.set_many(changes)
        for key, rank in changes.items():
            serial += 1
            if move == "discard":
                heap.discard(key)
                naive.pop(key, None)
            else:
                if move == "set":
                    heap.set(key, rank)
                naive[key] = (rank, serial)
        heap.check_integrity()
        least = min(naive, key=lambda key: naive[key], default=None)
        assert heap.least() == (None if least is None else (naive[least][0], least))
        assert len(heap) == len(naive)
        assert set(heap) == set(naive)
        assert all(heap.rank(key) == naive.get(key, (None,))[0] for key in "abcdefghij")


def test_many_of_few_and_few_of_many() -> None:
    """A change of a good part of all keys and one of a small part leave the same order as single changes."""
    for size in (2, 100):
        one_by_one, at_once = KeyHeap[int](), KeyHeap[int]()
        for number in range(100):
            for heap in (one_by_one, at_once):
                heap.set(str(number), 1000 + number)
        changes = {str(number): -number for number in range(size)}
        at_once.set_many(changes)
        for key, rank in changes.items():
            one_by_one.set(key, rank)
        for _ in range(100):
            least = one_by_one.least()
            assert least is not None
            assert least == at_once.least()
            one_by_one.discard(least[1])
            at_once.discard(least[1])
        assert one_by_one.least() is at_once.least() is None
