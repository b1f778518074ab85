"""The official client works against the router, streamed and not, and understands its errors."""

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.router.fake_engine import DONE, chunk, decode_plan, json_answer, stream_answer
from tests.router.harness import Stack, in_loop, stack
from tests.router.recorded import plan
from tests.wire.streams import CASES

MESSAGES = [{"role": "user", "content": "hello"}]


def client(router: Stack) -> AsyncOpenAI:
    """A client as its users make one."""
    return AsyncOpenAI(base_url=f"http://127.0.0.1:{router.port}/v1", api_key="k", max_retries=0)


@in_loop
async def test_conversation() -> None:
    """Three turns, unstreamed, streamed, unstreamed: the answers are there and the loop is closed."""
    async with stack() as router, client(router) as openai_client:
        messages = list(MESSAGES)
        create: Any = openai_client.chat.completions.create
        for stream in (False, True, False):
            if stream:
                events = await create(model="tiny", messages=messages, stream=True)
                text = "".join([event.choices[0].delta.content async for event in events])
            else:
                answer = await create(model="tiny", messages=messages)
                text = answer.choices[0].message.content
                assert "kv_transfer_params" not in answer.model_dump()
            assert text == "Hello"
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
        handles = [asked.params.get("kvloop_handle") for asked in router.prefill[0].asked]
        assert handles == [None, "h1", "h2"]
        assert [model.id async for model in openai_client.models.list()] == ["tiny"]


@pytest.mark.parametrize("stream", [False, True])
def test_tools(stream: bool) -> None:
    """A call comes with its arguments, and its result goes on from its turn."""
    function = {"name": "get_weather", "parameters": {"type": "object"}}
    tools: list[Any] = [{"type": "function", "function": function}]

    @in_loop
    async def run() -> None:
        async with stack(decode=[plan]) as router, client(router) as openai_client:
            asked: dict[str, Any] = {"model": "tiny", "messages": list(MESSAGES), "tools": tools}
            if stream:
                async with openai_client.chat.completions.stream(**asked) as turn:
                    answer: Any = await turn.get_final_completion()
            else:
                answer = await openai_client.chat.completions.create(**asked)
            (choice,) = answer.choices
            (call,) = choice.message.tool_calls
            assert choice.finish_reason == "tool_calls"
            assert (call.function.name, call.function.arguments) == ("get_weather", '{"city":"Oslo"}')
            said = {"role": "assistant", "tool_calls": [call.model_dump(exclude={"index"})]}
            result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
            asked["messages"] = [*MESSAGES, said, result]
            await openai_client.chat.completions.create(**asked)
            assert router.prefill[0].asked[-1].params["kvloop_handle"] == "h1"

    run()


@in_loop
async def test_final_chunk_of_033() -> None:
    """A stream of vLLM 0.33 reaches the client's objects without block metadata."""
    stream, _, _ = CASES["chat_033"]
    async with stack(decode=[lambda _: stream_answer(stream)]) as router, client(router) as openai_client:
        create: Any = openai_client.chat.completions.create
        events = await create(model="tiny", messages=MESSAGES, stream=True)
        seen = [event async for event in events]
        assert seen[-1].choices[0].finish_reason == "stop"
        assert not any(event.model_extra.get("kv_transfer_params") for event in seen)


@in_loop
async def test_errors() -> None:
    """Refusals, engines' errors and streams that break off are the client's own exceptions."""
    async with stack() as router, client(router) as openai_client:
        create: Any = openai_client.chat.completions.create
        with pytest.raises(openai.BadRequestError) as refused:
            await create(model="tiny", messages=MESSAGES, extra_body={"kv_transfer_params": {}})
        assert refused.value.param == "kv_transfer_params"
        router.prefill[0].plan = lambda _: json_answer(
            {"error": {"message": "no such model", "code": 404}}, 404
        )
        with pytest.raises(openai.NotFoundError, match="no such model"):
            await create(model="tiny", messages=MESSAGES)
        router.prefill[0].plan = decode_plan  # no handover: the request goes to decode alone
        router.decode[0].plan = lambda _: stream_answer(chunk("a"), None)
        with pytest.raises(openai.APIError, match="broke off"):
            async for _ in await create(model="tiny", messages=MESSAGES, stream=True):
                pass
        router.decode[0].plan = lambda _: stream_answer(chunk("a"), DONE)
        assert [event async for event in await create(model="tiny", messages=MESSAGES, stream=True)]


@in_loop
async def test_completions() -> None:
    """The older endpoint too."""
    answer = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "tiny"}
    choices = [{"index": 0, "text": "there was", "logprobs": None, "finish_reason": "length"}]
    params = {"kv_transfer_params": {"kvloop_handle": "h"}}
    plan = lambda _: json_answer({**answer, "choices": choices, **params})  # noqa: E731
    async with stack(decode=[plan]) as router, client(router) as openai_client:
        completion = await openai_client.completions.create(model="tiny", prompt="once", max_tokens=2)
        assert completion.choices[0].text == "there was"
        assert completion.model_extra == {}
