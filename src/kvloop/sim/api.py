"""A simulated engine's HTTP server: what kvloop and its users need of vLLM's API.

`POST /v1/chat/completions`, `/v1/completions`, `/v1/responses`, streamed or not; `GET /v1/models`, `/health`,
`/version`, `/metrics`; `POST /reset_prefix_cache`. An ASGI application without a framework: there are few
routes, and an answer should cost less than the router's own work on it. A client that goes away takes its
requests with it.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from prometheus_client import generate_latest

from kvloop.sim.body import (
    Body,
    chat_prompt,
    completion_prompts,
    make_request,
    read_body,
    response_prompt,
)
from kvloop.sim.driver import Driver
from kvloop.sim.formats import Chat, Completion, Format, Params
from kvloop.sim.metrics import Metrics
from kvloop.sim.outcome import Choice, Usage, answer_count
from kvloop.sim.request import Finished, Handover, Reason, Request, Sampled
from kvloop.sim.responses import Responses
from kvloop.wire.refusal import RequestError, error_body

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

MAX_BODY_BYTES = 64 << 20  # the router's own bound
_JSON = (b"content-type", b"application/json")
_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
_PLAIN = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
_PATHS = {"/v1/chat/completions": Chat, "/v1/completions": Completion, "/v1/responses": Responses}


@dataclass(slots=True)
class _Answer:
    """A request of a client's: its choices, and the events that have not been written."""

    form: Format
    requests: list[Request]
    choices: list[Choice]
    usage: Usage
    stream: bool
    began_ns: int
    ready: list[bytes] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    left: int = 0
    last_ns: int = 0
    params: Params = None


