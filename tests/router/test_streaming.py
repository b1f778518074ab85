"""Streams: passed on byte for byte and at once, held back by slow clients, given up with the client."""

import asyncio
import socket
import struct
from typing import Any

import pytest

from kvloop.router.config import Limits, Timeouts
from tests.router.fake_engine import (
    DONE,
    Answer,
    Asked,
    Counted,
    chunk,
    decode_plan,
    handle_event,
    json_answer,
    prefill_plan,
    stream_answer,
)
from tests.router.harness import HELLO, Stack, in_loop, post, raw_client, stack, until
from tests.wire.streams import CASES

STREAM: dict[str, Any] = {"model": "tiny", "messages": [HELLO], "stream": True}


def streaming(*pieces: bytes | float | asyncio.Event | None) -> Any:
    """A plan that streams these pieces."""
    return lambda _: stream_answer(*pieces)


async def handle_of_next_turn(router: Stack) -> Any:
    """What the next turn of the same conversation brings to prefill."""
    await router.chat([HELLO, {"role": "assistant", "content": "x"}, HELLO])
    return router.prefill[0].asked[-1].params


@in_loop
async def test_byte_exact() -> None:
    """Streams of both vLLM versions arrive as they were, less the handle, however the writes are cut."""
    async with stack() as router:
        for name, (stream, expected, params) in CASES.items():
            for size in (1, 7, 10**6):
                pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
                router.decode[0].plan = streaming(*pieces)
                before = await router.metric("handles_filed_total")
                answer = await router.client.post("/v1/chat/completions", json=STREAM)
                if not stream:
                    assert answer.status_code == 502
                    continue
                assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
                told = answer.content.removeprefix(expected)
                assert (name, expected + told) == (name, answer.content)
                assert bool(told) == (DONE.strip() not in expected) == (b'"error"' in told)
                filed = await router.metric("handles_filed_total") - before
                assert bool(filed) == (params is not None)


@in_loop
async def test_at_once() -> None:
    """The first event is with the client before the engine has a second one, and the head comes with it."""
    second = asyncio.Event()
    async with stack(decode=[streaming(chunk("a"), second, chunk("b"), handle_event("h"), DONE)]) as router:
        async with router.client.stream("POST", "/v1/chat/completions", json=STREAM) as answer:
            pieces = answer.aiter_raw()
            assert await anext(pieces) == chunk("a")
            second.set()
            assert b"".join([piece async for piece in pieces]) == chunk("b") + DONE
        assert (await handle_of_next_turn(router))["kvloop_handle"] == "h"


@in_loop
async def test_filed_before_done() -> None:
    """Whoever sends the next turn on seeing `[DONE]` finds the handle filed, before the stream is over."""
    over = asyncio.Event()
    plan = streaming(chunk("a"), handle_event("h"), DONE, over)
    async with stack(decode=[plan]) as router, raw_client(router.port) as client:
        client.send(post(STREAM))
        await client.reader.readuntil(DONE)
        router.decode[0].plan = decode_plan
        assert (await handle_of_next_turn(router))["kvloop_handle"] == "h"
        over.set()


@in_loop
async def test_leaving_cancels_decode() -> None:
    """A client that leaves in the middle of a stream ends the request on decode."""
    async with stack(decode=[streaming(chunk("a"), asyncio.Event())]) as router:
        async with raw_client(router.port) as client:
            client.send(post(STREAM))
            await client.reader.readuntil(b'"a"')
        await router.decode[0].cancelled.wait()
        assert await router.metric("clients_gone_total") == 1
        assert await router.metric(f'in_flight{{engine="{router.decode[0].url}",role="decode"}}') == 0


@in_loop
async def test_leaving_cancels_prefill() -> None:
    """A client that leaves during prefill ends the request there, and decode is never asked."""
    async with stack(prefill=[lambda _: Answer(before_head=asyncio.Event())]) as router:
        async with raw_client(router.port) as client:
            client.send(post(STREAM))
            await until(lambda: bool(router.prefill[0].asked))
        await router.prefill[0].cancelled.wait()
        assert not router.decode[0].asked


@in_loop
async def test_leaving_cancels_unstreamed() -> None:
    """A client that leaves while decode is computing a JSON answer ends that too."""
    async with stack(decode=[lambda _: Answer(before_head=asyncio.Event())]) as router:
        async with raw_client(router.port) as client:
            client.send(post({**STREAM, "stream": False}))
            await until(lambda: bool(router.decode[0].asked))
        await router.decode[0].cancelled.wait()


@in_loop
async def test_reset_cancels() -> None:
    """A client whose connection is reset, without an end of stream, ends the request as well."""
    plan = streaming(chunk("a"), asyncio.Event())
    async with stack(decode=[plan]) as router, raw_client(router.port) as client:
        client.send(post(STREAM))
        await client.reader.readuntil(b'"a"')
        connection = client.writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.writer.transport.abort()
        await router.decode[0].cancelled.wait()


@in_loop
async def test_half_closed_client_is_gone() -> None:
    """A client that closes only his sending side counts as gone: proxies do so for a client that left."""
    plan = streaming(chunk("a"), asyncio.Event())
    async with stack(decode=[plan]) as router, raw_client(router.port) as client:
        client.send(post(STREAM))
        await client.reader.readuntil(b'"a"')
        client.writer.write_eof()
        await router.decode[0].cancelled.wait()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/audio/transcriptions"])
