"""One request and its answer, over the router's own HTTP client: sent, timed as it comes, read to its end.

Times are taken once for each read from the socket: events that came in one read came at one time. Nothing
that an endpoint sends can make it raise; an answer that is not one is an error to record.
"""

import asyncio
import itertools
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from urllib.parse import urlsplit

import msgspec

from kvloop.bench.load.api import Event, Usage, event_of
from kvloop.core.chain import MAX_CHAIN_TOKENS
from kvloop.errors import UserError
from kvloop.router.pool import Pool
from kvloop.router.upstream import EngineFailureError

CONNECT_TIMEOUT_S = 30.0
MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_ERROR_BYTES = 64 * 1024
MAX_ANSWER_BYTES = 256 * 1024 * 1024
"""Of a whole stream: a million events of vLLM's."""
EVENTS_A_TOKEN, MORE_EVENTS = 8, 1_000
"""Where so many events have come for each token that was asked for, and more, an answer has no end."""
ERROR_CHARACTERS = 300
_DONE = b"[DONE]"
OK = 200


@dataclass(slots=True)
class Heard:
    """What came of a request. `status` is 0 where no answer came; times are seconds from the sending."""

    status: int = 0
    took_s: float = 0.0
    first_s: float | None = None
    between_s: list[float] = field(default_factory=list)
    text: str = ""
    usage: Usage | None = None
    route: str | None = None
    reused_tokens: int | None = None
    request_id: str = ""
    error: str | None = None

    @property
    def is_good(self) -> bool:
        """Whether it is an answer, and whole."""
        return self.status == OK and self.error is None


