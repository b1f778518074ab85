"""One answer to a client, written as it comes: whole, or as a stream of chunks.

The answer knows how it is framed (chunked for HTTP/1.1, up to the end of the connection for 1.0, no body for
HEAD) and whether the connection can serve another request after it. Whoever feeds a stream says how he is
stopped (`paced_by`), for while the client does not take what is there. Where several engines make one answer,
each but the first writes a `RestOfAnswer`.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from kvloop.wire.refusal import OPENAI, Shape

Headers = list[tuple[bytes, bytes]]

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
_JSON = (b"content-type", b"application/json")


def _nothing() -> None:
    return None


class Response:
    """The answer to one request. `headers` go out with it, whatever it turns out to be.

    `shape`: how its errors are written.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        *,
        head_only: bool,
        http10: bool,
        keep_alive: bool,
        shape: Shape = OPENAI,
    ) -> None:
        self.headers: Headers = []
        self.shape = shape
        self.keep_alive = keep_alive
        self.started = False
        self.finished = False
        self.status = 0
        self.on_pause: Callable[[], None] = _nothing
        self.on_resume: Callable[[], None] = _nothing
        self._transport = transport
        self._head_only = head_only
        self._http10 = http10
        self._chunked = False
        self._unsent = b""
        self._full = False

    def paced_by(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """How whoever feeds the stream is stopped, and told to go on: at once, if the client is behind."""
        self.on_pause, self.on_resume = pause, resume
        if self._full:
            pause()

    def pause(self) -> None:
        """The client does not take what is there."""
        self._full = True
        self.on_pause()

    def resume(self) -> None:
        """He does."""
        self._full = False
        self.on_resume()

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        """The whole answer."""
        length = [] if status in (204, 304) else [(b"content-length", b"%d" % len(body))]
        head = self._head(status, headers + length)
        self._transport.write(head if self._head_only else head + body)
        self.finished = True

    def send_json(self, status: int, body: bytes, headers: Headers | None = None) -> None:
        """The whole answer, in JSON."""
        self.send(status, [*(headers or []), _JSON], body)

    def send_error(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Headers | None = None,
    ) -> None:
        """An error, in the API's shape."""
        self.send_json(status, self.shape.body(status, message, param, code), headers)

    def start(self, status: int, headers: Headers, length: int | None = None) -> None:
        """The head of a stream, which leaves with what is written next. `length`: of its body, if known."""
        framing: Headers = []
        if length is not None:
            framing = [(b"content-length", b"%d" % length)]
        elif status not in (204, 304):
            self._chunked = not self._http10
            self.keep_alive = self.keep_alive and not self._http10
            framing = [(b"transfer-encoding", b"chunked")] if self._chunked else []
        self._unsent = self._head(status, headers + framing)

    def write(self, data: bytes, *, ends: bool = False) -> None:
        """More of a stream. `ends`: `finish` follows at once, so that they leave together."""
        if data and not self._head_only:
            self._unsent += b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
        if self._unsent and not ends:
            self._transport.write(self._unsent)
            self._unsent = b""

    def finish(self) -> None:
        """The stream's end."""
        if self._chunked and not self._head_only:
            self._unsent += b"0\r\n\r\n"
        self.write(b"")
        self.finished = True

    def abort(self) -> None:
        """Break off: the client sees that the answer is not whole."""
        self.keep_alive = False
        self.finished = True
        self._transport.abort()

    def _head(self, status: int, headers: Headers) -> bytes:
        assert not self.started
        self.started = True
        self.status = status
        lines = [b"HTTP/1.1 %d %b" % (status, _REASONS.get(status, b"Unknown"))]
        lines += [b"%b: %b" % header for header in headers]
        lines += [b"%b: %b" % header for header in self.headers]
        if not self.keep_alive:
            lines.append(b"connection: close")
        elif self._http10:
            lines.append(b"connection: keep-alive")
        return b"\r\n".join(lines) + b"\r\n\r\n"


class RestOfAnswer(Response):
    """What another engine writes to the end of an answer that has begun: its head is not needed any more.

    `refused`: it has nothing to write. `started` and `finished` are of the rest, all else is the answer's.
    """

    def __init__(self, answer: Response) -> None:
        self.headers = []
        self.shape = answer.shape
        self.keep_alive = True
        self.started = self.finished = self.refused = False
        self.status = answer.status
        self._answer = answer

    def paced_by(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """As for the answer."""
        self._answer.paced_by(pause, resume)

    def send(self, status: int, headers: Headers, body: bytes) -> None:  # noqa: ARG002
        """No stream, but an answer of its own, for which it is too late."""
        self.refused = True

    def start(self, status: int, headers: Headers, length: int | None = None) -> None:  # noqa: ARG002
        """It begins."""
        self.started = True

    def write(self, data: bytes, *, ends: bool = False) -> None:
        """More of it."""
        self._answer.write(data, ends=ends)

    def finish(self) -> None:
        """Its end, and with it the answer's."""
        self._answer.finish()
        self.finished = True
