"""The endpoint plugin: one event more on streams of 0.32, byte-exact otherwise; nothing at all on 0.33."""

import asyncio
import json
from argparse import Namespace
from collections.abc import AsyncGenerator, Sequence
from contextvars import Context
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from kvloop.connector import endpoint
from kvloop.connector.endpoint import EndpointPlugin, HandleMiddleware, MetricsMiddleware, handle_event

PARAMS = {"kvloop_handle": "abc_-"}
EVENT = b'data: {"object":"kvloop.handle","choices":[],"kv_transfer_params":{"kvloop_handle":"abc_-"}}\n\n'
CHUNK = b'data: {"choices":[{"delta":{"content":"Hi"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
STREAM_TYPE = b"text/event-stream; charset=utf-8"


class Engine:
    """vLLM's engine client, as far as the plugin listens to it: the last output brings the parameters."""

    def __init__(self, outputs: int = 3, transfer: Any = None) -> None:
        self.outputs = outputs
        self.vllm_config = SimpleNamespace(kv_transfer_config=transfer)

    async def generate(self, _prompt: str, params: dict[str, Any] | None = None) -> AsyncGenerator[Any, None]:
        """Outputs of one request; other requests run between them."""
        for number in range(self.outputs):
            await asyncio.sleep(0)
            output = SimpleNamespace(number=number)
            if number == self.outputs - 1:
                output.kv_transfer_params = params
            yield output


async def listening(engine: Any) -> Any:
    """The engine client after the plugin has been initialised."""
    await EndpointPlugin().init_state(engine, None, Namespace())
    return engine


def server(engine: Any, bodies: Sequence[bytes], params: Any, content_type: bytes = STREAM_TYPE) -> Any:
    """A route that generates, then answers with these chunks."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        async for _ in engine.generate("prompt", params=params):
            pass
        headers = [(b"x-request-id", b"1"), (b"Content-Type", content_type)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for body in bodies:
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body"})

    return app


async def sent(app: Any, path: str = "/v1/chat/completions", kind: str = "http") -> list[Any]:
    """What a wrapped application sends."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    await HandleMiddleware(app)({"type": kind, "path": path}, receive, send)
    return messages


def bodies_of(messages: list[Any]) -> list[bytes]:
    """The chunks of an answer."""
    return [message["body"] for message in messages if message.get("body")]


def answer(bodies: Sequence[bytes], params: Any = PARAMS, **changes: Any) -> list[bytes]:
    """The chunks that the client gets where the application sends `bodies`."""

    async def run() -> list[bytes]:
        engine = await listening(Engine())
        path = changes.pop("path", "/v1/chat/completions")
        return bodies_of(await sent(server(engine, bodies, params, **changes), path))

    return asyncio.run(run())


def test_the_event_is_what_the_router_takes_out() -> None:
    """One line and a blank one, the handle in the field that JSON answers carry it in."""
    assert handle_event(PARAMS) == EVENT
    assert json.loads(EVENT.removeprefix(b"data: "))["kv_transfer_params"] == PARAMS


@pytest.mark.parametrize(
    ("bodies", "expected"),
    [
        ([CHUNK, DONE], [CHUNK, EVENT + DONE]),
        ([CHUNK + DONE], [CHUNK + EVENT + DONE]),
        ([CHUNK, CHUNK + DONE], [CHUNK, CHUNK + EVENT + DONE]),
        ([DONE], [EVENT + DONE]),
        ([CHUNK, b"data: [DONE]"], [CHUNK, EVENT + b"data: [DONE]"]),
        ([b"\r\n" + DONE], [b"\r\n" + EVENT + DONE]),
    ],
)
def test_the_event_stands_just_before_the_terminator(bodies: list[bytes], expected: list[bytes]) -> None:
    """However the stream is cut into chunks; every other byte and every cut stays."""
    assert answer(bodies) == expected


MESSAGE_DELTA = b'event: message_delta\ndata: {"type":"message_delta"}\n\n'
MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


