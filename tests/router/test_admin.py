"""The operator's port: conversations by name and by content, forgotten on demand; health; metrics."""

from tests.router.harness import HELLO, in_loop, stack
from tests.router.test_leases import peer_, renewing


@in_loop
async def test_conversations() -> None:
    """Turns are listed with their names and without their handles, and forgotten by any of them."""
    async with stack() as router:
        alice = {"Authorization": "Bearer secret-of-alice", "X-Session-ID": "s/1"}
        await router.chat([HELLO], headers=alice, conversation_id="c1")
        await router.chat([HELLO])
        listed = await router.admin.get("/conversations")
        assert "secret" not in listed.text
        assert "kvloop_handle" not in listed.text
        body = listed.json()
        assert body["total"] == 2
        plain, named = body["conversations"]
        kinds = [(name["kind"], name["id"]) for name in named["names"][:2]]
        assert kinds == [("conversation_id", "c1"), ("x-session-id", "s/1")]
        assert (named["units"], named["decode"]) == (1, router.decode[0].url)
        assert 479 < named["expires_in_s"] <= 480
        assert (named["tenant"] == "", plain["tenant"] == "") == (False, True)
        assert len((await router.admin.get("/conversations?limit=1")).json()["conversations"]) == 1
        assert (await router.admin.get("/conversations?limit=" + "9" * 5000)).status_code == 200
        gone = await router.admin.delete("/conversations/x-session-id/s/1")
        assert (gone.status_code, gone.json()) == (200, {"forgotten": 1})
        assert (await router.admin.delete("/conversations/conversation_id/c1")).status_code == 404
        label = plain["names"][-1]
        assert (await router.admin.delete(f"/conversations/{label['kind']}/{label['id']}")).status_code == 200
        assert (await router.admin.get("/conversations")).json() == {"total": 0, "conversations": []}
        assert (await router.chat([HELLO])).headers["x-kvloop-route"] == "recompute"


@in_loop
async def test_inspect() -> None:
    """One conversation's turns, newest use first, by any of their names."""
    async with stack() as router:
        for text in ("a", "b"):
            await router.chat([{"role": "user", "content": text}], {"X-Session-ID": "s/1"})
        await router.chat([HELLO], conversation_id="s/1")
        found = (await router.admin.get("/conversations/x-session-id/s/1")).json()
        assert found["total"] == 2
        listed = (await router.admin.get("/conversations")).json()["conversations"]
        assert [one["names"] for one in found["conversations"]] == [one["names"] for one in listed[1:]]
        label = listed[0]["names"][-1]["id"]
        assert (await router.admin.get(f"/conversations/content/{label}")).json()["total"] == 1
        missing = await router.admin.get("/conversations/x-session-id/s")
        assert (missing.status_code, missing.json()) == (404, {"total": 0, "conversations": []})


@in_loop
async def test_keep() -> None:
    """A conversation's leases are kept on demand; what cannot be is said, and nonsense is refused."""
    with peer_() as peer:
        async with renewing(peer) as router:
            await router.chat([HELLO], {"X-Session-ID": "s/1"})
            path = "/conversations/x-session-id/s/1/keep"
            kept = await router.admin.post(path, json={"seconds": 300})
            assert (kept.status_code, kept.json()) == (200, {"total": 1, "kept": 1})
            for wrong in (b"", b"{}", b'{"seconds":-1}', b'{"seconds":1e10}', b'{"seconds":"5"}', b'{"s":5}'):
                answer = await router.admin.post(path, content=wrong)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "seconds")
            assert (await router.admin.post(path, json={"seconds": 0})).json()["kept"] == 1
            assert (await router.admin.post(path, json={"seconds": 5})).status_code == 409
            other = "/conversations/x-session-id/s/2/keep"
            assert (await router.admin.post(other, json={"seconds": 5})).status_code == 404
    async with stack() as router:  # without the secret nothing is renewed
        await router.chat([HELLO], conversation_id="c")
        answer = await router.admin.post("/conversations/conversation_id/c/keep", json={"seconds": 5})
        assert (answer.status_code, answer.json()) == (409, {"total": 1, "kept": 0})


@in_loop
async def test_health() -> None:
    """Health lists the engines and says `down` where no decode engine is left."""
    async with stack() as router:
        health = await router.admin.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "ok")
        assert [(one["role"], one["available"]) for one in health.json()["engines"]] == [
            ("prefill", True),
            ("decode", True),
        ]


@in_loop
async def test_metrics() -> None:
    """What happened is counted, by route, by how a turn was found, and by where its tokens came from."""
    async with stack() as router:
        await router.chat([HELLO])
        await router.chat([HELLO], conversation_id="c")
        await router.chat([{"role": "user", "content": "rewritten"}], conversation_id="c", stream=True)
        for name, value in {
            'requests_total{route="recompute",status="200"}': 1,
            'requests_total{route="return",status="200"}': 2,
            'lookups_total{by="none"}': 1,
            'lookups_total{by="content"}': 1,
            'lookups_total{by="conversation_id"}': 1,
            'prompt_tokens_total{source="returned"}': 128,
            'prompt_tokens_total{source="local"}': 48,
            "handles_filed_total": 3,
            'first_byte_seconds_count{route="return"}': 2,
            "turns": 2,
        }.items():
            assert (name, await router.metric(name)) == (name, value)


@in_loop
async def test_not_on_the_public_port() -> None:
    """Clients reach neither conversations nor metrics."""
    async with stack() as router:
        for path in ("/conversations", "/metrics"):
            assert (await router.client.get(path)).status_code == 404
