"""A simulated engine's HTTP server: what kvloop and its users need of vLLM's API.

The generation endpoints (`endpoints`), streamed or not; `POST /v1/messages/count_tokens` and
`/reset_prefix_cache`; `GET /v1/models`, `/health`, `/version`, `/metrics`. An answer should cost less than
the router's own work on it. A client that goes away takes its requests with it.
"""

import asyncio
import os
import time
from dataclasses import dataclass, field

import msgspec
from prometheus_client import generate_latest

from kvloop.sim.asgi import (
    EVENTS,
    JSON,
    PLAIN,
    Receive,
    Scope,
    Send,
    gone,
    refuse,
    reply,
    request_id,
    whole_body,
)
from kvloop.sim.body import Body, make_request, read_body
from kvloop.sim.driver import Driver
from kvloop.sim.endpoints import ENDPOINTS, Stamp
from kvloop.sim.formats import Format, Params
from kvloop.sim.metrics import Metrics
from kvloop.sim.outcome import Choice, Usage, answer_count
from kvloop.sim.prompts import chat_of_message, chat_prompts
from kvloop.sim.request import Finished, Reason, Request, Sampled
from kvloop.sim.text import TOKEN_BYTES
from kvloop.sim.transfer_params import answered
from kvloop.wire.refusal import RequestError

_COUNT = "/v1/messages/count_tokens"
_PATHS = {*ENDPOINTS, _COUNT}


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
    begun: bool = False

    def begin(self) -> None:
        """Say that it has begun, once, if it is a stream."""
        if self.stream and not self.begun:
            self.ready.append(self.form.begin(self.choices, self.usage))
        self.begun = True


class Api:
    """One engine's API, as an ASGI application."""

    def __init__(self, driver: Driver, model: str) -> None:
        self._driver = driver
        self._engine = driver.engine
        self._model = model
        self._metrics = Metrics(driver.engine)
        self._served = 0
        self._created_s = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, as ASGI has it."""
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        if path in _PATHS and method == "POST":
            await self._post(path, scope, receive, send)
        elif path == "/health":
            await reply(send, 200, b"", JSON)
        elif path == "/v1/models":
            await reply(send, 200, self._models(), JSON)
        elif path == "/version":
            await reply(send, 200, b'{"version":"kvloop-sim"}', JSON)
        elif path == "/metrics":
            await reply(send, 200, generate_latest(self._metrics.registry), PLAIN)
        elif path == "/reset_prefix_cache" and method == "POST":
            self._driver.reset_prefix_cache()
            await reply(send, 200, b"", JSON)
        else:
            error = RequestError(
                f"there is no {method} {path[:200]} here", status=405 if path in _PATHS else 404
            )
            await refuse(send, path, error)

    def _models(self) -> bytes:
        limits = self._engine.profile.limits
        card = {"id": self._model, "object": "model", "created": self._created_s, "owned_by": "kvloop"}
        card |= {"root": self._engine.profile.model, "parent": None, "max_model_len": limits.model_tokens}
        return msgspec.json.encode({"object": "list", "data": [card]})

    async def _post(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await whole_body(receive)
        if raw is None:
            return
        try:
            if path == _COUNT:
                await reply(send, 200, self._counted(raw), JSON)
                return
            answer = self._ask(path, request_id(scope), raw)
        except RequestError as error:
            await refuse(send, path, error)
            return
        left = asyncio.get_running_loop().create_task(gone(receive))
        left.add_done_callback(lambda _: answer.changed.set())
        try:
            await self._write(answer, send, left)
        finally:
            left.cancel()
            for request in answer.requests:
                self._driver.abort(request.request_id)

    def _ask(self, path: str, identifier: str, raw: bytes) -> _Answer:
        """Read a request and hand it to the engine. RequestError for one that cannot be served."""
        endpoint, body = ENDPOINTS[path], self._body(raw)
        body = endpoint.read(body)
        prompts = endpoint.prompts(body)
        stamp = Stamp(identifier, os.urandom(16).hex(), self._model, int(time.time()))
        form = endpoint.form(body, stamp)
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
        if form.announces:
            answer.begin()
        for request, choice in zip(requests, choices, strict=True):
            self._submit(answer, request, choice)
        return answer

    def _body(self, raw: bytes) -> Body:
        body = read_body(raw)
        if body.model not in (None, self._model):
            raise RequestError(f"The model `{body.model}` does not exist.", "model", "model_not_found", 404)
        return body

    def _counted(self, raw: bytes) -> bytes:
        """Of Anthropic's: how many tokens a prompt has."""
        body = msgspec.structs.replace(self._body(raw), max_tokens=1)
        (prompt,) = chat_prompts(chat_of_message(body))
        return msgspec.json.encode({"input_tokens": len(prompt) // TOKEN_BYTES})

    def _submit(self, answer: _Answer, request: Request, choice: Choice) -> None:
        handover = request.handover

        def listen(event: Sampled | Finished) -> None:
            now_ns = time.monotonic_ns()
            if isinstance(event, Sampled):
                self._time(answer, now_ns)
                answer.usage.answer += answer_count(event.data)
                answer.usage.cached = event.cached_tokens if handover is None else handover.cached_tokens
                answer.begin()
                news = choice.take(event.data)
                if answer.stream and news:
                    answer.ready.append(answer.form.piece(choice, news))
                if choice.reason is not None:  # a stop string: vLLM aborts such a request
                    self._driver.abort(request.request_id)
                    self._ended(answer, choice, Finished(request.request_id, Reason.STOP, False), now_ns)
            else:
                answer.begin()
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
        answer.params = answer.params or answered(finished)
        answer.left -= 1
        if answer.stream:
            answer.ready.append(answer.form.last(choice))
        if not answer.left:
            self._metrics.whole.observe((now_ns - answer.began_ns) / 1e9)
            if answer.stream:
                answer.ready.append(answer.form.end(answer.choices, answer.usage, answer.params))

    async def _write(self, answer: _Answer, send: Send, left: "asyncio.Task[None]") -> None:
        started = False
        while answer.left or answer.ready:
            if not (answer.ready and answer.stream):
                answer.changed.clear()
                if answer.left:
                    await answer.changed.wait()
            if left.done():
                return
            if answer.stream and answer.ready:
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": [EVENTS]})
                    started = True
                events, answer.ready = b"".join(answer.ready), []
                await send({"type": "http.response.body", "body": events, "more_body": True})
        if answer.stream:
            await send({"type": "http.response.body", "body": b""})
        else:
            await reply(send, 200, answer.form.whole(answer.choices, answer.usage, answer.params), JSON)