@pytest.mark.parametrize(
    ("bodies", "expected"),
    [
        ([MESSAGE_DELTA, MESSAGE_STOP], [MESSAGE_DELTA, EVENT + MESSAGE_STOP]),
        ([MESSAGE_DELTA + MESSAGE_STOP], [MESSAGE_DELTA + EVENT + MESSAGE_STOP]),
        ([MESSAGE_DELTA, b'data: {"text":"event: message_stop"}\n\n'], None),
    ],
)
def test_a_message_s_handle_stands_before_its_last_event(
    bodies: list[bytes], expected: list[bytes] | None
) -> None:
    """Anthropic's streams have no `[DONE]`; what ends them is an event with a name."""
    assert answer(bodies, path="/v1/messages") == (bodies if expected is None else expected)


ESCAPED = json.dumps({"choices": [{"delta": {"content": "a\ndata: [DONE]\n\nb"}}]}).encode()


@pytest.mark.parametrize(
    "bodies",
    [
        [CHUNK],
        [b"data: " + ESCAPED + b"\n\n"],
        [b'data: {"text":"data: [DONE]"}\n\n'],
        [b": data: [DONE]\n\n"],
        [b'data: {"error":{"message":"boom"}}\n\n'],
        [b"data: [DON"],
    ],
)
def test_without_a_terminator_nothing_is_added(bodies: list[bytes]) -> None:
    """The model may say what a terminator looks like; a stream that broke off has no handle."""
    assert answer(bodies) == bodies
    assert answer([*bodies[:1], DONE])[1:] == [EVENT + DONE]


@pytest.mark.parametrize("params", [None, {}])
def test_without_a_handle_nothing_is_added(params: Any) -> None:
    """Prefill's streams, requests that were not retained, upstream engines without a connector."""
    assert answer([CHUNK, DONE], params) == [CHUNK, DONE]


def test_the_event_is_added_once() -> None:
    """Whatever follows the terminator."""
    assert answer([DONE, DONE]) == [EVENT + DONE, DONE]


def test_what_is_not_an_event_stream_is_left_alone() -> None:
    """A JSON answer has its handle already."""
    assert answer([b"x\n" + DONE], content_type=b"application/json") == [b"x\n" + DONE]


def test_behind_a_path_prefix() -> None:
    """A deployment under `--root-path` streams handles too."""
    assert answer([DONE], path="/llm/v1/completions") == [EVENT + DONE]


def test_concurrent_requests_do_not_mix() -> None:
    """Each stream carries its own request's handle, those without one carry none."""

    async def run() -> list[list[bytes]]:
        engine = await listening(Engine())
        wanted = [{"kvloop_handle": str(number)} if number % 3 else None for number in range(30)]
        answers = await asyncio.gather(*(sent(server(engine, [CHUNK, DONE], params)) for params in wanted))
        return [bodies_of(messages) for messages in answers]

    for number, bodies in enumerate(asyncio.run(run())):
        event = handle_event({"kvloop_handle": str(number)}) if number % 3 else b""
        assert bodies == [CHUNK, event + DONE]


def test_outputs_belong_to_the_request_that_asked_for_them() -> None:
    """Whatever task takes them."""

    async def run() -> list[bytes]:
        engine = await listening(Engine())

        async def app(_scope: Any, _receive: Any, send: Any) -> None:
            outputs = engine.generate("prompt", params=PARAMS)

            async def take() -> None:
                async for _ in outputs:
                    pass

            await asyncio.get_running_loop().create_task(take(), context=Context())
            await send({"type": "http.response.start", "headers": [(b"content-type", STREAM_TYPE)]})
            await send({"type": "http.response.body", "body": DONE})

        return bodies_of(await sent(app))

    assert asyncio.run(run()) == [EVENT + DONE]


def test_a_request_does_not_leave_its_handle_to_the_next() -> None:
    """Also where the first one never came to its terminator, on the same task."""

    async def run() -> list[bytes]:
        engine = await listening(Engine())
        await sent(server(engine, [CHUNK], PARAMS))
        return bodies_of(await sent(server(engine, [DONE], None)))

    assert asyncio.run(run()) == [DONE]


def test_generation_outside_of_a_request_is_left_alone() -> None:
    """Its outputs pass unchanged, in order; so does what has no parameters at all."""

    async def run() -> list[int]:
        engine = await listening(Engine())
        return [output.number async for output in engine.generate("prompt", params=PARAMS)]

    assert asyncio.run(run()) == [0, 1, 2]


