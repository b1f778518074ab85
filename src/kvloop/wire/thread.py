"""A Responses conversation as JSON: a request with what it goes on from put before its own input.

Items are never looked into. An array without its brackets is a stretch of items, and stretches with commas
between them are a longer one. What a response put out is the input of the next, as it is: vLLM takes back
what it has written.
"""

from collections.abc import Sequence

from kvloop.wire.answers import PREVIOUS
from kvloop.wire.dialect import Endpoint
from kvloop.wire.members import (
    BOOL_OR_NULL,
    FIELDS,
    TEXT,
    TEXT_OR_NULL,
    checked,
    decoded,
    with_value,
    without_member,
)
from kvloop.wire.openai import Generation, read_generation
from kvloop.wire.refusal import RequestError
from kvloop.wire.units import user_item

MAX_ID_CHARS = 256
_ENDED = ("completed", "incomplete")
_SPACE = b" \t\r\n"


def is_stored(generation: Generation) -> bool:
    """Whether the request's answer is to be kept. RequestError for a `store` that says neither."""
    return checked(generation.fields, "store", BOOL_OR_NULL, None) is not False


def previous_of(generation: Generation) -> str | None:
    """The response that a request goes on from, or None. RequestError for what is no id."""
    previous = checked(generation.fields, PREVIOUS, TEXT_OR_NULL, None)
    if previous is None:
        return None
    if not 0 < len(previous) <= MAX_ID_CHARS:
        raise RequestError(f"{PREVIOUS} must have 1 to {MAX_ID_CHARS} characters", PREVIOUS, "invalid_value")
    if bytes(generation.fields.get("previous_input_messages", b"null")) != b"null":
        message = f"only one of previous_input_messages and {PREVIOUS} can be set"
        raise RequestError(message, PREVIOUS, "invalid_value")
    return str(previous)


def expanded(generation: Generation, stretches: Sequence[bytes]) -> Generation:
    """The request with these stretches before its own input, and without the id that stood for them."""
    fields = dict(generation.fields)
    whole = b",".join([part for part in (*stretches, _stretch(bytes(fields["input"]))) if part])
    raw = without_member(generation.raw, fields, PREVIOUS)
    del fields[PREVIOUS]
    return read_generation(Endpoint.RESPONSES, with_value(raw, fields, "input", b"[%b]" % whole))


def response_id_of(response: bytes) -> str | None:
    """A whole response's id; None for what is none, has none of a usable length, or has failed."""
    fields = decoded(response, FIELDS, {})
    name = decoded(fields.get("id", b""), TEXT, "")
    if not 0 < len(name) <= MAX_ID_CHARS or decoded(fields.get("status", b""), TEXT, "") not in _ENDED:
        return None
    return str(name)


def own_stretch(own_input: bytes, response: bytes) -> bytes:
    """What a turn adds to its conversation: its input, and what its response put out."""
    output = bytes(decoded(response, FIELDS, {}).get("output", b"[]"))
    return b",".join([part for part in (_stretch(own_input), _stretch(output)) if part])


def _stretch(items: bytes) -> bytes:
    """A JSON array without its brackets; a string's is the item that it stands for."""
    return user_item(items) if items[:1] == b'"' else items[1:-1].strip(_SPACE)
