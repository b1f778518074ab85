"""The file that names engines: what it can say, what is refused and where, and that a change is taken in."""

import asyncio
import tempfile
from pathlib import Path

import pytest

from kvloop.errors import UserError
from kvloop.router.config import Timeouts
from kvloop.router.engines_file import read_engines
from kvloop.router.target import Role, Target
from kvloop.router.watch import Reloads, WatchedFile
from tests.router.fake_engine import (
    DONE,
    Answer,
    Asked,
    FakeEngine,
    chunk,
    decode_plan,
    engines,
    prefill_plan,
    stream_answer,
)
from tests.router.harness import HELLO, Stack, in_loop, post, raw_client, stack

ONE = "engines:\n- url: http://d:1\n  role: decode\n"


def read(text: str) -> list[Target]:
    """The engines of a file of this text."""
    return read_engines("f.yaml", text.encode())


def test_what_it_can_say() -> None:
    """URLs with their roles, ranks by number or by list, weight and labels."""
    assert read(ONE) == [Target("http://d:1", Role.DECODE)]
    assert read(
        "engines:\n- {url: 'http://p:1/', role: prefill, weight: 2, labels: {zone: a}}\n"
        "- {url: 'https://b:1', role: both, ranks: 2}\n- {url: 'http://c:1', role: decode, ranks: [3]}\n"
    ) == [
        Target("http://p:1", Role.PREFILL, None, 2.0, (("zone", "a"),)),
        Target("https://b:1", Role.BOTH, 0),
        Target("https://b:1", Role.BOTH, 1),
        Target("http://c:1", Role.DECODE, 3),
    ]
    assert read("engines: []") == []


REFUSED = {
    "": "f.yaml:1: engines is missing",
    "- 1": "f.yaml:1: the file must be a mapping",
    "engines: 3": "f.yaml:1: engines must be a list",
    "engines:\n- http://d": "f.yaml:2: engines[0] must be a mapping",
    ONE + "  wieght: 2\n": "f.yaml:4: there is no engines[0].wieght; choose from url, role, ranks, weight",
    ONE + "x: 1\n": "f.yaml:4: there is no x; choose from engines",
    ONE + "  role: both\n": "f.yaml:4: engines[0].role is there twice",
    ONE + "- role: decode\n": "f.yaml:4: engines[1].url is missing",
    ONE + "- url: d:1\n  role: decode\n": "f.yaml:4: engines[1].url is none",
    ONE + "- url: http://d:1/\n  role: prefill\n": "f.yaml:4: engines[1].url is there twice: http://d:1",
    ONE + "- url: http://e\n  role: x\n": "f.yaml:5: engines[1].role must be one of prefill, decode, both",
    ONE + "- url: http://e\n  role: 1\n": "f.yaml:5: engines[1].role must be a text",
    ONE + "  weight: heavy\n": "f.yaml:4: engines[0].weight must be a number",
    ONE + "  weight: 0\n": "f.yaml:4: engines[0].weight must be positive",
    ONE + "  weight: .inf\n": "f.yaml:4: engines[0].weight must be positive",
    ONE + "  ranks: 0\n": "f.yaml:4: engines[0].ranks must be 1 to 1024",
    ONE + "  ranks: 99999999999999999999\n": "f.yaml:4: engines[0].ranks must be 1 to 1024",
    ONE + "  ranks: [1, 1]\n": "f.yaml:4: engines[0].ranks must be 1 to 1024",
    ONE + "  ranks: [1, -1]\n": "f.yaml:4: engines[0].ranks must be whole numbers",
    ONE + "  ranks: true\n": "f.yaml:4: engines[0].ranks must be a whole number",
    ONE + "  labels: {a: 1}\n": "f.yaml:4: engines[0].labels.a must be a text",
    "a: &x 1\nengines: *x\n": "f.yaml:1: anchors, aliases and tags are not taken",
    "engines: !!python/name:os.system\n": "f.yaml:1: anchors, aliases and tags are not taken",
    "engines: }": "f.yaml:1: this is not YAML",
    "engines: \x00": "f.yaml: this is not YAML",
    "engines: [[[[[[[[1]]]]]]]]": "f.yaml:1: this is nested too deeply",
    "[" * 20_000: "f.yaml:1: this is n",
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:40])
def test_refused(text: str) -> None:
    """One sentence that names the file, the line and the key."""
    with pytest.raises(UserError) as refused:
        read(text)
    assert str(refused.value).startswith(REFUSED[text])


def test_latin_1_is_not_yaml() -> None:
    """A file in another encoding is refused, and not read as something else."""
    with pytest.raises(UserError, match="not YAML"):
        read_engines("f.yaml", b"engines: \xff")


