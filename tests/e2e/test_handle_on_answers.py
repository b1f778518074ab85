"""Where the handle stands in decode's answers, on every generation route, streamed or not."""

import json
from typing import Any

import pytest

from tests.e2e.test_histories import opening
from tests.e2e.turns import Pair, events, post

RETAIN = {"kv_transfer_params": {"do_remote_decode": False, "do_remote_prefill": False}}
PROMPT = opening("handles", words=60)


def body_for(route: str) -> dict[str, Any]:
    """A greedy request of a route."""
    common: dict[str, Any] = {"model": "tiny", "temperature": 0}
    match route:
        case "chat/completions":
            return common | {"messages": PROMPT, "max_tokens": 8}
        case "completions":
            return common | {"prompt": PROMPT[0]["content"], "max_tokens": 8}
        case _:
            return common | {"input": PROMPT[0]["content"], "max_output_tokens": 8, "store": False}


def handles_in(value: Any) -> list[str]:
    """Every handle at any depth."""
    if isinstance(value, dict):
        own = [value["kvloop_handle"]] if "kvloop_handle" in value else []
        return own + [found for item in value.values() for found in handles_in(item)]
    if isinstance(value, list):
        return [found for item in value for found in handles_in(item)]
    return []


@pytest.mark.parametrize("route", ["chat/completions", "completions", "responses"])
def test_handle_on_a_whole_answer(pair: Pair, route: str) -> None:
    """A JSON answer carries one handle at its top level."""
    answer = json.loads(post(f"{pair.decode.url}/v1/{route}", body_for(route) | RETAIN))
    assert len(handles_in(answer)) == 1
    assert "kvloop_handle" in answer["kv_transfer_params"]


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_handle_on_a_stream(pair: Pair, route: str) -> None:
    """A stream carries one handle, in one event of its own, just before the terminator."""
    raw = post(f"{pair.decode.url}/v1/{route}", body_for(route) | RETAIN | {"stream": True})
    found = events(raw)
    assert len(handles_in(found)) == 1
    assert found[-1]["object"] == "kvloop.handle"
    assert found[-1]["choices"] == []
    assert raw.rstrip().endswith(b"data: [DONE]")


def test_handle_on_a_streamed_response(pair: Pair) -> None:
    """The Responses API carries it in the response of its last event."""
    raw = post(f"{pair.decode.url}/v1/responses", body_for("responses") | RETAIN | {"stream": True})
    with_handle = [event for event in events(raw) if handles_in(event)]
    assert [event["type"] for event in with_handle] == ["response.completed"]


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_no_handle_unasked(pair: Pair, route: str, stream: bool) -> None:
    """A request that no router sent is neither retained nor marked."""
    raw = post(f"{pair.decode.url}/v1/{route}", body_for(route) | {"stream": stream})
    assert b"kvloop" not in raw


def test_a_stream_is_otherwise_the_same(pair: Pair) -> None:
    """But for the handle's event and what differs between any two answers, a stream is what vLLM writes."""
    plain, marked = (
        events(post(f"{pair.decode.url}/v1/chat/completions", body_for("chat/completions") | extra))
        for extra in ({"stream": True}, {"stream": True} | RETAIN)
    )
    assert marked[-1]["object"] == "kvloop.handle"
    for event in plain + marked:
        event.pop("id", None)
        event.pop("created", None)
    assert marked[:-1] == plain
