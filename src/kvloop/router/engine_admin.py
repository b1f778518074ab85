"""The operator's side of the fleet: which engines there are, how they stand, and draining them."""

from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvloop.router.membership import Membership
from kvloop.wire.refusal import error_body

MAX_ORDER_BYTES = 16 * 1024


class _Order(msgspec.Struct, forbid_unknown_fields=True):
    url: str


_ORDERS = msgspec.json.Decoder(_Order)


def engine_routes(membership: Membership) -> list[Route]:
    """The routes: `/engines`, `/engines/drain`, `/engines/undrain`."""

    async def listed(_: Request) -> Response:
        return JSONResponse({"engines": membership.listed()})

    return [
        Route("/engines", listed),
        Route("/engines/drain", _order(membership.drain), methods=["POST"]),
        Route("/engines/undrain", _order(membership.undrain), methods=["POST"]),
    ]


def _order(act: Callable[[str], list[str]]) -> Callable[[Request], object]:
    async def answer(request: Request) -> Response:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_ORDER_BYTES:
                return _error(413, f"an order has at most {MAX_ORDER_BYTES} bytes", None)
        try:
            order = _ORDERS.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return _error(400, f'an order is {{"url": ENGINE}}: {error}', "url")
        names = act(order.url)
        if not names:
            return _error(404, f"there is no engine {order.url[:200]!r}", "url")
        return JSONResponse({"engines": names})

    return answer


def _error(status: int, message: str, param: str | None) -> Response:
    body = error_body(message, "invalid_request_error", param, None)
    return Response(body, status, media_type="application/json")
