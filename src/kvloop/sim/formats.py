"""Chats and completions in vLLM's shapes, whole or as server-sent events, and what all formats share.

A stream of chat or completion events is what vLLM 0.32 sends with kvloop's endpoint plugin in it: decode's
handle rides on an event of its own, just before `[DONE]`.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from kvloop.sim.outcome import Choice, Usage
from kvloop.wire.openai import HANDOVER_FIELD
from kvloop.wire.sse import HANDLE_OBJECT

DONE = b"data: [DONE]\n\n"
Params = dict[str, Any] | None


class Format(Protocol):
    """How one request's answer is written. `announces`: its stream begins before there is a token."""

    announces: bool

    def begin(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The events before the first token."""

    def piece(self, choice: Choice, news: str) -> bytes:
        """The event for more text."""

    def last(self, choice: Choice) -> bytes:
        """The event that ends one answer."""

    def end(self, choices: Sequence[Choice], usage: Usage, params: Params) -> bytes:
        """The events after the last answer."""

    def whole(self, choices: Sequence[Choice], usage: Usage, params: Params) -> bytes:
        """The answer as one JSON body."""


def event(value: Any, name: str = "") -> bytes:
    """One server-sent event."""
    data = b"data: " + msgspec.json.encode(value) + b"\n\n"
    return b"event: %b\n%b" % (name.encode(), data) if name else data


def handle_event(params: Params) -> bytes:
    """The event of kvloop's plugin that carries decode's handle; nothing without one."""
    if params is None:
        return b""
    return event({"object": HANDLE_OBJECT, "choices": [], HANDOVER_FIELD: params})


class _Chunked:
    """What chat and completions share: chunks with choices, usage in one of its own, the handle, the end."""

    announces = False
    kind = ""
    chunk_kind = ""

    def __init__(self, identifier: str, model: str, created_s: int, *, wants_usage: bool) -> None:
        self._wants_usage = wants_usage
        self._head = {"id": identifier, "object": self.kind, "created": created_s, "model": model}
        chunk = msgspec.json.encode(self._head | {"object": self.chunk_kind})
        self._opening = b"data: " + chunk[:-1] + b',"choices":['

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return self._opening + msgspec.json.encode(choice) + b"]}\n\n"

    def end(self, choices: Sequence[Choice], usage: Usage, params: Params) -> bytes:
        """Usage, if it is wanted, the handle, and the end."""
        del choices
        counted = b""
        if self._wants_usage:
            counted = self._opening + b'],"usage":' + msgspec.json.encode(usage.shown()) + b"}\n\n"
        return counted + handle_event(params) + DONE

    def _whole(self, choices: list[dict[str, Any]], usage: Usage, params: Params) -> bytes:
        tail = {"choices": choices, "usage": usage.shown(), HANDOVER_FIELD: params}
        return msgspec.json.encode(self._head | tail)


class Chat(_Chunked):
    """`/v1/chat/completions`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def begin(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Whose turn it is."""
        del usage
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._delta(choice, delta) for choice in choices)

    def piece(self, choice: Choice, news: str) -> bytes:
        """More text, or more of a call's arguments."""
        if choice.tool is None:
            return self._delta(choice, {"content": news})
        function: dict[str, Any] = {"arguments": choice.argument_news(news)}
        call: dict[str, Any] = {"index": 0, "function": function}
        if choice.is_begun_by(news):
            function["name"] = choice.tool
            call |= {"id": call_id(choice), "type": "function"}
        return self._delta(choice, {"tool_calls": [call]})

    def last(self, choice: Choice) -> bytes:
        """Why it ended; a call's arguments are closed before."""
        closing = b""
        if choice.tool is not None and choice.text:
            call = {"index": 0, "function": {"arguments": choice.argument_end}}
            closing = self._delta(choice, {"tool_calls": [call]})
        return closing + self._delta(choice, {}, choice.reason)

    def whole(self, choices: Sequence[Choice], usage: Usage, params: Params) -> bytes:
        """The answers as messages."""
        shown = []
        for choice in choices:
            message: dict[str, Any] = {"role": "assistant", "content": choice.text, "tool_calls": []}
            if choice.tool is not None:
                function = {"name": choice.tool, "arguments": choice.arguments}
                call = {"id": call_id(choice), "type": "function", "function": function}
                message |= {"content": None, "tool_calls": [call]}
            one = {"index": choice.index, "message": message, "logprobs": None}
            one |= {"finish_reason": choice.reason, "stop_reason": choice.matched}
            shown.append(one | _token_ids(choice))
        return self._whole(shown, usage, params)

    def _delta(self, choice: Choice, delta: dict[str, Any], reason: str | None = None) -> bytes:
        one = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._chunk(one)


class Completion(_Chunked):
    """`/v1/completions`."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def begin(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Nothing comes before the text."""
        del choices, usage
        return b""

    def piece(self, choice: Choice, news: str) -> bytes:
        """More text."""
        return self._chunk(self._text(choice, news, None))

    def last(self, choice: Choice) -> bytes:
        """Why it ended."""
        return self._chunk(self._text(choice, "", choice.reason))

    def whole(self, choices: Sequence[Choice], usage: Usage, params: Params) -> bytes:
        """The answers as texts."""
        shown = [self._text(choice, choice.text, choice.reason) | _token_ids(choice) for choice in choices]
        return self._whole(shown, usage, params)

    @staticmethod
    def _text(choice: Choice, text: str, reason: str | None) -> dict[str, Any]:
        one = {"index": choice.index, "text": text, "logprobs": None}
        return one | {"finish_reason": reason, "stop_reason": choice.matched}


def call_id(choice: Choice) -> str:
    """The id of the call that an answer is."""
    return f"call_{choice.index}_{choice.tool}"


def _token_ids(choice: Choice) -> dict[str, Any]:
    return {"token_ids": choice.token_ids} if choice.body.return_token_ids else {}
