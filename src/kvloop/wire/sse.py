"""Decode's handle, taken out of a stream of server-sent events; everything else passes byte for byte.

vLLM writes each event as one line, `data: {...}`, and a blank one (Anthropic's have a line more, which names
them). The handle comes in one of two ways:

    data: {"object":"kvloop.handle","choices":[],"kv_transfer_params":{...}}     vLLM 0.32 and kvloop's plugin
    data: {"id":...,"choices":[...],"kv_transfer_params":{...}}                  vLLM 0.33, once per choice

So whole lines are passed on, each read with one search, and only a line still under way is held back, for it
may become either; no client can use half a line. Text of the model sits inside JSON strings, where a
quotation mark is escaped, but names of members do not (a token is one in `top_logprobs`): a line that the
search finds is decoded, and only a member of the event itself counts.
"""

import re

import msgspec

from kvloop.wire.ending import FINISH_REASON, STOP, Spelling, ending_of_events
from kvloop.wire.members import Fields, is_object, without_member
from kvloop.wire.openai import HANDOVER_FIELD

HANDLE_OBJECT = "kvloop.handle"
_KEY = b'"kv_transfer_params"'
_HANDLE = re.compile(rb'"kv_transfer_params"\s*:\s*\{')  # 0.33 writes a null into every chunk before the last
_PREFIX = b"data:"
_BLANK_BYTES = 2  # the longest line that says nothing
DONE = (b"data: [DONE]", b"data:[DONE]")


class HandleFilter:
    """Takes the handle out of one stream. `handle` is the last one seen, as the bytes of a JSON object.

    `ending`: how the answer ended, as far as it has come; known at the latest when the handle is.
    `last`: the object that ended the answer, in an API that has one; where it is to be had.
    `overlong`: the line under way is longer than the bound, and the stream cannot be used any further.
    `says`: some of the answer itself has come, and not only the announcement of one.
    `failed`: what the engine has said instead of going on, where that is looked for.
    """

    def __init__(
        self, max_event_bytes: int, spelling: Spelling = FINISH_REASON, ends: tuple[bytes, ...] = DONE
    ) -> None:
        """`max_event_bytes` bounds what is held back: the longest line. `spelling`: of an ending. `ends`: of
        which a stream's last lines have one."""
        self.handle: bytes | None = None
        self.ending = STOP
        self.last: bytes | None = None
        self.overlong = False
        self.failed: str | None = None
        self.says = True
        self._max_event_bytes = max_event_bytes
        self._spelling = spelling
        self._ends = ends
        self._last_lines = b""
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._drop_blank = False

    def feed(self, data: bytes) -> bytes:
        """What may go on to the client now that `data` has come."""
        cut = data.rfind(b"\n") + 1
        if not cut:
            self._hold(data)
            return b""
        whole = data if cut == len(data) else data[:cut]
        if self._held:
            whole = b"".join((*self._held, whole))
            self._held.clear()
            self._held_bytes = 0
        if cut != len(data):
            self._hold(data[cut:])
        return self._passed(whole)

    def close(self) -> bytes:
        """What is left when the stream has ended."""
        left = b"".join(self._held)
        self._held.clear()
        self._held_bytes = 0
        return self._passed(left) if left else b""

    @property
    def whole(self) -> bool:
        """Whether the stream may end here: an engine may fall silent, and its server end the stream in good
        order."""
        return any(end in self._last_lines for end in self._ends)

    def _hold(self, data: bytes) -> None:
        self._held.append(data)
        self._held_bytes += len(data)
        self.overlong = self._held_bytes > self._max_event_bytes

    def _passed(self, lines: bytes) -> bytes:
        self.ending = ending_of_events(lines, self._spelling) or self.ending
        if len(lines) > _BLANK_BYTES:
            self._last_lines = lines
        if not self._drop_blank and self._found(lines, 0) < 0:
            return lines
        passed: list[bytes] = []
        at = 0
        while at < len(lines):
            start = at
            if not self._drop_blank:
                found = self._found(lines, at)
                if found < 0:
                    break
                ends = lines.rfind(b"\n", at, found), lines.rfind(b"\r", at, found)
                start = max(at, *(end + 1 for end in ends))
            end = _end_of_line(lines, start)
            passed += (lines[at:start], self._line(lines[start:end]))
            at = end
        passed.append(lines[at:])
        return b"".join(passed)

    def _found(self, lines: bytes, at: int) -> int:
        """Where, from `at` on, something stands for which its line has to be decoded; -1 for nowhere."""
        if lines.find(_KEY, at) < 0:
            return -1
        found = _HANDLE.search(lines, at)
        return -1 if found is None else found.start()

    def _line(self, line: bytes) -> bytes:
        if self._drop_blank:
            self._drop_blank = False
            if not line.strip(b"\r\n"):
                return b""
        if not line.startswith(_PREFIX) or self._found(line, 0) < 0:
            return line
        event = line[len(_PREFIX) :].strip(b" \r\n")
        try:
            fields = msgspec.json.decode(event, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return line
        kept = self._event(event, fields)
        if kept is None:
            self._drop_blank = True
            return b""
        start = line.index(event)
        return line[:start] + kept + line[start + len(event) :]

    def _event(self, event: bytes, fields: Fields) -> bytes | None:
        """An event's JSON as it goes on, None for one that does not."""
        raw = fields.get(HANDOVER_FIELD)
        if raw is None or not is_object(raw):
            return event
        self.handle = bytes(raw)
        if bytes(fields.get("object", b"")) == b'"%s"' % HANDLE_OBJECT.encode():
            return None
        return without_member(event, fields, HANDOVER_FIELD)


def _end_of_line(lines: bytes, start: int) -> int:
    """Where the line from `start` ends, with what ends it: CR, LF or both."""
    feed = lines.find(b"\n", start)
    end = feed + 1 or len(lines)
    back = lines.find(b"\r", start, end)
    return end if back < 0 or back + 1 == feed else back + 1
