"""Both official clients against simulated engines behind the router: each API, streamed and not, tools."""

import json
from typing import Any

import anthropic
import httpx
import openai
import pytest

from kvloop.sim.tokenizer import decode_ids, encode
from tests.router.harness import in_loop
from tests.router.recorded import ANSWERS
from tests.sim.pair import make_profile
from tests.sim.servers import Deployment, deployment, engine

NOTES = "The lighthouse at Skerry Point was built in 1871 after two ships were lost on the reef. " * 12
PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}}
BOTH = pytest.mark.parametrize("stream", [False, True])
FINE = make_profile(block_tokens=1, blocks=8192)  # a token more or less in a history would be seen


def openais(stack: Deployment) -> openai.AsyncOpenAI:
    """OpenAI's client of the router."""
    return openai.AsyncOpenAI(base_url=f"{stack.client.base_url}/v1", api_key="k", max_retries=0)


def anthropics(stack: Deployment) -> anthropic.AsyncAnthropic:
    """Anthropic's client of the router."""
    return anthropic.AsyncAnthropic(base_url=str(stack.client.base_url), api_key="k", max_retries=0)


def returned(stack: Deployment) -> int:
    """Tokens that prefill read back from decode."""
    return sum(driver.engine.counters.get("read_tokens", 0) for driver in stack.prefill)


async def responded(client: openai.AsyncOpenAI, stream: bool, **fields: Any) -> Any:
    """A response."""
    if not stream:
        return await client.responses.create(model="sim", **fields)
    async with client.responses.stream(model="sim", **fields) as turn:
        return await turn.get_final_response()


async def said(client: anthropic.AsyncAnthropic, stream: bool, messages: list[Any], **fields: Any) -> Any:
    """A message."""
    asked: dict[str, Any] = {"model": "sim", "max_tokens": 300, "messages": messages, **fields}
    if not stream:
        return await client.messages.create(**asked)
    async with client.messages.stream(**asked) as turn:
        return await turn.get_final_message()


@BOTH
def test_responses_by_name(stream: bool) -> None:
    """Each turn names the one before: answers are those that the whole history has, as input and as a chat,
    and all of it but what is new is read back."""

    async def run() -> None:
        async with deployment(profile=FINE) as stack, openais(stack) as client:
            previous, spent = None, 0
            history: list[Any] = []
            chat: list[Any] = []
            for question in (NOTES, "Why?", "And then?"):
                answer = await responded(client, stream, input=question, previous_response_id=previous)
                assert (answer.status, answer.previous_response_id) == ("completed", previous)
                assert not (answer.model_extra or {}).get("kv_transfer_params")
                if previous is not None:
                    assert answer.usage.input_tokens_details.cached_tokens >= spent - 1
                spent, previous = answer.usage.total_tokens, answer.id
                history.append({"role": "user", "content": question})
                whole = await responded(client, not stream, input=history, store=False)
                assert whole.output_text == answer.output_text
                chat.append(history[-1])
                expected = (await stack.chat(chat, max_tokens=300)).json()
                assert expected["usage"]["prompt_tokens"] == answer.usage.input_tokens
                chat.append(expected["choices"][0]["message"])
                assert chat[-1]["content"] == answer.output_text
                history += [item.model_dump(exclude_unset=True) for item in answer.output]
            assert returned(stack) > 2 * len(NOTES) // 4
            assert stack.wrong_answers() == 0
            got = await client.responses.retrieve(previous or "")
            assert got.output_text == answer.output_text

    in_loop(run)()


@BOTH
def test_messages(stream: bool) -> None:
    """A conversation with Anthropic's client: answers are a chat's to the same history, and are read back."""

    async def run() -> None:
        async with deployment(profile=FINE) as stack, anthropics(stack) as client:
            messages: list[Any] = []
            chat: list[Any] = [{"role": "system", "content": NOTES}]
            for question in ("When was it built?", "Why?", "And then?"):
                messages.append({"role": "user", "content": [{"type": "text", "text": question}]})
                chat.append({"role": "user", "content": question})
                message = await said(client, stream, messages, system=NOTES)
                assert message.stop_reason == "end_turn"
                assert "kv_transfer_params" not in message.model_dump()
                (block,) = message.content
                expected = (await stack.chat(chat, max_tokens=300)).json()
                assert block.text == expected["choices"][0]["message"]["content"]
                counted = message.usage.input_tokens + message.usage.cache_read_input_tokens
                assert counted == expected["usage"]["prompt_tokens"]
                count = await client.messages.count_tokens(model="sim", messages=messages, system=NOTES)
                assert count.input_tokens == counted
                messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True)]})
                chat.append({"role": "assistant", "content": block.text})
            assert returned(stack) > 2 * len(NOTES) // 4
            assert stack.wrong_answers() == 0

    in_loop(run)()


