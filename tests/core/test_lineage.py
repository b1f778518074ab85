"""The lineage table against one that only remembers a list, and what a guess must and must not find."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.core.chain import MAX_CHAIN_TOKENS
from kvloop.core.handle import LeaseRef
from kvloop.core.lineage import (
    CONTENT,
    KEY_COST_BYTES,
    MAX_UNITS,
    TURN_COST_BYTES,
    FiledTurn,
    LineageTable,
    Name,
    Prompt,
    content_keys,
    name_key,
)

KEY = b"k" * 32
ROOT = [b"tenant", b"model"]


def keys(*units: str) -> list[bytes]:
    """Content keys of a history."""
    return content_keys(KEY, ROOT, [unit.encode() for unit in units])


def turn(handle: str, depth: int, expires_ns: int = 1000, names: tuple[Name, ...] = ()) -> FiledTurn:
    """A filed turn."""
    return FiledTurn(handle.encode(), "d0", "t", depth, expires_ns, names)


def filed(table: LineageTable, handle: str, *units: str, now_ns: int = 0) -> None:
    """File a turn whose request consisted of `units`."""
    content = keys(*units)
    table.file(turn(handle, len(content)), content, [], now_ns)


def found(table: LineageTable, *units: str, now_ns: int = 0) -> tuple[str, int] | None:
    """The handle and depth that a request of `units` finds by content."""
    match = table.find(keys(*units), [], now_ns)
    return None if match is None else (match.turn.handle.decode(), match.depth)


def test_continuation() -> None:
    """The next turn finds the last one, with all of its messages shared."""
    table = LineageTable(100, 10**6)
    filed(table, "h1", "s", "u1")
    filed(table, "h2", "s", "u1", "a1", "u2")
    assert found(table, "s", "u1", "a1", "u2", "a2", "u3") == ("h2", 4)


def test_a_turn_comes_back_as_it_was_filed() -> None:
    """Whatever there is to say of it, also where an engine counts more tokens than any prompt has."""
    lease = LeaseRef("l", "i", ("h", 1), MAX_CHAIN_TOKENS, 24 * 3_600_000)
    prompt = Prompt(1 << 40, "p0", 1 << 40)
    one = FiledTurn(b"h", "d0", "t", 2, 1000, (Name("session_id", "s"),), lease, prompt)
    table = LineageTable(100, 10**6)
    table.file(one, keys("s", "u1"), [], 0)
    match = table.find(keys("s", "u1"), [], 0)
    assert match is not None
    assert match.turn == one


def test_edits_and_forks() -> None:
    """An edit, a fork, a regeneration each find the turn that shares the longest prefix with them."""
    table = LineageTable(100, 10**6)
    filed(table, "h1", "s", "u1")
    filed(table, "h2", "s", "u1", "a1", "u2")
    filed(table, "fork", "s", "u1", "a1", "other")
    assert found(table, "s", "u1", "a1", "u2", "a2", "u3") == ("h2", 4)
    assert found(table, "s", "u1", "a1", "other", "a", "u") == ("fork", 4)
    assert found(table, "s", "u1", "a1", "u2") == ("h2", 4)  # regenerated
    assert found(table, "s", "u1", "rewritten", "u2") == ("fork", 2)  # the newest of those that share two
    assert found(table, "s", "edited") == ("fork", 1)
    assert found(table, "x", "u1") is None


def test_superseded() -> None:
    """A turn of which a newer one has every prefix is forgotten: a chat takes the room of one turn."""
    table = LineageTable(1000, 10**6)
    history = [f"m{number}" for number in range(50)]
    for length in range(1, 50, 2):
        filed(table, f"h{length}", *history[:length])
        table.check_integrity()
    assert len(table) == 1
    assert table.key_count == 49


def test_what_nothing_leads_to_any_more_is_told() -> None:
    """Superseded turns by the filing that does it; those that expire, are removed or find no room, once."""
    table = LineageTable(3, 10**6)

    def superseded(handle: str, *units: str, expires_ns: int = 1000) -> list[str]:
        content = keys(*units)
        filed_before = table.file(turn(handle, len(content), expires_ns), content, [], 0)
        return [one.handle.decode() for one in filed_before]

    def dropped() -> list[str]:
        return [one.handle.decode() for one in table.take_dropped()]

    assert superseded("h1", "s") == []
    assert superseded("h2", "s", "u1") == ["h1"]
    assert superseded("fork", "s", "x", expires_ns=10) == []
    assert dropped() == []
    assert superseded("other", "o") == []
    assert dropped() == ["h2"]
    table.expire(10)
    assert dropped() == ["fork"]
    table.remove(CONTENT, keys("o")[-1].hex())
    assert dropped() == ["other"]
    assert superseded("late", "l", expires_ns=0) == []
    table.file(turn("nameless", 0), [], [], 0)
    assert dropped() == ["late", "nameless"]
    assert dropped() == []


def test_content_over_name() -> None:
    """Content wins where it covers all that its turn had, or as much as the named turn; else the name."""
    table = LineageTable(100, 10**6)
    name = Name("session_id", "s1")
    other = name_key(KEY, "t", "m", name)
    table.file(turn("named", 3, names=(name,)), keys("x", "y", "z"), [other], 0)
    filed(table, "short", "s", "u1")
    filed(table, "long", "s", "u1", "a1", "u2", "a2", "u3")

    def handle(*units: str) -> tuple[str, str]:
        match = table.find(keys(*units), [(name, other)], 0)
        assert match is not None
        return match.turn.handle.decode(), match.by

    assert handle("s", "u1", "a1", "u2", "a2", "u3", "a3") == ("long", CONTENT)  # all of it
    assert handle("s", "u1", "a1", "edited") == ("long", CONTENT)  # part, but as deep as the named one
    assert handle("s", "edited") == ("named", "session_id")  # only the system message
    assert handle("unseen") == ("named", "session_id")


def test_first_name_wins() -> None:
    """Names are tried in the order given, and an unknown one is passed over."""
    table = LineageTable(100, 10**6)
    a, b, c = Name("conversation_id", "1"), Name("session_id", "1"), Name("prompt_cache_key", "1")
    pairs = [(name, name_key(KEY, "t", "m", name)) for name in (a, b, c)]
    table.file(turn("b", 0, names=(b,)), [], [pairs[1][1]], 0)
    table.file(turn("c", 0, names=(c,)), [], [pairs[2][1]], 0)
    match = table.find([], pairs, 0)
    assert match is not None
    assert (match.turn.handle, match.by, match.depth) == (b"b", "session_id", 0)


def test_names_apart() -> None:
    """Equal values of different kinds, tenants or models are different names."""
    name, kind = Name("session_id", "x"), Name("conversation_id", "x")
    distinct = {
        name_key(KEY, "t", "m", name),
        name_key(KEY, "t", "m", kind),
        name_key(KEY, "u", "m", name),
        name_key(KEY, "t", "n", name),
        name_key(KEY, "tm", "", name),
        name_key(b"l" * 32, "t", "m", name),
    }
    assert len(distinct) == 6


@settings(deadline=None)
@given(st.lists(st.binary(max_size=3), max_size=4), st.lists(st.binary(max_size=3), max_size=4), st.data())
def test_keys_unambiguous(root: list[bytes], units: list[bytes], data: st.DataObject) -> None:
    """Two requests share a key exactly where root and units are equal up to it, however bytes are cut."""
    other_root = data.draw(st.sampled_from([root, [b"".join(root)], [*root, b""], root[:-1]]))
    joined = b"".join(units)
    cut = data.draw(st.integers(0, len(joined)))
    other = data.draw(st.sampled_from([units, [joined[:cut], joined[cut:]], [b"", *units]]))
    ours, theirs = content_keys(KEY, root, units), content_keys(KEY, other_root, other)
    for index in range(min(len(ours), len(theirs))):
        equal = root == other_root and units[: index + 1] == other[: index + 1]
        assert (ours[index] == theirs[index]) == equal
    assert not set(ours) & set(theirs[: len(ours)]) or root == other_root


def test_units_apart() -> None:
    """Two histories of the same bytes, cut elsewhere into messages, have no key in common."""
    first, second = content_keys(KEY, ROOT, [b"ab", b"c"]), content_keys(KEY, ROOT, [b"a", b"bc"])
    assert not set(first) & set(second)
    assert not set(first) & set(content_keys(KEY, [b"tenan", b"tmodel"], [b"ab", b"c"]))


def test_units_bounded() -> None:
    """A request of a million messages has a bounded number of keys."""
    assert len(content_keys(KEY, ROOT, (b"m" for _ in range(MAX_UNITS + 10)))) == MAX_UNITS


def test_expiry() -> None:
    """At its time a turn is gone, and its keys with it; no older turn comes back under them."""
    table = LineageTable(100, 10**6)
    table.file(turn("old", 2, 500), keys("s", "u"), [], 0)
    table.file(turn("new", 1, 100), keys("s"), [], 0)
    assert found(table, "s", now_ns=99) == ("new", 1)
    assert found(table, "s", now_ns=100) is None
    assert found(table, "s", "u", now_ns=100) == ("old", 2)
    assert found(table, "s", "u", now_ns=500) is None
    assert len(table) == table.key_count == table.used_bytes == 0


def test_bounded_by_keys_and_bytes() -> None:
    """The table stays within both bounds, and what was used last stays longest."""
    table = LineageTable(4, 10**6)
    filed(table, "a", "a1", "a2")
    filed(table, "b", "b1", "b2")
    assert found(table, "a1") == ("a", 1)
    filed(table, "c", "c1")
    assert found(table, "b1") is None
    assert found(table, "a1", "a2") == ("a", 2)
    small = LineageTable(100, 2 * (TURN_COST_BYTES + KEY_COST_BYTES + 1))
    for name in "abc":
        filed(small, name, name)
    assert [found(small, name) for name in "abc"] == [None, ("b", 1), ("c", 1)]
    filed(small, "x" * 10_000, "big")  # larger than the table
    assert len(small) == 0
    small.check_integrity()


def test_remove() -> None:
    """A conversation is forgotten by any of its names, or by the digest that it is listed under."""
    table = LineageTable(100, 10**6)
    name = Name("session_id", "s")
    for number in range(3):
        content = keys(f"u{number}")
        key = name_key(KEY, f"t{number}", "m", name)
        table.file(turn(str(number), 1, names=(name,)), content, [key], 0)
    filed(table, "other", "o")
    assert table.remove("conversation_id", "s") == 0
    assert table.remove("session_id", "s") == 3
    labels = [label for _, label in table.turns()]
    assert labels == [keys("o")[-1].hex()]
    assert table.remove(CONTENT, labels[0]) == 1
    table.check_integrity()
    assert len(table) == table.key_count == 0


def test_bounds_checked() -> None:
    """A table without room is a mistake of the caller's."""
    with pytest.raises(ValueError, match="positive"):
        LineageTable(0, 1)


