"""What a client makes of an answer: what was said, and whether it was told how it ended.

An answer is whole when its API says so (`[DONE]`, `response.completed`, `message_stop`, a JSON body's last
byte); an error is one in the shape that the API's clients read. An answer that is neither has just stopped.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvloop.bench.soak.exchange import Answer
from kvloop.bench.soak.oracle import Said
from kvloop.sim.tokenizer import ARGUMENT

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
Value = dict[str, Any]
_STOPS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


@dataclass(slots=True)
class Heard:
    """`said`: a whole answer, None without one. `error`: what went wrong, as the client was told. `items`: of
    the answer, as its API wants them back, and `name`: by which a response is gone on from."""

    said: Said | None = None
    error: str | None = None
    items: list[Value] = field(default_factory=list)
    name: str | None = None


def hear(path: str, answer: Answer) -> Heard:
    """An answer as its client understands it."""
    try:
        if answer.status != 200:
            return Heard(error=_refused(path, answer))
        if not answer.is_stream:
            return _WHOLE[path](msgspec.json.decode(answer.body)) if answer.whole else Heard()
        return _streamed(path, answer.body)
    except (msgspec.DecodeError, KeyError, IndexError, TypeError, AttributeError):
        return Heard()


def _refused(path: str, answer: Answer) -> str | None:
    if not answer.status or not answer.whole:
        return None
    body = msgspec.json.decode(answer.body)
    if path == MESSAGES and body["type"] != "error":
        return None
    return f"{answer.status} {body['error']['message']}"


def _streamed(path: str, body: bytes) -> Heard:
    events = list(_events(body))
    for event in events:
        if event.get("error"):
            return Heard(error=f"stream {event['error']['message']}")
    if path in (CHAT, COMPLETIONS):
        if not body.endswith(b"data: [DONE]\n\n"):
            return Heard()
        return _joined(path, events)
    last = "response.completed" if path == RESPONSES else "message_stop"
    if not events or events[-1]["type"] != last:
        return Heard()
    return _response(events[-1]["response"]) if path == RESPONSES else _blocks(events)


def _events(body: bytes) -> Iterator[Value]:
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            yield msgspec.json.decode(line[6:])


def _joined(path: str, events: list[Value]) -> Heard:
    """The chunks of a chat or a completion, put together."""
    choices = [event["choices"][0] for event in events if event.get("choices")]
    reason = next(choice["finish_reason"] for choice in choices[::-1] if choice.get("finish_reason"))
    if path == COMPLETIONS:
        return _completion({"choices": [{"text": _text(choices, "text"), "finish_reason": reason}]})
    deltas = [choice["delta"] for choice in choices]
    calls = [delta["tool_calls"][0] for delta in deltas if delta.get("tool_calls")]
    message: Value = {"role": "assistant", "content": _text(deltas, "content")}
    if calls:
        arguments = _text([call["function"] for call in calls], "arguments")
        function = {"name": calls[0]["function"]["name"], "arguments": arguments}
        message["tool_calls"] = [{"id": calls[0]["id"], "type": "function", "function": function}]
    return _chat({"choices": [{"message": message, "finish_reason": reason}]})


def _text(parts: list[Value], name: str) -> str:
    return "".join([part.get(name) or "" for part in parts])


def _chat(body: Value) -> Heard:
    choice = body["choices"][0]
    message, reason = choice["message"], choice["finish_reason"]
    if not message.get("tool_calls"):
        text = message["content"] or ""
        return Heard(Said(text, None, reason), items=[{"role": "assistant", "content": text}])
    call = message["tool_calls"][0]
    argument = msgspec.json.decode(call["function"]["arguments"])[ARGUMENT]
    back = {"role": "assistant", "content": None, "tool_calls": [call]}
    return Heard(Said(argument, call["function"]["name"], reason), items=[back])


def _completion(body: Value) -> Heard:
    choice = body["choices"][0]
    return Heard(Said(choice["text"], None, choice["finish_reason"]))


def _response(body: Value) -> Heard:
    reason = "length" if body["status"] == "incomplete" else "stop"
    items = body["output"]
    if not items:
        return Heard(Said("", None, reason), name=body["id"])
    item = items[0]
    if item["type"] == "message":
        return Heard(Said(item["content"][0]["text"], None, reason), items=items, name=body["id"])
    reason = "tool_calls" if reason == "stop" else reason
    argument = msgspec.json.decode(item["arguments"])[ARGUMENT]
    return Heard(Said(argument, item["name"], reason), items=items, name=body["id"])


def _blocks(events: list[Value]) -> Heard:
    """The events of a message, put together."""
    block: Value = {"type": "text", "text": ""}
    pieces: list[Value] = []
    reason = None
    for event in events:
        if event["type"] == "content_block_start":
            block = event["content_block"]
        elif event["type"] == "content_block_delta":
            pieces.append(event["delta"])
        elif event["type"] == "message_delta":
            reason = event["delta"]["stop_reason"]
    if block["type"] == "text":
        block["text"] = _text(pieces, "text")
    else:
        block["input"] = msgspec.json.decode(_text(pieces, "partial_json"))
    return _message({"content": [block], "stop_reason": reason})


def _message(body: Value) -> Heard:
    block, reason = body["content"][0], _STOPS[body["stop_reason"]]
    items: list[Value] = [{"role": "assistant", "content": [block]}]
    if block["type"] == "text":
        return Heard(Said(block["text"], None, reason), items=items)
    return Heard(Said(block["input"][ARGUMENT], block["name"], reason), items=items)


_WHOLE = {CHAT: _chat, COMPLETIONS: _completion, RESPONSES: _response, MESSAGES: _message}
