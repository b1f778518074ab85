"""Tenants meet neither each other's turns nor each other's blocks."""

import json

from kvloop.router.passing import SALTED
from tests.router.fake_engine import Asked
from tests.router.harness import HELLO, Stack, in_loop, stack
from tests.router.test_turns import A1, MORE, handle_sent


@in_loop
async def test_tenants_apart() -> None:
    """A tenant finds its own turns by content and by name, nobody else's, and its caches are salted."""
    async with stack() as router:
        ann, bob = {"Authorization": "Bearer ann"}, {"Authorization": "Bearer bob"}
        salts = []
        for who in (ann, bob, {}):
            assert await handle_sent(router, [HELLO], headers=who, session_id="s") is None
            asked = (router.prefill[0].asked[-1], router.decode[0].asked[-1])
            assert {one.headers.get("authorization") for one in asked} == {who.get("Authorization")}
            salts.append({one.body.get("cache_salt") for one in asked})
        assert await handle_sent(router, [HELLO, A1, MORE], headers=ann) == "h1"
        assert await handle_sent(router, [MORE], headers=bob, session_id="s") == "h2"
        assert all(len(salt) == 1 for salt in salts)
        (first,), (second,), (third,) = salts
        assert isinstance(first, str)
        assert first.startswith("kvloop.")
        assert first != second
        assert third is None
        await router.chat([HELLO], headers=ann, cache_salt="own")
        with_own = router.decode[0].asked[-1].body["cache_salt"]
        assert with_own not in (first, "own")
        await router.chat([HELLO], cache_salt="own")
        assert router.decode[0].asked[-1].body["cache_salt"] == "own"


@in_loop
async def test_salt_outlives_the_router() -> None:
    """A restarted router gives a tenant the same salt: the engines' caches are still warm."""
    salts = set()
    for _ in range(2):
        async with stack() as router:
            await router.chat([HELLO], headers={"Authorization": "Bearer ann"})
            salts.add(router.decode[0].asked[0].body["cache_salt"])
    assert len(salts) == 1


@in_loop
async def test_anthropic_s_key_is_a_tenant() -> None:
    """`x-api-key` says who calls where `Authorization` does not, and the same key is the same tenant."""
    async with stack() as router:
        ann, bob = {"X-Api-Key": "ann"}, {"X-Api-Key": "bob"}
        for who in (ann, bob, {}):
            assert await handle_sent(router, [HELLO], headers=who, session_id="s") is None
        salts = {asked.body.get("cache_salt") for asked in router.decode[0].asked}
        assert len(salts) == 3
        assert await handle_sent(router, [HELLO, A1, MORE], headers=bob) == "h2"
        both = {"Authorization": "Bearer ann", **ann}
        assert await handle_sent(router, [HELLO, A1, MORE], headers={"Authorization": "Bearer ann"}) == "h1"
        assert await handle_sent(router, [HELLO, A1, MORE, A1, MORE], headers=both) == "h5"


@in_loop
async def test_contradicting_keys() -> None:
    """Two different keys, or two of one kind, are refused; nobody is asked."""
    async with stack() as router:
        for headers in (
            [("authorization", "Bearer ann"), ("x-api-key", "bob")],
            [("authorization", "Bearer ann"), ("x-api-key", "")],
            [("x-api-key", "ann"), ("x-api-key", "ann")],
        ):
            answer = await router.client.post(
                "/v1/messages", json={"model": "m", "messages": []}, headers=headers
            )
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
            assert "x-api-key" in answer.json()["error"]["message"]
        assert not router.prefill[0].asked


@in_loop
async def test_a_key_is_no_tenant_name() -> None:
    """Where the operator's header names tenants, a client that sends such a name as its key is nobody."""
    async with stack(tenant_header="x-org") as router:
        assert await handle_sent(router, [HELLO], headers={"X-Org": "a"}) is None
        for headers in ({"X-Api-Key": "a"}, {"Authorization": "a"}, {}):
            assert await handle_sent(router, [HELLO, A1, MORE], headers=headers) != "h1"
            assert router.decode[0].asked[-1].body.get("cache_salt") is None


@in_loop
async def test_tenant_by_header() -> None:
    """Another header can say who is calling; two of them contradict each other."""
    async with stack(tenant_header="x-org") as router:
        assert await handle_sent(router, [HELLO], headers={"X-Org": "a", "Authorization": "1"}) is None
        assert await handle_sent(router, [HELLO], headers={"X-Org": "b", "Authorization": "1"}) is None
        assert await handle_sent(router, [HELLO], headers={"X-Org": "a", "Authorization": "2"}) == "h1"
        twice = await router.client.post(
            "/v1/chat/completions",
            json={"model": "m", "messages": []},
            headers=[("x-org", "a"), ("x-org", "b")],
        )
        assert (twice.status_code, twice.json()["error"]["param"]) == (400, "x-org")


def _asked(router: Stack) -> list[Asked]:
    return router.prefill[0].asked + router.decode[0].asked


@in_loop
async def test_one_hop_routes_are_salted_too() -> None:
    """Where an engine keeps KV of prompts: with the salt that the tenant has on routes that generate, mixed
    with the request's own, and every other byte as it came."""
    async with stack() as router:
        ann, bob = {"Authorization": "Bearer ann"}, {"Authorization": "Bearer bob"}
        await router.chat([HELLO], headers=ann)
        salt = router.decode[0].asked[-1].body["cache_salt"]

        async def asked(path: str, sent: bytes, who: dict[str, str]) -> bytes:
            answer = await router.client.post(path, content=sent, headers=who)
            assert answer.status_code == 200
            (one,) = [asked for asked in _asked(router) if asked.path == path][-1:]
            return one.raw

        for path in SALTED:
            got = await asked(path, b'{ "input" : "x" }', ann)
            assert got == b'{ "input" : "x" ,"cache_salt":"%s"}' % salt.encode()
            assert await asked(path, b'{ "input" : "x" }', {}) == b'{ "input" : "x" }'
        own = json.loads(await asked("/pooling", b'{"input":"x","cache_salt":"o"}', ann))["cache_salt"]
        other = json.loads(await asked("/pooling", b'{"input":"x","cache_salt":"o"}', bob))["cache_salt"]
        assert len({own, other, salt, "o"}) == 4
        twice = b'{"cache_salt":"a","input":"x","cache_salt":"o"}'
        assert (await asked("/pooling", twice, ann)).count(own.encode()) == 1
        assert await asked("/tokenize", b'{ "prompt" : "x" }', ann) == b'{ "prompt" : "x" }'


@in_loop
async def test_what_cannot_be_salted_is_refused() -> None:
    """A tenant's body that another JSON parser might read all the same, or a salt that may not be."""
    async with stack() as router:
        ann = {"Authorization": "Bearer ann"}
        for sent in (
            b'{"input": NaN}',
            '{"input": "x"}'.encode("utf-16"),
            b'[{"input": "x"}]',
            b'{"input": "x", "cache_salt": ""}',
            b'{"input": "x", "cache_salt": "kvloop.x"}',
            b'{"input": "x", "cache_salt": 1}',
            b'{"input": "x"' + b"".join(b',"%d":1' % number for number in range(20_000)) + b"}",
        ):
            answer = await router.client.post("/v1/embeddings", content=sent, headers=ann)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"]
        both = await router.client.post(
            "/v1/embeddings", content=b'{"input": "x"}', headers=ann | {"X-Api-Key": "bob"}
        )
        assert both.json()["error"]["param"] == "x-api-key"
        assert not _asked(router)
