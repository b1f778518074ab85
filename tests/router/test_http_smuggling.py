"""Requests whose end, or whose meaning, two servers could see differently: refused, and nothing after them is
read. Each is fed whole and byte by byte to the parser, and some to a router.

The cases are those that request smuggling has lived on, and the musts of RFC 9112.
"""

import asyncio

import pytest

from kvloop.router.config import Limits
from kvloop.router.request import BodyBudget, Request, RequestParser
from tests.router.harness import get, in_loop, raw_client, stack

HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = "Transfer-Encoding: chunked\r\n"


def request(
    headers: str, body: bytes = b"", start: str = "POST / HTTP/1.1", host: str = "Host: x\r\n"
) -> bytes:
    """A request of these headers."""
    return f"{start}\r\n{host}{headers}\r\n".encode() + body


ONE_CHUNK = b"3\r\nabc\r\n0\r\n\r\n"
REFUSED = {
    "the same length twice": request("Content-Length: 3\r\nContent-Length: 3\r\n", b"abc"),
    "a list of lengths": request("Content-Length: 3, 3\r\n", b"abc"),
    "a length with a sign": request("Content-Length: +3\r\n", b"abc"),
    "a length in hex": request("Content-Length: 0x3\r\n", b"abc"),
    "a length with a space": request("Content-Length: 3 4\r\n", b"abc"),
    "no length": request("Content-Length: \r\n", b"abc"),
    "an endless length": request("Content-Length: 99999999999999999999999\r\n", b"abc"),
    "a length with an underscore": request("Content-Length: 1_0\r\n", b"0123456789"),
    "a length in wide digits": request("Content-Length: \uff13\r\n", b"abc"),
    "chunked twice": request("Transfer-Encoding: chunked, chunked\r\n", ONE_CHUNK),
    "chunked not last": request("Transfer-Encoding: chunked, identity\r\n", ONE_CHUNK),
    "another coding below": request("Transfer-Encoding: gzip, chunked\r\n", ONE_CHUNK),
    "not quite chunked": request("Transfer-Encoding: xchunked\r\n", ONE_CHUNK),
    "chunked in quotes": request('Transfer-Encoding: "chunked"\r\n', ONE_CHUNK),
    "chunked after a control character": request("Transfer-Encoding: \x0bchunked\r\n", ONE_CHUNK),
    "two codings": request("Transfer-Encoding: identity\r\n" + CHUNKED, ONE_CHUNK),
    "two codings the other way": request(CHUNKED + "Transfer-Encoding: identity\r\n", ONE_CHUNK),
    "chunks twice": request(CHUNKED * 2, ONE_CHUNK),
    "no coding": request("Transfer-Encoding: \r\n"),
    "chunks in HTTP/1.0": request(CHUNKED, ONE_CHUNK, "POST / HTTP/1.0"),
    "a length in the trailers": request(CHUNKED, b"0\r\nContent-Length: 3\r\n\r\n"),
    "a trailer that is none": request(CHUNKED, b"0\r\nA B\r\n\r\n"),
    "a negative chunk": request(CHUNKED, b"-1\r\nabc\r\n0\r\n\r\n"),
    "a chunk in C's hex": request(CHUNKED, b"0x3\r\nabc\r\n0\r\n\r\n"),
    "an endless chunk": request(CHUNKED, b"10000000000000003\r\nabc\r\n0\r\n\r\n"),
    "a space after a chunk's size": request(CHUNKED, b"3 \r\nabc\r\n0\r\n\r\n"),
    "a space before it": request(CHUNKED, b" 3\r\nabc\r\n0\r\n\r\n"),
    "no size": request(CHUNKED, b"\r\nabc\r\n0\r\n\r\n"),
    "a chunk longer than its size": request(CHUNKED, b"3\r\nabcd\r\n0\r\n\r\n"),
    "a bare line feed after a size": request(CHUNKED, b"3\nabc\r\n0\r\n\r\n"),
    "a bare line feed after a chunk": request(CHUNKED, b"3\r\nabc\n0\r\n\r\n"),
    "a bare line feed in an extension": request(CHUNKED, b"3;a=\nb\r\nabc\r\n0\r\n\r\n"),
    "a bare return in an extension": request(CHUNKED, b"3;a=\rb\r\nabc\r\n0\r\n\r\n"),
    "a bare line feed in a value": request("A: b\nContent-Length: 3\r\n", b"abc"),
    "a bare return in a value": request("A: b\rc\r\n"),
    "a NUL in a value": request("A: b\0c\r\n"),
    "a header without a colon": request("A\r\n"),
    "a header without a name": request(": b\r\n"),
    "a space in a name": request("A B: c\r\n"),
    "a tab before the colon": request("A\t: c\r\n"),
    "a space before the first header": request(" A: b\r\n", host=""),
    "two hosts": request("Host: y\r\n"),
    "the same host twice": request("Host: x\r\n"),
    "no host": request("", host=""),
    "a space in the target": request("", start="GET /a b HTTP/1.1"),
    "a NUL in the target": request("", start="GET /\0 HTTP/1.1"),
    "tabs for spaces": request("", start="GET\t/\tHTTP/1.1"),
    "a method in small letters": request("", start="get / HTTP/1.1"),
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/1.2": request("", start="GET / HTTP/1.2"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/2 in a start line": request("", start="GET / HTTP/2.0"),
    "more after the version": request("", start="GET / HTTP/1.1x"),
}