@BOTH
def test_calls_come_back_to_their_own_tokens(stream: bool) -> None:
    """Made to, the model calls a tool in either API; with the result sent, everything before it is cached."""

    async def run() -> None:
        async with engine("e", profile=FINE) as (url, _):
            async with anthropic.AsyncAnthropic(base_url=url, api_key="k") as client:
                tools = [{"name": "look", "input_schema": PARAMETERS}]
                fields: dict[str, Any] = {"tools": tools, "tool_choice": {"type": "any"}}
                asked: list[Any] = [{"role": "user", "content": NOTES}]
                first = await said(client, stream, asked, **fields)
                (call,) = first.content
                assert (first.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "look")
                assert isinstance(call.input["input"], str)
                asked.append({"role": "assistant", "content": [call.model_dump(exclude_none=True)]})
                result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
                asked.append({"role": "user", "content": [result, {"type": "text", "text": "So?"}]})
                second = await said(client, stream, asked, **fields)
                spent = first.usage.input_tokens + first.usage.output_tokens
                assert second.usage.cache_read_input_tokens == spent - 1
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k") as opened:
                tools = [{"type": "function", "name": "go", "parameters": PARAMETERS, "strict": False}]
                fields = {"tools": tools, "tool_choice": "required", "instructions": NOTES}
                given: list[Any] = [{"role": "user", "content": "Where?"}]
                answer = await responded(opened, stream, input=given, **fields)
                (item,) = answer.output
                assert (answer.status, item.type, item.name) == ("completed", "function_call", "go")
                given.append(item.model_dump(exclude_unset=True))
                given.append({"type": "function_call_output", "call_id": item.call_id, "output": "there"})
                again = await responded(opened, stream, input=given, **fields)
                assert again.usage.input_tokens_details.cached_tokens == answer.usage.total_tokens - 1

    in_loop(run)()


@in_loop
async def test_how_answers_end() -> None:
    """A limit and a stop string, in the words of each API."""
    async with deployment() as stack, anthropics(stack) as client, openais(stack) as opened:
        asked = [{"role": "user", "content": "hello"}]
        for stream in (False, True):
            cut = await said(client, stream, asked, max_tokens=10)
            assert cut.stop_reason == "max_tokens"
            text = cut.content[0].text
            stopped = await said(client, stream, asked, stop_sequences=[text[20:24]])
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[20:24])
            assert text.startswith(stopped.content[0].text)
            short = await responded(opened, stream, input="hello", max_output_tokens=10)
            assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            assert len(short.output_text) == 40


@in_loop
async def test_refusals() -> None:
    """In Anthropic's shape on its path; an engine knows of no earlier response."""
    async with engine("e") as (url, driver):
        async with anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as client:
            with pytest.raises(anthropic.NotFoundError, match="does not exist"):
                await client.messages.create(model="x", max_tokens=9, messages=[])
            with pytest.raises(anthropic.BadRequestError, match="provide messages"):
                await client.messages.create(model="sim", max_tokens=9, messages=[])
            body = {"messages": [{"role": "user", "content": "x"}]}
            with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
                await client.post("/v1/messages", body=body, cast_to=object)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as opened:
            with pytest.raises(openai.NotFoundError, match="'resp_1' not found"):
                await opened.responses.create(model="sim", input="x", previous_response_id="resp_1")
            with pytest.raises(openai.BadRequestError, match="Unsupported input item type: picture"):
                await opened.responses.create(model="sim", input=[{"type": "picture"}])  # type: ignore[list-item]
        assert driver.engine.is_idle


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_events_are_vllm_s(path: str, tools: bool) -> None:
    """A stream has the events that vLLM's has, in its order, and each no member that vLLM's has not."""

    async def run() -> None:
        asked: dict[str, Any] = {"model": "sim", "stream": True, "max_tokens": 64, "input": "x"}
        asked["messages"] = [{"role": "user", "content": "x"}]
        if tools:
            asked |= {"tools": [{"type": "function", "name": "go", "input_schema": PARAMETERS}]}
            asked["tool_choice"] = {"type": "any"} if path == "/v1/messages" else "required"
        name = "message" if path == "/v1/messages" else "response"
        recorded = ANSWERS[f"{name}_stream_tools" if tools else f"{name}_stream"]
        async with engine("e", profile=FINE) as (url, _), httpx.AsyncClient(base_url=url) as client:
            ours = shapes((await client.post(path, json=asked)).text)
        theirs = shapes("".join(recorded))
        assert [kind for kind, _ in ours] == [kind for kind, _ in theirs]
        for (kind, has), (_, may) in zip(ours, theirs, strict=True):
            assert has <= may, kind

    in_loop(run)()


def shapes(stream: str) -> list[tuple[str, set[str]]]:
    """Each event's type and members, inner ones too; deltas in a row count once."""
    found: list[tuple[str, set[str]]] = []
    for line in stream.splitlines():
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            inner = event.get("response") or event.get("item") or event.get("message") or {}
            if not found or found[-1][0] != event["type"] or "delta" not in event["type"]:
                found.append((event["type"], {*event, *inner}))
    return found


@in_loop
async def test_completions_by_ids() -> None:
    """A prompt of token ids goes through both hops, and its answer's ids go on from it."""
    async with deployment(profile=FINE) as stack, openais(stack) as client:
        ids = decode_ids(encode(NOTES))
        for _ in range(2):
            answer = await client.completions.create(
                model="sim", prompt=ids, max_tokens=60, extra_body={"return_token_ids": True}
            )
            ids = [*ids, *(answer.choices[0].model_extra or {})["token_ids"], *decode_ids(encode("And? "))]
        assert returned(stack) > len(NOTES) // 4
