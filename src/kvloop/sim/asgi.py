"""ASGI without a framework, for there are few routes: a body read whole, an answer written whole, and how a
client leaves.
"""

import os
from collections.abc import Awaitable, Callable
from typing import Any

from kvloop.wire.refusal import RequestError, shape_of

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]

MAX_BODY_BYTES = 64 << 20  # the router's own bound
JSON: Header = (b"content-type", b"application/json")
EVENTS: Header = (b"content-type", b"text/event-stream; charset=utf-8")
PLAIN: Header = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")


async def whole_body(receive: Receive) -> bytes | None:
    """The request's body; None where the client left before it was whole, or it is over the bound."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            return None
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def gone(receive: Receive) -> None:
    """Until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def reply(send: Send, status: int, body: bytes, kind: Header) -> None:
    """A whole answer."""
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [kind, length]})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, path: str, error: RequestError) -> None:
    """An error, in the shape of the API that was asked."""
    body = shape_of(path).body(error.status, str(error), error.param, error.code)
    await reply(send, error.status, body, JSON)


def request_id(scope: Scope) -> str:
    """The client's own name for its request, or a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return str(value.decode("latin-1"))
    return os.urandom(16).hex()