class _Hearing:
    """The sink of one answer (see `router.upstream`)."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, heard: Heard, began_s: float, most_events: int, *, stream: bool
    ) -> None:
        self.done: asyncio.Future[None] = loop.create_future()
        self._heard = heard
        self._began_s = began_s
        self._last_s = 0.0
        self._is_stream = stream and heard.status == OK
        self._held = b""
        self._texts: list[str] = []
        self._is_whole = False
        self._most_events = most_events
        self._bytes = 0

    def on_body(self, data: bytes, ends: bool) -> None:  # noqa: ARG002
        """Some of the body."""
        if self.done.done():
            return
        self._bytes += len(data)
        if not self._is_stream:
            self._held += data
            if self._heard.status != OK and self._bytes > MAX_ERROR_BYTES:
                self.on_end()
            elif self._bytes > MAX_LINE_BYTES:
                self._give_up(f"an answer of more than {MAX_LINE_BYTES} bytes")
            return
        now_s = time.monotonic()
        *lines, self._held = (self._held + data).split(b"\n")
        if len(self._held) > MAX_LINE_BYTES:
            self._give_up(f"an event of more than {MAX_LINE_BYTES} bytes")
            return
        if self._bytes > MAX_ANSWER_BYTES:
            self._give_up(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
            return
        if self._is_whole and any(map(bytes.strip, lines)):
            self._give_up("the stream goes on after [DONE]")
            return
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now_s)
        if len(self._texts) > self._most_events:
            self._give_up(f"more than {self._most_events} events with a token, and no end")

    def on_end(self) -> None:
        """The body is whole, or as much of an error as is wanted."""
        if self.done.done():
            return
        self._heard.took_s = time.monotonic() - self._began_s
        if self._heard.status != OK:
            said = self._held.decode("utf-8", "replace")
            self._fail(f"HTTP {self._heard.status}: {said}")
        elif not self._is_stream:
            self._whole()
        elif not self._is_whole:
            self._fail("the stream ended without [DONE]")
        usage = self._heard.usage
        if self._heard.is_good and not self._texts and not (usage and usage.completion_tokens):
            self._fail("an answer without a token")
        self._finish()

    def on_lost(self, error: EngineFailureError) -> None:
        """It will never be."""
        if self.done.done():
            return
        self._heard.took_s = time.monotonic() - self._began_s
        self._fail(str(error))
        self._finish()

    def _event(self, data: bytes, now_s: float) -> None:
        if data == _DONE:
            self._is_whole = True
            return
        event = self._decoded(data)
        if event is None or not event.text:
            return
        self._texts.append(event.text)
        if self._heard.first_s is None:
            self._heard.first_s = now_s - self._began_s
        else:
            self._heard.between_s.append(now_s - self._last_s)
        self._last_s = now_s

    def _whole(self) -> None:
        event = self._decoded(self._held)
        if event is not None:
            self._texts.append(event.text)

    def _decoded(self, data: bytes) -> Event | None:
        try:
            event = event_of(data)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            self._fail(f"an answer that is none: {error}")
            return None
        said = bytes(event.error)
        if said not in (b"", b"null"):
            self._fail(said.decode("utf-8", "replace"))
        self._heard.usage = event.usage or self._heard.usage
        return event

    def _give_up(self, why: str) -> None:
        """What is left is not waited for: it may have no end."""
        self._held = b""
        self._heard.took_s = time.monotonic() - self._began_s
        self._fail(why)
        self._finish()

    def _fail(self, why: str) -> None:
        self._heard.error = self._heard.error or why[:ERROR_CHARACTERS]

    def _finish(self) -> None:
        self._heard.text = "".join(self._texts)
        if not self.done.done():
            self.done.set_result(None)


def _lines(headers: Mapping[str, str]) -> str:
    """Headers as they are sent. UserError for one that would be two."""
    if any("\r" in word or "\n" in word for pair in headers.items() for word in pair):
        raise UserError("a header has to be one line")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())


class Endpoint:
    """A base URL (`http://host:port`, with or without `/v1`) that is asked over kept connections."""

    def __init__(
        self, url: str, api_key: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        """Raises `UserError` for a URL that is none."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise UserError(f"{url!r} is not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise UserError(f"{url!r} is not an endpoint's URL: http://HOST:PORT is expected")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._base = urlsplit(self.url).path + "/v1"
        is_tls = parts.scheme == "https"
        tls = (ssl.create_default_context(), parts.hostname) if is_tls else None
        self._pool = Pool(parts.hostname, port or (443 if is_tls else 80), CONNECT_TIMEOUT_S, tls)
        sent = {"host": parts.netloc.rpartition("@")[2], "content-type": "application/json"} | dict(
            headers or {}
        )
        if api_key is not None:
            sent["authorization"] = f"Bearer {api_key}"
        self._headers = _lines(sent)
        self._ids = itertools.count()

    async def ask(
        self,
        path: str,
        body: bytes,
        timeout_s: float,
        *,
        stream: bool,
        name: str = "",
        headers: Mapping[str, str] = MappingProxyType({}),
        max_tokens: int = MAX_CHAIN_TOKENS,
    ) -> Heard:
        """Post `body`; what came of it. An answer that brings nothing for `timeout_s` is lost, and so is one
        that has no end: `max_tokens` is what it may be. `name` goes into the request's id, `headers` beside
        the endpoint's own."""
        loop = asyncio.get_running_loop()
        heard = Heard(request_id=f"bench-{name}-{next(self._ids)}")
        own = _lines({**headers, "x-request-id": heard.request_id, "content-length": str(len(body))})
        head = f"POST {self._base}{path} HTTP/1.1\r\n{self._headers}{own}\r\n"
        began_s = time.monotonic()
        try:
            exchange = await self._pool.ask((head.encode("latin-1", "replace"), body), timeout_s)
        except EngineFailureError as error:
            heard.took_s = time.monotonic() - began_s
            heard.error = str(error)[:ERROR_CHARACTERS]
            return heard
        heard.status = exchange.head.status
        heard.route = exchange.head.get(b"x-kvloop-route").decode("latin-1") or None
        reused = exchange.head.get(b"x-kvloop-reused-tokens")
        heard.reused_tokens = int(reused) if reused.isdigit() else None
        hearing = _Hearing(loop, heard, began_s, MORE_EVENTS + EVENTS_A_TOKEN * max_tokens, stream=stream)
        try:
            exchange.connection.attach(hearing)
            await hearing.done
        finally:
            exchange.connection.close()
        return heard

    def close(self) -> None:
        """Close all connections."""
        self._pool.close()
