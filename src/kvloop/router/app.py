"""The public routes. Everything else is 404 or 405, in OpenAI's shape."""

import asyncio
from collections.abc import Awaitable, Callable

from kvloop.router.engine import Engine
from kvloop.router.fleet import Fleet
from kvloop.router.headers import REQUEST_ID, forwarded, hop, request_id, returned
from kvloop.router.proxy import Proxy
from kvloop.router.request import Request
from kvloop.router.response import Response
from kvloop.router.upstream import EngineFailureError, Head
from kvloop.wire.openai import Endpoint, merged_models

MODELS_TIMEOUT_S = 5.0
MODELS_MAX_BYTES = 4 * 1024 * 1024

Route = Callable[[Request, Response], Awaitable[None]]


class App:
    """Answers one request of a client."""

    def __init__(self, proxy: Proxy, fleet: Fleet) -> None:
        self._proxy = proxy
        self._fleet = fleet
        self._routes: dict[str, dict[str, Route]] = {
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._completions},
            "/v1/models": {"GET": self._models, "HEAD": self._models},
            "/health": {"GET": self._health, "HEAD": self._health},
        }

    async def __call__(self, request: Request, response: Response) -> None:
        """Find the route and take it."""
        methods = self._routes.get(request.path)
        if methods is None:
            response.send_error(404, f"there is no {request.path[:200]} here", code="not_found")
            return
        route = methods.get(request.method)
        if route is None:
            allow = ", ".join(methods).encode()
            message = f"{request.path} does not take {request.method}"
            response.send_error(405, message, code="method_not_allowed", headers=[(b"allow", allow)])
            return
        await route(request, response)

    async def _chat(self, request: Request, response: Response) -> None:
        await self._proxy.generate(Endpoint.CHAT, request, response)

    async def _completions(self, request: Request, response: Response) -> None:
        await self._proxy.generate(Endpoint.COMPLETIONS, request, response)

    async def _health(self, _: Request, response: Response) -> None:
        if self._fleet.healthy():
            response.send_json(200, b'{"status":"ok"}')
        else:
            why = "the router is stopping" if self._fleet.stopping else "no decode engine can be reached"
            response.send_error(503, why)

    async def _models(self, request: Request, response: Response) -> None:
        """What the engines serve: one engine's own answer, or the union of all."""
        identifier = request_id(request)
        response.headers.append((REQUEST_ID, identifier))
        lines = forwarded(request, identifier)
        asked = [self._ask_models(engine, lines) for engine in self._fleet.servers()]
        answers = [answer for answer in await asyncio.gather(*asked) if answer is not None]
        served = [body for head, body in answers if head.status == 200]
        merged = merged_models(served)
        if len(served) == 1 or (merged is None and answers):
            head, body = next(answer for answer in answers if not served or answer[0].status == 200)
            response.send(head.status, returned(head), body)
        elif merged is None:
            response.send_error(502, "no engine could be reached")
        else:
            response.send_json(200, merged)

    async def _ask_models(self, engine: Engine, lines: bytes) -> tuple[Head, bytes] | None:
        parts = hop(engine, "GET", "/v1/models", lines, None)
        try:
            return await engine.fetch(parts, MODELS_MAX_BYTES, MODELS_TIMEOUT_S)
        except EngineFailureError:
            return None
