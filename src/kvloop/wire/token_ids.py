"""The ids of an answer's tokens, taken out of its stream on the way to a client who did not ask for them.

vLLM writes a chunk's members whether they were asked for or not, so that what was put in is an array where
there would be a null:

    data: {...,"choices":[{"index":0,"delta":{"content":" a"},...,"finish_reason":null,"token_ids":[264]}]}

The client gets the null, and with it byte for byte the stream that he would have got. Nearly all chunks of a
stream differ in their text and their id alone: what they have in common is learned from the first, and a read
that begins and ends with it is dealt with by its ends. The array cannot be
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
_TEXT = (b'"index":0,"delta":{"content":"', b'"index":0,"text":"')
_QUIET = (
    b'"},"logprobs":null,"finish_reason":null,',
    b'","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,',
)
_MAX_DIGITS = 10
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
        self._start = b"\n"  # of the stream's plain chunks, up to the text; of none as yet
        self._quiet = self._tail = b""  # between their text and their id, and after it

    def feed(self, data: bytes) -> bytes:
        """What may go on to the client now that `data` has come."""
        if not data.startswith(self._start) or self._held or self._drop_blank or self.failed is not None:
            return super().feed(data)
        if data.find(b"\n") + 2 == len(data):
            one = self._plain(data)
            return super().feed(data) if one is None else one
        if not data.endswith(b"\n\n"):
            return super().feed(data)
        passed: list[bytes] = []
        for event in data[:-2].split(b"\n\n"):
            whole = event + b"\n\n"
            plain = self._plain(whole) if event.startswith(self._start) else None
            passed.append(super().feed(whole) if plain is None else plain)
        return b"".join(passed)

    def _plain(self, event: bytes) -> bytes | None:
        """An event as the client gets it, if it has a text and one id, and is else like its like."""
        at = event.rfind(_KEY)
        end = at - len(self._quiet)
        number = event[at + len(_KEY) : -len(self._tail)]
        if (
            end > len(self._start)
            and number.isdigit()
            and len(number) <= _MAX_DIGITS
            and event.startswith(self._quiet, end)
            and event.endswith(self._tail)
        ):
            self.ledger.said(number)
            return event if self._keep else event[:at] + _NULL + self._tail[1:]
        return None

    def _learn(self, event: bytes) -> None:
        """What plain chunks look like, of one that may be one."""
        at = event.rfind(_KEY)
        for text, quiet in zip(_TEXT, _QUIET, strict=True):
            start = event.find(text)
            if start > 0 and event.endswith(quiet, 0, at) and event.count(b"\n") == 2:
                self._start, self._quiet = event[: start + len(text)], quiet
                self._tail = event[event.index(b"]", at) :]

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
        ledger.add(lines)
        if self._begun and not self._tail and lines.startswith(b"data:") and _KEY in lines:
            self._learn(lines)
        return lines if self._keep or _KEY not in lines else self._without_ids(lines)

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
