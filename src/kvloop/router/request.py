"""Bytes into requests, without I/O: llhttp does the grammar, this the bounds.

Whatever breaks HTTP or a bound becomes the parser's `refusal`, a status and a sentence, after which it reads
no more: where a message ends that could not be read is anybody's guess (request smuggling lives on such
guesses). llhttp refuses what has both a length and chunks, two lengths, folded headers and bare line feeds;
`_check_framing` what it takes and another server may take for something else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import httptools
import msgspec

from kvloop.router.config import Limits
from kvloop.router.keys import Key

_HEADER_EXTRA_BYTES = 4  # ": " and the line's end
_SMALL_BYTES = 1024  # an object of its own takes some 50 bytes and more, so smaller pieces are gathered


class Admitted(msgspec.Struct, frozen=True):
    """Whose a request is: its key and tenant, if it has them, and the headers that stay here."""

    key: Key | None = None
    tenant: str | None = None
    withheld: frozenset[bytes] = frozenset()


ANYBODY = Admitted()


@dataclass(slots=True)
class Request:
    """A request, whole. Header names in lower case."""

    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    keep_alive: bool
    http10: bool
    body: bytes = b""
    named: dict[bytes, bytes] = field(default_factory=dict)
    admitted: Admitted = ANYBODY

    def get(self, name: bytes) -> bytes:
        """A header's value (the last, where there are several), or nothing."""
        return self.named.get(name, b"")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why nothing more is read: the status and the sentence for the client."""

    status: int
    message: str
    code: str | None = None
    headers: Sequence[tuple[bytes, bytes]] = ()


class Admission(Protocol):
    """Says by its head whether a request is read any further."""

    def admit(
        self, path: bytes, headers: Sequence[tuple[bytes, bytes]], named: Mapping[bytes, bytes]
    ) -> Admitted | Refusal:
        """Whose it is, or why not."""
        ...


class BodyBudget:
    """What all bodies together may take, in bytes: those that come in, wait, or are being served."""

    def __init__(self, max_bytes: int) -> None:
        self.left_bytes = max_bytes


class _StopError(Exception):
    """Stops llhttp from within a callback."""


def _path(url: bytes) -> bytes:
    """A request target's path: of `/path?query`, or of the same with scheme and host before it."""
    path = url.partition(b"?")[0]
    if path[:1] != b"/" and b"://" in path:
        path = b"/" + path.partition(b"://")[2].partition(b"/")[2]
    return path