@dataclass
class Naive:
    """Every turn ever filed; a key leads to the newest turn that has it, or nowhere if that one is gone."""

    turns: list[tuple[FiledTurn, set[bytes]]] = field(default_factory=list)
    gone: set[bytes] = field(default_factory=set)

    def newest(self, key: bytes, now_ns: int) -> FiledTurn | None:
        """The turn under one key."""
        for one, its_keys in reversed(self.turns):
            if key in its_keys:
                return one if one.expires_ns > now_ns and one.handle not in self.gone else None
        return None

    def find(self, content: list[bytes], now_ns: int) -> tuple[bytes, int] | None:
        """The longest prefix that is known."""
        for depth in range(len(content), 0, -1):
            one = self.newest(content[depth - 1], now_ns)
            if one is not None:
                return one.handle, depth
        return None


histories = st.lists(st.sampled_from("ab"), min_size=1, max_size=5)
moves: st.SearchStrategy[tuple[str, list[str], int]] = st.one_of(
    st.tuples(st.just("file"), histories, st.integers(1, 30)),
    st.tuples(st.just("find"), histories, st.just(0)),
    st.tuples(st.just("remove"), histories, st.just(0)),
    st.tuples(st.just("wait"), st.just([]), st.integers(1, 10)),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(moves, max_size=60))
def test_equals_naive(script: list[tuple[str, list[str], int]]) -> None:
    """Whatever is filed, found, removed and expired, a request finds what the list of all turns says."""
    table, naive, now_ns = LineageTable(10**6, 10**9), Naive(), 0
    told: list[FiledTurn] = []
    for number, (move, history, amount) in enumerate(script):
        content = keys(*history)
        if move == "file":
            one = turn(str(number), len(history), now_ns + amount)
            told += table.file(one, content, [], now_ns)
            naive.turns.append((one, set(content)))
        elif move == "find":
            match = table.find(content, [], now_ns)
            assert (match and (match.turn.handle, match.depth)) == naive.find(content, now_ns)
        elif move == "remove":
            table.expire(now_ns)
            label = content[-1].hex()
            naive.gone |= {one.handle for one, listed in table.turns() if listed == label}
            table.remove(CONTENT, label)
        else:
            now_ns += amount
        table.check_integrity()
        told += table.take_dropped()
        left = [one for one, _ in table.turns()]
        assert sorted(one.handle for one in told + left) == sorted(one.handle for one, _ in naive.turns)
