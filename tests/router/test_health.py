"""Active probes: whom they take out and bring back, whom they leave alone; and the breaker."""

import asyncio
import secrets
import tempfile
import time
from pathlib import Path
from unittest import mock

from kvloop.core.decision import AppendLimits
from kvloop.core.policy import Kv
from kvloop.router.config import Health, Timeouts
from kvloop.router.engine import Engine
from kvloop.router.fleet import Fleet
from kvloop.router.health import Prober
from tests.router.decode_peer import decode_peer
from tests.router.fake_engine import Answer, Asked, decode_plan, engines, json_answer, prefill_plan
from tests.router.harness import HELLO, Stack, in_loop, stack, until
from tests.router.test_engines_file import listed, named
from tests.router.test_leases import renewing

FAST = Health(probe_interval_s=0.02, probe_timeout_s=0.5, probe_fall=2, probe_rise=2)


def fleet_of(*decode: Engine) -> Fleet:
    """A fleet of these."""
    return Fleet([], decode, time.monotonic_ns, Kv(), AppendLimits())


async def becomes(router: Stack, url: str, state: str) -> None:
    """Wait until the admin port says so of an engine."""
    while (await listed(router)).get(url) != state:
        await asyncio.sleep(0.01)


async def strangers_turn(router: Stack) -> int:
    """A turn of a conversation that no engine has seen; its status."""
    return (await router.chat([{"role": "user", "content": secrets.token_hex(8)}])).status_code


@in_loop
async def test_a_sick_engine_is_left_out() -> None:
    """One that answers 503 to its probes gets no request until it is well again, and metrics say so."""
    async with stack(prefill=[], decode=[decode_plan, decode_plan], health=FAST) as router:
        sick, well = router.decode
        sick.healthy = False
        await becomes(router, sick.url, "out")
        for _ in range(4):
            assert await strangers_turn(router) == 200
        assert (len(sick.asked), len(well.asked)) == (0, 4)
        label = f'engine="{sick.url}",role="decode"'
        assert await router.metric(f"engine_up{{{label}}}") == 0
        sick.healthy = True
        await becomes(router, sick.url, "serving")
        assert await router.metric(f'probes_total{{engine="{sick.url}",outcome="missed",role="decode"}}') >= 2


@in_loop
async def test_the_last_one_is_asked_all_the_same() -> None:
    """Where the probes find no decode engine at all, requests are still tried: probes may be wrong."""
    async with stack(prefill=[], health=FAST) as router:
        router.decode[0].healthy = False
        await becomes(router, router.decode[0].url, "out")
        assert (await router.client.get("/health")).status_code == 503
        assert (await router.chat([HELLO])).status_code == 200


@in_loop
async def test_back_is_another_process() -> None:
    """What was learned of an engine that was gone is forgotten once it is back, and not before."""
    async with engines(decode_plan) as (engine,):
        fleet = fleet_of(Engine(engine.url, "decode"))
        heard: list[str] = []
        fleet.listeners.append(lambda event, _: heard.append(event.value))
        prober = Prober(fleet, FAST)
        await until(lambda: engine.probes > 3)
        assert heard == []
        port = int(engine.url.rsplit(":", 1)[1])
        await engine.stop()
        await until(lambda: not fleet.is_available(fleet.engines()[0]))
        assert heard == []
        await engine.start(port)
        await until(lambda: heard == ["restarted"])
        await prober.aclose()
        assert fleet.listeners != []


@in_loop
async def test_one_probe_per_server() -> None:
    """Ranks share their server's probes, and nobody is probed that has left."""
    async with engines(decode_plan) as (engine,):
        ranks = [Engine(engine.url, "decode", rank=rank) for rank in range(4)]
        fleet = fleet_of(*ranks)
        prober = Prober(fleet, FAST)
        assert prober.servers == [engine.url]
        engine.healthy = False
        await until(lambda: not any(map(fleet.is_available, ranks)))
        for rank in ranks[:3]:
            fleet.remove(rank.name)
        asked = engine.probes
        await until(lambda: engine.probes > asked)
        fleet.remove(ranks[3].name)
        assert prober.servers == []
        await prober.aclose()