def test_slow_client_stops_the_engine(path: str) -> None:
    """While a client reads nothing, the engine stands still and the router holds little; then all arrives."""

    @in_loop
    async def run() -> None:
        size, count = 64 * 1024, 400
        piece = b"data: " + b"x" * (size - 8) + b"\n\n"
        end = b'event: message_stop\ndata: {"type":"message_stop"}\n\n' + DONE
        pieces = Counted([*[piece] * count, end])
        plan = lambda _: Answer(content_type="text/event-stream", pieces=pieces)  # noqa: E731
        async with stack(decode=[plan]) as router, raw_client(router.port) as client:
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            client.send(post({**STREAM, "max_tokens": 9}, path))
            await pieces.stand_still()
            assert pieces.written < count  # 25 MB are more than all the sockets' buffers on the way
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            _, _, body = await client.answer()
            assert len(body) == size * count + len(end)

    run()


@in_loop
async def test_next_answer_waits_for_the_last() -> None:
    """A client that does not take one answer is not served the next: what waits for him is bounded."""
    big = b"data: " + b"x" * 8_000_000 + b"\n\n"
    async with stack(decode=[streaming(big, DONE)]) as router, raw_client(router.port) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(3 * post(STREAM))
        await until(lambda: len(router.decode[0].asked) == 1)
        await asyncio.sleep(0.2)
        assert len(router.decode[0].asked) == 1
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(3):
            assert (await client.answer())[2] == big + DONE


@in_loop
async def test_paused_connection_is_not_kept_paused() -> None:
    """An engine's connection whose last answer ended while its client was slow serves the next client."""
    big = b"data: " + b"x" * 1_000_000 + b"\n\n" + DONE
    async with stack(decode=[streaming(big)], prefill=[]) as router, raw_client(router.port) as slow:
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(3):
            slow.send(post(STREAM))
            assert (await router.client.post("/v1/chat/completions", json=STREAM)).content == big


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", STREAM),
        ("/v1/completions", {"model": "tiny", "prompt": "x", "stream": True}),
        ("/v1/responses", {"model": "tiny", "input": "x", "stream": True}),
        ("/v1/messages", {**STREAM, "max_tokens": 9}),
    ],
)
def test_a_stream_that_stops_without_its_end(path: str, body: dict[str, Any]) -> None:
    """An engine that falls silent, and whose server ends the stream in good order, has broken off: the client
    is told, and where he has nothing yet, another engine is asked."""

    @in_loop
    async def run() -> None:
        said, nothing = streaming(chunk("[DONE]"), chunk("b")), streaming()
        async with stack(decode=[said, nothing]) as router:
            for _ in range(4):
                answer = await router.client.post(path, json=body)
                assert answer.content.startswith(chunk("[DONE]") + chunk("b"))
                assert b'"error"' in answer.content
            assert await router.metric('answers_cut_total{side="engine"}') == 4
            assert router.decode[1].asked

    run()


@in_loop
async def test_broken_off_stream() -> None:
    """Decode dying in the middle is an error event and the end of the connection; nothing is tried again."""
    async with (
        stack(decode=[streaming(chunk("a") + b"data: {", None)]) as router,
        raw_client(router.port) as client,
    ):
        client.send(post(STREAM))
        status, _, body = await client.answer()
        assert status == 200
        assert body.startswith(chunk("a") + b'\n\ndata: {"error":{')
        assert body.endswith(b"}}\n\n")
        assert await client.closed()
        assert len(router.decode[0].asked) == 1
        assert await router.metric('answers_cut_total{side="engine"}') == 1


@in_loop
async def test_event_too_long() -> None:
    """An event beyond the bound ends the stream with an error event, and the engine is told."""
    plan = streaming(chunk("a"), b"data: " + b"x" * 5000, asyncio.Event())
    async with stack(decode=[plan], limits=Limits(max_event_bytes=4000)) as router:
        answer = await router.client.post("/v1/chat/completions", json=STREAM)
        assert answer.content.startswith(chunk("a"))
        assert b"an event that is too long" in answer.content
        await router.decode[0].cancelled.wait()


@in_loop
async def test_standstill() -> None:
    """A stream that stands still for too long ends with an error event."""
    plan = streaming(chunk("a"), 0.1, chunk("b"), asyncio.Event())
    async with stack(decode=[plan], timeouts=Timeouts(idle_timeout_s=0.5, drain_timeout_s=0.1)) as router:
        answer = await router.client.post("/v1/chat/completions", json=STREAM)
        assert answer.content.startswith(chunk("a") + chunk("b"))
        assert b"broke off its answer (timeout)" in answer.content
        await router.decode[0].cancelled.wait()


@in_loop
async def test_connections_are_reused() -> None:
    """One connection to each engine serves many turns, streamed or not, one after another."""
    async with stack() as router:
        for number in range(6):
            await router.chat([HELLO], stream=bool(number % 2))
        assert router.prefill[0].connections == router.decode[0].connections == 1


@in_loop
async def test_stream_to_old_client() -> None:
    """An HTTP/1.0 client gets the stream without chunks, up to the end of the connection."""
    async with stack() as router, raw_client(router.port) as client:
        client.send(post(STREAM).replace(b"HTTP/1.1", b"HTTP/1.0"))
        data = await client.reader.read()
        assert b"transfer-encoding" not in data
        assert data.endswith(chunk("Hel") + chunk("lo") + DONE)


@in_loop
async def test_error_instead_of_stream() -> None:
    """An engine's refusal of a streamed request reaches the client as it is."""

    def refuse(_: Asked) -> Answer:
        return json_answer(b'{"error": {"message": "too long", "code": 400}}', 400)

    for plans in ({"prefill": [refuse]}, {"prefill": [prefill_plan], "decode": [refuse]}):
        async with stack(**plans) as router:
            answer = await router.client.post("/v1/chat/completions", json=STREAM)
            assert answer.status_code == 400
            assert answer.content == b'{"error": {"message": "too long", "code": 400}}'
