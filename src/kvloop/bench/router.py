"""What the router adds: a turn through it beside the same two hops made by the client itself.

Engines that answer at once stand in for vLLM, in a process of their own; the router runs in another, as it
always does; the client is three plain sockets. Routed and direct turns alternate, so that whatever else the
machine does meets both, and the figure is the median of the paired differences. A turn is complete with its
last byte; a streamed one counts up to its first event. `python -m kvloop.bench.router` runs it, and its exit
status says whether the target was met.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from kvloop.router.config import Limits, RouterConfig, Timeouts
from kvloop.router.downstream import ClientConnection, Service
from kvloop.router.request import BodyBudget, Request
from kvloop.router.response import Response
from kvloop.router.serve import serving

TARGET_MS = 2.0
DEFAULT_PAIRS = 300
WARM_UP_PAIRS = 20
EVENTS = 33
HANDOVER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [list(range(100))],
    "remote_engine_id": "p0",
    "kvloop_turn": {
        "prompt_tokens": 16000,
        "local_tokens": 0,
        "returned_tokens": 15900,
        "computed_tokens": 100,
        "reason": None,
    },
}
HANDLE = {"kvloop_handle": "h" * 240}


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case. `target_ms` bounds `added_ms`; `cpu_ms` is what the router used per turn."""

    name: str
    direct_ms: float
    routed_ms: float
    added_ms: float
    added_p95_ms: float
    cpu_ms: float
    target_ms: float = TARGET_MS

    @property
    def met(self) -> bool:
        """Whether the target is met."""
        return self.added_ms < self.target_ms


