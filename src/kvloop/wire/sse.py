"""Decode's handle, taken out of a stream of server-sent events; everything else passes byte for byte.

vLLM writes each event as one line, `data: {...}`, and a blank one. The handle comes in one of two ways:

    data: {"object":"kvloop.handle","choices":[],"kv_transfer_params":{...}}     vLLM 0.32 and kvloop's plugin
    data: {"id":...,"choices":[...],"kv_transfer_params":{...}}                  vLLM 0.33, once per choice

So whole lines are passed on, each read with one search, and only a line still under way is held back, for it
may become either; no client can use half a line. Text of the model sits inside JSON strings, where a
quotation mark is escaped, but names of members do not (a token is one in `top_logprobs`): a line that the
search finds is decoded, and only a member of the event itself counts.
"""

import re

import msgspec

from kvloop.wire.ending import STOP, ending_of_events
from kvloop.wire.openai import HANDOVER_FIELD, without_member

HANDLE_OBJECT = "kvloop.handle"
_KEY = b'"kv_transfer_params"'
_HANDLE = re.compile(rb'"kv_transfer_params"\s*:\s*\{')  # 0.33 writes a null into every chunk before the last
_PREFIX = b"data:"


class HandleFilter:
    """Takes the handle out of one stream. `handle` is the last one seen, as the bytes of a JSON object.

    `ending`: how the answer ended, as far as it has come; known at the latest when the handle is.
    `overlong`: the line under way is longer than the bound, and the stream cannot be used any further.
    """

    def __init__(self, max_event_bytes: int) -> None:
        """`max_event_bytes` bounds what is held back: the longest line."""
        self.handle: bytes | None = None
        self.ending = STOP
        self.overlong = False
        self._max_event_bytes = max_event_bytes
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

    def _hold(self, data: bytes) -> None:
        self._held.append(data)
        self._held_bytes += len(data)
        self.overlong = self._held_bytes > self._max_event_bytes

    def _passed(self, lines: bytes) -> bytes:
        self.ending = ending_of_events(lines) or self.ending
        if not self._drop_blank and (_KEY not in lines or _HANDLE.search(lines) is None):
            return lines
        return b"".join([self._line(line) for line in lines.splitlines(keepends=True)])

    def _line(self, line: bytes) -> bytes:
        if self._drop_blank:
            self._drop_blank = False
            if not line.strip(b"\r\n"):
                return b""
        if not line.startswith(_PREFIX) or _HANDLE.search(line) is None:
            return line
        event = line[len(_PREFIX) :].strip(b" \r\n")
        try:
            fields = msgspec.json.decode(event, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return line
        raw = bytes(fields.get(HANDOVER_FIELD, b""))
        if not raw.startswith(b"{"):
            return line
        self.handle = raw
        if bytes(fields.get("object", b"")) == b'"%s"' % HANDLE_OBJECT.encode():
            self._drop_blank = True
            return b""
        start = line.index(event)
        return line[:start] + without_member(event, fields) + line[start + len(event) :]
