"""`/v1/messages` through both hops, and errors in Anthropic's shape."""

import json
from typing import Any

import httpx

from tests.router.fake_engine import json_answer, stream_answer
from tests.router.harness import HELLO, Stack, in_loop, stack
from tests.router.recorded import body, events, plan

PATH = "/v1/messages"
A1 = {"role": "assistant", "content": "Hello"}
MORE = {"role": "user", "content": "more"}


async def ask(router: Stack, messages: list[Any], **fields: Any) -> httpx.Response:
    """One request."""
    return await router.client.post(
        PATH, json={"model": "tiny", "max_tokens": 64, "messages": messages, **fields}
    )


def handles(router: Stack) -> list[str | None]:
    """What prefill was given to read back from, request by request."""
    return [asked.params.get("kvloop_handle") for asked in router.prefill[0].asked]


@in_loop
async def test_two_hops() -> None:
    """Prefill is asked for one token, decode gets the client's bytes, and nobody sees the handle."""
    async with stack(decode=[plan]) as router:
        answer = await ask(router, [HELLO], stop_sequences=["x"])
        prefill, decode = router.prefill[0].asked[0], router.decode[0].asked[0]
        assert (prefill.body["max_tokens"], prefill.body["stream"]) == (1, False)
        assert decode.body["max_tokens"] == 64
        assert decode.params["do_remote_prefill"] is True
        message = json.loads(body("message"))
        assert message.pop("kv_transfer_params")
        assert answer.json() == message
        streamed = await ask(router, [HELLO, A1, MORE], stream=True)
        assert streamed.content == b"".join([one for one in events("message_stream") if b"kvloop" not in one])
        await ask(router, [HELLO, A1, MORE, A1, MORE])
        again = {"model": "tiny", "max_tokens": 64, "messages": [HELLO, A1, MORE, A1, MORE]}
        assert (await router.client.post(f"{PATH}?beta=true", json=again)).status_code == 200
        assert handles(router) == [None, "h1", "h2", "h3"]


@in_loop
async def test_what_a_conversation_is_recognised_by() -> None:
    """The system prompt counts, the billing line in it and cache marks do not."""

    def system(text: str, billing: str) -> list[dict[str, str]]:
        line = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=1; cch={billing};"}
        return [line, {"type": "text", "text": text}]

    def said(text: str, marked: bool) -> dict[str, Any]:
        block: dict[str, Any] = {"type": "text", "text": text}
        mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}} if marked else {}
        return {"role": "user", "content": [{**block, **mark}]}

    async with stack(decode=[plan]) as router:
        await ask(router, [said("hello", True)], system=system("be kind", "aaaa"))
        await ask(router, [said("hello", False), A1, said("more", True)], system=system("be kind", "bbbb"))
        await ask(router, [said("hello", False)], system=system("be rude", "bbbb"))
        assert handles(router) == [None, "h1", None]
        metrics = (await router.admin.get("/metrics")).text
        assert "kvloop_router_return_gap_seconds_count 1.0" in metrics


@in_loop
async def test_a_forced_call_goes_to_decode_alone() -> None:
    """vLLM refuses to put half a call's arguments into a message; other choices of tools are no matter."""
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    async with stack(decode=[plan]) as router:
        forced = await ask(router, [HELLO], tools=tools, tool_choice={"type": "tool", "name": "f"})
        assert forced.headers["x-kvloop-route"] == "decode"
        for choice in ({"type": "any"}, {"type": "auto"}, None, 5):
            answer = await ask(router, [HELLO], tools=tools, tool_choice=choice)
            assert answer.headers["x-kvloop-route"] != "decode"
        assert await router.metric('unsplit_total{field="tool_choice"}') == 1


@in_loop
async def test_refusals_have_anthropic_s_shape() -> None:
    """The router's own: bad fields, unknown paths below it, other methods, no engine."""
    async with stack(decode=[plan]) as router:
        for answer, status, kind in (
            (await ask(router, [HELLO], kv_transfer_params={}), 400, "invalid_request_error"),
            (await router.client.get(PATH), 405, "invalid_request_error"),
            (await router.client.post(f"{PATH}/nowhere"), 404, "not_found_error"),
        ):
            error = answer.json()
            assert (answer.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
            assert set(error["error"]) == {"type", "message"}
        await router.prefill[0].stop()
        await router.decode[0].stop()
        down = await ask(router, [HELLO])
        assert (down.status_code, down.json()["error"]["type"]) == (502, "api_error")


@in_loop
async def test_engines_errors_pass() -> None:
    """In an answer as they are; a stream that breaks off ends with an event of Anthropic's."""
    async with stack(decode=[plan]) as router:
        error = {"type": "error", "error": {"type": "BadRequestError", "message": "no"}}
        router.prefill[0].plan = lambda _: json_answer(error, 400)
        answer = await ask(router, [HELLO])
        assert (answer.status_code, answer.json()) == (400, error)
        first = events("message_stream")[0]
        router.prefill[0].plan = plan
        router.decode[0].plan = lambda _: stream_answer(first, None)
        told = (await ask(router, [HELLO], stream=True)).content.removeprefix(first)
        assert told.startswith(b"\n\nevent: error\ndata: ")
        assert json.loads(told.partition(b"data: ")[2])["error"]["type"] == "api_error"
