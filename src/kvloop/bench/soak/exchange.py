"""One HTTP exchange as a soak's clients have them: to the end, broken off on purpose, or slowly.

On asyncio streams and without a client library, for a library tries again, pools and hides. What came of an
exchange is a value: an answer as far as it got, and how its connection ended.
"""

import asyncio
import contextlib
import socket
from dataclasses import dataclass, field

LIMIT_BYTES = 1 << 20  # of one line, and of what waits to be read
SLOW_BUFFER_BYTES = 4096
SLOW_PAUSE_S = 0.03
SLOW_PAUSES = 40  # then a slow reader reads on as fast as it comes


@dataclass(frozen=True, slots=True)
class Manner:
    """How a client behaves. `leaves_after`: it is gone after so many reads, 0 for at once, None for never."""

    slow: bool = False
    leaves_after: int | None = None


@dataclass(slots=True)
class Answer:
    """What came: `status` 0 for no head at all. `whole`: as HTTP has it, to its last byte."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    whole: bool = False
    left: bool = False

    @property
    def is_stream(self) -> bool:
        """Whether it is made of events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")


class Line:
    """One client's connection, opened when it is needed and kept while both sides keep it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    def close(self) -> None:
        """Hang up."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def ask(self, path: str, headers: dict[str, str], body: bytes, manner: Manner) -> Answer:
        """Send a request and read its answer, as far as it comes. A broken connection shows in it."""
        answer = Answer()
        keeps = False
        try:
            reader, writer = await self._open(manner)
            words = {"host": "router", "content-type": "application/json", "content-length": str(len(body))}
            lines = "".join(f"{name}: {value}\r\n" for name, value in (words | headers).items())
            writer.write(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body)
            await writer.drain()
            if manner.leaves_after == 0:
                answer.left = True
            else:
                keeps = await _read(reader, answer, manner)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            pass  # the answer says how far it came
        finally:
            if not keeps or manner.slow:
                self.close()
        return answer

    async def raw(self, data: bytes) -> bytes:
        """Send bytes that may be anything, and read until the other side ends it or has said enough."""
        try:
            reader, writer = await self._open(Manner())
            writer.write(data)
            with contextlib.suppress(ConnectionError):
                writer.write_eof()
            return await reader.read(LIMIT_BYTES)
        except OSError:
            return b""
        finally:
            self.close()

    async def _open(self, manner: Manner) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        kept = self._reader is not None and not self._reader.at_eof()
        if kept and not manner.slow:
            assert self._reader is not None
            assert self._writer is not None
            return self._reader, self._writer
        self.close()
        made = socket.socket()
        made.setblocking(False)
        if manner.slow:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER_BYTES)
        try:
            await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", self._port))
        except OSError:
            made.close()
            raise
        limit = SLOW_BUFFER_BYTES if manner.slow else LIMIT_BYTES
        self._reader, self._writer = await asyncio.open_connection(sock=made, limit=limit)
        return self._reader, self._writer


async def _read(reader: asyncio.StreamReader, answer: Answer, manner: Manner) -> bool:
    """Read a response into `answer`. Whether the connection can be used again."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    answer.status = int(head[0].split(" ", 2)[1])
    answer.headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])
    }
    chunked = answer.headers.get("transfer-encoding") == "chunked"
    left_bytes = int(answer.headers.get("content-length", "0"))
    parts: list[bytes] = []
    reads = 0
    try:
        while True:
            if chunked:
                size = int(await reader.readline(), 16)
                parts.append((await reader.readexactly(size + 2))[:-2])
                if not size:
                    break
            else:
                if not left_bytes:
                    break
                parts.append(await reader.read(min(left_bytes, LIMIT_BYTES)))
                if not parts[-1]:
                    raise asyncio.IncompleteReadError(b"", left_bytes)
                left_bytes -= len(parts[-1])
            reads += 1
            if reads == manner.leaves_after:
                answer.left = True
                return False
            if manner.slow and reads <= SLOW_PAUSES:
                await asyncio.sleep(SLOW_PAUSE_S)
        answer.whole = True
    finally:
        answer.body = b"".join(parts)
    return answer.headers.get("connection", "").lower() != "close"