class RequestParser:
    """One connection's requests. `receiving`: one has begun and is not whole; `body_bytes`: what it has so
    far.

    `owes_continue`: its client waits for a 100 before he sends the body. A request's body counts against the
    budget until the caller gives it back; what is not whole yet, `discard` gives back.
    """

    def __init__(self, limits: Limits, budget: BodyBudget, gate: Admission | None = None) -> None:
        self.refusal: Refusal | None = None
        self.receiving = False
        self.owes_continue = False
        self.body_bytes = 0
        self._limits = limits
        self._budget = budget
        self._gate = gate
        self._admitted = ANYBODY
        self._parser = httptools.HttpRequestParser(self)
        self._whole: list[Request] = []
        self._in_head = False
        self._silent_bytes = 0  # in reads that brought nothing whole: a head under way, chunk sizes, trailers
        self._got_on = False  # the read that is being fed began a request, or brought some of a body
        self._body: list[bytes | bytearray] = []

    def feed(self, data: bytes) -> list[Request]:
        """The requests that `data` completes. After a refusal, none."""
        if self.refusal is not None:
            return []
        under_way, self._got_on = self.receiving, False
        try:
            self._parser.feed_data(data)
        except (
            httptools.HttpParserUpgrade
        ):  # the request itself is whole; what follows is in no protocol known here
            self.refusal = Refusal(400, "this server speaks HTTP/1.1 only")
        except httptools.HttpParserError as error:
            if self.refusal is None:
                self.refusal = Refusal(400, f"this is not HTTP/1.1: {error}")
        else:
            if self.receiving and under_way and not self._got_on:
                self._silent_bytes += len(data)
            if self._silent_bytes > self._limits.max_header_bytes:
                self.refusal = Refusal(431, f"headers are larger than {self._limits.max_header_bytes} bytes")
        whole, self._whole = self._whole, []
        return whole

    def discard(self) -> None:
        """Give back what the request under way has taken of the budget."""
        self._budget.left_bytes += self.body_bytes
        self.body_bytes = 0
        self._body = []

    # httptools

    def on_message_begin(self) -> None:
        self.receiving = self._in_head = self._got_on = True
        self.owes_continue = False
        self.body_bytes = self._head_bytes = self._silent_bytes = 0
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._named: dict[bytes, bytes] = {}
        self._body = []

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + _HEADER_EXTRA_BYTES
        if self._head_bytes > self._limits.max_header_bytes:
            self._count_head(0)
        if self._in_head:  # else it is a trailer, and nobody asked for one
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._silent_bytes = 0
        self._named = dict(self._headers)
        self._path = _path(self._url)
        version = self._parser.get_http_version()
        self._http10 = version == "1.0"
        self._check_framing(version)
        if self._gate is not None:
            verdict = self._gate.admit(self._path, self._headers, self._named)
            if isinstance(verdict, Refusal):
                self.refusal = verdict
                raise _StopError
            self._admitted = verdict
        length = int(self._named.get(b"content-length", b"0"))
        if length > self._limits.max_body_bytes:
            self._refuse_body()
        if self._named.get(b"expect", b"").lower() == b"100-continue":
            self.owes_continue = length > 0 or b"transfer-encoding" in self._named

    def on_body(self, data: bytes) -> None:
        self.owes_continue = False
        self._silent_bytes, self._got_on = 0, True
        if len(data) >= _SMALL_BYTES:
            self._body.append(data)
        elif self._body and isinstance(self._body[-1], bytearray):
            self._body[-1] += data
        else:
            self._body.append(bytearray(data))
        self.body_bytes += len(data)
        self._budget.left_bytes -= len(data)
        if self.body_bytes > self._limits.max_body_bytes:
            self._refuse_body()
        if self._budget.left_bytes < 0:
            self._refuse(503, "the router holds as many request bodies as it may; try again in a moment")

    def on_message_complete(self) -> None:
        self.receiving = self.owes_continue = False
        request = Request(
            method=self._parser.get_method().decode("latin-1"),
            path=self._path.decode("latin-1"),
            headers=self._headers,
            keep_alive=self._parser.should_keep_alive() and not self._parser.should_upgrade(),
            http10=self._http10,
            body=bytes(self._body[0]) if len(self._body) == 1 else b"".join(self._body),
            named=self._named,
            admitted=self._admitted,
        )
        self._body, self.body_bytes = [], 0
        self._whole.append(request)

    def _check_framing(self, version: str) -> None:
        """Refuse what llhttp takes and somebody else may take for something else (RFC 9112, 3.2 and 6.1)."""
        named = self._named
        hosts = b"host" in named
        if len(named) < len(self._headers):
            names = [name for name, _ in self._headers]
            hosts = names.count(b"host") == 1
            if names.count(b"transfer-encoding") > 1:
                self._refuse(400, "the request has two Transfer-Encoding headers")
        coding = named.get(b"transfer-encoding")
        if coding is not None and (self._http10 or coding.strip().lower() != b"chunked"):
            self._refuse(400, "the only transfer coding is chunked, and in HTTP/1.1")
        if not self._http10 and (not hosts or version != "1.1"):
            self._refuse(400, "this server speaks HTTP/1.1, with one Host header")

    def _count_head(self, size_bytes: int) -> None:
        self._head_bytes += size_bytes
        if self._head_bytes > self._limits.max_header_bytes:
            self._refuse(431, f"headers are larger than {self._limits.max_header_bytes} bytes")

    def _refuse_body(self) -> None:
        self._refuse(413, f"the request body is larger than {self._limits.max_body_bytes} bytes")

    def _refuse(self, status: int, message: str) -> None:
        self.refusal = Refusal(status, message)
        raise _StopError
