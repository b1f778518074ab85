"""One connection to an engine: an HTTP/1.1 client on an asyncio protocol, with llhttp as its parser.

An exchange is one request and one answer. `ask` writes the request and waits for the answer's head; then a
sink takes the body, as fast as it comes: `attach` hands it what is there already. Bytes that arrive in one
read reach the sink in one piece. Whoever opened an exchange closes it: a connection whose answer has ended
whole goes back to its pool, any other is aborted, which is how an engine learns that nobody wants its answer
any more.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import httptools

from kvloop.errors import PeerError
from kvloop.router.transport import without_delay
from kvloop.router.turn import Failure

UNCLAIMED_MAX_BYTES = 256 * 1024  # read ahead of a sink: about one socket buffer
HEAD_MAX_BYTES = 64 * 1024

Headers = list[tuple[bytes, bytes]]


class EngineFailureError(PeerError):
    """A hop that did not work out. `kind` is a short constant, fit for a metric's label."""

    def __init__(self, kind: str, failure: Failure, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind
        self.failure = failure


@dataclass(slots=True)
class Head:
    """An answer's status and headers, names in lower case."""

    status: int
    headers: Headers

    def get(self, name: bytes) -> bytes:
        """The first value of a header, or nothing."""
        return next((value for key, value in self.headers if key == name), b"")


class Sink(Protocol):
    """What takes an answer's body. After `on_end` or `on_lost` nothing more comes.

    `ends`: `on_end` follows at once.
    """

    def on_body(self, data: bytes, ends: bool) -> None: ...
    def on_end(self) -> None: ...
    def on_lost(self, error: EngineFailureError) -> None: ...


class Collector:
    """A sink that gathers a body of at most `max_bytes`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_bytes: int) -> None:
        self.done: asyncio.Future[bytes] = loop.create_future()
        self._parts: list[bytes] = []
        self._room = max_bytes

    def on_body(self, data: bytes, ends: bool) -> None:  # noqa: ARG002
        """One more piece."""
        self._room -= len(data)
        if self._room >= 0:
            self._parts.append(data)
        elif not self.done.done():
            self._parts.clear()
            self.done.set_exception(EngineFailureError("answer_oversize", Failure.ANSWERED))

    def on_end(self) -> None:
        """The body is whole."""
        if not self.done.done():
            self.done.set_result(b"".join(self._parts))

    def on_lost(self, error: EngineFailureError) -> None:
        """It will never be."""
        if not self.done.done():
            self.done.set_exception(error)


class EngineConnection(asyncio.Protocol):
    """A connection that serves one exchange at a time. `release` is told when it is free again, or gone."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, release: Callable[["EngineConnection", bool], None]
    ) -> None:
        self.exchanges = 0
        self.idle_since_s = 0.0
        self._loop = loop
        self._release = release
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[Head] | None = None
        self._head: Head | None = None
        self._head_bytes = 0
        self._sink: Sink | None = None
        self._pieces: list[bytes] = []
        self._ended = True
        self._until_close = False
        self._lost: EngineFailureError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._rings_s = 0.0  # when the timer does
        self._timeout_s = 0.0  # of the exchange under way, 0 for none
        self._moved_s = 0.0

    @property
    def usable(self) -> bool:
        """Whether it can take a request."""
        return self._ended and self._lost is None and self._transport is not None

    @property
    def answered(self) -> bool:
        """Whether a byte of an answer has come since the last request."""
        return self._head_bytes > 0

    def ask(self, parts: Sequence[bytes], timeout_s: float) -> asyncio.Future[Head]:
        """Send a request; its answer's head is to come. EngineFailureError if none does.

        From now to `close`, an exchange that brings not one byte for `timeout_s` is lost.
        """
        if self._transport is None or not self.usable:
            raise EngineFailureError("closed", Failure.UNREACHED)
        self.exchanges += 1
        self._head, self._sink, self._ended, self._until_close = None, None, False, False
        self._head_bytes = 0
        self._waiter = self._loop.create_future()
        self._moved_s = self._loop.time()
        self._watch(timeout_s)
        self._transport.resume_reading()  # its last client may have stopped it at his answer's end
        self._transport.writelines(parts)
        return self._waiter

    def attach(self, sink: Sink) -> None:
        """Let `sink` take the body: at once what has come, then the rest."""
        self._sink = sink
        self.resume()
        self._deliver()

    def collect(self, max_bytes: int) -> asyncio.Future[bytes]:
        """The whole body, when it is there. EngineFailureError if it is over `max_bytes`, or breaks off."""
        collector = Collector(self._loop, max_bytes)
        self.attach(collector)
        return collector.done

    def pause(self) -> None:
        """Read no more until `resume`: the client does not take it."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        """End the exchange: give the connection back if its answer was whole, else abort it.

        What no sink has taken is nobody's: it must not be there when the next exchange begins.
        """
        self._sink = None
        self._pieces.clear()
        self._timeout_s = 0.0
        reusable = self.usable
        if not reusable:
            self.abort()
        self._release(self, reusable)

    def abort(self) -> None:
        """Close the connection now."""
        self._lost = self._lost or EngineFailureError("aborted", Failure.BROKEN)
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = without_delay(transport)

    def data_received(self, data: bytes) -> None:
        if self._ended:
            self._break("unasked", "bytes without a request")
            return
        self._moved_s = self._loop.time()
        if self._head is None:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break("garbled", str(error))
            return
        if self._head is None and self._head_bytes > HEAD_MAX_BYTES:
            self._break("garbled", "the head is too long")
            return
        self._deliver()

    def eof_received(self) -> None:
        return None

    def connection_lost(self, error: Exception | None) -> None:
        if self._until_close and error is None:
            self._ended = True
        self._lost = self._lost or EngineFailureError("closed", Failure.BROKEN, str(error or ""))
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        self._deliver()
        self._release(self, False)

    # httptools

    def on_message_begin(self) -> None:
        self._headers: Headers = []
        if self._ended:  # more answers than questions: the connection is out of step, and not used again
            self._lost = EngineFailureError("unasked", Failure.BROKEN)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head is None:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self._ended:
            return
        self._head = Head(status, self._headers)
        framed = any(name in (b"content-length", b"transfer-encoding") for name, _ in self._headers)
        self._until_close = not framed and status not in (204, 304)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(self._head)

    def on_body(self, data: bytes) -> None:
        if not self._ended:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        if self._head is not None:
            self._ended = True
            if not self._parser.should_keep_alive():
                self._lost = EngineFailureError("closed", Failure.BROKEN)

    def _deliver(self) -> None:
        """Pass on what has come, and then that it is over."""
        if self._sink is None:
            self._hold_back()
            return
        if self._pieces:
            data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces.clear()
            self._sink.on_body(data, self._ended)
        if not self._ended and self._lost is None:
            return
        sink, self._sink = self._sink, None
        if sink is None:  # it has closed the exchange
            return
        if self._ended:
            sink.on_end()
        elif self._lost is not None:
            sink.on_lost(self._lost)

    def _hold_back(self) -> None:
        if self._waiter is not None and not self._waiter.done() and self._lost is not None:
            self._waiter.set_exception(self._lost)
        if self._transport is not None and sum(map(len, self._pieces)) > UNCLAIMED_MAX_BYTES:
            self._transport.pause_reading()

    def _watch(self, timeout_s: float) -> None:
        """Look after the exchange that begins. A timer of an earlier one that rings in time will do."""
        self._timeout_s = timeout_s
        due_s = self._moved_s + timeout_s
        if self._timer is not None:
            if self._rings_s <= due_s:
                return
            self._timer.cancel()
        self._rings_s = due_s
        self._timer = self._loop.call_at(due_s, self._check_time)

    def _check_time(self) -> None:
        self._timer = None
        if not self._timeout_s:  # nothing is under way
            return
        due_s = self._moved_s + self._timeout_s
        if due_s > self._loop.time():
            self._rings_s = due_s
            self._timer = self._loop.call_at(due_s, self._check_time)
            return
        self._lost = self._lost or EngineFailureError("timeout", Failure.BROKEN)
        self.abort()
        self._deliver()

    def _break(self, kind: str, detail: str) -> None:
        self._lost = EngineFailureError(kind, Failure.ANSWERED, detail)
        self._ended = False
        self._deliver()
        if self._transport is not None:
            self._transport.abort()
