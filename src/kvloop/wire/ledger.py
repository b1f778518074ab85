"""What a client has of a streamed answer, in tokens: enough to let another engine go on from there.

Text is not enough. Taken apart into tokens anew it may give others than the model made, and an engine holds
text back whose last character is not whole. So decode is asked for the ids of what it says
(`return_token_ids`), and they are kept here, behind the answer's back (`wire.token_ids`).

An answer can be gone on from after an event that brought one id and some text: text that is held back comes
out whole with the first id that completes it, so at such an event none was. What came after the last such
event is the overlap: the next engine makes it again, and it counts only if it is the same, id for id and
letter for letter. Where ids come several at a time no event tells whether its last id's text is whole, and
the last event but one is taken: should text have been missing there, the overlap does not come out the same.

An event of nothing but text and one id is known by its shape, and only its id is kept, as the digits that it
came in (`said`). Any other is kept as it came, and decoded when there are some, or when it comes to it. An
engine is not to be trusted: ids are digits, their number and size are bounded, and whatever is not understood
makes the answer one that cannot be gone on from.
"""

from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from kvloop.wire.members import BROKEN

MAX_STREAM_BYTES = 4 << 20  # of one stream: the ids of some 600,000 tokens
MAX_ID = 2**31
_KEPT_EVENTS = 32  # as they came, between two times that they are counted off
_KEPT_BYTES = 64 * 1024
_DIGITS = b"0123456789,"

Id = Annotated[int, msgspec.Meta(ge=0, lt=MAX_ID)]
IDS: msgspec.json.Decoder[list[int]] = msgspec.json.Decoder(list[Id])


class Choice(msgspec.Struct):
    """A choice of either API's chunks. `delta` and `text` are the same thing, once each."""

    index: int = 0
    delta: dict[str, Any] | None = None
    text: str | None = None
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[Id] | None = None

    @property
    def said(self) -> str | None:
        """Its text; None where it says anything else, or more."""
        if self.delta is None:
            return self.text
        if any(value for name, value in self.delta.items() if name not in ("role", "content")):
            return None
        content = self.delta.get("content") or ""
        return content if isinstance(content, str) else None


class Event(msgspec.Struct):
    """A chunk of either API."""

    choices: list[Choice]
    id: str = ""
    object: str = ""
    created: int = 0
    model: str = ""
    usage: dict[str, Any] | None = None
    system_fingerprint: str | None = None
    error: Any = None


EVENT: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


class Ledger:
    """One answer's. `charge(bytes)` is asked before that much more is kept, and told of what is given back
    with a negative number.

    `head`: the first chunk, which names the answer. `prompt` and `ids` are JSON arrays without their
    brackets, `ids` as far as can be gone on from; `overlap_ids` and `overlap` what the client has beyond.
    `open_event`: the blank line after the last event may not have gone out. `counted`: the usage has, `done`:
    the end. `finish`: the reason that the answer has ended for. `lost`: it cannot be gone on from.
    """

    def __init__(self, charge: Callable[[int], bool]) -> None:
        self.head: Event | None = None
        self.prompt = b""
        self.ids = bytearray()
        self.overlap_ids: list[int] = []
        self.overlap = ""
        self.finish: str | None = None
        self.counted = False
        self.done = False
        self.lost = False
        self.open_event = False
        self._charge = charge
        self._charged = 0
        self._events: list[bytes] = []
        self._said: list[bytes] = []
        self._held_bytes = 0
        self._last_said = 0  # so many of the overlap's ids came with its text

    @property
    def prompt_tokens(self) -> int:
        """How long the prompt is."""
        return self.prompt.count(b",") + 1

    @property
    def tokens(self) -> int:
        """How many of the answer's tokens can be gone on from."""
        return self.ids.count(b",") + 1 if self.ids else 0

    def begin(self, prompt: bytes) -> None:
        """The prompt's ids are known."""
        if not prompt or prompt.translate(None, _DIGITS) or not self._keeps(len(prompt)):
            self.lose()
            return
        self.prompt = prompt

    def said(self, number: bytes) -> None:
        """An event of some text and one id goes to the client: the id."""
        if self._events:
            self.settle()
        if self.lost:
            return
        if self.overlap_ids:
            self._can_go_on(len(self.overlap_ids))
        self._said.append(number)
        if len(self._said) >= _KEPT_EVENTS:
            self._count_off()

    def add(self, lines: bytes) -> None:
        """Other whole lines go to him."""
        if self._said:
            self._count_off()
        if self.lost:
            return
        self._events.append(lines)
        self._held_bytes += len(lines)
        if self.head is None or len(self._events) >= _KEPT_EVENTS or self._held_bytes > _KEPT_BYTES:
            self.settle()

    def settle(self) -> None:
        """Read what is still kept as it came: from here on the fields are right."""
        self._count_off()
        lines = b"".join(self._events)
        self.open_event = not lines.endswith(b"\n\n") if lines else self.open_event
        self._forget_events()
        for line in lines.split(b"\n"):
            if line.startswith(b"data:") and not self.lost:
                self._read(line[5:].strip())

    def absorb(self, ids: list[int], text: str, *, alone: bool) -> None:
        """An event's ids and text. `alone`: the id was the only one in its event."""
        if not self._keeps(len(text) + 11 * len(ids)):
            self.lose()
            return
        if text and not alone and self._last_said:
            self._can_go_on(self._last_said)
        self.overlap_ids += ids
        self.overlap += text
        if text:
            self._last_said = len(self.overlap_ids)
            if alone:
                self._can_go_on(self._last_said)

    def lose(self) -> None:
        """It cannot be gone on from, and nothing is kept any more."""
        self.lost = True
        self.close()

    def close(self) -> None:
        """Give back what was charged. May be called again."""
        self._charge(-self._charged)
        self._charged = 0
        self._forget_events()
        self.prompt, self.ids = b"", bytearray()

    def _keeps(self, size_bytes: int) -> bool:
        fits = self._charged + size_bytes <= MAX_STREAM_BYTES and self._charge(size_bytes)
        self._charged += size_bytes if fits else 0
        return fits

    def _can_go_on(self, tokens: int) -> None:
        """From after the first so many ids of the overlap on, with which all of its text has come."""
        more = b",".join(b"%d" % one for one in self.overlap_ids[:tokens])
        self.ids += b"," + more if self.ids else more
        del self.overlap_ids[:tokens]
        self.overlap, self._last_said = "", 0

    def _count_off(self) -> None:
        said, self._said = b",".join(self._said), []
        if said and not self._keeps(len(said) + 1):
            self.lose()
        elif said:
            self.ids += b"," + said if self.ids else said

    def _forget_events(self) -> None:
        self._events.clear()
        self._said.clear()
        self._held_bytes = 0

    def _read(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = EVENT.decode(data)
        except BROKEN:
            self.lose()
            return
        self.head = self.head or event
        self.counted = self.counted or (not event.choices and event.usage is not None)
        if not event.choices:
            return
        choice, ids = event.choices[0], event.choices[0].token_ids or []
        said = choice.said
        if len(event.choices) > 1 or choice.index or choice.logprobs or said is None or (said and not ids):
            self.lose()
            return
        self.finish = choice.finish_reason or self.finish
        self.absorb(ids, said, alone=len(ids) == 1)
