"""An engine that is none: it speaks vLLM's side of the protocol, tells what it was asked, and misbehaves on
demand.

A raw asyncio server, so that it can do what no HTTP framework would: break off in the middle of an event,
answer nothing, close a kept connection at the wrong moment. One coroutine per connection; `Plan` says what
comes next.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

TURN = {
    "prompt_tokens": 100,
    "local_tokens": 16,
    "returned_tokens": 64,
    "computed_tokens": 20,
    "reason": None,
}


@dataclass
class Asked:
    """A request as it came in."""

    method: str
    path: str
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> dict[str, Any]:
        """The request's JSON."""
        loaded: dict[str, Any] = json.loads(self.raw)
        return loaded

    @property
    def params(self) -> dict[str, Any]:
        """Its `kv_transfer_params`."""
        params: dict[str, Any] = self.body["kv_transfer_params"]
        return params


@dataclass
class Answer:
    """What an engine does with a request.

    `pieces` of the body are written one by one; a number is a pause in seconds, an event is waited for, and
    None breaks the connection off. `raw` is written as it is, instead of all this.
    """

    status: int = 200
    content_type: str = "application/json"
    pieces: list[bytes | float | asyncio.Event | None] = field(default_factory=list)
    chunked: bool = True
    headers: dict[str, str] = field(default_factory=dict)
    before_head: float | asyncio.Event | None = None
    no_answer: bool = False
    raw: bytes | None = None
    raw_closes: bool = True


def json_answer(body: dict[str, Any] | bytes, status: int = 200) -> Answer:
    """A JSON answer with a length."""
    raw = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    return Answer(status, pieces=[raw], chunked=False)


class Counted(list[Any]):
    """Pieces of an answer, and how many of them an engine has `written`."""

    written = 0

    def __iter__(self) -> Iterator[Any]:
        for one in super().__iter__():
            yield one
            self.written += 1

    async def stand_still(self) -> None:
        """Wait until some have been written and no more are."""
        before = -1
        while self.written <= 10 or self.written != before:
            before = self.written
            await asyncio.sleep(0.2)


def stream_answer(*pieces: bytes | float | asyncio.Event | None) -> Answer:
    """A stream of events, one chunk per piece."""
    return Answer(content_type="text/event-stream; charset=utf-8", pieces=list(pieces))


def handle_event(handle: str) -> bytes:
    """What kvloop's endpoint plugin adds on vLLM 0.32."""
    params = {"kvloop_handle": handle}
    event = {"object": "kvloop.handle", "choices": [], "kv_transfer_params": params}
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


def chunk(text: str, **more: Any) -> bytes:
    """One event of a streamed chat answer."""
    event = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "tiny",
        "choices": [{"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}],
        **more,
    }
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
Plan = Callable[[Asked], Answer]


def prefill_plan(asked: Asked) -> Answer:
    """A well-behaved kvloop prefill engine."""
    turn = TURN if "kvloop_handle" in asked.params else {**TURN, "returned_tokens": 0, "computed_tokens": 84}
    return json_answer(
        {
            "id": "x",
            "choices": [
                {"index": 0, "message": {"role": "assistant", "content": "A"}, "finish_reason": "length"}
            ],
            "usage": {"prompt_tokens": 100, "completion_tokens": 1, "total_tokens": 101},
            "kv_transfer_params": {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": [[1, 2, 3]],
                "remote_engine_id": "p0",
                "kvloop_turn": turn,
            },
        }
    )


def decode_plan(asked: Asked) -> Answer:
    """A well-behaved decode engine; its handles count up with the requests that it has served."""
    served = asked.headers["x-served"]
    if asked.body.get("stream"):
        return stream_answer(chunk("Hel"), chunk("lo"), handle_event(f"h{served}"), DONE)
    return json_answer(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "model": "tiny",
            "choices": [
                {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}
            ],
            "usage": {"prompt_tokens": 100, "completion_tokens": 2, "total_tokens": 102},
            "kv_transfer_params": {"kvloop_handle": f"h{served}"},
        }
    )


def models_plan() -> Answer:
    """`GET /v1/models`."""
    return json_answer({"object": "list", "data": [{"id": "tiny", "object": "model"}]})


class FakeEngine:
    """One engine.

    `plan` answers generation requests; `asked` is what came; `cancelled` counts clients that left. `models`
    answers `/v1/models`, `listed` times so far, the last time asked with `listing_headers`.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.asked: list[Asked] = []
        self.models = models_plan()
        self.listed = 0
        self.listing_headers: dict[str, str] = {}
        self.connections = 0
        self.probes = 0
        self.healthy = True
        self.cancelled = asyncio.Event()
        self.close_after_answer = False
        self.url = ""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self, port: int = 0) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=1 << 26)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Close everything: connections are refused from now on."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    def generations(self) -> list[Asked]:
        """The generation requests that came, in order."""
        return [asked for asked in self.asked if asked.method == "POST"]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        start, *lines = head.rstrip("\r\n").split("\r\n")
        method, path, _ = start.split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        raw = await reader.readexactly(int(headers.get("content-length", "0")))
        headers["x-served"] = str(len(self.generations()) + 1)
        asked = Asked(method, path, headers, raw)
        if path == "/health":
            self.probes += 1
            answer = json_answer(b"", 200 if self.healthy else 503)
        elif path == "/v1/models":
            self.asked.append(asked)
            self.listed += 1
            self.listing_headers = headers
            answer = self.models
        else:
            self.asked.append(asked)
            answer = self.plan(asked)
        watch = asyncio.ensure_future(reader.read(1))
        writing = asyncio.ensure_future(self._write(writer, answer))
        await asyncio.wait((watch, writing), return_when=asyncio.FIRST_COMPLETED)
        if not writing.done():  # the client has left
            self.cancelled.set()
            writing.cancel()
            return False
        if not watch.done():
            watch.cancel()
            await asyncio.wait((watch,))
        return writing.result() and not self.close_after_answer

    async def _write(self, writer: asyncio.StreamWriter, answer: Answer) -> bool:
        await _pause(answer.before_head)
        if answer.no_answer:
            writer.transport.abort()
            return False
        if answer.raw is not None:
            writer.write(answer.raw)
            await writer.drain()
            return not answer.raw_closes
        framing = "transfer-encoding: chunked"
        if not answer.chunked:
            framing = (
                f"content-length: {sum(len(piece) for piece in answer.pieces if isinstance(piece, bytes))}"
            )
        more = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
        writer.write(
            f"HTTP/1.1 {answer.status} X\r\nserver: fake\r\ncontent-type: {answer.content_type}\r\n"
            f"{more}{framing}\r\n\r\n".encode()
        )
        for piece in answer.pieces:
            if piece is None:
                await writer.drain()
                await asyncio.sleep(0.01)
                writer.transport.abort()
                return False
            if isinstance(piece, bytes):
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if answer.chunked else piece)
                await writer.drain()
            else:
                await _pause(piece)
        if answer.chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


async def _pause(what: float | asyncio.Event | None) -> None:
    if isinstance(what, asyncio.Event):
        await what.wait()
    elif what:
        await asyncio.sleep(what)


@asynccontextmanager
async def engines(*plans: Plan) -> AsyncIterator[list[FakeEngine]]:
    """Fake engines, one for each plan, while the block lasts."""
    started = [FakeEngine(plan) for plan in plans]
    for engine in started:
        await engine.start()
    try:
        yield started
    finally:
        for engine in started:
            await engine.stop()
