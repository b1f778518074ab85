"""Routes that are one hop: the request goes to an engine as it is, and the answer comes back as it is.

But where an engine keeps KV of prompts in its prefix cache, a tenant's requests are salted, as on the routes
that generate. Only routes that are named here are passed. What steers an engine (sleep, adapters, caches,
weights, RPC), and what would run a prompt past the tenants and the hand-over, is nobody's business on the
public port.
"""

import asyncio

from kvloop.router.config import RouterConfig
from kvloop.router.engine import Engine
from kvloop.router.fleet import Fleet
from kvloop.router.headers import REQUEST_ID, forwarded, hop, request_id, returned
from kvloop.router.metrics import Metrics
from kvloop.router.models import Models
from kvloop.router.request import Request
from kvloop.router.response import Response
from kvloop.router.tenant import caller_of, salt_of
from kvloop.router.upstream import EngineConnection, EngineFailureError, Head
from kvloop.wire.models import model_asked_for
from kvloop.wire.openai import fields_of, salt_in, with_salt
from kvloop.wire.refusal import RequestError, unknown_model

SALTED = (
    "/v1/embeddings",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/pooling",
    "/classify",
)
PASSED = (
    *SALTED,
    "/v2/embed",  # Cohere's API: vLLM takes no salt there
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
)
MAX_ENGINES = 2  # the first, and one other


class Passing:
    """Serves the routes of one hop, on whichever engine serves the model and has least to do."""

    def __init__(self, config: RouterConfig, fleet: Fleet, models: Models, metrics: Metrics) -> None:
        self._idle_timeout_s = config.timeouts.idle_timeout_s
        self._tenant_header = config.tenant_header.encode()
        self._fleet = fleet
        self._models = models
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()

    async def __call__(self, request: Request, response: Response) -> None:
        """Answer one request. Another engine is tried where one gives no answer at all."""
        identifier = request_id(request)
        response.headers.append((REQUEST_ID, identifier))
        lines = forwarded(request, identifier)
        model = model_asked_for(request.get(b"content-type"), request.body)
        tried: set[str] = set()
        why = ""
        try:
            body = self._salted(request)
            while (engine := await self._engine(model, tried, lines)) is not None:
                tried.add(engine.name)
                try:
                    with engine.slot():
                        await self._pass(engine, request, body, response, lines)
                    break
                except EngineFailureError as error:
                    why = error.kind
                    self._failed(engine, error)
                    if len(tried) == MAX_ENGINES or why == "timeout":
                        break
            if not response.started:
                status = 504 if why == "timeout" else 502
                response.send_error(status, f"no engine could serve the request ({why or 'none is left'})")
        except RequestError as error:
            response.send_error(error.status, str(error), error.param, error.code)
        except asyncio.CancelledError:
            self._metrics.gone.inc()
            raise
        self._metrics.passed.labels(request.path, str(response.status)).inc()

    def _salted(self, request: Request) -> bytes:
        """The body for the engine. RequestError for a tenant's that cannot be read: an engine that reads it
        all the same would find what others asked."""
        caller = caller_of(request, self._tenant_header)
        if caller is None or request.path not in SALTED:
            return request.body
        fields = fields_of(request.body)
        return with_salt(request.body, fields, salt_of(caller, salt_in(fields))) if fields else request.body

    async def _engine(self, model: str | None, tried: set[str], lines: bytes) -> Engine | None:
        engines = {engine.name: engine for engine in self._fleet.engines()}
        if model is not None and not tried and not await self._models.is_served(model, engines, lines):
            raise unknown_model(model)
        usable = [
            engine
            for engine in engines.values()
            if engine.name not in tried and (model is None or self._models.serves(engine.name, model))
        ]
        fit = [engine for engine in usable if self._fleet.is_available(engine)] or usable
        return min(fit, key=lambda engine: engine.in_flight, default=None)

    async def _pass(
        self, engine: Engine, request: Request, body: bytes, response: Response, lines: bytes
    ) -> None:
        kind = request.get(b"content-type") or b"application/json"
        parts = hop(engine, "POST", request.path, lines, body, kind)
        exchange = await engine.ask(parts, self._idle_timeout_s)
        try:
            if exchange.head.status < 500:
                engine.answered()
            else:
                engine.erred(self._loop.time())
            if not await _Relay(exchange.connection, response).run(exchange.head):
                self._metrics.cut.labels("engine").inc()
                engine.erred(self._loop.time())
                response.abort()
        finally:
            exchange.connection.close()

    def _failed(self, engine: Engine, error: EngineFailureError) -> None:
        engine.hop_failed(error, self._loop.time())
        self._metrics.fallbacks.labels(engine.role, error.kind).inc()


class _Relay:
    """The sink between one exchange and one response: every read is passed on at once.

    A client that does not read stops the reading from the engine.
    """

    def __init__(self, connection: EngineConnection, response: Response) -> None:
        self._done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._connection = connection
        self._response = response

    async def run(self, head: Head) -> bool:
        """Pass the answer on. False if it broke off, which the client has to see: end his connection."""
        length = head.get(b"content-length")
        self._response.paced_by(self._connection.pause, self._connection.resume)
        self._response.start(head.status, returned(head), int(length) if length else None)
        self._response.write(b"")  # its body may be long in coming
        self._connection.attach(self)
        return await self._done

    def on_body(self, data: bytes, ends: bool) -> None:
        """One read's worth."""
        self._response.write(data, ends=ends)

    def on_end(self) -> None:
        """The engine has said everything."""
        self._response.finish()
        self._done.set_result(True)

    def on_lost(self, _: EngineFailureError) -> None:
        """The engine is gone."""
        self._done.set_result(False)
