"""A request goes only to engines that serve its model; what is not known keeps nobody from being served."""

import asyncio
from typing import Any

from kvloop.router.engine import Engine
from kvloop.router.models import Models
from tests.router.fake_engine import Answer, Asked, Plan, decode_plan, json_answer, prefill_plan
from tests.router.harness import HELLO, Stack, in_loop, stack, until

NEVER_S = 3600.0  # the interval does not come round in a test


def listing(*models: str) -> Answer:
    """`/v1/models` of an engine that serves these."""
    return json_answer({"object": "list", "data": [{"id": model, "object": "model"} for model in models]})


async def read(router: Stack) -> None:
    """Wait until every engine was asked what it serves, and a little."""
    engines = [*router.prefill, *router.decode]
    while not all(engine.listed for engine in engines):
        await asyncio.sleep(0.001)
    await router.client.get("/v1/models")


def listed(router: Stack, *models: list[str]) -> None:
    """Engines, prefill first, serve these from now on."""
    for engine, served in zip([*router.prefill, *router.decode], models, strict=True):
        engine.models = listing(*served)


TWO: dict[str, Any] = {
    "prefill": [prefill_plan, prefill_plan],
    "decode": [decode_plan, decode_plan],
    "models_interval_s": NEVER_S,
}


@in_loop
async def test_engines_of_the_model() -> None:
    """Both hops go to engines that list it, adapters too; the list is the union, and has each model alone."""
    async with stack(**TWO) as router:
        listed(router, ["a"], ["b", "org/b-lora"], ["a"], ["b", "org/b-lora"])
        await read(router)
        for model, at in (("a", 0), ("b", 1), ("org/b-lora", 1)) * 3:
            assert (await router.chat([HELLO], model=model)).status_code == 200
            assert router.prefill[at].generations()[-1].body["model"] == model
            assert router.decode[at].generations()[-1].body["model"] == model
        assert [len(engine.generations()) for engine in (*router.prefill, *router.decode)] == [3, 6, 3, 6]
        models = (await router.client.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["a", "b", "org/b-lora"]
        one = await router.client.get("/v1/models/org%2Fb-lora")
        assert (one.status_code, one.json()) == (200, {"id": "org/b-lora", "object": "model"})


@in_loop
async def test_unknown_model() -> None:
    """404 in OpenAI's words, and in Anthropic's shape on its route; no engine is asked to generate."""
    async with stack(models_interval_s=NEVER_S) as router:
        await read(router)
        answer = await router.chat([HELLO], model="none")
        error = answer.json()["error"]
        assert answer.status_code == 404
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert error["type"] == "invalid_request_error"
        body = {"model": "none", "max_tokens": 5, "messages": [HELLO]}
        anthropic = await router.client.post("/v1/messages", json=body)
        assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (404, "not_found_error")
        assert (await router.client.get("/v1/models/none")).json()["error"]["code"] == "model_not_found"
        assert (await router.client.post("/v1/embeddings", json={"model": "none"})).status_code == 404
        assert not router.prefill[0].generations()
        assert not router.decode[0].generations()


@in_loop
async def test_a_model_that_was_loaded_meanwhile() -> None:
    """Is found by the first request for it, which has the engines asked with its own key, once."""
    async with stack(**TWO) as router:
        listed(router, ["a"], ["a"], ["a"], ["a"])
        await read(router)
        listed(router, ["a"], ["a", "new"], ["a"], ["a", "new"])
        before = router.decode[1].listed
        wanted = [router.chat([HELLO], {"Authorization": "Bearer k"}, model="new") for _ in range(5)]
        assert {answer.status_code for answer in await asyncio.gather(*wanted)} == {200}
        assert router.decode[1].listed == before + 1
        assert router.decode[1].listing_headers["authorization"] == "Bearer k"
        assert len(router.decode[1].generations()) == 5


@in_loop
async def test_requests_for_unknown_models_ask_seldom() -> None:
    """However many come."""
    async with stack(models_interval_s=NEVER_S) as router:
        await read(router)
        before = router.decode[0].listed
        for number in range(20):
            assert (await router.chat([HELLO], model=f"none{number}")).status_code == 404
        assert router.decode[0].listed <= before + 2


@in_loop
async def test_an_engine_that_does_not_tell() -> None:
    """Serves everything: where its list cannot be read, where it wants a key, where it lists too much."""
    many = listing(*[f"m{number}" for number in range(5000)])
    for answer in (json_answer({"error": {}}, 401), json_answer(b"no"), Answer(no_answer=True), many):
        async with stack(models_interval_s=NEVER_S) as router:
            router.prefill[0].models = router.decode[0].models = answer
            while not (router.decode[0].listed and router.prefill[0].listed):
                await asyncio.sleep(0.001)
            await router.client.get("/v1/models")
            assert (await router.chat([HELLO], model="any")).status_code == 200


@in_loop
async def test_the_last_list_counts() -> None:
    """An engine that stops telling keeps what it said; one that comes back with other models is heard."""
    async with stack(models_interval_s=NEVER_S) as router:
        await read(router)
        router.decode[0].models = json_answer({}, 500)
        await router.client.get("/v1/models")
        assert (await router.chat([HELLO], model="none")).status_code == 404
        router.decode[0].models = listing("other")
        await router.client.get("/v1/models")
        assert (await router.chat([HELLO], model="other")).headers["x-kvloop-route"] == "decode"
        assert (await router.chat([HELLO])).status_code == 404  # prefill alone could serve it


@in_loop
async def test_off() -> None:
    """With an interval of 0 no list is read, and any engine may serve any model."""
    async with stack() as router:
        assert (await router.chat([HELLO], model="any")).status_code == 200
        assert not router.decode[0].listed


def echo(asked: Asked) -> Answer:
    """Says what came."""
    return json_answer({"path": asked.path, "model": asked.body.get("model")})


PLANS: list[Plan] = [echo, echo]


@in_loop
async def test_routes_of_one_hop() -> None:
    """They go to an engine of the model too, in JSON as in a form."""
    async with stack(prefill=[echo], decode=PLANS, models_interval_s=NEVER_S) as router:
        listed(router, ["a"], ["a"], ["e"])
        await read(router)
        for path in ("/v1/embeddings", "/v1/rerank", "/tokenize"):
            answer = await router.client.post(path, json={"input": "x", "model": "e"})
            assert answer.json() == {"path": path, "model": "e"}
        router.decode[1].plan = lambda _: json_answer({"text": "hm"})
        form = {"data": {"model": "e"}, "files": {"file": ("a.wav", b"\x00\xff" * 1000, "audio/wav")}}
        heard = await router.client.post("/v1/audio/transcriptions", **form)  # type: ignore[arg-type]
        assert heard.json() == {"text": "hm"}
        assert len(router.decode[1].generations()) == 4


@in_loop
async def test_no_engine_is_not_the_model_s_fault() -> None:
    """Whoever has no engine at all says that, and not that there is no such model."""
    models = Models(list, NEVER_S)
    assert await models.is_served("any", (), b"")
    assert await models.is_served("any", ("http://127.0.0.1:1",), b"")
    assert models.serves("http://127.0.0.1:1", "any")


@in_loop
async def test_a_failure_of_its_own_does_not_end_the_watch() -> None:
    """The next reading comes all the same."""
    asked = 0

    def engines() -> list[Engine]:
        nonlocal asked
        asked += 1
        raise RuntimeError("a bug")

    async with Models(engines, 0.001).watching():
        await until(lambda: asked > 2)
