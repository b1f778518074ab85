"""A streamed answer gone on with by another engine: how its rest is asked for, and how it is told.

The rest is asked for as a completion of token ids, the prompt's and those that the client has, whatever the
API: so nothing is rendered or taken apart anew, and any engine will do. What the request says of sampling is
passed on (`wire.continuable`), and its bounds less what has been used of them.

The rest comes in chunks of completions. The client gets chunks of his own stream: its id, its time, its
usage. What he has already (the overlap, see `wire.ledger`) is compared and left out.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from kvloop.wire.continuable import SENT, value_of
from kvloop.wire.dialect import Endpoint
from kvloop.wire.ledger import EVENT, IDS, Choice, Event, Ledger
from kvloop.wire.members import BROKEN, decoded
from kvloop.wire.openai import Generation
from kvloop.wire.sse import HandleFilter
from kvloop.wire.token_ids import ASKED

PATH = "/v1/completions"
_COMPLETION_MAX_TOKENS = 16  # where none are named


def rest_of(generation: Generation, ledger: Ledger, max_model_len: int | None) -> bytes | None:
    """The request for the rest of an answer; None where it has none, or nobody knows how long it may be.

    `max_model_len`: of the model, where it is known.
    """
    fields = generation.fields
    if generation.endpoint is Endpoint.CHAT:
        most = _count(fields, "max_completion_tokens")
        most = _count(fields, "max_tokens") if most is None else most
    else:
        most = _count(fields, "max_tokens")
        most = _COMPLETION_MAX_TOKENS if most is None else most
    used = ledger.tokens
    if most is None and max_model_len is not None:
        most = max_model_len - ledger.prompt_tokens
    if most is None or most <= used + len(ledger.overlap_ids):
        return None
    ids = ledger.prompt + b"," + ledger.ids if ledger.ids else ledger.prompt
    rest: dict[str, Any] = {name: raw for name, raw in fields.items() if name in SENT}
    rest["prompt"] = msgspec.Raw(b"[" + ids + b"]")
    rest["max_tokens"] = most - used
    if (least := (_count(fields, "min_tokens") or 0) - used) > 0:
        rest["min_tokens"] = least
    rest[ASKED] = True
    return msgspec.json.encode(rest) if decoded(rest["prompt"], IDS, None) else None


class RestFilter(HandleFilter):
    """Takes the handle out of the rest's stream, and makes its chunks the client's. `keep`: he gets ids.

    `failed`: the engine cannot go on, or says something that does not go on from what the client has; why.
    """

    def __init__(self, max_event_bytes: int, ledger: Ledger, endpoint: Endpoint, *, keep: bool) -> None:
        super().__init__(max_event_bytes)
        assert ledger.head is not None
        self.ledger = ledger
        self._head = ledger.head
        self._endpoint = endpoint
        self._keep = keep
        self._ids = list(ledger.overlap_ids)
        self._text = ledger.overlap
        self._prompt_tokens = ledger.prompt_tokens
        self._before = ledger.tokens

    @property
    def whole(self) -> bool:
        """Whether it has come to its end."""
        return self.ledger.done

    def _passed(self, lines: bytes) -> bytes:
        events = [
            line[5:].strip() for line in super()._passed(lines).split(b"\n") if line.startswith(b"data:")
        ]
        return b"".join([self._told(event) for event in events])

    def _told(self, data: bytes) -> bytes:
        ledger = self.ledger
        if self.failed is not None:
            return b""
        if data == b"[DONE]":
            if ledger.finish is None:
                return self._fail("it ended too early")
            ledger.done = True
            return b"data: [DONE]\n\n"
        try:
            event = EVENT.decode(data)
        except BROKEN:
            return self._fail("it is no chunk")
        if event.error is not None:
            return self._fail("it failed")
        if not event.choices:
            ledger.counted = True
            return as_event({**self._start(), "choices": [], **self._usage(event)})
        choice = event.choices[0]
        return self._choice(event, choice, choice.token_ids or [], choice.text or "")

    def _choice(self, event: Event, choice: Choice, ids: list[int], text: str) -> bytes:
        again = min(len(ids), len(self._ids))
        same = min(len(text), len(self._text))
        if ids[:again] != self._ids[:again] or text[:same] != self._text[:same] or (text and not ids):
            return self._fail("it does not go on from what was sent")
        new_ids, new_text = ids[again:], text[same:]
        self._ids, self._text = self._ids[again:], self._text[same:]
        if choice.finish_reason is not None and (self._ids or self._text):
            return self._fail("it ended before what was sent")
        self.ledger.absorb(new_ids, new_text, alone=len(ids) == 1)
        self.ledger.finish = choice.finish_reason or self.ledger.finish
        if not new_ids and not new_text and choice.finish_reason is None:
            return b""
        chunk = {**self._start(), "choices": [self._chunk(choice, new_ids, new_text)]}
        return as_event({**chunk, **(self._usage(event) if event.usage else {})})

    def _chunk(self, choice: Choice, ids: list[int], text: str) -> dict[str, Any]:
        told: dict[str, Any] = {"index": 0}
        is_chat = self._endpoint is Endpoint.CHAT
        told |= {"delta": {"content": text}} if is_chat else {"text": text}
        told |= {"logprobs": None, "finish_reason": choice.finish_reason}
        if not is_chat or choice.finish_reason is not None:
            told["stop_reason"] = choice.stop_reason
        if not is_chat:
            told["prompt_token_ids"] = None
        return {**told, "token_ids": ids if self._keep else None}

    def _usage(self, event: Event) -> dict[str, Any]:
        """The whole turn's counts. What the prompt was made of is this engine's word: the other's is lost."""
        said = event.usage or {}
        count = said.get("completion_tokens")
        usage: dict[str, Any] = {
            **usage_of(self._prompt_tokens, self._before + (count if isinstance(count, int) else 0))
        }
        if isinstance(details := said.get("prompt_tokens_details"), dict):
            cached = details.get("cached_tokens")
            usage["prompt_tokens_details"] = details
            if isinstance(cached, int):
                usage["prompt_tokens_details"] = details | {"cached_tokens": min(cached, self._prompt_tokens)}
        if event.system_fingerprint is None:
            return {"usage": usage}
        return {"usage": usage, "system_fingerprint": event.system_fingerprint}

    def _start(self) -> dict[str, Any]:
        return start_of(self._head)

    def _fail(self, why: str) -> bytes:
        self.failed = why
        return b""


def end_of(ledger: Ledger, generation: Generation) -> bytes:
    """What is still to be sent of an answer that had ended but for its last words."""
    assert ledger.head is not None
    options = value_of(generation.fields.get("stream_options", b"null"))
    told = b""
    if isinstance(options, dict) and options.get("include_usage") and not ledger.counted:
        usage = usage_of(ledger.prompt_tokens, ledger.tokens + len(ledger.overlap_ids))
        told = as_event({**start_of(ledger.head), "choices": [], "usage": usage})
    return told + (b"" if ledger.done else b"data: [DONE]\n\n")


def usage_of(prompt: int, count: int) -> dict[str, int]:
    """The whole turn's usage: tokens of its prompt, and of its answer."""
    return {"prompt_tokens": prompt, "total_tokens": prompt + count, "completion_tokens": count}


def start_of(head: Event) -> dict[str, Any]:
    """What all chunks of one answer begin with."""
    return {"id": head.id, "object": head.object, "created": head.created, "model": head.model}


def as_event(value: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _count(fields: Mapping[str, msgspec.Raw], name: str) -> int | None:
    value = value_of(fields.get(name, b"null"))
    return value if isinstance(value, int) else None
