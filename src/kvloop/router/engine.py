"""One engine: its connections, what it has in flight, and whether it is worth trying.

Health is passive: an engine that cannot be reached, or lets a hop time out, is left out for a moment, twice
as long each time up to a bound; the first answer clears it. A connection that is kept for reuse may be closed
by the engine at the very moment a request goes out on it, so a request that got not one byte back on a used
connection goes out once more on a new one.
"""

import asyncio
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvloop.router.turn import Failure
from kvloop.router.upstream import EngineConnection, EngineFailureError, Head

BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 8.0  # an engine that is back is found within this
LOG_EVERY_S = 10.0  # per engine
IDLE_MAX_S = 4.0  # vLLM's own keep-alive is 5 s
IDLE_MAX_CONNECTIONS = 256  # per engine


@dataclass(slots=True)
class Exchange:
    """An answer under way: its head, and the connection that its body comes over. Close it."""

    head: Head
    connection: EngineConnection


class Engine:
    """One vLLM server."""

    def __init__(self, url: str, role: str, connect_timeout_s: float) -> None:
        parts = urlsplit(url)
        self.url = url.rstrip("/")
        self.role = role
        self.in_flight = 0
        self.authority = parts.netloc.encode()
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[EngineConnection] = []
        self._open: set[EngineConnection] = set()
        self._backoff_s = 0.0
        self._avoid_until_s = 0.0
        self._silent_until_s = 0.0

    def available(self, now_s: float) -> bool:
        """Whether it has not just failed."""
        return now_s >= self._avoid_until_s

    def worth_a_line(self, now_s: float) -> bool:
        """Whether a failure should be logged: not every one of an outage is."""
        due = now_s >= self._silent_until_s
        if due:
            self._silent_until_s = now_s + LOG_EVERY_S
        return due

    def failed(self, now_s: float) -> None:
        """It could not be reached, or did not answer in time."""
        if now_s >= self._avoid_until_s:  # failures of one outage count once
            self._backoff_s = min(max(2 * self._backoff_s, BACKOFF_FIRST_S), BACKOFF_MAX_S)
            self._avoid_until_s = now_s + self._backoff_s

    def answered(self) -> None:
        """It did answer."""
        self._backoff_s = self._avoid_until_s = 0.0

    @contextmanager
    def slot(self) -> Iterator[None]:
        """One request in flight, while the block lasts."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def ask(self, parts: Sequence[bytes], timeout_s: float) -> Exchange:
        """Send a request, return when the answer's head is there.

        EngineFailureError if that fails; from then on an exchange is lost that is silent for `timeout_s`.
        """
        connection = self._take_idle()
        if connection is not None:
            with suppress(_StaleError):
                return await self._exchange(connection, parts, timeout_s)
        return await self._exchange(await self._connect(), parts, timeout_s)

    async def fetch(self, parts: Sequence[bytes], max_bytes: int, timeout_s: float) -> tuple[Head, bytes]:
        """Send a request and gather its answer.

        EngineFailureError if that fails, or it is over `max_bytes`, or silent for `timeout_s`.
        """
        exchange = await self.ask(parts, timeout_s)
        try:
            return exchange.head, await exchange.connection.collect(max_bytes)
        finally:
            exchange.connection.close()

    def close(self) -> None:
        """Abort every connection."""
        for connection in list(self._open):
            connection.abort()

    async def _exchange(
        self, connection: EngineConnection, parts: Sequence[bytes], timeout_s: float
    ) -> Exchange:
        try:
            return Exchange(await connection.ask(parts, timeout_s), connection)
        except BaseException as error:
            connection.close()
            stale = (
                isinstance(error, EngineFailureError) and error.kind == "closed" and not connection.answered
            )
            if stale and connection.exchanges > 1:
                raise _StaleError from error
            raise

    async def _connect(self) -> EngineConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: EngineConnection(loop, self._release), self._host, self._port, ssl=self._ssl
                )
        except (OSError, TimeoutError) as error:
            kind = "connect_timeout" if isinstance(error, TimeoutError) else "connect"
            raise EngineFailureError(kind, Failure.UNREACHED, str(error)) from None
        self._open.add(connection)
        return connection

    def _take_idle(self) -> EngineConnection | None:
        now_s = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and now_s - connection.idle_since_s < IDLE_MAX_S:
                return connection
            connection.abort()
        return None

    def _release(self, connection: EngineConnection, reusable: bool) -> None:
        if reusable and len(self._idle) < IDLE_MAX_CONNECTIONS:
            connection.idle_since_s = asyncio.get_running_loop().time()
            self._idle.append(connection)
            return
        if reusable:
            connection.abort()
        self._open.discard(connection)
        with suppress(ValueError):
            self._idle.remove(connection)


class _StaleError(Exception):
    """A kept connection turned out to be closed."""