def chat_body(size_bytes: int, stream: bool) -> bytes:
    """A chat request of about this size: a conversation in messages of 1 KiB."""
    roles = ("user", "assistant")
    messages = [
        {"role": roles[number % 2], "content": f"{number} ".ljust(960, "x")}
        for number in range(max(size_bytes // 1000, 1) | 1)
    ]
    body = {"model": "tiny", "messages": messages, "stream": stream, "max_tokens": 64, "temperature": 0}
    return json.dumps(body, separators=(",", ":")).encode()


def main(words: list[str] | None = None) -> int:
    """Measure, print one row per case, and return 1 if a target was missed."""
    parser = argparse.ArgumentParser(
        prog="python -m kvloop.bench.router", description="what the router adds to a turn"
    )
    parser.add_argument(
        "--pairs",
        type=int,
        default=DEFAULT_PAIRS,
        metavar="COUNT",
        help="turns per case (default: %(default)s)",
    )
    rows = measure(parser.parse_args(words).pairs)
    sys.stdout.write(table(rows))
    waiting, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if waiting > cores + 1:
        sys.stdout.write(
            f"load average {waiting:.1f} on {cores} cores: all but CPU shows the neighbours as well\n"
        )
    return 0 if all(row.met for row in rows) else 1


def measure(pairs: int) -> list[Row]:
    """One row per case, of so many turns each way."""
    with _Process(_engines) as engines:
        prefill, decode = engines.ports
        with _Process(_router, prefill, decode) as router:
            (routed,) = router.ports
            return [
                _measure(
                    name, chat_body(size_bytes, stream), stream, (prefill, decode, routed), pairs, router
                )
                for name, size_bytes, stream in (
                    ("2 KB body, JSON answer", 2_000, False),
                    ("64 KB body, JSON answer", 64_000, False),
                    ("64 KB body, first event", 64_000, True),
                )
            ]


def table(rows: list[Row]) -> str:
    """The rows as text."""
    lines = [
        f"{'case':26}{'direct':>10}{'routed':>10}{'added':>10}{'p95':>10}{'CPU':>10}{'target':>12}  verdict"
    ]
    for row in rows:
        figures = (row.direct_ms, row.routed_ms, row.added_ms, row.added_p95_ms, row.cpu_ms)
        cells = "".join([f"{figure:>7.3f} ms" for figure in figures])
        target = f"< {row.target_ms:.1f} ms"
        lines.append(f"{row.name:26}{cells}{target:>12}  {'met' if row.met else 'MISSED'}")
    return "\n".join(lines) + "\n"


def _measure(
    name: str, body: bytes, stream: bool, ports: tuple[int, int, int], pairs: int, router: "_Process"
) -> Row:
    prefill_port, decode_port, routed_port = ports
    params = {"do_remote_decode": True, "do_remote_prefill": False, **HANDLE}
    short = {"stream": False, "max_tokens": 1, "kv_transfer_params": params}
    to_prefill = json.dumps({**json.loads(body), **short}, separators=(",", ":")).encode()
    to_decode = body[:-1] + b',"kv_transfer_params":' + json.dumps(HANDOVER).encode() + b"}"
    prefill, decode, routed = (_connect(port) for port in (prefill_port, decode_port, routed_port))

    def direct() -> float:
        began_ns = time.perf_counter_ns()
        _turn(prefill, to_prefill, first_event=False)
        return _since_ms(began_ns, _turn(decode, to_decode, first_event=stream))

    def through_router() -> float:
        began_ns = time.perf_counter_ns()
        return _since_ms(began_ns, _turn(routed, body, first_event=stream))

    used_ms = router.cpu_ms()
    timed = [(direct(), through_router()) for _ in range(pairs + WARM_UP_PAIRS)][WARM_UP_PAIRS:]
    added = sorted(through - alone for alone, through in timed)
    for connection in (prefill, decode, routed):
        connection.close()
    return Row(
        name,
        statistics.median(alone for alone, _ in timed),
        statistics.median(through for _, through in timed),
        statistics.median(added),
        added[int(0.95 * (len(added) - 1))],
        (router.cpu_ms() - used_ms) / (pairs + WARM_UP_PAIRS),
    )


def _since_ms(began_ns: int, ended_ns: int) -> float:
    return (ended_ns - began_ns) / 1e6


def _connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _turn(connection: socket.socket, body: bytes, first_event: bool) -> int:
    """One request and its whole answer; the time of its last byte, or of its first event, in nanoseconds."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    answer, first_ns = b"", 0
    while not _whole(answer):
        more = connection.recv(1 << 18)
        if not more:
            raise ConnectionError("an answer broke off")
        answer += more
        if not first_ns and b"data: " in answer:
            first_ns = time.perf_counter_ns()
    if not answer.startswith(b"HTTP/1.1 200"):
        raise ConnectionError(answer[:200].decode())
    return first_ns if first_event else time.perf_counter_ns()


def _whole(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    if not end:
        return False
    lowered = head.lower()
    if b"transfer-encoding: chunked" in lowered:
        return body.endswith(b"0\r\n\r\n")
    return len(body) == int(lowered.split(b"content-length:")[1].split(b"\r\n")[0])


class _Process:
    """Something that listens, in a process of its own, as long as the block lasts. `ports` is where."""

    def __init__(self, target: Callable[..., Coroutine[Any, Any, None]], *arguments: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_in_loop, args=(target, theirs, *arguments), daemon=True)
        self.ports: tuple[int, ...] = ()

    def __enter__(self) -> "_Process":
        self._process.start()
        self.ports = self._ours.recv()
        return self

    def cpu_ms(self) -> float:
        """What its main thread has used of a processor."""
        return int(Path(f"/proc/{self._process.pid}/schedstat").read_text().split()[0]) / 1e6

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()


def _in_loop(target: Callable[..., Coroutine[Any, Any, None]], pipe: Connection, *arguments: int) -> None:
    uvloop.run(target(pipe, *arguments))


async def _router(pipe: Connection, prefill: int, decode: int) -> None:
    config = RouterConfig(
        prefill=(f"http://127.0.0.1:{prefill}",),
        decode=(f"http://127.0.0.1:{decode}",),
        host="127.0.0.1",
        port=0,
        admin_port=0,
    )
    async with serving(config) as ports:
        pipe.send((ports.port,))
        await asyncio.Event().wait()


async def _engines(pipe: Connection) -> None:
    """A prefill and a decode engine that answer at once."""
    prefilled = json.dumps({"id": "x", "choices": [], "kv_transfer_params": HANDOVER}).encode()
    answered = json.dumps(
        {"id": "x", "choices": [{"text": "x" * 500}], "kv_transfer_params": HANDLE}
    ).encode()
    event = b"data: " + json.dumps({"choices": [{"delta": {"content": "x" * 20}}]}).encode() + b"\n\n"
    last = {"object": "kvloop.handle", "choices": [], "kv_transfer_params": HANDLE}
    stream = (
        EVENTS * event
        + b"data: "
        + json.dumps(last, separators=(",", ":")).encode()
        + b"\n\ndata: [DONE]\n\n"
    )

    async def prefill(_: Request, response: Response) -> None:
        response.send_json(200, prefilled)

    async def decode(request: Request, response: Response) -> None:
        if b'"stream":true' in request.body:
            response.start(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
            response.write(stream)
            response.finish()
        else:
            response.send_json(200, answered)

    loop = asyncio.get_running_loop()
    limits = Limits()
    ports = []
    for serve in (prefill, decode):
        service = Service(serve, limits, Timeouts(), BodyBudget(limits.max_buffered_bytes))
        server = await loop.create_server(lambda service=service: ClientConnection(service), "127.0.0.1", 0)  # type: ignore[misc]
        ports.append(server.sockets[0].getsockname()[1])
    pipe.send(tuple(ports))
    await asyncio.Event().wait()


if __name__ == "__main__":
    sys.exit(main())
