"""Anthropic's shape of an answer: a message of blocks, and a stream with an event for each change.

Decode's handle is a member of a whole message. A stream has no place for it: as with kvloop's endpoint plugin
in vLLM it comes in an event without a name, just before the last.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvloop.sim.formats import Params, call_id, event, handle_event
from kvloop.sim.outcome import Choice, Usage
from kvloop.sim.request import Reason
from kvloop.wire.openai import HANDOVER_FIELD

Value = dict[str, Any]


class Messages:
    """`/v1/messages`. There is one answer: a text, or a call of a tool."""

    announces = False

    def __init__(self, identifier: str, model: str) -> None:
        self._head = {"id": identifier, "type": "message", "role": "assistant", "model": model}

    def begin(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The message is announced; what it is made of, with the first token."""
        del choices
        ending = {"stop_reason": None, "stop_sequence": None}
        message = self._head | {"content": [], "usage": _usage(usage)} | ending
        return _event("message_start", message=message)

    def piece(self, choice: Choice, news: str) -> bytes:
        """More text, or more of a call's input; the block opens with the first."""
        if choice.tool is None:
            opened: Value = {"type": "text", "text": ""}
            delta = {"type": "text_delta", "text": news}
        else:
            opened = {"type": "tool_use", "id": call_id(choice), "name": choice.tool, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": choice.argument_news(news)}
        more = _event("content_block_delta", index=0, delta=delta)
        if choice.is_begun_by(news):
            return _event("content_block_start", index=0, content_block=opened) + more
        return more

    def last(self, choice: Choice) -> bytes:
        """The block is complete, if there is one."""
        if not choice.text:
            return b""
        closing = b""
        if choice.tool is not None:
            delta = {"type": "input_json_delta", "partial_json": choice.argument_end}
            closing = _event("content_block_delta", index=0, delta=delta)
        return closing + _event("content_block_stop", index=0)

    def end(self, choices: Sequence[Choice], usage: Usage, params: Params) -> bytes:
        """Why it ended, the handle, and the end."""
        told = _event("message_delta", delta=_ending(choices[0]), usage=_usage(usage))
        return told + handle_event(params) + _event("message_stop")

    def whole(self, choices: Sequence[Choice], usage: Usage, params: Params) -> bytes:
        """The message as one JSON body; members without a value are left out, as vLLM does."""
        (choice,) = choices
        block: Value = {"type": "text", "text": choice.text}
        if choice.tool is not None:
            called = msgspec.json.decode(choice.arguments)
            block = {"type": "tool_use", "id": call_id(choice), "name": choice.tool, "input": called}
        message = self._head | {"content": [block], **_ending(choice), "usage": _usage(usage)}
        message[HANDOVER_FIELD] = params
        return msgspec.json.encode({name: value for name, value in message.items() if value is not None})


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _ending(choice: Choice) -> Value:
    if choice.reason == Reason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if choice.matched is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.matched}
    return {"stop_reason": "end_turn" if choice.tool is None else "tool_use", "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, int]:
    """Anthropic counts what was cached beside the input, not in it."""
    counted = {"input_tokens": usage.prompt - usage.cached, "output_tokens": usage.answer}
    return counted | {"cache_read_input_tokens": usage.cached}
