"""The plugin on vLLM's own `/v1/messages` route: the handle is where the router's filter takes it out."""

import asyncio
from argparse import Namespace
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from vllm.entrypoints.anthropic import api_router

from kvloop.connector.endpoint import EndpointPlugin
from kvloop.wire.answers import stream_filter
from kvloop.wire.openai import Endpoint
from tests.connector.test_endpoint import PARAMS, Engine
from tests.router.recorded import ANSWERS


class Serving:
    """vLLM's handler, as far as the route knows it: it generates, and writes events as it goes."""

    def __init__(self, engine: Any, events: list[str]) -> None:
        self._engine = engine
        self._events = events

    async def create_messages(self, *_: Any) -> AsyncGenerator[str, None]:
        """A stream's events: the last ones when all outputs have come."""
        outputs = self._engine.generate("prompt", params=PARAMS)

        async def events() -> AsyncGenerator[str, None]:
            yield self._events[0]
            async for _ in outputs:
                pass
            for event in self._events[1:]:
                yield event

        return events()


async def streamed(events: list[str]) -> bytes:
    """What the server sends for one request."""
    app, engine, plugin = FastAPI(), Engine(), EndpointPlugin()
    api_router.attach_router(app)
    plugin.attach_router(app)
    await plugin.init_state(engine, app.state, Namespace())
    app.state.anthropic_serving_messages = Serving(engine, events)
    app.state.enable_server_load_tracking = False
    request = {"model": "tiny", "max_tokens": 9, "stream": True}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        messages = [{"role": "user", "content": "hello"}]
        answer = await client.post("/v1/messages", json={**request, "messages": messages})
    assert answer.status_code == 200
    return answer.content


@pytest.mark.parametrize("name", ["message_stream", "message_stream_tools"])
def test_the_handle_goes_in_and_comes_out(name: str) -> None:
    """A client of the router sees what it would have seen of a vLLM without the plugin."""
    events = ANSWERS[name]
    sent = asyncio.run(streamed(events))
    assert sent.count(b"kvloop.handle") == 1
    taken_out = stream_filter(Endpoint.MESSAGES, 1 << 20)
    assert taken_out.feed(sent) + taken_out.close() == "".join(events).encode()
    assert taken_out.handle == b'{"kvloop_handle":"abc_-"}'


def test_a_stream_without_an_end_has_no_handle() -> None:
    """What broke off is nothing to go on from."""
    events = ANSWERS["message_stream"][:-1]
    assert asyncio.run(streamed(events)) == "".join(events).encode()
