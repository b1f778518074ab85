"""Routes of one hop: bytes pass both ways as they are, and no other route of an engine's can be reached."""

import asyncio
import json
import re
from pathlib import Path

import httpx
import pytest

from kvloop.router.app import GENERATION
from kvloop.router.passing import PASSED
from tests.router.fake_engine import Answer, Asked, json_answer, stream_answer
from tests.router.harness import get, in_loop, post, raw_client, stack
from tests.router.recorded import body, plan

# Every other route of vLLM 0.32's server: what steers an engine, and what runs or renders prompts past the
# hand-over and the tenants.
CLOSED = re.findall(
    r"\S+",
    """
/sleep /wake_up /is_sleeping /release_kv_cache_memory /reset_prefix_cache /reset_mm_cache
/reset_encoder_cache /collective_rpc /server_info /v1/load_lora_adapter /v1/unload_lora_adapter
/start_profile /stop_profile /scale_elastic_ep /is_scaling_elastic_ep /fault_tolerance/apply
/fault_tolerance/status /pause /resume /is_paused /abort_requests /init_weight_transfer_engine
/shutdown_weight_transfer_engine /start_weight_update /start_draft_weight_update /update_weights
/finish_weight_update /update_weight_version /weight_info /weight_checker /get_world_size
/invocations /ping /inference/v1/generate /inference/v1/abort_requests /v1/chat/completions/batch
/v1/chat/completions/render /v1/completions/render /v1/chat/completions/derender
/v1/completions/derender /v1/messages/render /v1/responses/render /cohere/v2/chat /load /version
/metrics /tokenizer_info /kv_event_sources /generative_scoring /v1/systemone /v1/realtime /docs
/openapi.json /server_info/ /../sleep /v1/../sleep //sleep /v1/embeddings/
/v1/embeddings/../../sleep /V1/embeddings
""",
)


@in_loop
async def test_engine_control_cannot_be_reached() -> None:
    """Whatever the method; no engine hears of it."""
    async with stack() as router, raw_client(router.port) as client:
        for path in CLOSED:
            for request in (post(b"{}", path), get(path), get(path, "DELETE")):
                client.send(request)
                refused = (
                    (404, 405) if path.startswith("/v1/responses/") else (404,)
                )  # an id, for all one knows
                assert (await client.answer())[0] in refused
        assert not router.prefill[0].asked
        assert not router.decode[0].asked


def test_the_list_of_closed_routes_is_whole() -> None:
    """Every route that the installed vLLM declares is passed, generates, or is listed as closed."""
    vllm = pytest.importorskip("importlib.util").find_spec("vllm")
    if vllm is None or vllm.origin is None:
        pytest.skip("there is no vLLM here")
    declared = re.compile(r"@router\.(?:get|post|websocket)\(\s*\"(/[^\"]*)\"")
    found = set()
    for path in (Path(vllm.origin).parent / "entrypoints").rglob("*.py"):
        found |= set(declared.findall(path.read_text()))
    ours = {*PASSED, *GENERATION, "/v1/models", "/health"}
    below = {path for path in found if path.startswith("/v1/responses/{")}
    assert found - ours - below - set(CLOSED) == set()
    assert len(found) > 40


@in_loop
async def test_bytes_pass_both_ways() -> None:
    """Method, path, headers and body in; status, headers and body out."""
    async with stack() as router:
        sent, got = b'{ "input" : "x", "nan": NaN }', b"\x00\xffnot JSON"
        for path in PASSED:
            for engine in (*router.prefill, *router.decode):
                engine.plan = lambda _: Answer(
                    418, "application/x-own", [got], chunked=False, headers={"x-more": "1"}
                )
            headers = {"content-type": "application/json; charset=utf-8", "x-own": "y"}
            answer = await router.client.post(path, content=sent, headers=headers)
            asked = (router.prefill[0].asked + router.decode[0].asked)[-1]
            assert (asked.method, asked.path, asked.raw) == ("POST", path, sent)
            assert asked.headers["content-type"] == headers["content-type"]
            assert (asked.headers["x-own"], answer.headers["x-more"]) == ("y", "1")
            assert (answer.status_code, answer.content) == (418, got)
            assert answer.headers["content-length"] == str(len(got))
            assert answer.headers["x-request-id"] == asked.headers["x-request-id"]
            router.prefill[0].asked.clear()
        assert await router.metric('passed_total{path="/tokenize",status="418"}') == 1


