"""An answer of each endpoint: the handle out of its stream or its body, its ending, and what it says whole.

Of a stored response the router keeps what the client was given (`router.responses`), so the filter of its
stream also holds on to the last event's object. A request that named an earlier response goes to the engines
without that name, and the answer is given it back.
"""

import re

import msgspec

from kvloop.wire.dialect import Endpoint
from kvloop.wire.ending import (
    STOP_REASON,
    ending_of_answer,
    ending_of_message,
)
from kvloop.wire.members import FIELDS, TEXT, Fields, decoded, is_object, with_value, without_member
from kvloop.wire.openai import HANDOVER_FIELD, take_handle
from kvloop.wire.responses import ending_of_response
from kvloop.wire.sse import HandleFilter

PREVIOUS = "previous_response_id"
_LAST_EVENT = re.compile(rb'"response\.(?:completed|incomplete|failed|cancelled)"')
_ERROR = b'"error"'
_ITEM = b'"response.output_item.added"'  # vLLM announces a response before its prompt has been computed
_MESSAGE_ENDS = (b'"message_stop"', _ERROR)  # a quotation mark inside a text is escaped
_LAST_TYPES = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
_RESPONSE_ENDS = (*(b'"%s"' % name.encode() for name in _LAST_TYPES), _ERROR)


def stream_filter(endpoint: Endpoint, max_event_bytes: int, previous_id: str | None = None) -> HandleFilter:
    """What takes the handle out of a stream of this endpoint. `previous_id`: see `ResponseFilter`."""
    if endpoint is Endpoint.RESPONSES:
        return ResponseFilter(max_event_bytes, previous_id)
    if endpoint is Endpoint.MESSAGES:
        return HandleFilter(max_event_bytes, STOP_REASON, _MESSAGE_ENDS)
    return HandleFilter(max_event_bytes)


def read_answer(
    endpoint: Endpoint, body: bytes, previous_id: str | None = None
) -> tuple[bytes, bytes | None, str]:
    """A JSON answer as the client gets it, the handle that was in it, and how it ended."""
    body, handle = take_handle(body)
    if endpoint is Endpoint.RESPONSES:
        fields = decoded(body, FIELDS, {})
        return with_previous(body, fields, previous_id), handle, ending_of_response(fields)
    return body, handle, ending_of_message(body) if endpoint is Endpoint.MESSAGES else ending_of_answer(body)


def with_previous(response: bytes, fields: Fields, previous_id: str | None) -> bytes:
    """A response, whose members are `fields`, that goes on from that one, or from none."""
    if previous_id is None or bytes(fields.get(PREVIOUS, b"")) != b"null":
        return response
    return with_value(response, fields, PREVIOUS, msgspec.json.encode(previous_id))


class ResponseFilter(HandleFilter):
    """Takes the handle out of a Responses stream. `last` is the response object that ended it, as passed on.

    `previous_id`: the response that this one goes on from, written where the engine wrote null.
    """

    def __init__(self, max_event_bytes: int, previous_id: str | None = None) -> None:
        super().__init__(max_event_bytes, ends=_RESPONSE_ENDS)
        self.says = False
        self._previous_id = previous_id

    def _passed(self, lines: bytes) -> bytes:
        self.says = self.says or _ITEM in lines
        return super()._passed(lines)

    def _found(self, lines: bytes, at: int) -> int:
        last = _LAST_EVENT.search(lines, at)
        found = [super()._found(lines, at), -1 if last is None else last.start()]
        if self._previous_id is not None:
            found.append(lines.find(b'"previous_response_id":null', at))
        return min([place for place in found if place >= 0], default=-1)

    def _event(self, event: bytes, fields: Fields) -> bytes | None:
        kept = super()._event(event, fields)
        raw = fields.get("response")
        if kept is None or raw is None or not is_object(raw):
            return kept
        response, inner = bytes(raw), decoded(raw, FIELDS, {})
        handle = inner.get(HANDOVER_FIELD)
        if handle is not None and is_object(handle):
            self.handle = bytes(handle)
            response = without_member(response, inner, HANDOVER_FIELD)
            del inner[HANDOVER_FIELD]
        response = with_previous(response, inner, self._previous_id)
        if decoded(fields.get("type", b""), TEXT, "") in _LAST_TYPES:
            self.last, self.ending = response, ending_of_response(inner)
        if response == bytes(raw):
            return kept
        left = {name: raw for name, raw in fields.items() if name != HANDOVER_FIELD}
        return with_value(kept, left, "response", response)
