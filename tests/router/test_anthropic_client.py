"""Anthropic's official client works against the router: messages, streams, tools, counts, errors."""

from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from tests.router.fake_engine import json_answer, stream_answer
from tests.router.harness import Stack, in_loop, stack
from tests.router.recorded import events, plan

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
TOOLS: list[Any] = [
    {
        "name": "get_weather",
        "description": "The weather in a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]


def client(router: Stack, key: str = "k") -> AsyncAnthropic:
    """A client as its users make one."""
    return AsyncAnthropic(base_url=f"http://127.0.0.1:{router.port}", api_key=key, max_retries=0)


async def said(anthropic_client: AsyncAnthropic, messages: list[Any], stream: bool, **fields: Any) -> Any:
    """A turn's message."""
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 64, "messages": messages, **fields}
    if not stream:
        return await anthropic_client.messages.create(**asked)
    async with anthropic_client.messages.stream(**asked) as turn:
        return await turn.get_final_message()


@in_loop
async def test_conversation() -> None:
    """Three turns, unstreamed, streamed, unstreamed: the answers are there and the loop is closed."""
    async with stack(decode=[plan]) as router, client(router) as anthropic_client:
        messages = list(MESSAGES)
        for stream in (False, True, False):
            message = await said(anthropic_client, messages, stream, system="be kind")
            assert (message.content[0].text, message.stop_reason) == ("Hello", "end_turn")
            assert "kv_transfer_params" not in message.model_dump()
            assert (message.usage.input_tokens, message.usage.output_tokens) == (100, 2)
            messages += [
                {"role": "assistant", "content": [block.model_dump() for block in message.content]},
                {"role": "user", "content": "more"},
            ]
        handles = [asked.params.get("kvloop_handle") for asked in router.prefill[0].asked]
        assert handles == [None, "h1", "h2"]


@pytest.mark.parametrize("stream", [False, True])
def test_tools(stream: bool) -> None:
    """A call comes with its input, and its result goes on from its turn."""

    @in_loop
    async def run() -> None:
        async with stack(decode=[plan]) as router, client(router) as anthropic_client:
            message = await said(anthropic_client, MESSAGES, stream, tools=TOOLS)
            (call,) = message.content
            assert message.stop_reason == "tool_use"
            assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Oslo"})
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
            history = [
                *MESSAGES,
                {"role": "assistant", "content": [call.model_dump()]},
                {"role": "user", "content": [result]},
            ]
            await said(anthropic_client, history, stream, tools=TOOLS)
            assert router.prefill[0].asked[-1].params["kvloop_handle"] == "h1"

    run()


@in_loop
async def test_events() -> None:
    """The client sees the events that vLLM wrote, and none of kvloop's."""
    async with stack(decode=[plan]) as router, client(router) as anthropic_client:
        create: Any = anthropic_client.messages.create
        seen = [
            event.type
            async for event in await create(model="tiny", max_tokens=9, messages=MESSAGES, stream=True)
        ]
        assert seen == [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]


@in_loop
async def test_the_plugin_s_event_does_not_disturb_a_client() -> None:
    """Who asks an engine without a router gets the same events."""
    async with stack(decode=[plan]) as router:
        base_url = router.decode[0].url
        async with AsyncAnthropic(base_url=base_url, api_key="k", max_retries=0) as anthropic_client:
            message = await said(anthropic_client, MESSAGES, True)
            assert message.content[0].text == "Hello"
        assert not router.prefill[0].asked


@in_loop
async def test_count_tokens() -> None:
    """By an engine."""
    async with stack(prefill=[plan], decode=[plan]) as router, client(router) as anthropic_client:
        count = await anthropic_client.messages.count_tokens(model="tiny", messages=MESSAGES)
        assert count.input_tokens == 12


@in_loop
async def test_keys_are_tenants() -> None:
    """Two clients with keys of their own do not meet, in the router or in the engines' caches."""
    async with stack(decode=[plan]) as router, client(router, "a") as ann, client(router, "b") as bob:
        for who in (ann, bob, ann):
            await said(who, MESSAGES, False)
        asked = router.prefill[0].asked
        assert [one.params.get("kvloop_handle") for one in asked] == [None, None, "h1"]
        salts = [one.body["cache_salt"] for one in asked]
        assert salts[0] == salts[2] != salts[1]
        keys = [one.headers["authorization"] for one in asked]
        assert keys == ["Bearer a", "Bearer b", "Bearer a"]  # older clients send it as x-api-key
        request = {"model": "tiny", "max_tokens": 64, "messages": MESSAGES}
        await router.client.post("/v1/messages", json=request, headers={"x-api-key": "a"})
        assert (asked[3].body["cache_salt"], asked[3].headers["x-api-key"]) == (salts[0], "a")


@in_loop
async def test_errors() -> None:
    """Refusals, engines' errors and streams that break off are the client's own exceptions."""
    async with stack(decode=[plan]) as router, client(router) as anthropic_client:
        with pytest.raises(anthropic.BadRequestError, match="set by the router"):
            await said(anthropic_client, MESSAGES, False, extra_body={"kv_transfer_params": {}})
        error = {"type": "error", "error": {"type": "NotFoundError", "message": "no such model"}}
        router.prefill[0].plan = lambda _: json_answer(error, 404)
        with pytest.raises(anthropic.NotFoundError, match="no such model"):
            await said(anthropic_client, MESSAGES, False)
        router.prefill[0].plan = plan  # no handover: the request goes to decode alone
        router.decode[0].plan = lambda _: stream_answer(*events("message_stream")[:3], None)
        with pytest.raises(anthropic.APIError, match="broke off"):
            await said(anthropic_client, MESSAGES, True)
        router.decode[0].plan = lambda _: json_answer({"error": {"message": "boom"}}, 500)
        with pytest.raises(anthropic.InternalServerError, match="boom"):
            await said(anthropic_client, MESSAGES, False)
