"""The endpoint plugin: carries decode's handle out on streamed answers where vLLM itself does not (up to
0.32), and adds what the engines count about leases, claims and reads to the server's `/metrics`.

vLLM puts `kv_transfer_params` into JSON answers but its event writer for chat completions and completions
drops them up to 0.32. The last `RequestOutput` of a stream still has them, so the plugin listens on the
engine client's `generate` and adds one event just before `data: [DONE]`:

    data: {"object":"kvloop.handle","choices":[],"kv_transfer_params":{...}}

From 0.33 on vLLM writes them into the final chunk and the plugin adds nothing there. A response of the
Responses API carries them in its last event's `response` object, in either version. Anthropic's messages are
made of chat chunks, and their events have no field for them: there the same event stands before the last one,
`event: message_stop`. It has no name, and Anthropic's clients pass over what has none.

vLLM's own metrics come with the outputs of steps, and an idle engine takes none: leases come and go all the
same, so kvloop's are asked for at scrape time (`scrape`) and written under vLLM's own.
"""

import json
from argparse import Namespace
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvloop.connector.compat import messages_carry_handle, streams_carry_handle
from kvloop.connector.scrape import Scraper, local_engines

METRICS_PATH = "/metrics"
DONE = b"data: [DONE]"  # ends a stream of chat completions, and of completions
MESSAGE_STOP = b"event: message_stop"
_answer: ContextVar[dict[str, Any] | None] = ContextVar("kvloop_answer", default=None)
"""Of the HTTP request being served: filled with its last output's parameters under `params`."""


def handle_event(params: dict[str, Any]) -> bytes:
    """The server-sent event that carries `params`."""
    body = {"object": "kvloop.handle", "choices": [], "kv_transfer_params": params}
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


class HandleMiddleware:
    """Adds the handle event to streamed answers, before the first of `terminators`."""

    def __init__(self, app: ASGIApp, terminators: Sequence[bytes] = (DONE, MESSAGE_STOP)) -> None:
        self._app = app
        self._terminators = terminators

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer: dict[str, Any] = {}
        is_stream = False
        token = _answer.set(answer)

        async def send_with_handle(message: Message) -> None:
            nonlocal is_stream
            if message["type"] == "http.response.start":
                is_stream = _is_event_stream(message)
            elif message["type"] == "http.response.body" and is_stream and answer.get("params"):
                message = self._with_handle(message, answer)
            await send(message)

        try:
            await self._app(scope, receive, send_with_handle)
        finally:
            _answer.reset(token)

    def _with_handle(self, message: Message, answer: dict[str, Any]) -> Message:
        """The message, with the event put in where its terminator begins. The terminator is an event of its
        own: the model's text is JSON-escaped and cannot start a line."""
        body = bytes(message.get("body", b""))
        for terminator in self._terminators:
            at = body.rfind(b"\n" + terminator) + 1
            if body.startswith(terminator, at):
                return {**message, "body": body[:at] + handle_event(answer.pop("params")) + body[at:]}
        return message


def _is_event_stream(start: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.lower().startswith(b"text/event-stream")
        for name, value in start.get("headers", ())
    )


def _terminators() -> tuple[bytes, ...]:
    """Of the streams that vLLM itself does not put the handle on."""
    chat = () if streams_carry_handle() else (DONE,)
    return chat if messages_carry_handle() else (*chat, MESSAGE_STOP)


class MetricsMiddleware:
    """Writes `more()` under the server's own metrics."""

    def __init__(self, app: ASGIApp, more: Callable[[], Awaitable[str]]) -> None:
        self._app = app
        self._more = more

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI connection."""
        if scope["type"] != "http" or _path(scope) != METRICS_PATH:
            await self._app(scope, receive, send)
            return
        start: Message = {}
        body = bytearray()

        async def collect(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            elif message["type"] == "http.response.body":
                body.extend(message.get("body", b""))

        # As plain text, uncompressed: what another format ends with would not let anything follow.
        plain = [pair for pair in scope["headers"] if pair[0] not in (b"accept", b"accept-encoding")]
        await self._app({**scope, "headers": plain}, receive, collect)
        if scope["method"] == "GET" and start.get("status") == HTTPStatus.OK:
            body += (await self._more()).encode()
            kept = [pair for pair in start["headers"] if pair[0].lower() != b"content-length"]
            start["headers"] = [*kept, (b"content-length", str(len(body)).encode())]
        await send(start)
        await send({"type": "http.response.body", "body": bytes(body)})


def _path(scope: Scope) -> str:
    path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
    return path if path == "/" else path.rstrip("/")


class EndpointPlugin:
    """vLLM's endpoint plugin protocol (group `vllm.endpoint_plugins`)."""

    name = "kvloop"
    required_tasks: tuple[Any, ...] | None = ("generate",)

    def __init__(self) -> None:
        self._scraper: Scraper | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Wrap the application; no route is added."""
        app.add_middleware(MetricsMiddleware, more=self._metrics)
        if terminators := _terminators():
            app.add_middleware(HandleMiddleware, terminators=terminators)

    async def _metrics(self) -> str:
        return "" if self._scraper is None else await self._scraper.text()

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:  # noqa: ARG002
        """Find the engines, and listen to the outputs of `engine_client.generate`."""
        if engine_client is None:
            return
        engines = local_engines(engine_client.vllm_config)
        if engines is not None:
            self._scraper = Scraper(*engines)
        if not _terminators():
            return
        generate = engine_client.generate

        def listening(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            answer = _answer.get()

            async def outputs() -> AsyncGenerator[Any, None]:
                async for output in generate(*args, **kwargs):
                    params = getattr(output, "kv_transfer_params", None)
                    if answer is not None and params:
                        answer["params"] = params
                    yield output

            return outputs()

        engine_client.generate = listening
