"""Engines' answers in every shape that HTTP allows, and in some that it does not."""

import asyncio
from typing import Any
from unittest import mock

import pytest

from kvloop.router.config import Limits
from kvloop.router.upstream import UNCLAIMED_MAX_BYTES, EngineConnection
from tests.router.fake_engine import DONE, Answer, Asked, chunk, decode_plan, prefill_plan
from tests.router.harness import HELLO, in_loop, stack

BODY = b'{"id":"x"}'
JSON = b"Content-Type: application/json\r\n"
SSE = b"Content-Type: Text/Event-Stream\r\n"


def raw(data: bytes, closes: bool = True) -> Answer:
    """These bytes for an answer."""
    return Answer(raw=data, raw_closes=closes)


GOOD: dict[str, tuple[bytes, bytes]] = {
    "until_close": (b"HTTP/1.1 200 OK\r\n" + JSON + b"\r\n" + BODY, BODY),
    "old": (b"HTTP/1.0 200 OK\r\n" + JSON + b"\r\n" + BODY, BODY),
    "stream_until_close": (b"HTTP/1.1 200 OK\r\n" + SSE + b"\r\n" + chunk("a") + DONE, chunk("a") + DONE),
    "informed_first": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
        b"HTTP/1.1 200 OK\r\n" + JSON + b"Content-Length: 10\r\n\r\n" + BODY,
        BODY,
    ),
    "trailers": (
        b"HTTP/1.1 200 OK\r\n"
        + JSON
        + b"Transfer-Encoding: chunked\r\n\r\na\r\n"
        + BODY
        + b"\r\n0\r\nX: y\r\n\r\n",
        BODY,
    ),
}
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
BAD: dict[str, bytes] = {
    "no_http": b"SSH-2.0-x\r\n",
    "switching": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    "short": b"HTTP/1.1 200 OK\r\n" + JSON + b"Content-Length: 11\r\n\r\n" + BODY,
    "length_and_chunks": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n" + CHUNKED + b"1\r\na\r\n0\r\n\r\n",
    "empty_stream": b"HTTP/1.1 200 OK\r\n" + SSE + b"Content-Length: 0\r\n\r\n",
    "large_head": b"HTTP/1.1 200 OK\r\n" + b"A: " + b"x" * 300_000,
}


@pytest.mark.parametrize("name", GOOD)
def test_any_framing(name: str) -> None:
    """However an answer is framed, the client gets its body, framed for him, and the next turn is served."""
    data, body = GOOD[name]

    @in_loop
    async def check() -> None:
        async with stack(decode=[lambda _: raw(data)], prefill=[]) as router:
            for _ in range(2):
                answer = await router.chat([HELLO])
                assert (answer.status_code, answer.content) == (200, body)
                assert "x" not in answer.headers

    check()


@pytest.mark.parametrize("name", BAD)
def test_no_answer_at_all(name: str) -> None:
    """What is no answer is a failure like any other: another engine is asked, at last it is a 502."""
    data, closes = BAD[name], name != "large_head"

    @in_loop
    async def check() -> None:
        async with stack(prefill=[lambda _: raw(data, closes)]) as router:
            assert (await router.chat([HELLO])).headers["x-kvloop-route"] == "decode"
        async with stack(decode=[lambda _: raw(data), decode_plan]) as router:
            for _ in range(2):
                assert (await router.chat([HELLO])).status_code == 200
        async with stack(decode=[lambda _: raw(data)], prefill=[]) as router:
            assert (await router.chat([HELLO])).status_code == 502

    check()


@in_loop
async def test_bytes_without_a_request() -> None:
    """A connection on which an engine says more than it was asked is not used again."""
    reply = b"HTTP/1.1 200 OK\r\n" + JSON + b"Content-Length: 10\r\n\r\n" + BODY
    async with stack(decode=[lambda _: raw(reply + reply, closes=False)], prefill=[]) as router:
        for number in range(3):
            answer = await router.chat([HELLO])
            assert (answer.status_code, answer.content) == (200, BODY)
            assert router.decode[0].connections == number + 1


@in_loop
async def test_read_ahead_bounded() -> None:
    """An engine that answers prefill with more than the bound is a failure, not memory."""

    def long(asked: Asked) -> Answer:
        answer = prefill_plan(asked)
        answer.pieces.append(b" " * 5_000_000)
        return answer

    async with stack(prefill=[long], limits=Limits(max_answer_bytes=1_000_000)) as router:
        assert (await router.chat([HELLO])).headers["x-kvloop-route"] == "decode"
        assert await router.metric('fallbacks_total{hop="prefill",reason="answer_oversize"}') == 1


def connection() -> tuple[EngineConnection, list[bool]]:
    """A connection over a transport that is none, and what its pool is told."""
    told: list[bool] = []
    one = EngineConnection(asyncio.get_running_loop(), lambda _, reusable: told.append(reusable))
    transport = mock.Mock()
    transport.is_closing.return_value = False
    transport.get_extra_info.return_value = None
    one.connection_made(transport)
    return one, told


@in_loop
async def test_nothing_left_for_the_next() -> None:
    """An answer whose client left before he took it does not reach the next client of that connection."""
    one, told = connection()
    asking = asyncio.ensure_future(one.ask([b"x"], 10))
    await asyncio.sleep(0)
    one.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecret")
    assert (await asking).status == 200
    one.close()  # nobody attached
    assert told == [True]
    asking = asyncio.ensure_future(one.ask([b"x"], 10))
    await asyncio.sleep(0)
    one.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nown")
    await asking
    assert await one.collect(100) == b"own"


@in_loop
async def test_reading_ahead_stops() -> None:
    """Before anybody takes the body, no more than the bound is read; then reading goes on."""
    one, _ = connection()
    asking = asyncio.ensure_future(one.ask([b"x"], 10))
    await asyncio.sleep(0)
    transport: Any = one._transport
    one.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n" + b"x" * UNCLAIMED_MAX_BYTES)
    assert not transport.pause_reading.called
    one.data_received(b"x")
    assert transport.pause_reading.called
    await asking
    transport.resume_reading.reset_mock()
    collecting = asyncio.ensure_future(one.collect(10**6))
    await asyncio.sleep(0)
    assert transport.resume_reading.called
    one.data_received(b"x" * (999999 - UNCLAIMED_MAX_BYTES - 1))
    assert len(await collecting) == 999999


@in_loop
async def test_idle_connection_that_speaks() -> None:
    """Bytes on a connection that waits for its next request close it at once."""
    one, _ = connection()
    transport: Any = one._transport
    one.data_received(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
    assert transport.abort.called
    assert not one.usable
