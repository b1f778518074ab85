"""HTTP/1.1 as clients speak it: in order, within bounds, never in two minds about where a message ends."""

import asyncio
import json
from typing import Any
from unittest import mock

import pytest

from kvloop.router.config import Limits, Timeouts
from tests.router.fake_engine import Answer, Asked, decode_plan
from tests.router.harness import HELLO, in_loop, post, raw_client, stack, until

TURN: dict[str, Any] = {"model": "tiny", "messages": [HELLO]}
BODY = json.dumps(TURN).encode()


def get(path: str, method: str = "GET", headers: str = "") -> bytes:
    """A request without a body."""
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode()


def chunked(body: bytes, size: int = 7) -> bytes:
    """A request in chunks."""
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    framed = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + framed + b"0\r\nX-Trailer: 1\r\n\r\n"


@in_loop
async def test_routes() -> None:
    """Unknown paths are 404, wrong methods 405 with what is allowed, all in OpenAI's shape."""
    async with stack() as router, raw_client(router.port) as client:
        for method, path, status, allow in (
            ("GET", "/nothing", 404, None),
            ("POST", "/v1/embeddings", 404, None),
            ("GET", "/v1/chat/completions", 405, "POST"),
            ("DELETE", "/v1/models", 405, "GET, HEAD"),
            ("OPTIONS", "/health", 405, "GET, HEAD"),
            ("GET", "/health?x=1", 200, None),
        ):
            client.send(get(path, method))
            answered, headers, body = await client.answer()
            assert (answered, headers.get("allow")) == (status, allow)
            if status != 200:
                assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


@in_loop
async def test_head() -> None:
    """HEAD has GET's head and no body, also where it fails."""
    async with stack() as router, raw_client(router.port) as client:
        for path in ("/health", "/v1/models", "/nothing"):
            client.send(get(path, "HEAD") + get(path))
            first = await client.answer(head_only=True)
            second = await client.answer()
            assert first[0] == second[0]
            assert first[1]["content-length"] == second[1]["content-length"] == str(len(second[2]))


@in_loop
async def test_models() -> None:
    """`/v1/models` is the engines' own answer, or 502 where none can be reached."""
    async with stack() as router:
        models = await router.client.get("/v1/models", headers={"Authorization": "Bearer k"})
        assert [model["id"] for model in models.json()["data"]] == ["tiny"]
        assert router.decode[0].asked[0].headers["authorization"] == "Bearer k"
        for engine in (*router.prefill, *router.decode):
            await engine.stop()
        assert (await router.client.get("/v1/models")).status_code == 502


@in_loop
async def test_pipelined_in_order() -> None:
    """Requests sent without waiting are answered one at a time, in order, though the first is the slowest."""

    def slow_first(asked: Asked) -> Answer:
        answer = decode_plan(asked)
        answer.before_head = 0.1 if asked.headers["x-served"] == "1" else None
        answer.headers["x-number"] = asked.headers["x-served"]
        return answer

    async with stack(decode=[slow_first]) as router, raw_client(router.port) as client:
        client.send(post(TURN) + get("/health") + post(TURN) + get("/nothing"))
        answers = [await client.answer() for _ in range(4)]
        assert [answer[0] for answer in answers] == [200, 200, 200, 404]
        assert [answer[1].get("x-number") for answer in answers] == ["1", None, "2", None]


@in_loop
async def test_byte_by_byte() -> None:
    """A request is the same however its bytes are cut, with a length or in chunks."""
    async with stack() as router, raw_client(router.port) as client:
        for request in (post(BODY), chunked(BODY)):
            for byte in request:
                client.send(bytes((byte,)))
                await asyncio.sleep(0)
            status, _, _ = await client.answer()
            assert status == 200
        raws = [asked.raw for asked in router.decode[0].asked]
        assert all(raw.startswith(BODY[:-1]) for raw in raws)
        assert "x-trailer" not in router.decode[0].asked[1].headers


@in_loop
async def test_expect_continue() -> None:
    """A client that waits for leave to send its body gets it; if the body is too large, a refusal instead."""
    async with stack(limits=Limits(max_body_bytes=1000)) as router, raw_client(router.port) as client:
        head, _, body = post(BODY, headers="Expect: 100-continue\r\n").partition(b"\r\n\r\n")
        client.send(head + b"\r\n\r\n")
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(body)
        assert (await client.answer())[0] == 200
        client.send(get("/v1/completions", "POST", "Expect: 100-continue\r\nContent-Length: 1001\r\n"))
        assert (await client.answer())[0] == 413
        assert await client.closed()


