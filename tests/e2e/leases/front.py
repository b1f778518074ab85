"""What makes a deployment's control messages take another way: its decode engine seen through a front.

A handle names the address to ask, so whoever passes the answer on can change it for whoever reads it next:
the router behind it renews, and the prefill engine claims, over the link that this front names. Each HTTP
exchange is passed on whole.
"""

import http.client
import re
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from kvloop.errors import HandleError
from kvloop.local.stack import Engine
from kvloop.wire.handle import decode_handle
from tests.e2e.link import HOST, Link
from tests.e2e.turns import REQUEST_TIMEOUT_S

_HANDLE = re.compile(rb'(?<="kvloop_handle":")[\w-]+')


class Front:
    """An HTTP server that passes everything on to `decode`, and handles with `link` for their address. A
    context manager. `lease_ids` are those that passed."""

    def __init__(self, decode: Engine, link: Link, secret: bytes) -> None:
        self.lease_ids: list[str] = []
        self._decode = decode
        self._link = link
        self._secret = secret
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                front.pass_on(self)

            def do_POST(self) -> None:
                front.pass_on(self)

            def log_message(self, *_: Any) -> None:
                """Nothing: the engine logs."""

        self._server = ThreadingHTTPServer((HOST, 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://{HOST}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        """Serve."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def pass_on(self, asked: BaseHTTPRequestHandler) -> None:
        """One exchange."""
        body = asked.rfile.read(int(asked.headers.get("content-length") or 0))
        connection = http.client.HTTPConnection(HOST, self._decode.port, timeout=REQUEST_TIMEOUT_S)
        try:
            headers = {name: value for name, value in asked.headers.items() if name.lower() != "host"}
            connection.request(asked.command, asked.path, body, headers)
            answer = connection.getresponse()
            text = _HANDLE.sub(self._renamed, answer.read())
            asked.send_response(answer.status)
            asked.send_header("content-type", answer.headers.get("content-type") or "text/plain")
            asked.send_header("content-length", str(len(text)))
            asked.end_headers()
            asked.wfile.write(text)
        finally:
            connection.close()

    def _renamed(self, found: re.Match[bytes]) -> bytes:
        text = found.group().decode()
        with suppress(HandleError):
            self.lease_ids.append(decode_handle(text, self._secret).lease_id)
            return self._link.rename(text).encode()
        return found.group()
