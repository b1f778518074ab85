"""API keys: what their file can say, who is turned away and when, and that no secret is seen anywhere."""

import asyncio
import contextlib
import hashlib
import io
import logging
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvloop.cli import main
from kvloop.errors import UserError
from kvloop.router.config import Access, RouterConfig, Timeouts
from kvloop.router.keys import MAX_KEY_BYTES, KeyRing, KeySpec, read_keys, spec_of
from tests.router.fake_engine import Answer, Asked, decode_plan
from tests.router.harness import HELLO, Stack, get, in_loop, post, raw_client, stack

ALICE, BOB, OTHER = "key-of-alice", "key-of-bob", "key-of-nobody"
TURN = {"model": "tiny", "messages": [HELLO]}
RELOADED = {
    outcome: f'file_reloads_total{{file="engine-api-key-file",outcome="{outcome}"}}'
    for outcome in ("taken", "refused")
}
RELOADING = Timeouts(reload_interval_s=0.02, drain_timeout_s=0.2)


def entry(name: str, key: str, more: str = "") -> str:
    """A key as the file has it."""
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f'- name: {name}\n  sha256: "{digest}"\n{more}'


@contextlib.asynccontextmanager
async def guarded(
    *entries: str, env: str | None = None, **settings: Any
) -> AsyncIterator[tuple[Stack, Path]]:
    """A router with these keys, and their file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "keys.yaml")
        path.write_text("keys:\n" + "".join(entries))
        async with stack(access=Access(str(path), env), **settings) as router:
            yield router, path


async def asked(router: Stack, key: str | None, **headers: str) -> httpx.Response:
    """One turn with this key."""
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    return await router.chat([HELLO], headers=headers)


def test_what_the_file_can_say() -> None:
    """A digest and a name; the tenant is the name if it is not said; limits if there are any."""
    text = "keys:\n" + entry("alice", ALICE) + entry("bob", BOB, "  tenant: acme\n  concurrency: 2\n")
    one, two = read_keys("k", text.encode())
    assert one == KeySpec("alice", hashlib.sha256(ALICE.encode()).digest(), "alice")
    assert (two.tenant, two.requests_per_minute, two.concurrency) == ("acme", None, 2)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (entry("alice", BOB), "k:4: keys[1].name is there twice"),
        (entry("bob", ALICE), "k:5: keys[1].sha256 is there twice"),
        ("- name: bob\n", "k:4: keys[1].sha256 is missing"),
        (entry("env", BOB), "k:4: keys[1].name is what the key in KVLOOP_API_KEY is called"),
        ("- name: bob\n  sha256: abc\n", "k:5: keys[1].sha256 must be 64"),
        (f"- name: bob\n  sha256: {'1' * 64}\n", "k:5: keys[1].sha256 must be a text"),
        ("- name: bob\n  key: abc\n", "k:5: there is no keys[1].key; choose from name"),
        (entry("b b", BOB), "k:4: keys[1].name must be 1 to 64"),
        (entry("bob", BOB, "  tenant: ''\n"), "k:6: keys[1].tenant must have"),
        (
            entry("bob", BOB, "  requests_per_minute: 0\n"),
            "k:6: keys[1].requests_per_minute must be at least",
        ),
        (entry("bob", BOB, "  concurrency: two\n"), "k:6: keys[1].concurrency must be a whole number"),
    ],
)
def test_files_refused(more: str, said: str) -> None:
    """One sentence that names the file, the line and the key's field."""
    with pytest.raises(UserError) as refused:
        read_keys("k", ("keys:\n" + entry("alice", ALICE) + more).encode())
    assert str(refused.value).startswith(said)


def test_a_ring_keeps_what_was_used_up() -> None:
    """A key that stays in the file goes on with its count and its rate; an overlong one is nobody's."""
    ring = KeyRing()
    ring.set([KeySpec("a", spec_of("k", "a", None).digest, None, 1)])
    key = ring.find(b"k")
    assert key is not None
    assert key.begin(0) == ("", 0)
    ring.set([KeySpec("a", key.spec.digest, "t", 1, 1)])
    assert ring.find(b"k") is key
    assert key.begin(0)[0] == "concurrency"
    key.end()
    assert key.begin(0) == ("requests_per_minute", 60)
    assert ring.find(b"k" * (MAX_KEY_BYTES + 1)) is None
    ring.set([])
    assert ring.find(b"k") is None


