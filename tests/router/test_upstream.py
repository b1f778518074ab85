"""Engines' answers in every shape that HTTP allows, and in some that it does not."""

import pytest

from kvloop.router.config import Limits
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
    "empty_stream": (b"HTTP/1.1 200 OK\r\n" + SSE + b"Content-Length: 0\r\n\r\n", b""),
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
    data = BAD[name]

    @in_loop
    async def check() -> None:
        async with stack(prefill=[lambda _: raw(data)]) as router:
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
