"""A handle as text: under 300 ASCII bytes, authenticated, without block ids.

    base64url without padding ( msgpack array of the fields || keyed BLAKE2b-128 of that array )

Nothing is parsed before its authenticity is proven. The first field is the version; a handle of a later
version that our key authenticates is told from garbage, so that an operator sees a half-done upgrade.
"""

import binascii
import hmac
from operator import attrgetter
from typing import Annotated

import msgspec

from kvloop.core.chain import MAX_CHAIN_TOKENS
from kvloop.core.handle import HANDLE_VERSION, Handle
from kvloop.core.key import HANDLE_PURPOSE, MAC_BYTES, keyed_digest
from kvloop.errors import HandleError

__all__ = [
    "HANDLE_MAX_BYTES",
    "HANDLE_VERSION",
    "decode_handle",
    "encode_handle",
]

HANDLE_MAX_BYTES = 299
ID_MAX_BYTES = 64
HOST_MAX_BYTES = 128  # an IPv6 literal has 45, a Kubernetes pod's name about 60
MAX_RANKS = 1024
MAX_EXPIRES_MS = 24 * 3_600_000

_Ascii = Annotated[str, msgspec.Meta(pattern=r"\A[!-~]+\Z", max_length=ID_MAX_BYTES)]
_Host = Annotated[str, msgspec.Meta(pattern=r"\A[!-~]+\Z", max_length=HOST_MAX_BYTES)]
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]


class _Version(msgspec.Struct, array_like=True, frozen=True):
    version: int


class _Fields(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    version: Annotated[int, msgspec.Meta(ge=HANDLE_VERSION, le=HANDLE_VERSION)]
    engine_id: _Ascii
    incarnation: _Ascii
    lease_id: _Ascii
    control_host: _Host
    control_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    tp_size: _Ranks
    pp_size: _Ranks
    dcp_size: _Ranks
    token_count: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHAIN_TOKENS)]
    expires_in_ms: Annotated[int, msgspec.Meta(ge=0, le=MAX_EXPIRES_MS)]


_FIELD_NAMES = _Fields.__struct_fields__
_values_of = attrgetter(*_FIELD_NAMES)


def encode_handle(handle: Handle, key: bytes) -> str:
    """The handle's text. HandleError if a field is out of bounds, or all of them together are too long."""
    fields = _Fields(*_values_of(handle))
    try:
        body = msgspec.msgpack.encode(fields)
    except (TypeError, ValueError, OverflowError) as error:  # no integer of 64 bits, or no Unicode
        raise HandleError("field") from error
    _checked_fields(body)
    text = _to_text(body + keyed_digest(key, HANDLE_PURPOSE, body))
    if len(text) > HANDLE_MAX_BYTES:
        raise HandleError("too_long")
    return text


def decode_handle(text: str, key: bytes) -> Handle:
    """The handle that `encode_handle` made with this key.

    HandleError otherwise: too_long, malformed (not our encoding), forged (not our key, or tampered with),
    version (from the future), field (out of bounds).
    """
    if len(text) > HANDLE_MAX_BYTES:
        raise HandleError("too_long")
    sealed = _from_text(text)
    if len(sealed) <= MAC_BYTES:
        raise HandleError("malformed")
    body, mac = sealed[:-MAC_BYTES], sealed[-MAC_BYTES:]
    if not hmac.compare_digest(mac, keyed_digest(key, HANDLE_PURPOSE, body)):
        raise HandleError("forged")
    try:
        version = msgspec.msgpack.decode(body, type=_Version).version
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise HandleError("malformed") from error
    if version != HANDLE_VERSION:
        raise HandleError("version")
    fields = _checked_fields(body)
    return Handle(*msgspec.structs.astuple(fields))


def _checked_fields(body: bytes) -> _Fields:
    try:
        return msgspec.msgpack.decode(body, type=_Fields)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise HandleError("field", _field_named_in(str(error))) from error


def _field_named_in(message: str) -> str | None:
    """msgspec says "… - at `$[3]`"; the field's name says more."""
    _, _, position = message.partition("$[")
    digits = position.partition("]")[0]
    return _FIELD_NAMES[int(digits)] if digits.isdigit() and int(digits) < len(_FIELD_NAMES) else None


def _to_text(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).translate(_TO_URL).rstrip(b"=").decode()


def _from_text(text: str) -> bytes:
    """The bytes whose only encoding is `text`."""
    try:
        padded = text.encode("ascii").translate(_FROM_URL) + b"=" * (-len(text) % 4)
        data = binascii.a2b_base64(padded, strict_mode=True)
    except ValueError as error:
        raise HandleError("malformed") from error
    if _to_text(data) != text:
        raise HandleError("malformed")
    return data


_TO_URL = bytes.maketrans(b"+/", b"-_")
_FROM_URL = bytes.maketrans(b"-_+/", b"+/**")
