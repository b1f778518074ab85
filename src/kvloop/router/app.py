"""The public routes. Everything else is 404 or 405, in the shape of the API that was asked."""

from collections.abc import Awaitable, Callable
from functools import partial
from urllib.parse import unquote

from kvloop.router.fleet import Fleet
from kvloop.router.headers import REQUEST_ID, forwarded, request_id, returned
from kvloop.router.models import Models
from kvloop.router.passing import PASSED, Passing
from kvloop.router.proxy import Proxy
from kvloop.router.request import Request
from kvloop.router.response import Response
from kvloop.router.responses import CANCEL, Responses
from kvloop.router.responses import PATH as RESPONSE
from kvloop.wire.dialect import Endpoint
from kvloop.wire.models import merged_models, one_model
from kvloop.wire.refusal import unknown_model

GENERATION = {
    "/v1/chat/completions": Endpoint.CHAT,
    "/v1/completions": Endpoint.COMPLETIONS,
    "/v1/responses": Endpoint.RESPONSES,
    "/v1/messages": Endpoint.MESSAGES,
}
MODEL = "/v1/models/"  # and an id behind it

Route = Callable[[Request, Response], Awaitable[None]]


class App:
    """Answers one request of a client."""

    def __init__(
        self, proxy: Proxy, passing: Passing, fleet: Fleet, models: Models, responses: Responses
    ) -> None:
        self._fleet = fleet
        self._listings = models
        self._responses = responses
        self._routes: dict[str, dict[str, Route]] = {
            **{path: {"POST": partial(proxy.generate, endpoint)} for path, endpoint in GENERATION.items()},
            **{path: {"POST": passing} for path in PASSED},
            "/v1/models": {"GET": self._models, "HEAD": self._models},
            "/health": {"GET": self._health, "HEAD": self._health},
        }

    async def __call__(self, request: Request, response: Response) -> None:
        """Find the route and take it."""
        methods = self._methods(request.path)
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

    def _methods(self, path: str) -> dict[str, Route] | None:
        methods = self._routes.get(path)
        if methods is None and path.startswith(MODEL):
            methods = {"GET": self._model, "HEAD": self._model}
        elif methods is None and path.startswith(RESPONSE):
            retrieve = self._responses.retrieve
            if "/" not in path.removeprefix(RESPONSE):
                methods = {"GET": retrieve, "HEAD": retrieve, "DELETE": self._responses.delete}
            elif "/" not in path.removeprefix(RESPONSE).removesuffix(CANCEL):
                methods = {"POST": self._responses.cancel}
        return methods

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
        answers = await self._listings.read(forwarded(request, identifier))
        served = [body for head, body in answers if head.status == 200]
        merged = merged_models(served)
        if len(served) == 1 or (merged is None and answers):
            head, body = next(answer for answer in answers if not served or answer[0].status == 200)
            response.send(head.status, returned(head), body)
        elif merged is None:
            response.send_error(502, "no engine could be reached")
        else:
            response.send_json(200, merged)

    async def _model(self, request: Request, response: Response) -> None:
        """What an engine says of one model."""
        identifier = request_id(request)
        response.headers.append((REQUEST_ID, identifier))
        model = unquote(request.path.removeprefix(MODEL))
        answers = await self._listings.read(forwarded(request, identifier))
        found = one_model([body for head, body in answers if head.status == 200], model)
        if found is not None:
            response.send_json(200, found)
        elif not answers:
            response.send_error(502, "no engine could be reached")
        else:
            error = unknown_model(model)
            response.send_error(error.status, str(error), error.param, error.code)