@in_loop
async def test_a_bad_content_changes_nothing() -> None:
    """It is counted once however often it is looked at, and the next good one is taken."""
    taken: list[str] = []

    def read_it(_: str, data: bytes) -> str:
        if b"bad" in data:
            raise UserError("it is bad")
        return data.decode()

    with tempfile.TemporaryDirectory() as folder:
        path, reloads = Path(folder, "f"), Reloads()
        path.write_text("one")
        file = WatchedFile("--config", str(path), read_it, taken.append, reloads)
        for text in ("one", "bad", "bad", "one", "two", "two"):
            path.write_text(text)
            await file.look()
        path.unlink()
        await file.look()
    assert taken == ["one", "two"]
    assert reloads.counts == {("--config", "refused"): 2, ("--config", "taken"): 1}


def named(*pairs: tuple[FakeEngine, str]) -> str:
    """A file that names these engines."""
    return "engines:\n" + "".join(f"- url: {engine.url}\n  role: {role}\n" for engine, role in pairs)


async def listed(router: Stack) -> dict[str, str]:
    """Every engine's state, as the admin port tells it."""
    rows = (await router.admin.get("/engines")).json()["engines"]
    return {row["name"]: row["state"] for row in rows}


@in_loop
async def test_a_running_router_follows_its_file() -> None:
    """Whom it names anew is asked, whom it drops finishes its stream; a mistake costs nobody."""
    go = asyncio.Event()

    def slow(_: Asked) -> Answer:
        return stream_answer(chunk("Hel"), go, chunk("lo"), DONE)

    timeouts = Timeouts(reload_interval_s=0.02, drain_timeout_s=0.2)
    async with engines(slow, decode_plan) as (old, new):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "engines.yaml")
            path.write_text(named((old, "decode")))
            async with (
                stack(prefill=[], decode=[], config_file=str(path), timeouts=timeouts) as router,
                raw_client(router.port) as client,
            ):
                client.send(post({"model": "tiny", "messages": [HELLO], "stream": True}))
                await client.reader.readuntil(b'"Hel"')
                path.write_text(named((new, "decode")))
                while await listed(router) != {old.url: "draining", new.url: "serving"}:
                    await asyncio.sleep(0.01)
                assert (await router.chat([HELLO])).status_code == 200
                assert len(new.generations()) == 1
                go.set()
                await client.reader.readuntil(DONE)
                while await listed(router) != {new.url: "serving"}:
                    await asyncio.sleep(0.01)
                path.write_text("engines: {")
                refused = 'file_reloads_total{file="config",outcome="refused"}'
                while not await router.metric(refused):
                    await asyncio.sleep(0.01)
                assert await listed(router) == {new.url: "serving"}
                assert (await router.chat([HELLO])).status_code == 200


@in_loop
async def test_ranks_reach_their_engine() -> None:
    """vLLM is told the rank by header on its hop, and what a client says about ranks is not passed on."""
    async with engines(prefill_plan, decode_plan) as (prefill, decode):
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(named((prefill, "prefill"), (decode, "decode")) + "  ranks: [5]\n")
            file.flush()
            async with stack(prefill=[], decode=[], config_file=file.name) as router:
                answer = await router.chat([HELLO], headers={"X-Data-Parallel-Rank": "7"})
                assert answer.status_code == 200
                assert "x-data-parallel-rank" not in prefill.asked[-1].headers
                assert decode.asked[-1].headers["x-data-parallel-rank"] == "5"
                assert f"{decode.url}#5" in await listed(router)


@in_loop
async def test_draining_by_order() -> None:
    """An engine that is drained gets nothing more, and others do, until it is undrained."""
    async with stack(prefill=[], decode=[decode_plan, decode_plan]) as router:
        first, second = router.decode
        drained = await router.admin.post("/engines/drain", json={"url": first.url})
        assert (drained.status_code, drained.json()) == (200, {"engines": [first.url]})
        for number in range(4):
            await router.chat([{"role": "user", "content": str(number)}])
        assert (len(first.asked), len(second.asked)) == (0, 4)
        assert await listed(router) == {first.url: "drained", second.url: "serving"}
        await router.admin.post("/engines/drain", json={"url": second.url})
        assert (await router.client.get("/health")).status_code == 503
        assert (await router.chat([HELLO])).status_code == 502
        await router.admin.post("/engines/undrain", json={"url": first.url})
        assert (await router.chat([HELLO])).status_code == 200
        assert len(first.asked) == 1


@in_loop
async def test_orders_refused() -> None:
    """An order that is none, or about nobody, is an error in OpenAI's shape that names the field."""
    async with stack() as router:
        for body, status in (
            (b"{", 400),
            (b'{"uri":"x"}', 400),
            (b'{"url":"http://nobody"}', 404),
            (b" " * 20_000, 413),
        ):
            answer = await router.admin.post("/engines/drain", content=body)
            assert (answer.status_code, set(answer.json()["error"])) == (
                status,
                {"message", "type", "param", "code"},
            )
        assert (await router.admin.get("/engines/drain")).status_code == 405
