"""Connections to one engine: taken out of a pool, opened where it is empty, given back after a whole answer.

A connection that is kept for reuse may be closed by the engine at the very moment a request goes out on it,
so a request that got not one byte back on a used connection goes out once more on a new one.
"""

import asyncio
import errno
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvloop.router.turn import Failure
from kvloop.router.upstream import EngineConnection, EngineFailureError, Head

OUT_OF_FILES = "out_of_files"  # the router's own trouble, which says nothing of an engine
IDLE_MAX_S = 4.0  # vLLM's own keep-alive is 5 s
IDLE_MAX_CONNECTIONS = 256  # per engine


@dataclass(slots=True)
class Exchange:
    """An answer under way: its head, and the connection that its body comes over. Close it."""

    head: Head
    connection: EngineConnection


class Pool:
    """The connections to one host and port. `tls` comes with the name that its certificate has to have."""

    def __init__(
        self, host: str, port: int, connect_timeout_s: float, tls: tuple[ssl.SSLContext, str] | None = None
    ) -> None:
        self._host = host
        self._port = port
        self._tls = tls[0] if tls else None
        self._server_name = tls[1] if tls else None
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[EngineConnection] = []
        self._open: set[EngineConnection] = set()
        self._retired = False

    async def ask(self, parts: Sequence[bytes], timeout_s: float) -> Exchange:
        """Send a request, return when the answer's head is there.

        EngineFailureError if that fails; from then on an exchange is lost that is silent for `timeout_s`.
        """
        connection = self._take_idle()
        while True:
            if connection is None:
                connection = await self._connect()
            try:
                return Exchange(await connection.ask(parts, timeout_s), connection)
            except BaseException as error:
                connection.close()
                if not _is_stale(error, connection):
                    raise
            connection = None

    async def fetch(self, parts: Sequence[bytes], max_bytes: int, timeout_s: float) -> tuple[Head, bytes]:
        """Send a request and gather its answer.

        EngineFailureError if that fails, or it is over `max_bytes`, or silent for `timeout_s`.
        """
        exchange = await self.ask(parts, timeout_s)
        try:
            return exchange.head, await exchange.connection.collect(max_bytes)
        finally:
            exchange.connection.close()

    def retire(self, retired: bool = True) -> None:
        """Keep no connection for reuse from now on; or do again."""
        self._retired = retired
        if retired:
            for connection in list(self._idle):
                connection.abort()
            self._idle.clear()

    def close(self) -> None:
        """Abort every connection."""
        for connection in list(self._open):
            connection.abort()

    async def _connect(self) -> EngineConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: EngineConnection(loop, self._release),
                    self._host,
                    self._port,
                    ssl=self._tls,
                    server_hostname=self._server_name,
                )
        except (OSError, TimeoutError, UnicodeError) as error:  # the last: a name that is none
            kind = "connect_timeout" if isinstance(error, TimeoutError) else "connect"
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                kind = OUT_OF_FILES
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
        if reusable and not self._retired and len(self._idle) < IDLE_MAX_CONNECTIONS:
            connection.idle_since_s = asyncio.get_running_loop().time()
            self._idle.append(connection)
            return
        if reusable:
            connection.abort()
        self._open.discard(connection)
        with suppress(ValueError):
            self._idle.remove(connection)


def _is_stale(error: BaseException, connection: EngineConnection) -> bool:
    """Whether a kept connection turned out to be closed; a new one never is."""
    closed = isinstance(error, EngineFailureError) and error.kind == "closed"
    return closed and not connection.answered and connection.exchanges > 1
