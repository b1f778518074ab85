"""Which headers go on to an engine, and which come back.

Headers that belong to one connection stay on it (RFC 9110, 7.6.1), with all that `Connection` names. The
body's length is the router's own matter on both sides. No engine is offered a compression: the handle has to
be found in what it answers. Nothing named `x-kvloop-` passes: these are the router's words.
"""

import os

from kvloop.router.engine import Engine
from kvloop.router.log import REQUEST
from kvloop.router.request import Request
from kvloop.router.upstream import Head

Headers = list[tuple[bytes, bytes]]

REQUEST_ID = b"x-request-id"
REQUEST_ID_MAX_BYTES = 128
OWN_PREFIX = b"x-kvloop-"
_CONNECTION = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_NOT_FORWARDED = _CONNECTION | {
    b"host",
    b"content-length",
    b"content-type",
    b"expect",
    b"accept-encoding",
    REQUEST_ID,
    b"x-data-parallel-rank",  # the router's choice
}
_NOT_RETURNED = _CONNECTION | {b"content-length", REQUEST_ID}


def request_id(request: Request) -> bytes:
    """The client's own id, if it is a sensible one, else a new one.

    The same on both hops, in the answer, and in every line that is logged about it.
    """
    given = request.get(REQUEST_ID)
    if not (given and len(given) <= REQUEST_ID_MAX_BYTES and given.isascii()):
        given = os.urandom(16).hex().encode()
    REQUEST.set(given)
    return given


def forwarded(request: Request, request_id: bytes) -> bytes:
    """The client's headers as lines for an engine, without those that differ from hop to hop."""
    dropped = _NOT_FORWARDED
    if request.admitted.withheld:
        dropped = dropped | request.admitted.withheld
    connection = request.get(b"connection").lower()
    if connection not in (b"", b"keep-alive", b"close"):
        dropped = dropped | {word.strip() for word in connection.split(b",")}
    kept = [
        b"%b: %b\r\n" % header
        for header in request.headers
        if header[0] not in dropped and not header[0].startswith(OWN_PREFIX)
    ]
    return b"".join(kept) + b"%b: %b\r\n" % (REQUEST_ID, request_id)


def hop(
    engine: Engine,
    method: str,
    path: str,
    lines: bytes,
    body: bytes | None,
    content_type: bytes = b"application/json",
) -> tuple[bytes, ...]:
    """A request to an engine, in pieces to write."""
    asked = method.encode(), path.encode("latin-1"), engine.authority, engine.lines
    start = b"%b %b HTTP/1.1\r\nhost: %b\r\n%b" % asked
    if body is None:
        return (start + lines + b"\r\n",)
    length = b"content-type: %b\r\ncontent-length: %d\r\n\r\n" % (content_type, len(body))
    return (start + lines + length, body)


def returned(head: Head) -> Headers:
    """An engine's headers as they go back to the client."""
    return [
        header
        for header in head.headers
        if header[0] not in _NOT_RETURNED and not header[0].startswith(OWN_PREFIX)
    ]
