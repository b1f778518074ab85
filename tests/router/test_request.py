"""The request parser without a connection: the same requests at any cut, and books that balance."""

import tracemalloc

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.router.config import Limits
from kvloop.router.request import BodyBudget, Request, RequestParser

LIMITS = Limits(max_header_bytes=400, max_body_bytes=100)
REQUESTS = [
    b"GET /a?b=c HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nX-A: 1\r\nx-a: 2\r\n\r\nhello",
    (
        b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nT: 1\r\n\r\n"
    ),
    b"POST /d HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 0\r\n\r\n",
]
BROKEN = b"POST /e HTTP/1.1\r\nHost: x\r\nContent-Length: 101\r\n\r\n"


def parsed(pieces: list[bytes]) -> tuple[list[Request], RequestParser, BodyBudget]:
    """What a parser makes of these pieces."""
    budget = BodyBudget(10**6)
    parser = RequestParser(LIMITS, budget)
    requests = [request for piece in pieces for request in parser.feed(piece)]
    return requests, parser, budget


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(REQUESTS), max_size=5), st.booleans(), st.data())
def test_at_any_cut(stream: list[bytes], broken: bool, data: st.DataObject) -> None:
    """Requests are the same however their bytes are cut, and so is the refusal that ends them."""
    whole = b"".join(stream) + (BROKEN if broken else b"")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=10)))
    pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    requests, parser, budget = parsed(pieces)
    expected = [parsed([one])[0][0] for one in stream]
    assert requests == expected
    assert (parser.refusal is not None and parser.refusal.status == 413) == broken
    assert budget.left_bytes == 10**6 - sum(len(request.body) for request in requests)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=300) | st.sampled_from(REQUESTS), st.binary(max_size=50), st.integers(0, 300))
def test_any_bytes(start: bytes, middle: bytes, cut: int) -> None:
    """No bytes raise anything, after a refusal nothing is read, and discarding balances the budget."""
    data = start[:cut] + middle + start[cut:]
    requests, parser, budget = parsed([data])
    if parser.refusal is not None:
        assert parser.feed(REQUESTS[0]) == []
    parser.discard()
    assert budget.left_bytes == 10**6 - sum(len(request.body) for request in requests)


def test_headers_read() -> None:
    """Names come in lower case, values as they are, and of several the last one counts."""
    (request,), _, _ = parsed([REQUESTS[1]])
    assert (request.method, request.path, request.body) == ("POST", "/b", b"hello")
    assert request.headers == [(b"host", b"x"), (b"content-length", b"5"), (b"x-a", b"1"), (b"x-a", b"2")]
    assert (request.get(b"x-a"), request.get(b"nothing")) == (b"2", b"")
    assert parsed([REQUESTS[0]])[0][0].path == "/a"
    assert parsed([REQUESTS[3]])[0][0].keep_alive


def test_endless_trailers() -> None:
    """Trailers without an end are refused while they come in."""
    head = b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nT: "
    _, parser, _ = parsed([head, *[b"x" * 100] * 5])
    assert parser.refusal is not None
    assert parser.refusal.status == 431


def test_body_in_large_reads() -> None:
    """A body is no head, in however large reads it comes: only its own bound counts, chunked or not."""
    limits = Limits(max_header_bytes=400, max_body_bytes=10_000)
    for head, framed in (
        (b"Content-Length: 9000", b"x" * 9000),
        (b"Transfer-Encoding: chunked", b"bb8\r\n%b\r\n" % (b"x" * 3000) * 3 + b"0\r\n\r\n"),
    ):
        whole = b"POST /c HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n%b" % (head, framed)
        parser = RequestParser(limits, BodyBudget(10**6))
        pieces = [whole[:50], *(whole[start : start + 1000] for start in range(50, len(whole), 1000))]
        bodies = [request.body for piece in pieces for request in parser.feed(piece)]
        assert parser.refusal is None
        assert bodies == [b"x" * 9000]


@pytest.mark.parametrize("sizes", [(2,), (1, 1030), (1030, 1, 1)])
def test_a_body_takes_no_more_than_its_bytes(sizes: tuple[int, ...]) -> None:
    """In however small pieces it comes: what is held of it is little more than what counts as held."""
    pieces = [b"%x\r\n%b\r\n" % (size, b"x" * size) for size in sizes]
    framed = b"".join(pieces) * (200_000 // sum(sizes))
    parser = RequestParser(Limits(max_body_bytes=10**6), BodyBudget(10**6))
    parser.feed(b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    tracemalloc.start()
    try:
        for start in range(0, len(framed), 65_536):
            parser.feed(framed[start : start + 65_536])
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert parser.body_bytes > 190_000
    assert held_bytes < 1.5 * parser.body_bytes
    (request,) = parser.feed(b"0\r\n\r\n")
    assert request.body == b"x" * len(request.body)
    assert len(request.body) > 190_000


def test_many_requests_in_one_read() -> None:
    """Requests that come whole in one read are no head either, however many they are."""
    head, rest = REQUESTS[0][:10], REQUESTS[0][10:]
    requests, parser, _ = parsed([head, rest + REQUESTS[0] * 50 + head])
    assert len(requests) == 51
    assert parser.refusal is None


@pytest.mark.parametrize("lenient", [b"GET / HTTP/1.1\nA: b\n\n", b"GET / HTTP/1.1\r\nA: b\r\n c\r\n\r\n"])
def test_llhttp_is_strict(lenient: bytes) -> None:
    """The installed llhttp reads neither bare line feeds nor folded headers: refusals rest on that."""
    with pytest.raises(httptools.HttpParserError):
        httptools.HttpRequestParser(object()).feed_data(lenient)