def test_other_connections_pass_by() -> None:
    """A websocket, the server's lifespan."""

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": f"{scope['type']}.send", "body": DONE})

    messages = asyncio.run(sent(app, kind="websocket"))
    assert messages == [{"type": "websocket.send", "body": DONE}]


@pytest.mark.parametrize("messages", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_a_vllm_that_streams_the_handle_itself_gets_nothing(
    monkeypatch: pytest.MonkeyPatch, chat: bool, messages: bool
) -> None:
    """Handles where vLLM adds none, a listener where there is such a stream; the metrics in any version."""
    monkeypatch.setattr(endpoint, "streams_carry_handle", lambda: chat)
    monkeypatch.setattr(endpoint, "messages_carry_handle", lambda: messages)
    app, engine = FastAPI(), Engine()
    EndpointPlugin().attach_router(app)
    asyncio.run(listening(engine))
    added = {middleware.cls: middleware.kwargs for middleware in app.user_middleware}
    wanted = [*([] if chat else [DONE.strip()]), *([] if messages else [b"event: message_stop"])]
    assert MetricsMiddleware in added
    assert list(added.get(HandleMiddleware, {}).get("terminators", ())) == wanted
    assert ("generate" in vars(engine)) is bool(wanted)


def test_the_installed_vllm_streams_no_handle_on_messages() -> None:
    """What its events have no field for, its writer drops."""
    assert not endpoint.messages_carry_handle()


def scraped(app: Any, method: str = "GET", path: str = "/metrics", **headers: str) -> list[Any]:
    """What is sent where the server answers `app`, and the engines count one line."""

    async def run() -> list[Any]:
        messages: list[Any] = []

        async def send(message: Any) -> None:
            messages.append(message)

        async def more() -> str:
            return "ours 1\n"

        pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": method, "path": path, "root_path": "/llm", "headers": pairs}
        await MetricsMiddleware(app, more)(scope, None, send)  # type: ignore[arg-type]
        return messages

    return asyncio.run(run())


def answering(bodies: Sequence[bytes], status: int = 200) -> Any:
    """An application that answers with these chunks, and with the headers that it was asked with."""

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        length = str(sum(map(len, bodies))).encode()
        headers = [(b"Content-Length", length), (b"content-type", b"text/plain"), *scope["headers"]]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for number, body in enumerate(bodies, 1):
            await send({"type": "http.response.body", "body": body, "more_body": number < len(bodies)})

    return app


@pytest.mark.parametrize("path", ["/metrics", "/metrics/", "/llm/metrics"])
def test_metrics_are_written_under_the_server_s_own(path: str) -> None:
    """In one answer of the right length."""
    start, body = scraped(answering([b"theirs", b" 2\n"]), path=path)
    assert body["body"] == b"theirs 2\nours 1\n"
    assert not body.get("more_body")
    assert [pair for pair in start["headers"] if pair[0].lower() == b"content-length"] == [
        (b"content-length", b"16")
    ]


def test_metrics_are_asked_for_as_plain_text() -> None:
    """Compressed, or in a format with an end of its own, nothing could follow."""
    start, _ = scraped(
        answering([b"x"]), accept="application/openmetrics-text", accept_encoding="gzip", a="b"
    )
    assert {name for name, _ in start["headers"]} == {b"content-type", b"content-length", b"a"}


@pytest.mark.parametrize(
    ("status", "method", "path"),
    [(404, "GET", "/metrics"), (200, "HEAD", "/metrics"), (200, "GET", "/metrics/x"), (200, "GET", "/v1/m")],
)
def test_nothing_else_gets_metrics(status: int, method: str, path: str) -> None:
    """Errors, other methods, other paths."""
    messages = scraped(answering([b"theirs"], status), method, path)
    assert b"".join(bodies_of(messages)) == b"theirs"


def test_a_server_without_kvloop_s_connector_has_no_metrics_of_it() -> None:
    """Upstream's, or none at all."""

    async def run() -> str:
        plugin = EndpointPlugin()
        await plugin.init_state(
            Engine(transfer=SimpleNamespace(kv_connector="NixlConnector")), None, Namespace()
        )
        return await plugin._metrics()

    assert asyncio.run(run()) == ""


def test_a_server_without_an_engine_starts() -> None:
    """vLLM's render server has none."""
    asyncio.run(listening(None))
