"""`previous_response_id`: a conversation goes on by its last response's name, if its tenant says it."""

import json
from typing import Any

import httpx
import pytest

from kvloop.router.config import Limits
from tests.router.fake_engine import json_answer, stream_answer
from tests.router.harness import Stack, in_loop, stack
from tests.router.recorded import body, events, plan

PATH = "/v1/responses"
HELLO_ITEM = {"role": "user", "content": "hello"}
OUTPUT = json.loads(body("response"))["output"]


async def ask(router: Stack, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    """One request."""
    sent = {"model": "tiny", "input": "hello", **fields}
    return await router.client.post(PATH, json=sent, headers=headers)


def inputs(router: Stack) -> list[Any]:
    """What decode was given as input, request by request."""
    return [asked.body["input"] for asked in router.decode[0].asked]


def last_of(answer: httpx.Response) -> dict[str, Any]:
    """The response that a stream ended with."""
    last: dict[str, Any] = json.loads(answer.text.rpartition("data: ")[2])["response"]
    return last


@in_loop
async def test_goes_on() -> None:
    """Three turns by name, unstreamed and streamed: engines get everything, and the loop is closed."""
    async with stack(decode=[plan]) as router:
        first = (await ask(router)).json()
        assert (first["id"], first["previous_response_id"]) == ("resp_1", None)
        streamed = await ask(router, input="more", previous_response_id="resp_1", stream=True)
        assert streamed.text.count('"previous_response_id":"resp_1"') == 3
        assert last_of(streamed)["id"] == "resp_2"
        third = await ask(router, input=[{"role": "user", "content": "still"}], previous_response_id="resp_2")
        assert third.json()["previous_response_id"] == "resp_2"
        more, still = {"role": "user", "content": "more"}, {"role": "user", "content": "still"}
        history = [HELLO_ITEM, *OUTPUT, more, *OUTPUT, still]
        assert inputs(router) == ["hello", history[:3], history]
        for asked in (*router.prefill[0].asked, *router.decode[0].asked):
            assert "previous_response_id" not in asked.body
        handles = [asked.params.get("kvloop_handle") for asked in router.prefill[0].asked]
        assert handles == [None, "h1", "h2"]
        fork = await ask(router, input="fork", previous_response_id="resp_1")
        assert fork.status_code == 200
        assert inputs(router)[-1] == [HELLO_ITEM, *OUTPUT, {"role": "user", "content": "fork"}]


@in_loop
async def test_tools() -> None:
    """A call and its result, by name: the call stands in the input as vLLM wrote it."""
    async with stack(decode=[plan]) as router:
        tools = [{"type": "function", "name": "get_weather", "parameters": {"type": "object"}}]
        call = (await ask(router, tools=tools)).json()["output"][0]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
        await ask(router, input=[result], tools=tools, previous_response_id="resp_1")
        assert inputs(router)[-1] == [HELLO_ITEM, call, result]
        assert router.prefill[0].asked[-1].params["kvloop_handle"] == "h1"


@in_loop
async def test_unknown() -> None:
    """404 that names the field: what never was, was not stored, was deleted, failed, or broke off."""

    async def unknown(name: Any, status: int = 404) -> None:
        before = len(router.prefill[0].asked)
        answer = await ask(router, previous_response_id=name)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, "previous_response_id")
        assert len(router.prefill[0].asked) == before

    async with stack(decode=[plan]) as router:
        await unknown("resp_0")
        for name in ("", "x" * 257, 5):
            await unknown(name, 400)
        await ask(router, store=False)
        await unknown("resp_1")
        await ask(router)
        assert (await router.client.delete(f"{PATH}/resp_2")).json()["deleted"] is True
        await unknown("resp_2")
        failed = body("response").replace(b'"status":"completed","text"', b'"status":"failed","text"')
        router.decode[0].plan = lambda _: json_answer(failed)
        await ask(router)
        await unknown("resp_1")
        router.decode[0].plan = lambda _: stream_answer(*events("response_stream")[:-1], None)
        await ask(router, stream=True)
        await unknown("resp_1")
        router.decode[0].plan = lambda _: json_answer({"id": "resp_9", "status": "completed"}, 404)
        await ask(router)
        await unknown("resp_9")


