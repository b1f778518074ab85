"""The handle comes out of streams of both vLLM versions; nothing else changes, however the bytes are cut."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.wire.sse import HandleFilter
from tests.wire.streams import CASES, DONE, HANDLE_EVENT, NASTY, chat_chunk, event

MAX_EVENT_BYTES = 1 << 20
cases = pytest.mark.parametrize("name", CASES)


def passed(pieces: list[bytes]) -> tuple[bytes, bytes | None]:
    """What a filter passes on of a stream in these pieces, and the handle."""
    one = HandleFilter(MAX_EVENT_BYTES)
    out = b"".join([one.feed(piece) for piece in pieces]) + one.close()
    return out, one.handle


def check(name: str, pieces: list[bytes]) -> None:
    """A case, cut into pieces, gives what is expected of it."""
    _, expected, params = CASES[name]
    out, handle = passed(pieces)
    assert out == expected
    assert (json.loads(handle) if handle is not None else None) == params


@cases
def test_whole(name: str) -> None:
    """In one piece."""
    check(name, [CASES[name][0]])


@cases
def test_byte_by_byte(name: str) -> None:
    """One byte at a time."""
    check(name, [bytes((byte,)) for byte in CASES[name][0]])


@cases
@settings(deadline=None, max_examples=100)
@given(st.data())
def test_at_any_cut(name: str, data: st.DataObject) -> None:
    """At any places."""
    stream = CASES[name][0]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    check(name, [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)])


@settings(deadline=None, max_examples=200)
@given(st.lists(st.text() | st.just(NASTY) | st.just('"kv_transfer_params":{'), max_size=5), st.data())
def test_any_text(texts: list[str], data: st.DataObject) -> None:
    """Whatever a model says passes byte for byte, and only the handle is missing."""
    events = [
        event(chat_chunk(text=text, extra=data.draw(st.sampled_from([{}, {"kv_transfer_params": None}]))))
        for text in texts
    ]
    stream = b"".join([*events, event(HANDLE_EVENT), DONE])
    cut = data.draw(st.integers(0, len(stream)))
    assert passed([stream[:cut], stream[cut:]]) == (
        b"".join([*events, DONE]),
        json.dumps(HANDLE_EVENT["kv_transfer_params"], separators=(",", ":")).encode(),
    )


members = st.dictionaries(
    st.sampled_from(["id", "choices", "kv_transfer_params", 'a"kv_transfer_params', "usage"]),
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5) | st.just('"kv_transfer_params":{"x":1}'),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["kv_transfer_params", "k"]), inner, max_size=2)
        ),
        max_leaves=8,
    ),
    min_size=1,
)


@settings(deadline=None, max_examples=300)
@given(members, st.booleans())
def test_only_the_member_of_the_event(fields: dict[str, Any], spaced: bool) -> None:
    """A cut takes out the event's own member, if it is an object, and leaves equal names deeper down."""
    separators = (", ", ": ") if spaced else (",", ":")
    line = b"data: " + json.dumps(fields, separators=separators).encode() + b"\n\n"
    out, handle = passed([line])
    params = fields.get("kv_transfer_params")
    if not isinstance(params, dict):
        assert (out, handle) == (line, None)
        return
    left = {name: value for name, value in fields.items() if name != "kv_transfer_params"}
    assert json.loads(out.removeprefix(b"data: ")) == left
    assert out == b"data: " + json.dumps(left, separators=separators).encode() + b"\n\n"
    assert handle is not None
    assert json.loads(handle) == params


def test_passed_at_once() -> None:
    """A whole event goes on as soon as it is there; of a part nothing does, for it may become the handle."""
    one = HandleFilter(MAX_EVENT_BYTES)
    whole = event(chat_chunk(text="a"))
    assert one.feed(whole) is whole  # not even copied
    assert one.feed(whole[:20]) == b""
    assert one.feed(whole[20:] + whole[:5]) == whole


def test_bounded() -> None:
    """An event longer than the bound is told; one of that length passes, and so does what came before it."""
    one = HandleFilter(10)
    assert one.feed(b"0123456789") == b""
    assert not one.overlong
    assert one.feed(b"\n") == b"0123456789\n"
    assert one.feed(b"x\n01234567890") == b"x\n"
    assert one.overlong
