"""The operator's side, an ordinary ASGI application on a port of its own: metrics, health, conversations.

Every endpoint is a coroutine that awaits nothing but its request's body: it runs on the router's own loop,
between requests, and needs no lock. (A plain function would run on a thread.)
"""

from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Annotated, Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvloop.core.lineage import CONTENT, FiledTurn
from kvloop.router.conversations import Conversations
from kvloop.router.engine_admin import engine_routes
from kvloop.router.explain import Explanations
from kvloop.router.fleet import Fleet
from kvloop.router.membership import Membership
from kvloop.router.metrics import Metrics
from kvloop.wire.refusal import error_body

LIST_MAX_TURNS = 1000
LIMIT_MAX_CHARS = 20  # more digits say nothing more, and Python converts no number of thousands of them
KEEP_MAX_S = 1e9
_NS_PER_S = 1_000_000_000

Answer = Callable[[Request], Awaitable[Response]]


def admin_app(
    fleet: Fleet,
    conversations: Conversations,
    metrics: Metrics,
    explanations: Explanations,
    membership: Membership,
) -> Starlette:
    """The routes: `/metrics`, `/health`, `/engines...`, `/decisions/{request id}`, `/conversations`,
    `/conversations/{kind}/{id}` and its `/keep`."""
    return Starlette(
        routes=[
            Route("/metrics", _metrics(metrics)),
            Route("/health", _health(fleet)),
            *engine_routes(membership),
            Route("/decisions/{request_id:path}", _explain(explanations)),
            Route("/conversations", _list(conversations)),
            Route("/conversations/{kind}/{value:path}/keep", _keep(conversations), methods=["POST"]),
            Route("/conversations/{kind}/{value:path}", _inspect(conversations), methods=["GET"]),
            Route("/conversations/{kind}/{value:path}", _forget(conversations), methods=["DELETE"]),
        ]
    )


def _metrics(metrics: Metrics) -> Answer:
    async def answer(_: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    return answer


def _health(fleet: Fleet) -> Answer:
    async def answer(_: Request) -> Response:
        engines = [
            {
                "url": engine.name,
                "role": engine.role,
                "available": fleet.is_available(engine),
                "in_flight": engine.in_flight,
            }
            for engine in fleet.engines()
        ]
        healthy = fleet.healthy()
        status = "stopping" if fleet.stopping else "ok" if healthy else "down"
        return JSONResponse({"status": status, "engines": engines}, 200 if healthy else 503)

    return answer


def _explain(explanations: Explanations) -> Answer:
    async def answer(request: Request) -> Response:
        found = explanations.find(request.path_params["request_id"])
        if found is None:
            return JSONResponse({"error": "nothing is known of this request, or not any more"}, 404)
        return JSONResponse(found)

    return answer


def _list(conversations: Conversations) -> Answer:
    async def answer(request: Request) -> Response:
        asked = request.query_params.get("limit", "100")
        limit = min(int(asked[:LIMIT_MAX_CHARS]), LIST_MAX_TURNS) if asked.isdecimal() else 100
        conversations.expire()
        turns = islice(conversations.table.turns(), limit)
        listed = [_shown(conversations, turn, label) for turn, label in turns]
        return JSONResponse({"total": len(conversations.table), "conversations": listed})

    return answer


def _inspect(conversations: Conversations) -> Answer:
    async def answer(request: Request) -> Response:
        conversations.expire()
        kind, value = request.path_params["kind"], request.path_params["value"]
        found = conversations.table.named(kind, value)
        listed = [_shown(conversations, turn, label) for turn, label in found[:LIST_MAX_TURNS]]
        return JSONResponse({"total": len(found), "conversations": listed}, 200 if found else 404)

    return answer


def _keep(conversations: Conversations) -> Answer:
    async def answer(request: Request) -> Response:
        keep_ns = _seconds_asked_ns(await request.body())
        if keep_ns is None:
            wrong = error_body(
                'seconds: expected {"seconds": 600} or the like', "invalid_request_error", "seconds"
            )
            return Response(wrong, 400, media_type="application/json")
        conversations.expire()
        kind, value = request.path_params["kind"], request.path_params["value"]
        found = len(conversations.table.named(kind, value))
        kept = conversations.keep(kind, value, keep_ns)
        return JSONResponse({"total": found, "kept": kept}, 200 if kept else 409 if found else 404)

    return answer


def _forget(conversations: Conversations) -> Answer:
    async def answer(request: Request) -> Response:
        kind, value = request.path_params["kind"], request.path_params["value"]
        forgotten = conversations.remove(kind, value)
        return JSONResponse({"forgotten": forgotten}, 200 if forgotten else 404)

    return answer


def _shown(conversations: Conversations, turn: FiledTurn, label: str) -> dict[str, Any]:
    """A turn, without its handle."""
    names = [{"kind": name.kind, "id": name.value} for name in turn.names]
    return {
        "names": [*names, {"kind": CONTENT, "id": label}],
        "tenant": turn.tenant,
        "units": turn.depth,
        "decode": turn.engine,
        "expires_in_s": round((turn.expires_ns - conversations.clock_ns()) / _NS_PER_S, 3),
    }


class _Wish(msgspec.Struct, forbid_unknown_fields=True):
    seconds: Annotated[float, msgspec.Meta(ge=0, le=KEEP_MAX_S)]


_WISH = msgspec.json.Decoder(_Wish)


def _seconds_asked_ns(body: bytes) -> int | None:
    try:
        return int(_WISH.decode(body).seconds * _NS_PER_S)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
