"""The bounds on what clients send: sizes, numbers, times, and the grammar of HTTP itself."""

import asyncio
import json
import socket

import pytest

from kvloop.router.config import Limits, Timeouts
from tests.router.fake_engine import Answer, Asked, chunk, decode_plan, json_answer, stream_answer
from tests.router.harness import HELLO, chunked, get, in_loop, post, raw_client, stack

BODY = json.dumps({"model": "tiny", "messages": [HELLO]}).encode()


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


@in_loop
async def test_too_many_members() -> None:
    """A request of more members than the bound is a 400 in OpenAI's shape, and the connection goes on."""
    async with stack() as router, raw_client(router.port) as client:
        client.send(post({"model": "tiny", "messages": [HELLO], **{f"m{one}": 0 for one in range(20_000)}}))
        status, _, body = await client.answer()
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (400, "too_many_members")
        assert "more than 1024 members" in error["message"]
        client.send(post(BODY))
        assert (await client.answer())[0] == 200
        assert len(router.prefill[0].asked) == 1


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
        for _ in range(60):  # together more than the bound
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
async def test_clients_that_do_not_read() -> None:
    """An answer that nobody takes is given up in time, whole or streamed, and with it decode's request."""

    def endless(asked: Asked) -> Answer:
        if asked.body.get("stream"):
            return stream_answer(*[chunk("x" * 60_000)] * 2000)
        return json_answer(b'{"choices":[],"x":"%b"}' % (b"x" * (30 << 20)))

    timeouts = Timeouts(client_timeout_s=0.1, keep_alive_s=0.2, drain_timeout_s=0.1)
    loop = asyncio.get_running_loop()
    async with stack(decode=[endless], timeouts=timeouts, limits=Limits(max_connections=1)) as router:
        for body in ({"stream": True}, {}):
            for headers in ("", "Connection: close\r\n"):
                with socket.socket() as client:
                    client.setblocking(False)
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
                    await loop.sock_connect(client, ("127.0.0.1", router.port))
                    request = post({"model": "tiny", "messages": [HELLO], **body}, headers=headers)
                    await loop.sock_sendall(client, request)
                    while await _health(router.port) == 503:  # there is room for one connection only
                        await asyncio.sleep(0.02)
        assert len(router.decode[0].generations()) == 4


async def _health(port: int) -> int:
    async with raw_client(port) as client:
        client.send(get("/health"))
        return (await client.answer())[0]
