"""Arrays and objects are looked at in memory and time that how many they hold has no part in."""

import json
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.core.lineage import MAX_UNITS
from kvloop.wire.items import MAX_MEMBERS, SMALL_BYTES, FirstItems, Members, TooManyMembersError
from kvloop.wire.openai import Endpoint, RequestError, prefill_body, read_generation
from tests.wire.streams import NASTY

ITEMS = FirstItems()
MEMBERS = Members()


@pytest.mark.parametrize("count", [0, 1, 20, MAX_UNITS - 1, MAX_UNITS, MAX_UNITS + 1, 2 * MAX_UNITS])
def test_the_first_items_are_those_of_a_whole_decoding(count: int) -> None:
    """Small arrays come whole, large ones up to the bound, each item as the client wrote it."""
    item = b'{"role": "user", "content": "%d"}'
    whole = b"[" + b" , ".join(item % place for place in range(count)) + b"]"
    taken = [bytes(one) for one in ITEMS.decode(whole)]
    naive = [bytes(one) for one in msgspec.json.decode(whole, type=list[msgspec.Raw])]
    assert taken == (naive if len(whole) <= SMALL_BYTES else naive[:MAX_UNITS])


@pytest.mark.parametrize("size", [0, SMALL_BYTES])
@pytest.mark.parametrize("broken", [b"{}", b"[1", b"5", b"[1]]", b"null"])
def test_no_array(broken: bytes, size: int) -> None:
    """What is no array is an error, however long it is."""
    with pytest.raises(msgspec.DecodeError):
        ITEMS.decode(broken + b" " * size)


@pytest.mark.parametrize(
    ("endpoint", "item"), [(Endpoint.CHAT, b"0"), (Endpoint.COMPLETIONS, b"0"), (Endpoint.COMPLETIONS, b'""')]
)
def test_a_body_of_items_takes_no_more_than_its_bytes(endpoint: Endpoint, item: bytes) -> None:
    """Reading a request of a million items takes less memory than the request has bytes, three times over."""
    body = b'{"model":"tiny","%b":[%b]}' % (endpoint.encode(), b",".join([item] * 1_000_000))
    tracemalloc.start()
    try:
        read_generation(endpoint, body)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(body)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [0, SMALL_BYTES])
@given(value=st.dictionaries(st.text(), st.none() | st.text() | st.lists(st.integers()), max_size=20))
def test_members_are_those_of_a_naive_decoding(size: int, value: dict[str, Any]) -> None:
    """Names as plain strings, values as their bytes; the escapes of a name are undone."""
    for ascii_only in (False, True):
        body = json.dumps(value, ensure_ascii=ascii_only).encode() + b" " * size
        naive = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        members = MEMBERS.decode(body)
        assert {name: bytes(raw) for name, raw in members.items()} == {
            name: bytes(raw) for name, raw in naive.items()
        }
        assert {type(name) for name in members} <= {str}


def object_of(count: int, member: str = '"m%d":0') -> bytes:
    """An object of so many members."""
    return b"{%b}" % ",".join(member % place if "%" in member else member for place in range(count)).encode()


@pytest.mark.parametrize("size", [0, SMALL_BYTES])
@pytest.mark.parametrize("member", ['"m%d":0', '"%d\\\\" \n: {}', '"\\u0041%d":"\\":\\":"'])
def test_members_are_bounded(member: str, size: int) -> None:
    """As many as the bound are read, each time anew; one more is refused, however they are written."""
    for _ in range(2):
        assert len(MEMBERS.decode(object_of(MAX_MEMBERS, member) + b" " * size)) == MAX_MEMBERS
        with pytest.raises(TooManyMembersError):
            MEMBERS.decode(object_of(MAX_MEMBERS + 1, member) + b" " * size)


def test_one_member_many_times_is_many() -> None:
    """Where it matters: a small object of them is read as the one that it is."""
    with pytest.raises(TooManyMembersError):
        MEMBERS.decode(object_of(SMALL_BYTES // 4, '"same":0'))
    assert len(MEMBERS.decode(object_of(MAX_MEMBERS + 1, '"same":0'))) == 1


@pytest.mark.parametrize("size", [0, SMALL_BYTES])
@pytest.mark.parametrize("broken", [b"[]", b"1", b"null", b'"x"'])
def test_no_object(broken: bytes, size: int) -> None:
    """What is no object is a ValidationError, however long it is."""
    with pytest.raises(msgspec.ValidationError):
        MEMBERS.decode(broken + b" " * size)


def test_a_request_of_too_many_members_is_refused_by_name() -> None:
    """In OpenAI's words; a million of them are not looked at, nor kept."""
    body = b'{"model":"tiny","messages":[],' + object_of(1_000_000)[1:]
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match=f"more than {MAX_MEMBERS} members") as caught:
            read_generation(Endpoint.CHAT, body)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert (caught.value.code, caught.value.status) == ("too_many_members", 400)


def test_an_object_of_too_many_members_names_nobody() -> None:
    """It is not the router's to read, and passes; the memory that it takes is bounded."""
    body = b'{"model":"tiny","messages":[],"metadata":{"session_id":"s",%b}' % object_of(1_000_000)[1:]
    generation = read_generation(Endpoint.CHAT, body)
    tracemalloc.start()
    try:
        assert generation.text("metadata.session_id") is None
        assert tracemalloc.get_traced_memory()[1] < 2 * len(body)
    finally:
        tracemalloc.stop()


CODE = 'def f(x):\n\treturn {"a": [1, "b\\"c"], \'k\': {}}  # "quoted": \\\\ \\":\n'
HONEST = {
    "code": CODE,
    "JSON in a string": json.dumps({f"k{place}": [{"a": 1}] for place in range(20)}),
    "JSON in JSON in a string": json.dumps(json.dumps({"a": {"b": "c"}})),
    "quotation marks": '"",":":{"[',
    "backslashes": "\\" * 64,
    "every kind of character": NASTY,
}


@pytest.mark.parametrize("text", HONEST.values(), ids=HONEST)
@pytest.mark.parametrize("messages", [1, 1000])
def test_large_honest_bodies_pass(text: str, messages: int) -> None:
    """What a text is made of does not count: 2 MB of it in one message or in a thousand."""
    content = text * (2_000_000 // messages // len(text.encode()))
    sent = {"role": "user", "content": content, "tool_calls": [{"function": {"arguments": text}}]}
    value = {"model": "tiny", "messages": [sent] * messages, "metadata": {"session_id": "s"}}
    for ascii_only in (False, True):
        body = json.dumps(value, ensure_ascii=ascii_only).encode()
        generation = read_generation(Endpoint.CHAT, body)
        assert len(generation.units) == messages
        assert generation.text("metadata.session_id") == "s"
        assert json.loads(prefill_body(generation, None, None))["messages"] == value["messages"]
