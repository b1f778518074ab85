"""The index of digests, the order of slots and their deadlines, each against a naive one."""

from array import array
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.core.digest_index import GROWTH, DigestIndex
from kvloop.core.order import SlotOrder
from kvloop.core.shared import Shared
from kvloop.core.slot_deadlines import SlotDeadlines
from tests.reach import explore_until_reached

DIGESTS = [chain + 8 * number for number in range(3) for chain in (0, 1, (1 << 64) - 64)]
REACHED: Counter[str] = Counter()
MUST_REACH = {"taken over", "found in a chain", "dropped from a chain", "not its own", "a node used again"}

index_moves = st.tuples(
    st.sampled_from(["put", "put", "find", "drop", "deepest"]),
    st.lists(st.sampled_from(DIGESTS), min_size=1, max_size=4, unique=True),
    st.integers(1, 5),
)


def digests(values: list[int]) -> "array[int]":
    """As the index takes them."""
    return array("Q", values)


def test_the_index_equals_a_dictionary() -> None:
    """Whatever is put, found and dropped, in chains of many digests: each leads to where it was put last."""
    explore_until_reached(_equals_a_dictionary, REACHED, MUST_REACH)


@settings(deadline=None, max_examples=200)
@given(st.lists(index_moves, max_size=40))
def _equals_a_dictionary(script: list[tuple[str, list[int], int]]) -> None:
    index, naive, nodes = DigestIndex(8), dict[int, int](), 0
    for move, values, slot in script:
        if move == "put":
            REACHED["taken over"] += naive.get(values[0], slot) != slot
            REACHED["a node used again"] += len(naive) < nodes and values[0] not in naive
            assert index.put(values[0], slot) == naive.get(values[0], 0)
            naive[values[0]] = slot
            new = [value for value in values[1:] if value not in naive]
            index.add(digests(new), slot)
            naive |= dict.fromkeys(new, slot)
            nodes = max(nodes, len(naive))
        elif move == "find":
            assert [index.find(value) for value in values] == [naive.get(value, 0) for value in values]
            REACHED["found in a chain"] += sum(value & 7 == values[0] & 7 for value in naive) > 1
        elif move == "drop":
            mine = [value for value in values if naive.get(value) == slot]
            REACHED["dropped from a chain"] += any(
                value & 7 == other & 7 for value in mine for other in naive if value != other
            )
            REACHED["not its own"] += any(naive.get(value, slot) != slot for value in values)
            index.drop(digests(values), slot)
            for value in mine:
                del naive[value]
        else:
            known = [place for place, value in enumerate(values, 1) if value in naive]
            expected = (known[-1], naive[values[known[-1] - 1]]) if known else (0, 0)
            assert index.deepest(digests(values)) == expected
        index.check_integrity()
        assert len(index) == len(naive)
        assert dict(index) == naive


def test_the_index_grows_past_its_bound_and_uses_its_nodes_again() -> None:
    """A thousand digests in eight chains; and a second thousand, after the first, takes no more room."""
    index, first, second = DigestIndex(8), range(1, 1001), range(2001, 3001)
    index.add(digests([*first]), 7)
    index.check_integrity()
    nodes = len(index._digests)
    assert 1000 < nodes <= 1000 + GROWTH + 1
    index.drop(digests([*first]), 7)
    assert len(index) == 0
    index.add(digests([*second]), 8)
    assert [index.find(one) for one in (1, 1000, 2001, 3000)] == [0, 0, 8, 8]
    assert len(index._digests) == nodes
    index.check_integrity()


def test_a_digest_that_comes_twice_leaves_nothing_behind() -> None:
    """Each of its nodes is dropped with its slot, also once a later one has taken the digest over."""
    index = DigestIndex(8)
    index.add(digests([5, 5]), 1)
    assert index.put(5, 2) == 1
    index.drop(digests([5, 5]), 1)
    assert (len(index), index.find(5)) == (1, 2)
    index.drop(digests([5]), 2)
    assert len(index) == 0
    index.check_integrity()


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(["in", "in", "out", "end"]), st.integers(1, 6)), max_size=40))
def test_the_order_equals_a_list(script: list[tuple[str, int]]) -> None:
    """Slots put in anywhere, taken out and moved to the end stand as in a list, forwards and backwards."""
    order, naive = SlotOrder(), list[int]()
    for move, slot in script:
        if slot not in naive:
            after = naive[slot % len(naive)] if naive and move == "in" else 0
            order.insert(slot, after)
            naive.insert(naive.index(after) if after else len(naive), slot)
        elif move == "out":
            order.remove(slot)
            naive.remove(slot)
        else:
            order.to_end(slot)
            naive.append(naive.pop(naive.index(slot)))
        assert list(order) == naive
        assert list(reversed(order)) == naive[::-1]
        assert (order.first, order.last) == ((naive[0], naive[-1]) if naive else (0, 0))
        order.check_integrity()


deadline_moves = st.tuples(
    st.sampled_from(["set", "set", "drop", "due"]), st.integers(1, 5), st.integers(0, 9)
)


@settings(deadline=None, max_examples=200)
@given(st.lists(deadline_moves, max_size=200))
def test_deadlines_come_out_in_order(script: list[tuple[str, int, int]]) -> None:
    """The earliest first, equal ones in the order in which they were set; what was moved or dropped never."""
    deadlines, naive = SlotDeadlines(), list[tuple[int, int]]()
    for move, slot, at_ns in script:
        if move == "due":
            due = [one for one in sorted(naive, key=lambda one: one[0]) if one[0] <= at_ns][:1]
            assert deadlines.pop_due(at_ns) == (due[0][1] if due else 0)
            naive = [one for one in naive if one not in due]
        else:
            naive = [one for one in naive if one[1] != slot]
            if move == "set":
                deadlines.set(slot, at_ns)
                naive.append((at_ns, slot))
            else:
                deadlines.discard(slot)
        deadlines.check_integrity()
        assert deadlines.next_ns() == min([at_ns for at_ns, _ in naive], default=None)
        assert {slot for slot in range(1, 6) if slot in deadlines} == {slot for _, slot in naive}


def test_equal_values_are_kept_once_and_few() -> None:
    """An equal value comes back as the first object of it; past the bound all are forgotten."""
    shared = Shared(2)
    first = ("engine", 1)
    assert shared.of(first) is first
    assert shared.of(("engine", int("1"))) is first
    shared.of("b")
    again = ("engine", int("1"))
    shared.of("c")
    assert shared.of(again) is again
    assert len(shared) == 2
