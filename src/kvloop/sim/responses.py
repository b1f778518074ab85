"""The Responses API's shape of an answer: items with parts, and a stream with an event for each change.

Decode's handle is a member of the response, in a stream of the last event's. vLLM keeps no responses unless
it is told to: what one goes on from is the router's business.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvloop.sim.formats import Params, call_id, event
from kvloop.sim.outcome import Choice, Usage
from kvloop.sim.request import Reason
from kvloop.wire.openai import HANDOVER_FIELD

Value = dict[str, Any]
_DONE = "completed"


class Responses:
    """`/v1/responses`. There is one answer: a message, or a call of a tool."""

    announces = True

    def __init__(self, identifier: str, model: str, created_s: int) -> None:
        self._head = {
            "id": f"resp_{identifier}",
            "object": "response",
            "created_at": created_s,
            "model": model,
        }
        self._identifier = identifier
        self._number = -1

    def begin(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The response is announced; its item, with the first token."""
        del choices, usage
        started = self._response("in_progress", [], None, None)
        return self._event("response.created", response=started) + self._event(
            "response.in_progress", response=started
        )

    def piece(self, choice: Choice, news: str) -> bytes:
        """More text, or more of a call's arguments; the item opens with the first."""
        opening = self._opening(choice) if choice.is_begun_by(news) else b""
        if choice.tool is not None:
            return opening + self._arguments(choice, choice.argument_news(news))
        place = self._place(choice)
        return opening + self._event("response.output_text.delta", **place, delta=news, logprobs=[])

    def last(self, choice: Choice) -> bytes:
        """The item is complete, if there is one."""
        if not choice.text:
            return b""
        place, text = self._place(choice), choice.text
        if choice.tool is None:
            told = {"text": text, "logprobs": []}
            closing = self._event("response.output_text.done", **place, **told)
            closing += self._event("response.content_part.done", **place, part=_part(text))
        else:
            told = {"arguments": choice.arguments, "name": choice.tool}
            closing = self._arguments(choice, choice.argument_end)
            closing += self._event("response.function_call_arguments.done", **place, **told)
        item = self._item(choice, choice.text, _DONE)
        return closing + self._event("response.output_item.done", output_index=0, item=item)

    def end(self, choices: Sequence[Choice], usage: Usage, params: Params) -> bytes:
        """The response as a whole. vLLM's event is called completed although the response may not be."""
        return self._event("response.completed", response=self._ended(choices[0], usage, params))

    def whole(self, choices: Sequence[Choice], usage: Usage, params: Params) -> bytes:
        """The response as one JSON body."""
        return msgspec.json.encode(self._ended(choices[0], usage, params))

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields}, kind)

    def _opening(self, choice: Choice) -> bytes:
        item = self._item(choice, "", "in_progress")
        if choice.tool is not None:
            return self._event("response.output_item.added", output_index=0, item=item)
        added = self._event("response.output_item.added", output_index=0, item=item | {"content": []})
        part = _part("") | {"logprobs": []}
        return added + self._event("response.content_part.added", **self._place(choice), part=part)

    def _arguments(self, choice: Choice, delta: str) -> bytes:
        return self._event("response.function_call_arguments.delta", **self._place(choice), delta=delta)

    def _ended(self, choice: Choice, usage: Usage, params: Params) -> Value:
        status = "incomplete" if choice.reason == Reason.LENGTH else _DONE
        items = [self._item(choice, choice.text, _DONE)] if choice.text else []
        return self._response(status, items, usage, params)

    def _response(self, status: str, items: list[Value], usage: Usage | None, params: Params) -> Value:
        counted = None if usage is None else _usage(usage)
        cut_off = {"reason": "max_output_tokens"} if status == "incomplete" else None
        tail = {"status": status, "output": items, "usage": counted, HANDOVER_FIELD: params}
        settings = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        settings["previous_response_id"] = None
        return self._head | settings | tail | {"incomplete_details": cut_off}

    def _item(self, choice: Choice, text: str, status: str) -> Value:
        if choice.tool is None:
            item = {"id": self._item_id(choice), "type": "message", "role": "assistant", "status": status}
            return item | {"content": [_part(text)]}
        called = {"call_id": call_id(choice), "name": choice.tool}
        called["arguments"] = choice.arguments if text else ""
        return {"id": self._item_id(choice), "type": "function_call", "status": status} | called

    def _item_id(self, choice: Choice) -> str:
        return f"{'msg' if choice.tool is None else 'fc'}_{self._identifier}"

    def _place(self, choice: Choice) -> Value:
        place = {"item_id": self._item_id(choice), "output_index": 0}
        return place | ({"content_index": 0} if choice.tool is None else {})


def _part(text: str) -> Value:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}


def _usage(usage: Usage) -> Value:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.answer,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.answer,
    }
