"""The Responses and Messages APIs through the whole loop: a second turn reads back what the first one left,
and its answer is the one that a stranger gets, for whom everything is computed."""

import json
from typing import Any

import pytest

from tests.e2e.test_histories import opening
from tests.e2e.test_router import Answer, Client, client
from tests.e2e.turns import Pair

__all__ = ["client"]

TOKENS = 12


def output(answer: Answer) -> str:
    """A response's text, streamed or not."""
    body = answer.body if answer.raw.startswith(b"{") else last_event(answer)["response"]
    return "".join(
        part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"]
    )


def last_event(answer: Answer) -> dict[str, Any]:
    """The last event of a stream."""
    lines = [line for line in answer.raw.splitlines() if line.startswith(b"data: {")]
    event: dict[str, Any] = json.loads(lines[-1].removeprefix(b"data: "))
    return event


def said(answer: Answer) -> str:
    """A message's text, streamed or not."""
    if answer.raw.startswith(b"{"):
        return "".join(block["text"] for block in answer.body["content"])
    events = [json.loads(line[6:]) for line in answer.raw.splitlines() if line.startswith(b"data: {")]
    return "".join(
        event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_responses(client: Client, pair: Pair, stream: bool) -> None:
    """The second one names the first, and the router puts the conversation together."""
    assert pair.decode.running
    text = opening(f"ferries{stream}")[0]["content"]
    body = {"model": "tiny", "temperature": 0, "max_output_tokens": TOKENS, "stream": stream}
    first = client.post("/v1/responses", body | {"input": text})
    assert (first.status, first.route) == (200, "recompute")
    opened = first.body if not stream else last_event(first)["response"]
    more = body | {"input": "And the return trip?", "previous_response_id": opened["id"]}
    second = client.post("/v1/responses", more)
    assert (second.status, second.route) == (200, "return")
    assert second.reused > 0
    assert b"kvloop" not in second.raw
    assert b'kv_transfer_params":{' not in second.raw.replace(b" ", b"")
    history = [
        {"role": "user", "content": text},
        *opened["output"],
        {"role": "user", "content": "And the return trip?"},
    ]
    cold = client.post("/v1/responses", body | {"input": history}, authorization=f"Bearer cold{stream}")
    assert (cold.status, cold.reused) == (200, 0)
    assert output(second) == output(cold)
    stranger = client.post("/v1/responses", more, authorization="Bearer stranger")
    assert stranger.status == 404


@pytest.mark.parametrize("stream", [False, True])
def test_messages(client: Client, pair: Pair, stream: bool) -> None:
    """As Anthropic's clients send them, with their key."""
    assert pair.decode.running
    text = opening(f"markets{stream}")[0]["content"]
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    body = {"model": "tiny", "temperature": 0, "max_tokens": TOKENS, "stream": stream, "system": "Be brief."}
    first = client.post("/v1/messages", body | {"messages": messages}, x_api_key="own")
    assert (first.status, first.route) == (200, "recompute")
    messages += [{"role": "assistant", "content": said(first)}, {"role": "user", "content": "And then?"}]
    second = client.post("/v1/messages", body | {"messages": messages}, x_api_key="own")
    assert (second.status, second.route) == (200, "return")
    assert second.reused > 0
    assert b"kvloop" not in second.raw
    cold = client.post("/v1/messages", body | {"messages": messages}, x_api_key=f"cold{stream}")
    assert (cold.status, cold.reused) == (200, 0)
    assert said(second) == said(cold)
