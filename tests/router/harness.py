"""A router between fake engines, in the test's own loop; and a client that speaks bytes."""

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvloop

from kvloop.router.config import Choice, Limits, RouterConfig, Timeouts
from kvloop.router.serve import serving
from tests.router.fake_engine import FakeEngine, Plan, decode_plan, engines, prefill_plan

TEST_TIMEOUT_S = 60.0
HELLO = {"role": "user", "content": "hello"}


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a coroutine as a test, on uvloop, in bounded time. Its arguments are fixtures."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(TEST_TIMEOUT_S):
                await test(**fixtures)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(bounded())

    return run


@dataclass
class Stack:
    """A router and what is around it."""

    client: httpx.AsyncClient
    admin: httpx.AsyncClient
    port: int
    prefill: list[FakeEngine]
    decode: list[FakeEngine]

    async def chat(
        self, messages: list[Any], headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        """One chat turn."""
        body = {"model": "tiny", "messages": messages, **fields}
        return await self.client.post("/v1/chat/completions", json=body, headers=headers)

    async def metric(self, name: str) -> float:
        """A metric's value; 0 if it is not there."""
        for line in (await self.admin.get("/metrics")).text.splitlines():
            if line.startswith(f"kvloop_router_{name} "):
                return float(line.rsplit(" ", 1)[1])
        return 0.0


@asynccontextmanager
async def stack(
    prefill: list[Plan] | None = None,
    decode: list[Plan] | None = None,
    limits: Limits | None = None,
    timeouts: Timeouts | None = None,
    **settings: Any,
) -> AsyncIterator[Stack]:
    """A router with engines of these plans (one well-behaved each, if not said otherwise) that reads back
    what there is to read back, unless a `choice` says otherwise."""
    prefill = [prefill_plan] if prefill is None else prefill
    decode = [decode_plan] if decode is None else decode
    async with engines(*prefill, *decode) as started:
        config: dict[str, Any] = {
            "prefill": tuple(engine.url for engine in started[: len(prefill)]),
            "decode": tuple(engine.url for engine in started[len(prefill) :]),
            "host": "127.0.0.1",
            "port": 0,
            "admin_port": 0,
            "models_interval_s": 0,  # engines hear of nothing but what a test sends
            "limits": limits or Limits(),
            "timeouts": timeouts or Timeouts(drain_timeout_s=0.2),
            "choice": Choice("tests.router.return_first:ReturnFirst", append_max_tokens=0),
        }
        async with (
            serving(RouterConfig(**{**config, **settings})) as ports,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports.port}", timeout=10) as client,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports.admin_port}", timeout=10) as admin,
        ):
            yield Stack(client, admin, ports.port, started[: len(prefill)], started[len(prefill) :])


class RawClient:
    """A connection of which every byte is the test's."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        """Write bytes."""
        self.writer.write(data)

    async def answer(self, head_only: bool = False) -> tuple[int, dict[str, str], bytes]:
        """The next answer: its status, headers and body."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        start, *lines = head.rstrip("\r\n").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = b""
        if not head_only and "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        elif not head_only and headers.get("transfer-encoding") == "chunked":
            while piece := await self.chunk():
                body += piece
        return int(start.split()[1]), headers, body

    async def chunk(self) -> bytes:
        """The next chunk of an answer; empty for the last."""
        size = int((await self.reader.readline()).strip(), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def closed(self) -> bool:
        """Whether nothing more comes."""
        try:
            return await self.reader.read() == b""
        except ConnectionError:
            return True


@asynccontextmanager
async def raw_client(port: int) -> AsyncIterator[RawClient]:
    """A raw connection to a router."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()


def post(body: dict[str, Any] | bytes, path: str = "/v1/chat/completions", headers: str = "") -> bytes:
    """A request's bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {len(data)}\r\n\r\n".encode() + data


def get(path: str, method: str = "GET", headers: str = "") -> bytes:
    """A request without a body."""
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode()


def chunked(body: bytes, size: int = 7) -> bytes:
    """A request in chunks."""
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    framed = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + framed + b"0\r\nX-Trailer: 1\r\n\r\n"


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for something to become true."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)
