"""Answers of the Responses and Messages APIs: the handle comes out, the ending is read, the rest stays."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.wire.answers import ResponseFilter, read_answer, stream_filter
from kvloop.wire.dialect import Endpoint
from kvloop.wire.ending import LENGTH, STOP, TOOL_CALLS
from tests.router.fake_engine import handle_event
from tests.router.recorded import HANDLE, body, events
from tests.wire.streams import NASTY

TAKEN = b'{"kvloop_handle":"h1"}'
MEMBER = HANDLE.replace("HANDLE", "h1").encode() + b","
STREAMS = {
    "response_stream": (Endpoint.RESPONSES, STOP),
    "response_stream_tools": (Endpoint.RESPONSES, TOOL_CALLS),
    "message_stream": (Endpoint.MESSAGES, STOP),
    "message_stream_tools": (Endpoint.MESSAGES, TOOL_CALLS),
}
streams = pytest.mark.parametrize("name", STREAMS)


def expected(name: str) -> bytes:
    """What a client may see of a stream."""
    return b"".join(events(name)).replace(handle_event("h1"), b"").replace(MEMBER, b"")


def check(name: str, cuts: list[int], previous_id: str | None = None) -> Any:
    """A stream cut there passes as it should; the filter comes back."""
    stream = b"".join(events(name))
    one = stream_filter(STREAMS[name][0], 1 << 20, previous_id)
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    out = b"".join([one.feed(piece) for piece in pieces]) + one.close()
    wanted = expected(name)
    if previous_id is not None:
        wanted = wanted.replace(
            b'"previous_response_id":null', b'"previous_response_id":"%b"' % previous_id.encode()
        )
    assert out == wanted
    assert (one.handle, one.ending) == (TAKEN, STREAMS[name][1])
    return one


@streams
def test_byte_by_byte(name: str) -> None:
    """One byte at a time: the handle and the ending are found, nothing else changes."""
    check(name, list(range(1, len(b"".join(events(name))))))


@streams
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_at_any_cut(name: str, data: st.DataObject) -> None:
    """At any places."""
    size = len(b"".join(events(name)))
    check(name, sorted(data.draw(st.lists(st.integers(0, size), max_size=6))))


def test_the_last_response_is_held_on_to() -> None:
    """As the client saw it; that of a stream which goes on from another says so, in each event that can."""
    one = check("response_stream", [200, 3000], "resp_0")
    assert isinstance(one, ResponseFilter)
    last = json.loads(one.last or b"")
    assert (last["id"], last["status"], last["previous_response_id"]) == ("resp_1", "completed", "resp_0")
    assert "kv_transfer_params" not in last
    assert check("response_stream", []).last is not None


def test_a_handle_deep_in_a_response_is_text() -> None:
    """Only a member of the response itself is the handle; what a tool is called with may look like one."""
    item = {"type": "function_call", "arguments": NASTY, "kv_transfer_params": {"a": 1}}
    response = {"output": [item], "kv_transfer_params": {"kvloop_handle": "x"}, "status": "completed"}
    event = b"data: " + msgspec.json.encode({"response": response, "type": "response.completed"}) + b"\n\n"
    one = stream_filter(Endpoint.RESPONSES, 1 << 20)
    del response["kv_transfer_params"]
    assert json.loads(one.feed(event).removeprefix(b"data: "))["response"] == response
    assert one.handle == b'{"kvloop_handle":"x"}'


@pytest.mark.parametrize(
    ("name", "endpoint", "ending"),
    [
        ("response", Endpoint.RESPONSES, STOP),
        ("response_tools", Endpoint.RESPONSES, TOOL_CALLS),
        ("response_cut", Endpoint.RESPONSES, LENGTH),
        ("message", Endpoint.MESSAGES, STOP),
        ("message_tools", Endpoint.MESSAGES, TOOL_CALLS),
    ],
)
def test_json_answers(name: str, endpoint: Endpoint, ending: str) -> None:
    """The handle out, the ending, and every other byte as it was."""
    left, handle, read = read_answer(endpoint, body(name))
    assert (handle, read) == (TAKEN, ending)
    assert left == body(name).replace(MEMBER, b"").replace(b"," + MEMBER[:-1], b"")


def test_a_tool_s_arguments_do_not_end_a_message() -> None:
    """`stop_reason` counts as a member of the message alone."""
    message = {"content": [{"type": "tool_use", "input": {"stop_reason": "x"}}], "stop_reason": "max_tokens"}
    assert read_answer(Endpoint.MESSAGES, msgspec.json.encode(message))[2] == LENGTH
    assert read_answer(Endpoint.MESSAGES, b'{"stop_reason":5}')[2] == STOP


def test_previous_is_written_only_where_the_engine_wrote_null() -> None:
    """An engine that says something else is not corrected."""
    fine = b'{"id":"a","previous_response_id":null,"x":{"previous_response_id":null}}'
    assert read_answer(Endpoint.RESPONSES, fine, "p")[0] == fine.replace(b"null", b'"p"', 1)
    for other in (b'{"previous_response_id":"q"}', b'{"id":"a"}', b"[]"):
        assert read_answer(Endpoint.RESPONSES, other, "p")[0] == other
