"""The simulated engine's API as clients see it: vLLM's shapes, vLLM's names, vLLM's mistakes' answers."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseCompletedEvent

from kvloop.sim.driver import Driver
from kvloop.sim.tokenizer import decode_ids, encode
from tests.router.harness import in_loop
from tests.sim.pair import make_profile
from tests.sim.servers import engine

HELLO = [{"role": "user", "content": "Hello, who is there?"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("look", "go")
]


@asynccontextmanager
async def served() -> AsyncIterator[tuple[httpx.AsyncClient, Driver]]:
    """A client of one engine."""
    async with engine("e") as (url, driver), httpx.AsyncClient(base_url=url, timeout=10) as client:
        yield client, driver


@in_loop
async def test_openai_s_client_understands_every_endpoint() -> None:
    """Whole and streamed, the three endpoints give the same text, and counts that add up."""
    async with engine("e") as (url, _):
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        chat = await client.chat.completions.create(model="sim", messages=HELLO, max_tokens=12)  # type: ignore[call-overload]
        said = chat.choices[0].message.content
        assert chat.choices[0].finish_reason == "length"
        assert len(said) == 48
        assert chat.usage.total_tokens == chat.usage.prompt_tokens + 12
        stream = await client.chat.completions.create(  # type: ignore[call-overload]
            model="sim", messages=HELLO, max_tokens=12, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert "".join(pieces) == said
        text = await client.completions.create(model="sim", prompt="Once upon a time", max_tokens=9)
        chunks = await client.completions.create(
            model="sim", prompt=decode_ids(encode("Once upon a time")), max_tokens=9, stream=True
        )
        assert "".join([chunk.choices[0].text async for chunk in chunks]) == text.choices[0].text
        answer = await client.responses.create(model="sim", input="Hello", instructions="Be kind.")
        events = await client.responses.create(
            model="sim", input="Hello", instructions="Be kind.", stream=True
        )
        last = [event async for event in events][-1]
        assert isinstance(last, ResponseCompletedEvent)
        assert last.response.output_text == answer.output_text
        assert (await client.models.list()).data[0].id == "sim"


@in_loop
async def test_a_tool_call_comes_back_to_its_own_tokens() -> None:
    """Made to, the model calls a tool; sent back in the history, whole or streamed, the call is what was
    generated: everything but the last token comes from the cache."""
    async with engine("e", profile=make_profile(block_tokens=1, blocks=4096)) as (url, _):
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        fields: dict[str, Any] = {"model": "sim", "tools": TOOLS, "tool_choice": "required"}
        first = await client.chat.completions.create(messages=HELLO, **fields)
        choice = first.choices[0]
        assert choice.finish_reason == "tool_calls"
        call = choice.message.tool_calls[0]
        assert call.function.name in ("look", "go")
        stream = await client.chat.completions.create(messages=HELLO, stream=True, **fields)
        deltas = [call.function async for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
        assert "".join(delta.arguments for delta in deltas) == call.function.arguments
        assert [delta.name for delta in deltas if delta.name] == [call.function.name]
        back = [*HELLO, choice.message.model_dump(exclude_none=True)]
        back.append({"role": "tool", "tool_call_id": call.id, "content": "done"})
        second = await client.chat.completions.create(messages=back, **fields)
        assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens - 1


@in_loop
async def test_several_answers_and_a_stop_string() -> None:
    """`n` answers are numbered; at a stop string an answer ends, and no handle is kept for it, as in vLLM."""
    async with served() as (client, driver):
        body: dict[str, Any] = {"model": "sim", "messages": HELLO, "max_tokens": 30}
        whole = (await client.post("/v1/chat/completions", json={**body, "n": 2})).json()
        assert [choice["index"] for choice in whole["choices"]] == [0, 1]
        text = whole["choices"][0]["message"]["content"]
        stop = text[50:53]
        params = {"do_remote_decode": False, "do_remote_prefill": False}
        long = [{"role": "user", "content": "Hello, who is there?" * 20}]
        kept = {"messages": long, "kv_transfer_params": params}
        for stream in (False, True):
            cut = await client.post("/v1/chat/completions", json={**body, "stop": [stop], "stream": stream})
            events = [json.loads(line[6:]) for line in cut.text.splitlines() if line.startswith("data: {")]
            said = (
                "".join(one["choices"][0]["delta"].get("content") or "" for one in events if one["choices"])
                or cut.json()["choices"][0]["message"]["content"]
            )
            assert said == text[: text.index(stop)]
        answer = (await client.post("/v1/chat/completions", json={**body, **kept})).json()
        assert answer["kv_transfer_params"]["kvloop_handle"]
        said = answer["choices"][0]["message"]["content"]
        stopped = await client.post("/v1/chat/completions", json={**body, **kept, "stop": said[8:11]})
        assert stopped.json()["kv_transfer_params"] is None
        assert driver.engine.is_idle


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/chat/completions", b"{", 400, None),
        ("/v1/chat/completions", {"model": "sim"}, 400, "messages"),
        ("/v1/chat/completions", {"model": "other", "messages": HELLO}, 404, "model"),
        ("/v1/chat/completions", {"messages": HELLO, "n": 99}, 400, "n"),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 10**9}, 400, None),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 0}, 400, None),
        ("/v1/chat/completions", {"messages": 7}, 400, None),
        ("/v1/completions", {"prompt": []}, 400, "prompt"),
        ("/v1/completions", {"prompt": [-1]}, 400, "prompt"),
        ("/v1/responses", {"model": "sim"}, 400, "input"),
        ("/v1/embeddings", {"input": "x"}, 404, None),
    ],
)
def test_what_cannot_be_served_is_said_so(
    path: str, body: bytes | dict[str, Any], status: int, param: str | None
) -> None:
    """OpenAI's shape of an error, its status and its field; the engine has nothing of it."""

    async def ask() -> None:
        async with served() as (client, driver):
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await client.post(path, content=content)
            assert answer.status_code == status
            assert answer.json()["error"]["param"] == param
            assert driver.engine.is_idle

    in_loop(ask)()