def parsed(pieces: list[bytes]) -> tuple[list[Request], RequestParser]:
    """What a parser makes of these pieces."""
    parser = RequestParser(Limits(max_header_bytes=1000, max_body_bytes=3000), BodyBudget(10**6))
    return [one for piece in pieces for one in parser.feed(piece)], parser


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """Not served, with a 400, however its bytes are cut; and what is hidden behind it is not read either."""
    data = REFUSED[name] + HIDDEN
    for pieces in ([data], [data[at : at + 1] for at in range(len(data))]):
        requests, parser = parsed(pieces)
        assert requests == []
        assert parser.refusal is not None
        assert parser.refusal.status == 400


TAKEN = {
    "a tab before chunked": request("Transfer-Encoding:\tchunked\r\n", ONE_CHUNK),
    "chunked in capitals": request("Transfer-Encoding: CHUNKED\r\n", ONE_CHUNK),
    "zeros before a size": request(CHUNKED, b"0000000000000000000003\r\nabc\r\n0\r\n\r\n"),
    "extensions": request(CHUNKED, b'3;a=b;c="d e"\r\nabc\r\n0\r\n\r\n'),
    "a body of a GET": request("Content-Length: 3\r\n", b"abc", "GET / HTTP/1.1"),
    "a length named by Connection": request("Connection: content-length\r\nContent-Length: 3\r\n", b"abc"),
    "line breaks before": b"\r\n\r\n" + request("Content-Length: 3\r\n", b"abc"),
    "a whole URL": request("Content-Length: 3\r\n", b"abc", "POST http://y/?b HTTP/1.1"),
    "a whole URL without a path": request("Content-Length: 3\r\n", b"abc", "POST http://y HTTP/1.1"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str) -> None:
    """What is unusual and right is one request of its body, and the next one is the next one."""
    data = TAKEN[name] + HIDDEN
    for pieces in ([data], [data[at : at + 1] for at in range(len(data))]):
        requests, parser = parsed(pieces)
        assert [(one.path, one.body) for one in requests] == [("/", b"abc"), ("/hidden", b"")]
        assert parser.refusal is None


def test_nothing_after_the_end() -> None:
    """What comes after a request that closes its connection is not served: whose is it?"""
    for last in (request("Connection: close\r\n"), request("", start="GET / HTTP/1.0")):
        requests, parser = parsed([last + HIDDEN])
        assert [one.path for one in requests] == ["/"]
        assert parser.refusal is not None


@in_loop
async def test_a_long_pipeline() -> None:
    """Hundreds of requests in one write are answered one by one, and a bad one among them is the last."""
    async with stack() as router, raw_client(router.port) as client:
        client.send(get("/health") * 300 + REFUSED["two hosts"] + get("/health") * 300)
        statuses = [(await client.answer())[0] for _ in range(301)]
        assert statuses == [200] * 300 + [400]
        assert await client.closed()


@in_loop
async def test_oversize_lines() -> None:
    """A line without an end is refused while it comes in, wherever it stands; nothing of it is kept."""
    async with stack(limits=Limits(max_header_bytes=2000)) as router:
        for start in (
            b"GET /",
            b"GET / HTTP/1.1\r\nHost: x\r\nA",
            b"GET / HTTP/1.1\r\nHost: x\r\nA: ",
            request(CHUNKED, b"3;a="),
            request(CHUNKED, b"0\r\nA: "),
        ):
            async with raw_client(router.port) as client:
                client.send(start)
                answer = asyncio.ensure_future(client.answer())
                while not answer.done():
                    client.send(b"x" * 1000)
                    await asyncio.sleep(0.002)
                assert (await answer)[0] == 431
                assert await client.closed()
        assert not router.prefill[0].asked
