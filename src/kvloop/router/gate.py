"""The door: who has no key is turned away at the head of his request, before a byte of its body is kept.

Whoever has one is let in within its limits, and his request carries its tenant. The key itself goes no
further: it is the router's own secret, not the engines'. Health checks need none.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from kvloop.router.downstream import Serve
from kvloop.router.keys import KeyRing
from kvloop.router.request import Admitted, Refusal, Request
from kvloop.router.response import Response

AUTHORIZATION = b"authorization"
API_KEY = b"x-api-key"
_OPEN_PATH = b"/health"
_BEARER = b"bearer "
_CHALLENGE = ((b"www-authenticate", b"Bearer"),)


class Gate:
    """Admits requests by their heads. Without a ring everybody is, as nobody in particular."""

    def __init__(self, ring: KeyRing | None, engines_have_a_key: bool) -> None:
        self._ring = ring
        withheld = {AUTHORIZATION, API_KEY} if ring is not None or engines_have_a_key else set[bytes]()
        self._withheld = frozenset(withheld)
        self._anybody = Admitted(None, None, self._withheld)

    def admit(
        self, path: bytes, headers: Sequence[tuple[bytes, bytes]], named: Mapping[bytes, bytes]
    ) -> Admitted | Refusal:
        """Whose request this is; or why it is not read any further."""
        ring = self._ring
        if ring is None:
            return self._anybody
        if path == _OPEN_PATH and b"content-length" not in named and b"transfer-encoding" not in named:
            return self._anybody
        presented = _presented(headers, named)
        key = None if presented is None else ring.find(presented)
        if key is None:
            ring.strangers += 1
            said = (
                "needs an API key (Authorization: Bearer ...)" if presented is None else "has a wrong API key"
            )
            return Refusal(401, f"the request {said}", "invalid_api_key", _CHALLENGE)
        return Admitted(key, key.spec.tenant, self._withheld)


def _presented(headers: Sequence[tuple[bytes, bytes]], named: Mapping[bytes, bytes]) -> bytes | None:
    """The key that a request shows; None for none, or for two."""
    if len(named) < len(headers):
        shown = [name for name, _ in headers if name in (AUTHORIZATION, API_KEY)]
        if len(shown) > len(set(shown)):
            return None
    authorization = named.get(AUTHORIZATION, b"")
    if authorization[: len(_BEARER)].lower() == _BEARER:
        return authorization[len(_BEARER) :].strip()
    return named.get(API_KEY)


def limited(serve: Serve, clock_ns: Callable[[], int] = time.monotonic_ns) -> Serve:
    """Serves requests as `serve` does, each within the limits of its key."""

    async def serve_within(request: Request, response: Response) -> None:
        key = request.admitted.key
        if key is None:
            await serve(request, response)
            return
        limit, wait_s = key.begin(clock_ns())
        if limit:
            message = f"this key is over its {limit}; try again in {wait_s} s"
            headers = [(b"retry-after", b"%d" % wait_s)]
            response.send_error(429, message, code="rate_limit_exceeded", headers=headers)
            return
        try:
            await serve(request, response)
        finally:
            key.end()

    return serve_within
