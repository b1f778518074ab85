"""HTTP/1.1 as clients speak it: in order, within bounds, never in two minds about where a message ends."""

import asyncio
import json
from typing import Any
from unittest import mock

from kvloop.router.config import Limits
from tests.router.fake_engine import Answer, Asked, decode_plan
from tests.router.harness import HELLO, chunked, get, in_loop, post, raw_client, stack, until

TURN: dict[str, Any] = {"model": "tiny", "messages": [HELLO]}
BODY = json.dumps(TURN).encode()


@in_loop
async def test_routes() -> None:
    """Unknown paths are 404, wrong methods 405 with what is allowed, all in OpenAI's shape."""
    async with stack() as router, raw_client(router.port) as client:
        for method, path, status, allow in (
            ("GET", "/nothing", 404, None),
            ("POST", "/v1/load_lora_adapter", 404, None),
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
        with mock.patch("kvloop.router.opening.read_generation", side_effect=ZeroDivisionError):
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
