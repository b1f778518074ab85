"""What a text says of KV: states that depend on every token before, and core's own chain."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.core.chain import Identity, build_chain, root_digest
from kvloop.sim.text import Text, origin
from tests.sim.pair import KEY, tokens

ROOT = root_digest(KEY, Identity("m", "", "", "", ""))
sizes = st.integers(0, 300)


@settings(deadline=None)
@given(pieces=st.lists(st.binary(max_size=40).map(lambda data: data[: len(data) // 4 * 4]), max_size=12))
def test_a_grown_text_is_the_text_written_at_once(pieces: list[bytes]) -> None:
    """States and chain are the same whether the tokens came at once or bit by bit, asked for in between."""
    whole = Text(b"".join(pieces), origin("m"), 16)
    grown = Text(b"", origin("m"), 16)
    for piece in pieces:
        grown.append(piece)
        grown.state(len(grown))
        grown.chain(KEY, ROOT, len(grown))
    assert len(grown) == len(whole)
    assert [grown.state(count) for count in range(len(whole) + 1)] == [
        whole.state(count) for count in range(len(whole) + 1)
    ]
    numbers = [int.from_bytes(whole.data(at, at + 1), "little") for at in range(len(whole))]
    for count in {0, len(whole) // 2, len(whole)}:
        assert grown.chain(KEY, ROOT, count) == build_chain(KEY, ROOT, numbers[:count])


@settings(deadline=None)
@given(count=st.integers(1, 200), changed=st.integers(0, 199))
def test_a_state_depends_on_every_token_before(count: int, changed: int) -> None:
    """Another token at one place changes every state from there on, and none before."""
    changed %= count
    data = tokens(count)
    other = data[: changed * 4] + b"\xff\xff\xff\xff" + data[changed * 4 + 4 :]
    here, there = Text(data, 1, 16), Text(other, 1, 16)
    for upto in range(count + 1):
        assert (here.state(upto) == there.state(upto)) is (upto <= changed)


def test_the_origin_is_part_of_every_state_and_not_of_the_answer() -> None:
    """Another model or salt is another KV from the first token on; the same tokens get the same answer."""
    here, there = Text(tokens(40), origin("m", ""), 16), Text(tokens(40), origin("m", "salt"), 16)
    assert not set(here.states(2)) & set(there.states(2))
    assert here.seed() == there.seed() != Text(tokens(41), origin("m", ""), 16).seed()
    assert origin("a", "bc") != origin("ab", "c")


def test_a_copy_grows_by_itself() -> None:
    """What is appended to a copy is not in the text that it was made of."""
    first = Text(tokens(20), 1, 16)
    first.chain(KEY, ROOT, 20)
    twin = first.copy()
    twin.append(tokens(80, 2))
    assert len(first) == 20
    assert first.chain(KEY, ROOT, 100) == build_chain(KEY, ROOT, list(range(20)))
    assert twin.chain(KEY, ROOT, 64).token_count == 64


def test_a_torn_token_is_refused() -> None:
    """Bytes that are no whole tokens are a mistake of the caller's."""
    with pytest.raises(ValueError, match="whole number"):
        Text(b"abc", 1, 16)
    with pytest.raises(ValueError, match="whole number"):
        Text(b"", 1, 16).append(b"a")