@in_loop
async def test_who_is_let_in() -> None:
    """A known key, as a bearer or as x-api-key; nobody else, and health checks."""
    async with guarded(entry("alice", ALICE)) as (router, _):
        assert (await asked(router, ALICE)).status_code == 200
        assert (await router.chat([HELLO], headers={"x-api-key": ALICE})).status_code == 200
        assert (await router.chat([HELLO], headers={"authorization": f"bearer {ALICE}"})).status_code == 200
        engines = len(router.decode[0].asked)
        for headers in (
            {},
            {"authorization": f"Bearer {OTHER}"},
            {"authorization": f"Basic {ALICE}"},
            {"authorization": ALICE},
            {"x-api-key": OTHER},
            [("authorization", f"Bearer {OTHER}"), ("authorization", f"Bearer {ALICE}")],
            [("x-api-key", ALICE), ("x-api-key", ALICE)],
        ):
            answer = await router.client.post("/v1/chat/completions", json=TURN, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        assert (await router.client.get("/v1/models")).status_code == 401
        assert (await router.client.get("/nothing")).status_code == 401
        assert (await router.client.get("/health")).status_code == 200
        assert len(router.decode[0].asked) == engines
        assert await router.metric("strangers_total") == 9


@in_loop
async def test_no_body_of_a_stranger_s() -> None:
    """Who has no key is refused at his head: his body is neither awaited nor kept, whatever its path."""
    async with guarded(entry("alice", ALICE)) as (router, _):
        for path in ("/v1/chat/completions", "/health"):
            async with raw_client(router.port) as client:
                client.send(get(path, "POST", "Content-Length: 1000\r\nExpect: 100-continue\r\n"))
                assert (await client.answer())[0] == 401
                assert await client.closed()


@in_loop
async def test_tenants_are_the_keys() -> None:
    """Two keys of one tenant share its turns, another's do not; no engine ever sees a key."""
    entries = [entry("a", ALICE, "  tenant: t\n"), entry("b", BOB, "  tenant: t\n"), entry("c", OTHER)]
    async with guarded(*entries) as (router, _):
        for key, route in ((ALICE, "recompute"), (BOB, "return"), (OTHER, "recompute")):
            answer = await asked(router, key, **{"x-api-key": key})
            assert answer.headers["x-kvloop-route"] == route
        salts = [one.body["cache_salt"] for one in router.decode[0].asked]
        assert (salts[0] == salts[1], salts[0] == salts[2]) == (True, False)
        for engine in (*router.prefill, *router.decode):
            for one in engine.asked:
                assert not {"authorization", "x-api-key"} & set(one.headers)


@in_loop
async def test_limits() -> None:
    """Too many a minute or too many at once are 429 that say when to come back; other keys go on."""
    go = asyncio.Event()

    def slow(asked: Asked) -> Answer:
        answer = decode_plan(asked)
        answer.before_head = go
        return answer

    entries = [entry("a", ALICE, "  requests_per_minute: 2\n"), entry("b", BOB, "  concurrency: 1\n")]
    async with guarded(*entries, decode=[slow]) as (router, _), raw_client(router.port) as client:
        client.send(post(TURN, headers=f"Authorization: Bearer {BOB}\r\n"))
        while not router.decode[0].asked:
            await asyncio.sleep(0.005)
        refused = await asked(router, BOB)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        go.set()
        assert (await client.answer())[0] == 200
        assert (await asked(router, BOB)).status_code == 200
        assert [(await asked(router, ALICE)).status_code for _ in range(3)] == [200, 200, 429]
        assert int((await asked(router, ALICE)).headers["retry-after"]) in range(1, 31)
        assert await router.metric('key_requests_total{key="a",outcome="over_rate"}') == 2
        assert await router.metric('key_requests_total{key="b",outcome="over_concurrency"}') == 1


@in_loop
async def test_a_client_that_leaves_gives_its_place_back() -> None:
    """However a request ends, it counts no longer as one of its key's."""

    def never(_: Asked) -> Answer:
        return Answer(before_head=asyncio.Event())

    async with guarded(entry("b", BOB, "  concurrency: 1\n"), decode=[never]) as (router, _):
        async with raw_client(router.port) as client:
            client.send(post(TURN, headers=f"Authorization: Bearer {BOB}\r\n"))
            await asyncio.wait_for(_until_asked(router), 20)
        await router.decode[0].cancelled.wait()
        router.decode[0].plan = decode_plan
        while (await asked(router, BOB)).status_code == 429:
            await asyncio.sleep(0.01)


async def _until_asked(router: Stack) -> None:
    while not router.decode[0].asked:
        await asyncio.sleep(0.005)


@in_loop
async def test_the_file_is_read_again() -> None:
    """A key that is taken out is refused, one that is put in is let in; the environment's stays, and what
    a mistake was to change."""
    async with guarded(entry("alice", ALICE), env=OTHER, timeouts=RELOADING) as (router, path):
        path.write_text("keys:\n" + entry("bob", BOB))
        while (await asked(router, BOB)).status_code == 401:
            await asyncio.sleep(0.01)
        assert (await asked(router, ALICE)).status_code == 401
        assert (await asked(router, OTHER)).status_code == 200
        path.write_text("keys:\n- name: x\n")
        while not await router.metric('file_reloads_total{file="api-keys-file",outcome="refused"}'):
            await asyncio.sleep(0.01)
        assert (await asked(router, BOB)).status_code == 200


@in_loop
async def test_secrets_are_nowhere() -> None:
    """Neither clients' keys nor the engines' own are in a log, a metric, a page, an answer or a repr."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"key-of-engines\n")
            file.flush()
            access = Access(None, ALICE, file.name)
            async with stack(access=access) as router:
                answers = [await asked(router, ALICE), await asked(router, OTHER), await asked(router, None)]
                assert [answer.status_code for answer in answers] == [200, 401, 401]
                for engine in (*router.prefill, *router.decode):
                    assert engine.asked[0].headers["authorization"] == "Bearer key-of-engines"
                    await engine.stop()
                answers.append(await asked(router, ALICE))
                pages = ("/metrics", "/engines", "/health", "/conversations")
                answers += [await router.admin.get(page) for page in pages]
                seen = log.getvalue() + repr(RouterConfig(("http://d",), access=access))
                seen += "".join(answer.text + repr(answer.headers) for answer in answers)
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    assert "cannot" in seen or "connect" in seen, "nothing was logged at all"
    for secret in (ALICE, OTHER, "key-of-engines"):
        assert secret not in seen


@in_loop
async def test_engine_keys_refused() -> None:
    """A file that holds no key, or more than one, is one sentence that does not show it."""
    for content in (b"", b" \n", b"two keys", b"k\xc3\xa9y", b"k" * 2000):
        with tempfile.NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            with pytest.raises(UserError, match="must hold one key") as refused:
                async with stack(access=Access(engine_api_key_file=file.name)):
                    pass
            assert content.strip() == b"" or content.decode() not in str(refused.value)


@in_loop
async def test_the_engines_key_is_read_again() -> None:
    """A new key goes out with the next request; a file that holds none changes nothing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "key")
        path.write_text("one")
        async with stack(access=Access(engine_api_key_file=str(path)), timeouts=RELOADING) as router:
            sent = []
            for key in ("one", "two words", "two"):
                path.write_text(key)
                while await router.metric(RELOADED["refused"]) + await router.metric(RELOADED["taken"]) < len(
                    sent
                ):
                    await asyncio.sleep(0.01)
                await router.chat([HELLO], headers={"Authorization": "Bearer mine"})
                sent.append(router.decode[0].asked[-1].headers["authorization"])
            assert sent == ["Bearer one", "Bearer one", "Bearer two"]