@in_loop
async def test_form() -> None:
    """A file in a form arrives as it was sent."""
    audio = bytes(range(256)) * 1000
    async with stack(prefill=[], decode=[lambda _: json_answer({"text": "hm"})]) as router:
        answer = await router.client.post(
            "/v1/audio/transcriptions", data={"model": "tiny"}, files={"file": ("a.wav", audio)}
        )
        asked = router.decode[0].asked[0]
        assert asked.headers["content-type"].startswith("multipart/form-data; boundary=")
        assert audio in asked.raw
        assert answer.json() == {"text": "hm"}


@in_loop
async def test_streams_pass_as_they_come() -> None:
    """Chunk by chunk: the first is there while the engine waits with the second."""
    held = asyncio.Event()
    async with (
        stack(prefill=[], decode=[lambda _: stream_answer(b"data: 1\n\n", held, b"data: 2\n\n")]) as router,
        router.client.stream("POST", "/v1/audio/transcriptions", content=b"x") as answer,
    ):
        pieces = answer.aiter_raw()
        assert await anext(pieces) == b"data: 1\n\n"
        held.set()
        assert [piece async for piece in pieces] == [b"data: 2\n\n"]


@in_loop
async def test_count_tokens() -> None:
    """Anthropic's, to any engine."""
    async with stack(prefill=[plan], decode=[plan]) as router:
        request = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
        answer = await router.client.post("/v1/messages/count_tokens", json=request)
        assert answer.content == body("count_tokens")


@in_loop
async def test_another_engine() -> None:
    """Is tried, once, where one gives no answer at all; an error is an answer."""
    async with stack(prefill=[], decode=[lambda _: Answer(no_answer=True)] * 3) as router:
        answer = await router.client.post("/pooling", json={})
        assert (answer.status_code, sum(len(engine.asked) for engine in router.decode)) == (502, 2)
        for engine in router.decode:
            engine.plan = lambda _: json_answer({"error": {"message": "boom"}}, 500)
        answer = await router.client.post("/pooling", json={})
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "boom")
        assert sum(len(engine.asked) for engine in router.decode) == 3
        await router.decode[0].stop()
        await router.decode[1].stop()
        for _ in range(2):
            assert (await router.client.post("/pooling", json={})).status_code in (500, 502)
        assert (await router.client.post("/pooling", json={})).status_code == 500


@in_loop
async def test_an_answer_that_breaks_off() -> None:
    """Breaks off for the client too: half an answer is not taken for a whole one."""

    def half(_: Asked) -> Answer:
        return Answer(pieces=[b'{"data":[1', None], chunked=True)

    async with stack(prefill=[], decode=[half]) as router:
        with pytest.raises(httpx.RemoteProtocolError):
            await router.client.post("/v1/embeddings", json={})
        assert await router.metric('answers_cut_total{side="engine"}') == 1
        assert json.loads((await router.client.get("/health")).content)["status"] == "ok"


@in_loop
async def test_a_client_that_leaves() -> None:
    """Ends its request at the engine."""
    async with stack(prefill=[], decode=[lambda _: Answer(before_head=asyncio.Event())]) as router:
        async with raw_client(router.port) as client:
            client.send(post(b"{}", "/v1/embeddings"))
            while not router.decode[0].asked:
                await asyncio.sleep(0.001)
        await router.decode[0].cancelled.wait()
        assert await router.metric("clients_gone_total") == 1


@in_loop
async def test_an_engine_that_only_fails_is_left_out() -> None:
    """5xx of these routes count against it as those of turns do, and none of them clears it."""
    async with stack(prefill=[], decode=[lambda _: json_answer(b"{}", 500)]) as router:
        for _ in range(6):
            await router.client.post("/v1/embeddings", json={"model": "tiny", "input": "x"})
        assert (await router.client.get("/health")).status_code == 503
