"""The ids of an answer's tokens, taken out of its stream on the way to a client who did not ask for them.

vLLM writes a chunk's members whether they were asked for or not, so that what was put in is an array where
there would be a null:

    data: {...,"choices":[{"index":0,"delta":{"content":" a"},...,"finish_reason":null,"token_ids":[264]}]}

The client gets the null, and with it byte for byte the stream that he would have got. The array cannot be
taken for anything that the model says: inside a JSON string the quotation marks would be escaped. Where a
parser holds text back the engine sends chunks of nothing but ids, and those go no further.

An engine that has failed inside says so in an event, and ends the stream as if nothing was. Such an event is
the end of what is passed on: what comes of it is for whoever reads `failed` to say.
"""

import re

import msgspec

from kvloop.wire.ledger import Ledger
from kvloop.wire.members import BROKEN
from kvloop.wire.openai import Generation
from kvloop.wire.sse import HandleFilter

ASKED = "return_token_ids"
_KEY = b'"token_ids":['
_NULL = b'"token_ids":null'
_PROMPT = re.compile(rb'"prompt_token_ids":\[([0-9,]*)\]')
_PROMPT_NULL = b'"prompt_token_ids":null'
_EMPTY = b'"delta":{},"logprobs":null,"finish_reason":null,'
_ERROR = re.compile(rb'^data:\s*(\{"error":.*)$', re.MULTILINE)
_SERVER_ERROR = 500


class _Error(msgspec.Struct):
    code: int = 0


class _ErrorEvent(msgspec.Struct):
    error: _Error


_ERROR_EVENT = msgspec.json.Decoder(_ErrorEvent)


def asks_for_ids(generation: Generation) -> bool:
    """Whether the client wants the ids himself."""
    return bytes(generation.fields.get(ASKED, b"")) == b"true"


class TokenIdsFilter(HandleFilter):
    """Takes out the handle, and the ids, which `ledger` gets. `keep`: the client asked for them, too.

    `failed`: the engine has said that it cannot go on.
    """

    def __init__(self, max_event_bytes: int, ledger: Ledger, *, keep: bool) -> None:
        super().__init__(max_event_bytes)
        self.ledger = ledger
        self._keep = keep
        self._begun = False

    @property
    def whole(self) -> bool:
        """Whether it ended as a stream ends, if it is one that can be gone on with."""
        return not self._begun or self.ledger.lost or self.ledger.has_ended

    def close(self) -> bytes:
        """What is left, if it is the end: half an event would spoil what is to follow."""
        if self._begun and not self.ledger.lost and b"".join(self._held).strip() != b"data: [DONE]":
            self._held.clear()
        return super().close()

    def _passed(self, lines: bytes) -> bytes:
        lines = super()._passed(lines)
        if self.failed is not None:
            return b""
        ledger = self.ledger
        if not self._begun:
            found = _PROMPT.search(lines)
            if found is not None:
                self._begun = True
                ledger.begin(found[1])
                if not self._keep:
                    lines = _PROMPT.sub(_PROMPT_NULL, lines, 1)
        if b'{"error":' in lines:
            lines = self._before_error(lines)
        first, *rest = lines.split(_KEY)
        if len(rest) == 1:
            ids, _, left = rest[0].partition(b"]")
            ledger.add(lines, [ids])
            if self._keep:
                return lines
            if first.endswith(_EMPTY):
                return self._without_ids(lines)
            return first + _NULL + left
        ledger.add(lines, [one.partition(b"]")[0] for one in rest])
        if self._keep or not rest:
            return lines
        return self._without_ids(lines)

    def _without_ids(self, lines: bytes) -> bytes:
        """Whole lines without their ids, and without the events that have nothing else."""
        kept: list[bytes] = []
        for event in re.split(rb"(?<=\n\n)", lines):
            first, *rest = event.split(_KEY)
            if first.endswith(_EMPTY):
                continue
            kept.append(first)
            for one in rest:
                kept += (_NULL, one.partition(b"]")[2])
        return b"".join(kept)

    def _before_error(self, lines: bytes) -> bytes:
        found = _ERROR.search(lines)
        if found is None or self.ledger.lost or not self._begun:
            return lines
        try:
            code = _ERROR_EVENT.decode(found[1]).error.code
        except BROKEN:
            return lines
        if code < _SERVER_ERROR:
            return lines
        self.failed = "failed"
        return lines[: found.start()]