def test_keygen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command adds a key and shows it once; a name that is there, or none, changes nothing."""
    path = tmp_path / "keys.yaml"
    for name in ("alice", "123"):
        assert main(["keygen", "--api-key", name, str(path)]) == 0
    keys = capsys.readouterr().out.split()
    specs = read_keys("k", path.read_bytes())
    assert [spec.name for spec in specs] == ["alice", "123"]
    assert [spec.digest for spec in specs] == [hashlib.sha256(key.encode()).digest() for key in keys]
    assert path.stat().st_mode & 0o777 == 0o600
    assert all(key.startswith("kvloop-") and key not in path.read_text() for key in keys)
    before = path.read_bytes()
    for name in ("alice", "a b", ""):
        assert main(["keygen", "--api-key", name, str(path)]) == 2
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["keys.yaml"]


def test_the_environment_s_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kvloop route` takes it, an empty one is none, and no repr of the config shows it."""
    configs: list[RouterConfig] = []
    monkeypatch.setattr("kvloop.router.serve.run", configs.append)
    for value in (ALICE, ""):
        monkeypatch.setenv("KVLOOP_API_KEY", value)
        assert main(["route", "--decode", "http://d:1"]) == 0
    assert [config.access.api_key for config in configs] == [ALICE, None]
    assert ALICE not in repr(configs)