@in_loop
async def test_continue_waits_its_turn() -> None:
    """Leave to send a body is not given in the middle of another answer."""

    def slow(asked: Asked) -> Answer:
        answer = decode_plan(asked)
        answer.before_head = 0.05
        return answer

    async with stack(decode=[slow]) as router, raw_client(router.port) as client:
        head, _, body = post(BODY, headers="Expect: 100-continue\r\n").partition(b"\r\n\r\n")
        client.send(post(BODY) + head + b"\r\n\r\n")
        assert (await client.answer())[0] == 200
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(body)
        assert (await client.answer())[0] == 200


REFUSED: dict[str, tuple[bytes, int]] = {
    "not_http": (b"hello\r\n\r\n", 400),
    "length_and_chunks": (
        get("/", "POST", "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n") + b"3\r\nabc\r\n0\r\n\r\n",
        400,
    ),
    "chunks_and_length": (
        get("/", "POST", "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n") + b"3\r\nabc\r\n0\r\n\r\n",
        400,
    ),
    "two_lengths": (get("/", "POST", "Content-Length: 3\r\nContent-Length: 4\r\n") + b"abcd", 400),
    "bad_length": (get("/", "POST", "Content-Length: -3\r\n"), 400),
    "unknown_coding": (get("/", "POST", "Transfer-Encoding: gzip\r\n"), 400),
    "bad_chunk": (get("/", "POST", "Transfer-Encoding: chunked\r\n") + b"zz\r\n", 400),
    "folded_header": (get("/", headers="A: b\r\n c: d\r\n"), 400),
    "space_before_colon": (get("/", headers="A : b\r\n"), 400),
    "large_head": (get("/", headers="A: " + "x" * 2000 + "\r\n"), 431),
    "many_headers": (get("/", headers="A: b\r\n" * 300), 431),
    "long_path": (get("/" + "x" * 2000), 431),
    "endless_head": (b"GET / HTTP/1.1\r\nA: " + b"x" * 5000, 431),
    "large_trailers": (chunked(b"{}")[:-2] + b"A: " + b"x" * 2000 + b"\r\n\r\n", 431),
    "large_length": (get("/", "POST", "Content-Length: 3001\r\n"), 413),
    "large_chunks": (chunked(b"x" * 3001, 500), 413),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """What breaks HTTP or a bound is refused after the requests before it, and ends the connection."""
    request, status = REFUSED[name]

    @in_loop
    async def check() -> None:
        limits = Limits(max_header_bytes=1000, max_body_bytes=3000)
        async with stack(limits=limits) as router, raw_client(router.port) as client:
            client.send(post(BODY) + request[:5])
            await asyncio.sleep(0.005)
            client.send(request[5:])
            assert (await client.answer())[0] == 200
            answered, headers, body = await client.answer()
            assert (answered, headers["connection"]) == (status, "close")
            assert json.loads(body)["error"]["type"] == "invalid_request_error"
            assert await client.closed()
            assert len(router.decode[0].asked) == 1

    check()


@in_loop
async def test_at_the_bound() -> None:
    """A body of exactly the bound is served."""
    padded = BODY + b" " * (3000 - len(BODY))
    async with stack(limits=Limits(max_body_bytes=3000)) as router, raw_client(router.port) as client:
        client.send(post(padded) + chunked(padded, 100))
        assert [(await client.answer())[0] for _ in range(2)] == [200, 200]


@in_loop
async def test_bodies_bounded_together() -> None:
    """All bodies together have a bound, and what was taken of it comes back."""
    async with stack(limits=Limits(max_buffered_bytes=2500)) as router:
        for _ in range(2):
            async with raw_client(router.port) as first, raw_client(router.port) as second:
                first.send(get("/v1/completions", "POST", "Content-Length: 2400\r\n") + b"x" * 2000)
                await asyncio.sleep(0.02)
                second.send(post(b"x" * 1000))
                assert (await second.answer())[0] == 503
            await asyncio.sleep(0.02)
        assert (await router.chat([HELLO])).status_code == 200


@in_loop
async def test_connections_bounded() -> None:
    """One connection too many is told so, and the others work on."""
    async with stack(limits=Limits(max_connections=1)) as router, raw_client(router.port) as first:
        first.send(get("/health"))
        assert (await first.answer())[0] == 200
        async with raw_client(router.port) as second:
            assert (await second.answer())[0] == 503
        first.send(get("/health"))
        assert (await first.answer())[0] == 200


@in_loop
async def test_slow_clients() -> None:
    """A request that does not come in is refused in time, in its head or in its body."""
    timeouts = Timeouts(client_timeout_s=0.1, keep_alive_s=1000, drain_timeout_s=0.1)
    for begun in (b"GET /health HTT", get("/v1/completions", "POST", "Content-Length: 100\r\n") + b"x"):
        async with stack(timeouts=timeouts) as router, raw_client(router.port) as client:
            client.send(begun)
            assert (await client.answer())[0] == 408
            assert await client.closed()


@in_loop
async def test_idle_clients() -> None:
    """A connection without a request is closed in its own time, before the first request and after one."""
    timeouts = Timeouts(client_timeout_s=0.1, keep_alive_s=0.2, drain_timeout_s=0.1)
    async with stack(timeouts=timeouts) as router:
        for request in (b"", get("/health")):
            async with raw_client(router.port) as client:
                client.send(request)
                if request:
                    assert (await client.answer())[0] == 200
                assert await client.closed()


@in_loop
async def test_slow_answer_is_no_idleness() -> None:
    """A request that takes longer than the times for clients is answered."""

    def slow(asked: Asked) -> Answer:
        answer = decode_plan(asked)
        answer.before_head = 0.3
        return answer

    timeouts = Timeouts(client_timeout_s=0.1, keep_alive_s=0.1, drain_timeout_s=0.1)
    async with stack(decode=[slow], timeouts=timeouts) as router:
        assert (await router.chat([HELLO])).status_code == 200


@in_loop
async def test_connection_close() -> None:
    """Who asks for the end of the connection gets it, and HTTP/1.0 clients unless they ask to stay."""
    async with stack() as router:
        for request in (
            get("/health", headers="Connection: close\r\n"),
            get("/health").replace(b"1.1", b"1.0"),
        ):
            async with raw_client(router.port) as client:
                client.send(request)
                _, headers, _ = await client.answer()
                assert headers["connection"] == "close"
                assert await client.closed()
        async with raw_client(router.port) as client:
            client.send(2 * get("/health", headers="Connection: keep-alive\r\n").replace(b"1.1", b"1.0"))
            for _ in range(2):
                assert (await client.answer())[1]["connection"] == "keep-alive"


@in_loop
async def test_upgrade_ignored() -> None:
    """An offer to change the protocol is ignored: the request is answered, and the connection closed."""
    async with stack() as router, raw_client(router.port) as client:
        client.send(get("/health", headers="Connection: Upgrade\r\nUpgrade: h2c\r\n"))
        assert (await client.answer())[0] == 200
        assert await client.closed()


@in_loop
async def test_hop_headers_stay() -> None:
    """Headers of one connection are not passed on, nor what `Connection` names, nor the router's own."""
    own = "Connection: keep-alive, x-secret\r\nX-Secret: 1\r\nTE: trailers\r\nX-Kvloop-Route: no\r\n"
    async with stack() as router, raw_client(router.port) as client:
        client.send(post(BODY, headers=own + "X-Mine: 1\r\nAccept-Encoding: gzip\r\nKeep-Alive: 5\r\n"))
        assert (await client.answer())[0] == 200
        for asked in (*router.prefill[0].asked, *router.decode[0].asked):
            names = set(asked.headers)
            assert "x-mine" in names
            assert not names & {
                "x-secret",
                "te",
                "x-kvloop-route",
                "accept-encoding",
                "keep-alive",
                "connection",
            }


@in_loop
async def test_validation_errors() -> None:
    """A body that the router refuses is a 400 that names the field, and no engine hears of it."""
    async with stack() as router:
        for body, param in (
            (b"{", None),
            (b'{"messages":[]}', "model"),
            (b'{"model":"m","messages":[],"kv_transfer_params":{}}', "kv_transfer_params"),
        ):
            answer = await router.client.post("/v1/chat/completions", content=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["type"]) == (
                400,
                param,
                "invalid_request_error",
            )
            assert answer.headers["x-request-id"]
        assert not router.prefill[0].asked
        assert not router.decode[0].asked


@in_loop
async def test_internal_failure() -> None:
    """A fault of the router's own is a 500, and the connection serves on."""
    async with stack() as router, raw_client(router.port) as client:
        with mock.patch("kvloop.router.proxy.read_generation", side_effect=ZeroDivisionError):
            client.send(post(BODY))
            status, _, body = await client.answer()
        assert (status, json.loads(body)["error"]["type"]) == (500, "server_error")
        client.send(post(BODY))
        assert (await client.answer())[0] == 200


@in_loop
async def test_many_at_once() -> None:
    """Hundreds of clients at once each get their own answer."""

    def echo(asked: Asked) -> Answer:
        answer = decode_plan(asked)
        answer.headers["x-echo"] = asked.body["messages"][0]["content"]
        return answer

    async with stack(decode=[echo, echo], prefill=None) as router:

        async def one(number: int) -> None:
            body = {
                "model": "tiny",
                "messages": [{"role": "user", "content": str(number)}],
                "stream": number % 2 == 0,
            }
            async with raw_client(router.port) as client:
                for _ in range(2):
                    client.send(post(body))
                    status, headers, _ = await client.answer()
                    assert (status, headers["x-echo"]) == (200, str(number))

        await asyncio.gather(*(one(number) for number in range(200)))
        await until(lambda: True)