@in_loop
async def test_metrics_have_vllm_s_names() -> None:
    """What kvloop's benches and dashboards read is there, and counts."""
    async with served() as (client, _):
        await client.post("/v1/completions", json={"prompt": "x" * 400, "max_tokens": 5})
        await client.post("/v1/completions", json={"prompt": "x" * 400, "max_tokens": 5})
        lines = (await client.get("/metrics")).text.splitlines()
        values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[0] != "#"}
        labels = '{engine="0",model_name="sim"}'
        expected = {
            "vllm:prompt_tokens_total": 200,
            "vllm:generation_tokens_total": 10,
            "vllm:prefix_cache_hits_total": 96,
            "vllm:external_prefix_cache_hits_total": 0,
            "vllm:num_requests_running": 0,
            "vllm:time_to_first_token_seconds_count": 2,
            "kvloop_sim_wrong_answers_total": 0,
        }
        assert {name: values[name + labels] for name in expected} == expected
        assert values['kvloop_claims_total{engine="0",outcome="granted"}'] == 0
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/reset_prefix_cache")).status_code == 200
        assert (await client.get("/v1/chat/completions")).status_code == 405


@in_loop
async def test_a_message_begins_when_its_prompt_is_computed() -> None:
    """As vLLM's does: what the cache gave is known by then. A response is announced before that."""
    async with served() as (client, _):
        text = "Hello, who is there? " * 20
        body: dict[str, Any] = {"model": "sim", "max_tokens": 3, "stream": True}
        body["messages"] = [{"role": "user", "content": text}]
        for cached in (False, True):
            lines = (await client.post("/v1/messages", json=body)).text.splitlines()
            (start,) = [json.loads(line[6:]) for line in lines if '"message_start"' in line and "{" in line]
            assert (start["message"]["usage"]["cache_read_input_tokens"] > 0) == cached
        asked = {"model": "sim", "input": text, "stream": True}
        events = [line[7:] for line in (await client.post("/v1/responses", json=asked)).text.splitlines()]
        assert events[0] == "response.created"
