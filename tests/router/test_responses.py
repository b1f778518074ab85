"""`/v1/responses` through both hops, with the handle both ways."""

import json
from typing import Any

import httpx
import pytest

from tests.router.fake_engine import json_answer, stream_answer
from tests.router.harness import Stack, in_loop, stack
from tests.router.recorded import body, events, plan

PATH = "/v1/responses"


async def ask(router: Stack, **fields: Any) -> httpx.Response:
    """One request."""
    return await router.client.post(PATH, json={"model": "tiny", "input": "hello", **fields})


@in_loop
async def test_two_hops() -> None:
    """Prefill is asked for one token and keeps nothing; decode gets the client's bytes; the handle goes."""
    async with stack(decode=[plan]) as router:
        sent = b'{"model":"tiny", "input":"hello","max_output_tokens":9,"include":["x"],"top_logprobs":1}'
        answer = await router.client.post(PATH, content=sent)
        prefill, decode = router.prefill[0].asked[0], router.decode[0].asked[0]
        assert prefill.path == decode.path == PATH
        left = {key: value for key, value in prefill.body.items() if key != "kv_transfer_params"}
        assert left == {
            "model": "tiny",
            "input": "hello",
            "max_output_tokens": 1,
            "stream": False,
            "store": False,
        }
        assert prefill.params["do_remote_decode"] is True
        assert decode.raw.startswith(sent[:-1] + b',"kv_transfer_params":{"do_remote_prefill":true')
        assert answer.json() == {
            key: value for key, value in json.loads(body("response")).items() if key != "kv_transfer_params"
        }


@in_loop
async def test_the_loop_is_closed() -> None:
    """A string is one user's item: a client that goes on by itself finds its turn, streamed or not."""
    async with stack(decode=[plan]) as router:
        answer = await ask(router)
        history = [{"role": "user", "content": "hello"}, *answer.json()["output"]]
        for text in ("more", "and more"):
            history.append({"role": "user", "content": text})
            streamed = (await ask(router, input=history, stream=True)).text
            assert "kv_transfer_params" not in streamed.replace('"kv_transfer_params":null', "")
            last = json.loads(streamed.rpartition("data: ")[2])
            history += last["response"]["output"]
        handles = [asked.params.get("kvloop_handle") for asked in router.prefill[0].asked]
        assert handles == [None, "h1", "h2"]
        await ask(router, input=history, instructions="be brief")
        assert "kvloop_handle" not in router.prefill[0].asked[-1].params


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": {}}, "input"),
    ({"background": True}, "background"),
    ({"background": 5}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"kv_transfer_params": {}}, "kv_transfer_params"),
    ({"stream": "yes"}, "stream"),
]


@in_loop
async def test_refused() -> None:
    """What cannot be served is a 400 that names the field, and no engine hears of it."""
    async with stack(decode=[plan]) as router:
        for fields, param in REFUSED:
            answer = await ask(router, **fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert (await router.client.post(PATH, json={"model": "tiny"})).json()["error"]["param"] == "input"
        assert not router.prefill[0].asked
        assert (await ask(router, background=False, conversation=None)).status_code == 200


@in_loop
async def test_alone() -> None:
    """A prompt that is cut to fit, and tools that an engine may run itself, go to decode alone."""
    async with stack(decode=[plan]) as router:
        own = {"type": "function", "name": "f", "parameters": {}}
        for fields in ({"truncation": "auto"}, {"tools": [own, {"type": "code_interpreter"}]}):
            assert (await ask(router, **fields)).headers["x-kvloop-route"] == "decode"
        for fields in ({"truncation": "disabled"}, {"tools": [own, {"type": "web_search"}]}, {"tools": 5}):
            assert (await ask(router, **fields)).headers["x-kvloop-route"] != "decode"


@pytest.mark.parametrize("begun", [False, True])
def test_an_engine_that_breaks_off(begun: bool) -> None:
    """Before its first byte another way is taken; after it, the client is told in the API's own event."""

    @in_loop
    async def run() -> None:
        first = events("response_stream")[0]
        async with stack(decode=[plan]) as router:
            router.decode[0].plan = lambda _: stream_answer(*([first] if begun else []), None)
            answer = await ask(router, stream=True)
            if begun:
                told = answer.text.removeprefix(first.decode())
                assert told.startswith("\n\nevent: error\ndata: ")
                error = json.loads(told.removeprefix("\n\nevent: error\ndata: "))
                assert (error["type"], error["error"]["type"]) == ("error", "server_error")
            else:
                assert answer.status_code == 502

    run()


@in_loop
async def test_engines_errors_pass() -> None:
    """As they are."""
    async with stack(decode=[plan]) as router:
        error = {"error": {"message": "no", "type": "invalid_request_error", "param": "x", "code": 400}}
        router.prefill[0].plan = lambda _: json_answer(error, 400)
        answer = await ask(router)
        assert (answer.status_code, answer.json()) == (400, error)
