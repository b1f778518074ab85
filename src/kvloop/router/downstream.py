"""One client's connection: an HTTP/1.1 server on an asyncio protocol.

Requests are served one at a time, in the order they came; what a client pipelines waits, and while anything
waits no more is read. Otherwise reading never stops, for the end of the stream is how a client says that he
has lost interest: his request's task is cancelled, and that closes the engines' connections. A connection
that had to refuse a request says so in its turn, and is closed. Who takes nothing of his answer for as long
as an idle connection is kept has left without saying so: what is kept for him costs memory, here and at
decode.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from kvloop.router.config import Limits, Timeouts
from kvloop.router.request import Admission, BodyBudget, Refusal, Request, RequestParser
from kvloop.router.response import Response
from kvloop.router.transport import without_delay
from kvloop.wire.refusal import shape_of

LINGER_S = 1.0  # a refused client gets this long to read why
MIN_BODY_BYTES_PER_S = (
    32 * 1024
)  # on top of the time for a request, each second must bring this much of its body

logger = logging.getLogger("kvloop.router")

Serve = Callable[[Request, Response], Awaitable[None]]


@dataclass(slots=True)
class Service:
    """What all connections share."""

    serve: Serve
    limits: Limits
    timeouts: Timeouts
    budget: BodyBudget
    gate: Admission | None = None
    connections: set["ClientConnection"] = field(default_factory=set)


class ClientConnection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._parser = RequestParser(service.limits, service.budget, service.gate)
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self._response: Response | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._since_s = self._loop.time()  # the request under way began, or the last one ended
        self._ending = False  # nothing more is read
        self._draining = False
        self._full = False  # what was written has not gone out
        self._unsent_bytes = 0  # as the last look found it
        self._taken_s = 0.0  # the client took something, as far as the looks tell

    @property
    def busy(self) -> bool:
        """Whether a request is being served or waits."""
        return self._task is not None or bool(self._waiting)

    def drain(self) -> None:
        """Take no further request; close when those that are there are answered."""
        self._draining = True
        if self._response is not None and not self._response.started:
            self._response.keep_alive = False
        if not self.busy and self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close now."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = without_delay(transport)
        self._service.connections.add(self)
        if len(self._service.connections) > self._service.limits.max_connections:
            self._refuse(Refusal(503, "too many connections; try again in a moment"))
        else:
            self._timer = self._loop.call_later(self._service.timeouts.client_timeout_s, self._check_time)

    def connection_lost(self, _: Exception | None) -> None:
        self._transport = None
        self._service.connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        self._parser.discard()
        self._service.budget.left_bytes += sum(len(request.body) for request in self._waiting)
        self._waiting.clear()

    def eof_received(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._ending:
            return
        was_receiving = self._parser.receiving
        self._waiting.extend(self._parser.feed(data))
        if self._parser.receiving and not was_receiving:
            self._since_s = self._loop.time()
        self._advance()

    def pause_writing(self) -> None:
        self._full = True
        if self._response is not None:
            self._response.pause()

    def resume_writing(self) -> None:
        self._full = False
        self._taken_s = self._loop.time()
        if self._response is not None:
            self._response.resume()
        self._advance()

    def _advance(self) -> None:
        """Serve the next request, or refuse what could not be read, if it is its turn."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._task is None and not self._full:
            if self._waiting:
                self._task = self._loop.create_task(self._run(self._waiting.popleft()))
            elif self._parser.refusal is not None:
                self._refuse(self._parser.refusal)
                return
            elif self._parser.owes_continue:
                self._parser.owes_continue = False
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._waiting:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    async def _run(self, request: Request) -> None:
        assert self._transport is not None
        response = self._response = Response(
            self._transport,
            head_only=request.method == "HEAD",
            http10=request.http10,
            keep_alive=request.keep_alive and not self._draining,
            shape=shape_of(request.path),
        )
        try:
            await self._service.serve(request, response)
            assert response.finished, "a request was left without an answer"
        except asyncio.CancelledError:
            response.abort()
        except Exception:
            logger.exception("a request failed")
            if response.started:
                response.abort()
            else:
                response.send_error(500, "the router failed; its log says why")
        finally:
            self._service.budget.left_bytes += len(request.body)
            self._task = self._response = None
            self._since_s = self._loop.time()
            if self._transport is not None and (self._draining or not response.keep_alive):
                self._transport.close()
            self._advance()

    def _refuse(self, refusal: Refusal) -> None:
        """Say why, and close when the client has had time to read it."""
        assert self._transport is not None
        self._ending = True
        self._parser.discard()
        response = Response(self._transport, head_only=False, http10=False, keep_alive=False)
        headers = list(refusal.headers)
        response.send_error(refusal.status, refusal.message, code=refusal.code, headers=headers)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(LINGER_S, self.abort)

    def _check_time(self) -> None:
        """Close what is idle or does not take its answer, and refuse what comes in too slowly."""
        now_s = self._loop.time()
        timeouts = self._service.timeouts
        due_s = now_s + timeouts.client_timeout_s
        if self._is_stuck(now_s):
            self.abort()
            return
        if self._task is None and not self._ending and not self._unsent_bytes and self._transport is not None:
            if self._parser.receiving:
                allowed_s = timeouts.client_timeout_s + self._parser.body_bytes / MIN_BODY_BYTES_PER_S
            else:
                allowed_s = timeouts.keep_alive_s
            due_s = self._since_s + allowed_s
            if now_s >= due_s:
                if self._parser.receiving:
                    self._refuse(Refusal(408, "the request took too long to come in"))
                else:
                    self._transport.close()
                return
        self._timer = self._loop.call_at(due_s, self._check_time)

    def _is_stuck(self, now_s: float) -> bool:
        """Whether the client has taken nothing of what waits for him for too long."""
        unsent_bytes = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if unsent_bytes != self._unsent_bytes:
            self._unsent_bytes, self._taken_s = unsent_bytes, now_s
        return unsent_bytes > 0 and now_s - self._taken_s >= self._service.timeouts.keep_alive_s
