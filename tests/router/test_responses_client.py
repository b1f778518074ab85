"""OpenAI's official client on the Responses API: by history and by name, streamed and not, with tools."""

import asyncio
from typing import Any

import openai
import pytest

from tests.router.fake_engine import json_answer, stream_answer
from tests.router.harness import in_loop, stack
from tests.router.recorded import events, plan
from tests.router.test_openai_client import client

TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]


async def answered(openai_client: openai.AsyncOpenAI, stream: bool, **fields: Any) -> Any:
    """A turn's response."""
    if not stream:
        return await openai_client.responses.create(model="tiny", **fields)
    async with openai_client.responses.stream(model="tiny", **fields) as turn:
        return await turn.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
def test_by_name(stream: bool) -> None:
    """Turns that name the one before: the loop is closed, and what was stored can be had and deleted."""

    @in_loop
    async def run() -> None:
        async with stack(decode=[plan]) as router, client(router) as openai_client:
            previous = None
            for text in ("hello", "more", "still more"):
                response = await answered(openai_client, stream, input=text, previous_response_id=previous)
                assert (response.output_text, response.status) == ("Hello", "completed")
                assert response.previous_response_id == previous
                assert not (response.model_extra or {}).get("kv_transfer_params")
                previous = response.id
            handles = [asked.params.get("kvloop_handle") for asked in router.prefill[0].asked]
            assert handles == [None, "h1", "h2"]
            assert len(router.decode[0].asked[-1].body["input"]) == 5
            got = await openai_client.responses.retrieve("resp_2")
            assert (got.id, got.output_text) == ("resp_2", "Hello")
            await openai_client.responses.delete("resp_2")
            with pytest.raises(openai.NotFoundError) as missing:
                await answered(openai_client, stream, input="x", previous_response_id="resp_2")
            assert missing.value.param == "previous_response_id"
            with pytest.raises(openai.BadRequestError, match="synchronous"):
                await openai_client.responses.cancel("resp_3")

    run()


@pytest.mark.parametrize("stream", [False, True])
def test_by_history(stream: bool) -> None:
    """A client that keeps the history itself, as the client's own objects."""

    @in_loop
    async def run() -> None:
        async with stack(decode=[plan]) as router, client(router) as openai_client:
            history: list[Any] = [{"role": "user", "content": "hello"}]
            for _ in range(3):
                response = await answered(openai_client, stream, input=history, store=False)
                history += [item.model_dump(exclude_unset=True) for item in response.output]
                history.append({"role": "user", "content": "more"})
            handles = [asked.params.get("kvloop_handle") for asked in router.prefill[0].asked]
            assert handles == [None, "h1", "h2"]

    run()


@pytest.mark.parametrize("stream", [False, True])
def test_tools(stream: bool) -> None:
    """A call comes with its arguments, and its result goes on from its turn."""

    @in_loop
    async def run() -> None:
        async with stack(decode=[plan]) as router, client(router) as openai_client:
            response = await answered(openai_client, stream, input="weather?", tools=TOOLS)
            (call,) = response.output
            assert (call.type, call.name, call.arguments) == (
                "function_call",
                "get_weather",
                '{"city":"Oslo"}',
            )
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
            await answered(
                openai_client, stream, input=[result], tools=TOOLS, previous_response_id=response.id
            )
            assert router.prefill[0].asked[-1].params["kvloop_handle"] == "h1"

    run()


@in_loop
async def test_events() -> None:
    """The client sees the events that vLLM wrote, in order."""
    async with stack(decode=[plan]) as router, client(router) as openai_client:
        create: Any = openai_client.responses.create
        seen = [event async for event in await create(model="tiny", input="hello", stream=True)]
        assert [event.sequence_number for event in seen] == list(range(10))
        assert (seen[0].type, seen[-1].type) == ("response.created", "response.completed")
        assert not (seen[-1].response.model_extra or {}).get("kv_transfer_params")


@in_loop
async def test_an_announcement_is_not_an_answer() -> None:
    """An engine announces a response before it has computed the prompt: nothing is learned from that."""
    computed = asyncio.Event()
    announced, rest = events("response_stream")[:2], events("response_stream")[2:]
    slow = stream_answer(*announced, computed, *rest)
    async with stack(decode=[lambda _: slow]) as router, client(router) as openai_client:
        stream: Any = await openai_client.responses.create(model="tiny", input="hello", stream=True)
        seen = [(await anext(stream)).type for _ in announced]
        assert seen == ["response.created", "response.in_progress"]
        assert await router.metric('first_byte_seconds_count{route="recompute"}') == 0
        computed.set()
        assert [event.type async for event in stream][-1] == "response.completed"
        assert await router.metric('first_byte_seconds_count{route="recompute"}') == 1


@in_loop
async def test_errors() -> None:
    """Refusals, engines' errors and streams that break off are the client's own exceptions."""
    async with stack(decode=[plan]) as router, client(router) as openai_client:
        with pytest.raises(openai.BadRequestError) as refused:
            await openai_client.responses.create(model="tiny", input="x", background=True)
        assert refused.value.param == "background"
        router.decode[0].plan = lambda _: stream_answer(*events("response_stream")[:4], None)
        with pytest.raises(openai.APIError, match="broke off"):
            await answered(openai_client, True, input="x")
        router.prefill[0].plan = lambda _: json_answer({"error": {"message": "no", "code": 404}}, 404)
        with pytest.raises(openai.NotFoundError, match="no"):
            await answered(openai_client, False, input="x")


@in_loop
async def test_other_routes() -> None:
    """Embeddings, one model, an unknown one."""
    async with stack(decode=[plan], models_interval_s=3600) as router, client(router) as openai_client:
        vector = {"object": "embedding", "index": 0, "embedding": [0.5, 1.0]}
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        made = {"object": "list", "model": "tiny", "data": [vector], "usage": usage}
        router.prefill[0].plan = router.decode[0].plan = lambda _: json_answer(made)
        answer = await openai_client.embeddings.create(model="tiny", input="x", encoding_format="float")
        assert answer.data[0].embedding == [0.5, 1.0]
        assert (await openai_client.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError) as unknown:
            await openai_client.models.retrieve("other")
        assert unknown.value.code == "model_not_found"