@in_loop
async def test_errors_open_the_breaker() -> None:
    """An engine that answers 500 time after time is left out, and one answer to a trial brings it back."""
    broken = [True]

    def plan(asked: Asked) -> Answer:
        return json_answer(b"{}", 500) if broken[0] else decode_plan(asked)

    health = Health(breaker_failures=2, breaker_backoff_max_s=0.3)
    async with stack(prefill=[], decode=[plan, decode_plan], health=health) as router:
        ill, _ = router.decode
        openings = f'breaker_openings_total{{engine="{ill.url}",role="decode"}}'
        while not await router.metric(openings):
            assert await strangers_turn(router) == 200
        assert len(ill.asked) == 2
        broken[0] = False
        while len(ill.asked) < 4:
            assert await strangers_turn(router) == 200
        assert (await listed(router))[ill.url] == "serving"


@in_loop
async def test_who_joins_starts_slowly() -> None:
    """An engine that joins is said to have a part of its share, one of the start to have all of it."""
    timeouts = Timeouts(reload_interval_s=0.02, drain_timeout_s=0.2)
    async with engines(decode_plan, decode_plan) as (first, second):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "engines.yaml")
            path.write_text(named((first, "decode")))
            health = Health(slow_start_s=1000.0)
            async with stack(
                prefill=[], decode=[], config_file=str(path), timeouts=timeouts, health=health
            ) as router:
                path.write_text(named((first, "decode"), (second, "decode")))
                await becomes(router, second.url, "serving")
                rows = (await router.admin.get("/engines")).json()["engines"]
                assert [row["share"] for row in rows] == [1.0, 0.1]


@in_loop
async def test_a_handle_tells_of_a_restart() -> None:
    """An engine whose handles are of another run than before is taken to be another process; once."""
    with decode_peer() as peer, mock.patch.object(Fleet, "restarted") as restarted:
        async with renewing(peer) as router:
            for _ in range(2):
                await router.chat([HELLO])
            assert restarted.call_count == 0
            peer.incarnation = "another"
            for _ in range(2):
                await router.chat([HELLO])
            assert restarted.call_count == 1


@in_loop
async def test_prefill_stays_until_decode_has_read() -> None:
    """A prefill engine that is drained leaves when decode, which reads from it, has begun to answer."""
    go = asyncio.Event()

    def slow(asked: Asked) -> Answer:
        answer = decode_plan(asked)
        answer.before_head = go
        return answer

    async with stack(decode=[slow]) as router:
        turn = asyncio.create_task(router.chat([HELLO]))
        await until(lambda: router.decode[0].asked != [])
        url = router.prefill[0].url
        await router.admin.post("/engines/drain", json={"url": url})
        row = (await router.admin.get("/engines")).json()["engines"][0]
        assert (row["state"], row["in_flight"], row["held"]) == ("draining", 0, 1)
        go.set()
        assert (await turn).status_code == 200
        await becomes(router, url, "drained")


@in_loop
async def test_an_engine_that_left_in_between() -> None:
    """An engine that would be asked once more, and has left since, is passed over, and the turn is served."""
    go = asyncio.Event()

    def fails(asked: Asked) -> Answer:
        answer = json_answer(b"{}", 500)
        answer.before_head = go
        return answer if "kvloop_handle" in asked.params else prefill_plan(asked)

    async with stack(prefill=[fails]) as router:
        await router.chat([HELLO])
        turn = asyncio.create_task(router.chat([HELLO]))
        await until(lambda: len(router.prefill[0].asked) == 2)
        await router.admin.post("/engines/drain", json={"url": router.prefill[0].url})
        go.set()
        answer = await turn
        assert (answer.status_code, answer.headers["x-kvloop-route"]) == (200, "decode")
        assert len(router.prefill[0].asked) == 2
