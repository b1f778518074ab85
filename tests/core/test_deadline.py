"""The deadline heap against a dictionary that is searched from end to end."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.core.deadline import Deadlines

keys = st.sampled_from("abcdef")
times = st.integers(0, 20)
moves = st.one_of(
    st.tuples(st.just("set"), keys, times),
    st.tuples(st.just("discard"), keys, times),
    st.tuples(st.just("pop"), keys, times),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(moves, max_size=400))
def test_equals_naive(script: list[tuple[str, str, int]]) -> None:
    """Whatever is set, moved, dropped and popped, the next deadline is the least one."""
    deadlines, naive = Deadlines(), dict[str, int]()
    for move, key, when in script:
        if move == "set":
            deadlines.set(key, when)
            naive[key] = when
        elif move == "discard":
            deadlines.discard(key)
            naive.pop(key, None)
        else:
            popped = deadlines.pop_due(when)
            assert (popped is None) == (min(naive.values(), default=when + 1) > when)
            if popped is not None:
                assert naive.pop(popped) <= when
        deadlines.check_integrity()
        assert deadlines.next_ns() == min(naive.values(), default=None)
        assert len(deadlines) == len(naive)
        assert all((key in deadlines) == (key in naive) for key in "abcdef")


def test_memory_follows_the_keys() -> None:
    """A thousand moves of one deadline, or a thousand keys come and gone, leave nothing behind."""
    deadlines = Deadlines()
    for when in range(1_000):
        deadlines.set("renewed", when)
        deadlines.set(f"gone {when}", 10**9)
        deadlines.discard(f"gone {when}")
        deadlines.check_integrity()


def test_ties_break_by_insertion() -> None:
    """Equal deadlines come out in the order in which they were set, under any hash seed."""
    deadlines = Deadlines()
    for key in "qwertz":
        deadlines.set(key, 5)
    assert "".join(deadlines.pop_due(5) or "" for _ in range(6)) == "qwertz"
    assert deadlines.pop_due(5) is None
