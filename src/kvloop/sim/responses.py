"""The Responses API's shape of an answer: items with parts, and a stream with an event for each change."""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvloop.sim.formats import Params, event
from kvloop.sim.outcome import Choice, Usage
from kvloop.sim.request import Reason
from kvloop.wire.openai import HANDOVER_FIELD


class Responses:
    """`/v1/responses`. There is one answer, a message; tools are rendered into the prompt, and not called."""

    def __init__(self, identifier: str, model: str, created_s: int) -> None:
        self._head = {"id": identifier, "object": "response", "created_at": created_s, "model": model}
        self._item_id = f"msg_{identifier.removeprefix('resp_')}"
        self._number = -1

    def begin(self, choices: Sequence[Choice]) -> bytes:
        """The response, its item and the item's part are announced."""
        del choices
        started = self._response("in_progress", [], None, None)
        item = self._item("", "in_progress") | {"content": []}
        return b"".join(
            (
                self._event("response.created", response=started),
                self._event("response.in_progress", response=started),
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.content_part.added", **self._place(), part=self._part("")),
            )
        )

    def piece(self, choice: Choice, news: str) -> bytes:
        """More text."""
        del choice
        return self._event("response.output_text.delta", **self._place(), delta=news, logprobs=[])

    def last(self, choice: Choice) -> bytes:
        """Part and item are complete."""
        text = choice.text
        item = self._item(text, _status(choice))
        return b"".join(
            (
                self._event("response.output_text.done", **self._place(), text=text, logprobs=[]),
                self._event("response.content_part.done", **self._place(), part=self._part(text)),
                self._event("response.output_item.done", output_index=0, item=item),
            )
        )

    def end(self, choices: Sequence[Choice], usage: Usage, params: Params) -> bytes:
        """The response as a whole."""
        status = _status(choices[0])
        items = [self._item(choices[0].text, status)]
        return self._event(f"response.{status}", response=self._response(status, items, usage, params))

    def whole(self, choices: Sequence[Choice], usage: Usage, params: Params) -> bytes:
        """The response as one JSON body."""
        status = _status(choices[0])
        items = [self._item(choices[0].text, status)]
        return msgspec.json.encode(self._response(status, items, usage, params))

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields}, kind)

    def _response(
        self, status: str, items: list[dict[str, Any]], usage: Usage | None, params: Params
    ) -> dict[str, Any]:
        counted = None if usage is None else _usage(usage)
        cut_off = {"reason": "max_output_tokens"} if status == "incomplete" else None
        tail = {"status": status, "output": items, "usage": counted, HANDOVER_FIELD: params}
        settings = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "error": None}
        return self._head | settings | tail | {"incomplete_details": cut_off}

    def _item(self, text: str, status: str) -> dict[str, Any]:
        item = {"id": self._item_id, "type": "message", "role": "assistant", "status": status}
        return item | {"content": [self._part(text)]}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    @staticmethod
    def _part(text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}


def _status(choice: Choice) -> str:
    return "incomplete" if choice.reason == Reason.LENGTH else "completed"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.answer,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.answer,
    }