class Api:
    """One engine's API, as an ASGI application."""

    def __init__(self, driver: Driver, model: str) -> None:
        self._driver = driver
        self._engine = driver.engine
        self._model = model
        self._metrics = Metrics(driver.engine)
        self._served = 0
        self._created_s = int(time.time())

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """One request, as ASGI has it."""
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        if path in _PATHS and method == "POST":
            await self._generate(path, scope, receive, send)
        elif path == "/health":
            await _reply(send, 200, b"", _JSON)
        elif path == "/v1/models":
            await _reply(send, 200, self._models(), _JSON)
        elif path == "/version":
            await _reply(send, 200, b'{"version":"kvloop-sim"}', _JSON)
        elif path == "/metrics":
            await _reply(send, 200, generate_latest(self._metrics.registry), _PLAIN)
        elif path == "/reset_prefix_cache" and method == "POST":
            self._driver.reset_prefix_cache()
            await _reply(send, 200, b"", _JSON)
        else:
            known = path in _PATHS
            await _fail(send, 405 if known else 404, f"there is no {method} {path[:200]} here")

    def _models(self) -> bytes:
        limits = self._engine.profile.limits
        card = {"id": self._model, "object": "model", "created": self._created_s, "owned_by": "kvloop"}
        card |= {"root": self._engine.profile.model, "parent": None, "max_model_len": limits.model_tokens}
        return msgspec.json.encode({"object": "list", "data": [card]})

    async def _generate(self, path: str, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        raw = await _body(receive)
        if raw is None:
            return
        try:
            answer = self._ask(path, _request_id(scope), raw)
        except RequestError as error:
            await _fail(send, error.status, str(error), error.param, error.code)
            return
        gone = asyncio.get_running_loop().create_task(_gone(receive))
        gone.add_done_callback(lambda _: answer.changed.set())
        try:
            await self._write(answer, send, gone)
        finally:
            gone.cancel()
            for request in answer.requests:
                self._driver.abort(request.request_id)

    def _ask(self, path: str, identifier: str, raw: bytes) -> _Answer:
        """Read a request and hand it to the engine. RequestError for one that cannot be served."""
        body = read_body(raw)
        if body.model not in (None, self._model):
            raise RequestError(f"The model `{body.model}` does not exist.", "model", "model_not_found", 404)
        form, prompts = self._form(path, identifier, body)
        self._served += 1
        requests = []
        for index, prompt in enumerate(one for one in prompts for _ in range(body.choices)):
            # An id of the client's may come again; the engine's must not.
            own_id = f"{identifier}-{self._served}-{index}"
            limits = self._engine.profile.limits
            cell_tokens = self._engine.memory.cell_tokens
            model = self._engine.profile.model
            requests.append(make_request(body, own_id, prompt, model, cell_tokens, limits.model_tokens))
        usage = Usage(sum(len(request.text) for request in requests[:: body.choices]))
        choices = [Choice(index, body) for index in range(len(requests))]
        now_ns = time.monotonic_ns()
        answer = _Answer(form, requests, choices, usage, bool(body.stream), now_ns, left=len(requests))
        if answer.stream:
            answer.ready.append(form.begin(choices))
        for request, choice in zip(requests, choices, strict=True):
            self._submit(answer, request, choice)
        return answer

    def _form(self, path: str, identifier: str, body: Body) -> tuple[Format, Sequence[bytes]]:
        now_s = int(time.time())
        if path == "/v1/responses":
            return Responses(f"resp_{identifier}", self._model, now_s), [response_prompt(body)]
        if path == "/v1/completions":
            completion = Completion(f"cmpl-{identifier}", self._model, now_s, wants_usage=body.wants_usage)
            return completion, completion_prompts(body)
        chat = Chat(f"chatcmpl-{identifier}", self._model, now_s, wants_usage=body.wants_usage)
        return chat, [chat_prompt(body)]

    def _submit(self, answer: _Answer, request: Request, choice: Choice) -> None:
        handover = request.handover

        def listen(event: Sampled | Finished) -> None:
            now_ns = time.monotonic_ns()
            if isinstance(event, Sampled):
                self._time(answer, now_ns)
                answer.usage.answer += answer_count(event.data)
                answer.usage.cached = event.cached_tokens if handover is None else handover.cached_tokens
                news = choice.take(event.data)
                if answer.stream and news:
                    answer.ready.append(answer.form.piece(choice, news))
                if choice.reason is not None:  # a stop string: vLLM aborts such a request
                    self._driver.abort(request.request_id)
                    self._ended(answer, choice, Finished(request.request_id, Reason.STOP, False), now_ns)
            else:
                self._ended(answer, choice, event, now_ns)
            if answer.stream or not answer.left:
                answer.changed.set()

        try:
            self._driver.submit(request, listen)
        except ValueError as error:
            raise RequestError(str(error)) from None

    def _time(self, answer: _Answer, now_ns: int) -> None:
        if not answer.last_ns:
            self._metrics.first_token.observe((now_ns - answer.began_ns) / 1e9)
        else:
            self._metrics.next_token.observe((now_ns - answer.last_ns) / 1e9)
        answer.last_ns = now_ns

    def _ended(self, answer: _Answer, choice: Choice, finished: Finished, now_ns: int) -> None:
        choice.end(finished)
        self._metrics.ended(finished.reason)
        answer.params = answer.params or _params(finished)
        answer.left -= 1
        if answer.stream:
            answer.ready.append(answer.form.last(choice))
        if not answer.left:
            self._metrics.whole.observe((now_ns - answer.began_ns) / 1e9)
            if answer.stream:
                answer.ready.append(answer.form.end(answer.choices, answer.usage, answer.params))

    async def _write(self, answer: _Answer, send: Send, gone: "asyncio.Task[None]") -> None:
        started = False
        while answer.left or answer.ready:
            if not (answer.ready and answer.stream):
                answer.changed.clear()
                if answer.left:
                    await answer.changed.wait()
            if gone.done():
                return
            if answer.stream and answer.ready:
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": [_EVENTS]})
                    started = True
                events, answer.ready = b"".join(answer.ready), []
                await send({"type": "http.response.body", "body": events, "more_body": True})
        if answer.stream:
            await send({"type": "http.response.body", "body": b""})
        else:
            await _reply(send, 200, answer.form.whole(answer.choices, answer.usage, answer.params), _JSON)


async def _body(receive: Receive) -> bytes | None:
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


async def _gone(receive: Receive) -> None:
    """Until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _reply(send: Send, status: int, body: bytes, kind: tuple[bytes, bytes]) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [kind, length]})
    await send({"type": "http.response.body", "body": body})


async def _fail(
    send: Send, status: int, message: str, param: str | None = None, code: str | None = None
) -> None:
    await _reply(send, status, error_body(message, "invalid_request_error", param, code), _JSON)


def _request_id(scope: dict[str, Any]) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return str(value.decode("latin-1"))
    return os.urandom(16).hex()


def _params(finished: Finished) -> Params:
    """`kv_transfer_params` of an answer: prefill's hand-over with its account, or decode's handle."""
    if finished.handover is not None:
        return _shown(finished.handover) | {"kvloop_turn": finished.turn}
    if finished.handle is None:
        return None
    return {"kvloop_handle": finished.handle, "kvloop_turn": finished.decoded}


def _shown(handover: Handover) -> dict[str, Any]:
    host, port = handover.address
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [handover.blocks],
        "remote_engine_id": handover.engine_id,
        "remote_request_id": handover.request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": handover.token_count,
        "remote_blocks_expiry_time": None,
        "kvloop_incarnation": handover.incarnation,
        "remote_prefill_cached_tokens": handover.cached_tokens,
    }
