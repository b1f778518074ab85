"""JSON objects read one level deep and edited as bytes.

A value is looked at only if something is decided by it; all others stay the bytes that they came in. A member
is cut out, put in, or given another value in place, and each edit is checked by decoding what it made: the
search proposes, the decoder decides, for text inside a body may say anything.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from kvloop.wire.items import FirstItems, Members
from kvloop.wire.refusal import RequestError

Fields = dict[str, msgspec.Raw]
Decoder = msgspec.json.Decoder[Any]  # made once: to describe a type costs more than to decode a small value

FIELDS = Members()
ITEMS: Decoder = msgspec.json.Decoder(list[msgspec.Raw])
FIRST_ITEMS = FirstItems()
TEXT: Decoder = msgspec.json.Decoder(str)
TEXT_OR_NULL: Decoder = msgspec.json.Decoder(str | None)
BOOL_OR_NULL: Decoder = msgspec.json.Decoder(bool | None)
INT: Decoder = msgspec.json.Decoder(int)
INT_OR_NULL: Decoder = msgspec.json.Decoder(int | None)
BROKEN = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what decoding raises
_SPACE = b" \t\r\n"


def decoded(raw: bytes | msgspec.Raw, kind: Decoder | FirstItems | Members, default: Any) -> Any:
    """The value, or `default` where it is not of that kind."""
    try:
        return kind.decode(raw)
    except BROKEN:
        return default


def checked(fields: Mapping[str, msgspec.Raw], name: str, kind: Decoder | FirstItems, default: Any) -> Any:
    """A member's value, or `default` where there is none. RequestError where it is not of that kind."""
    raw = fields.get(name)
    if raw is None:
        return default
    try:
        return kind.decode(raw)
    except BROKEN as error:
        raise RequestError(f"{name}: {error}", name, "invalid_type") from None


def is_object(raw: bytes | msgspec.Raw) -> bool:
    """Whether a decoded value is a JSON object."""
    return bytes(raw)[:1] == b"{"


def spliced(body: bytes, name: str, value: bytes) -> bytes:
    """`body`, a JSON object with at least one member, with one more before its closing brace."""
    end = body.rindex(b"}")
    return b"".join((body[:end], b',"', name.encode(), b'":', value, body[end:]))


def without_member(body: bytes, fields: Fields, name: str) -> bytes:
    """`body`, whose members are `fields`, without the member `name`; byte for byte otherwise.

    A cut counts only if every other member is left as it was.
    """
    kept = {key: raw for key, raw in fields.items() if key != name}
    value = bytes(fields[name])
    for found in reversed(list(_member(name).finditer(body))):
        if not body.startswith(value, found.end()):
            continue
        head, tail = body[: found.start()].rstrip(_SPACE), body[found.end() + len(value) :]
        if head.endswith(b","):
            cut = head[:-1] + tail
        else:
            cut = body[: found.start()] + tail.lstrip(_SPACE).removeprefix(b",").lstrip(_SPACE)
        if decoded(cut, FIELDS, {}) == kept:
            return cut
    return msgspec.json.encode(kept)


def with_value(body: bytes, fields: Fields, name: str, value: bytes) -> bytes:
    """`body`, whose members are `fields`, with another value for its member `name`, in the same place."""
    wanted = {**_as_bytes(fields), name: value}
    old = bytes(fields[name])
    for found in _member(name).finditer(body):
        if not body.startswith(old, found.end()):
            continue
        changed = b"".join((body[: found.end()], value, body[found.end() + len(old) :]))
        if _as_bytes(decoded(changed, FIELDS, {})) == wanted:
            return changed
    return msgspec.json.encode({key: msgspec.Raw(raw) for key, raw in wanted.items()})


@cache
def _member(name: str) -> re.Pattern[bytes]:
    return re.compile(rb'"%b"\s*:\s*' % re.escape(name.encode()))


def _as_bytes(fields: Mapping[str, msgspec.Raw]) -> dict[str, bytes]:
    return {name: bytes(raw) for name, raw in fields.items()}