@in_loop
async def test_tenants() -> None:
    """Nobody goes on from, sees or deletes another tenant's response, whatever it is called."""
    async with stack(decode=[plan]) as router:
        ann, bob = {"Authorization": "Bearer ann"}, {"Authorization": "Bearer bob"}
        await ask(router, ann)
        for who in (bob, {}):
            assert (await ask(router, who, previous_response_id="resp_1")).status_code == 404
            assert (await router.client.get(f"{PATH}/resp_1", headers=who)).status_code == 404
            assert (await router.client.delete(f"{PATH}/resp_1", headers=who)).status_code == 404
        await ask(router, bob, request_id="resp_1")
        assert (await router.client.get(f"{PATH}/resp_1", headers={"X-Api-Key": "ann"})).status_code == 200
        both = {**ann, "x-api-key": "bob"}
        assert (await router.client.get(f"{PATH}/resp_1", headers=both)).status_code == 400
        assert (await ask(router, ann, previous_response_id="resp_1")).status_code == 200


@in_loop
async def test_retrieved_as_it_was() -> None:
    """GET has the answer's own bytes, of a stream its last response's; DELETE and cancel answer as OpenAI."""
    async with stack(decode=[plan]) as router:
        answer = await ask(router)
        got = await router.client.get(f"{PATH}/resp_1")
        assert got.content == answer.content
        streamed = await ask(router, stream=True, previous_response_id="resp_1")
        assert (await router.client.get(f"{PATH}/resp_2")).json() == last_of(streamed)
        assert b"kv_transfer_params" not in (await router.client.get(f"{PATH}/resp_2")).content
        cancel = await router.client.post(f"{PATH}/resp_1/cancel")
        assert (cancel.status_code, cancel.json()["error"]["param"]) == (400, "response_id")
        assert (await router.client.post(f"{PATH}/resp_0/cancel")).status_code == 404
        deleted = await router.client.delete(f"{PATH}/resp_1")
        assert deleted.json() == {"id": "resp_1", "object": "response", "deleted": True}
        missing = await router.client.get(f"{PATH}/resp_1")
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "invalid_request_error")
        assert (await ask(router, previous_response_id="resp_2")).status_code == 200
        for path in (f"{PATH}/", f"{PATH}/a/b", f"{PATH}/resp_2/cancel/x"):
            assert (await router.client.get(path)).status_code == 404


@in_loop
async def test_bounds() -> None:
    """A conversation is no larger than a body, and what is put before a request counts like one."""
    item = [{"role": "user", "content": "x" * 3000}]
    async with stack(decode=[plan], limits=Limits(max_body_bytes=8000)) as router:
        await ask(router, input=item)
        await ask(router, input=item, previous_response_id="resp_1")
        answer = await ask(router, input=item, previous_response_id="resp_2")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "previous_response_id")
    async with stack(decode=[plan], limits=Limits(max_buffered_bytes=6000)) as router:
        await ask(router, input=item)
        for _ in range(20):  # what was taken is given back, also by requests that are refused later
            assert (await ask(router, input="y", previous_response_id="resp_1")).status_code == 200
            wrong = await ask(router, {"X-Kvloop-Retain": "x"}, previous_response_id="resp_1")
            assert wrong.status_code == 400
        assert (await ask(router, input=item, previous_response_id="resp_1")).status_code == 503
    async with stack(decode=[plan], limits=Limits(max_responses=2)) as router:
        for _ in range(3):
            await ask(router)
        assert await router.metric("responses") == 2
        assert await router.metric("response_bytes") > 2 * len(body("response"))
        assert (await ask(router, previous_response_id="resp_1")).status_code == 404
        assert (await ask(router, previous_response_id="resp_2")).status_code == 200


@pytest.mark.parametrize("field", ["store", "previous_input_messages"])
def test_contradictions(field: str) -> None:
    """A `store` that says neither, and two histories, are refused."""

    @in_loop
    async def run() -> None:
        async with stack(decode=[plan]) as router:
            await ask(router)
            answer = await ask(router, previous_response_id="resp_1", **{field: [{"role": "user"}]})
            assert answer.status_code == 400

    run()


@in_loop
async def test_found_by_the_response_s_name() -> None:
    """A turn is listed under its response, which leads to its handle where another root hides the history."""
    async with stack(decode=[plan]) as router:
        await ask(router)
        listed = (await router.admin.get("/conversations")).json()["conversations"][0]["names"]
        assert {"kind": "previous_response_id", "id": "resp_1"} in listed
        await ask(router, input="more", previous_response_id="resp_1", reasoning={"effort": "low"})
        assert router.prefill[0].asked[-1].params["kvloop_handle"] == "h1"
        assert await router.metric('lookups_total{by="previous_response_id"}') == 1
        again = {"role": "user", "content": "more"}
        await ask(router, input=[HELLO_ITEM, *OUTPUT, again], reasoning={"effort": "high"})
        assert "kvloop_handle" not in router.prefill[0].asked[-1].params
