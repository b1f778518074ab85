"""Engines that are found: behind DNS names, and as pods of a Kubernetes that is faked."""

import asyncio
import contextlib
import logging
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from unittest import mock

import pytest

from kvloop.core.decision import AppendLimits
from kvloop.core.policy import Kv
from kvloop.errors import UserError
from kvloop.router.config import Discovery, RouterConfig, Timeouts
from kvloop.router.dns import DnsSource, resolve
from kvloop.router.engine import EngineRules
from kvloop.router.fleet import Fleet
from kvloop.router.kubernetes import PodSource, pod_api
from kvloop.router.membership import Membership
from kvloop.router.pods import Pods
from kvloop.router.serve import serving
from kvloop.router.target import Role
from tests.router.fake_engine import decode_plan, engines
from tests.router.fake_kubernetes import FakeKubernetes, fake_kubernetes, kubeconfig, pod
from tests.router.harness import HELLO, get, in_loop, post, raw_client, stack, until


def fleet_of() -> tuple[Fleet, Membership]:
    """An empty fleet."""
    fleet = Fleet([], [], time.monotonic_ns, Kv(), AppendLimits())
    return fleet, Membership(fleet, EngineRules())


def names(fleet: Fleet) -> list[str]:
    """Who takes requests."""
    return sorted(engine.name for engine in fleet.engines())


@in_loop
async def test_addresses_are_engines() -> None:
    """Every address of a name is one, v4 and v6, and a name that stops resolving keeps what it had."""
    answers: list[list[str] | OSError] = [["10.0.0.1", "fd00::1"], OSError("no such name"), [], ["10.0.0.2"]]

    async def resolver(host: str, port: int) -> list[str]:
        assert (host, port) == ("decode.svc", 8000)
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    fleet, membership = fleet_of()
    source = DnsSource("http://decode.svc:8000", Role.DECODE, membership, resolver)
    await source.ask()
    assert names(fleet) == ["http://10.0.0.1:8000", "http://[fd00::1]:8000"]
    assert fleet.engines()[0].target.server_name == "decode.svc"
    for _ in range(2):
        await source.ask()
        assert len(names(fleet)) == 2
    assert source.failures == 2
    await source.ask()
    assert names(fleet) == ["http://10.0.0.2:8000"]


@in_loop
async def test_a_resolver_that_hangs() -> None:
    """It is asked one question however often it is due, and its late answer still counts."""
    asked, answer = [0], asyncio.get_running_loop().create_future()

    async def resolver(_: str, __: int) -> list[str]:
        asked[0] += 1
        return list(await answer)

    fleet, membership = fleet_of()
    source = DnsSource("http://decode.svc", Role.DECODE, membership, resolver)
    with mock.patch("kvloop.router.dns.RESOLVE_TIMEOUT_S", 0.01):
        for _ in range(3):
            await source.ask()
        assert (asked[0], source.failures) == (1, 3)
        answer.set_result(["10.0.0.1"])
        await source.ask()
    assert (asked[0], names(fleet)) == (1, ["http://10.0.0.1:80"])
    await source.aclose()


@in_loop
async def test_a_router_finds_engines_by_name() -> None:
    """The flags alone, with a name of this machine's: a turn is served, and a changed answer is followed."""
    assert "127.0.0.1" in await resolve("localhost", 1)
    async with engines(decode_plan) as (engine,):
        port = engine.url.rsplit(":", 1)[1]
        found = Discovery(decode_dns=(f"http://decode.svc:{port}",))
        timeouts = Timeouts(dns_interval_s=0.02, drain_timeout_s=0.2)
        answer = ["127.0.0.2"]

        async def resolver(_: str, __: int) -> list[str]:
            return list(answer)

        with mock.patch("kvloop.router.dns.resolve", resolver):
            async with stack(prefill=[], decode=[], discovery=found, timeouts=timeouts) as router:
                answer[0] = "127.0.0.1"
                while [one["url"] for one in (await router.admin.get("/engines")).json()["engines"]] != [
                    engine.url
                ]:
                    await asyncio.sleep(0.01)
                assert (await router.chat([HELLO])).status_code == 200


@contextlib.asynccontextmanager
async def following(
    fake: FakeKubernetes, selector: str = "app=vllm", pods: Pods | None = None
) -> AsyncIterator[tuple[Fleet, PodSource]]:
    """A fleet that follows the fake's pods."""
    fleet, membership = fleet_of()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config")
        path.write_text(kubeconfig(fake.port))
        async with pod_api(str(path)) as api:
            source = PodSource(api, "ns", selector, pods or Pods(8000, Role.DECODE), membership, "pods")
            task = asyncio.create_task(source.follow(pause_first_s=0.01))
            try:
                yield fleet, source
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


async def becomes(fleet: Fleet, *addresses: str) -> None:
    """Wait until the fleet is these."""
    await until(lambda: names(fleet) == [f"http://{one}:8000" for one in addresses], 20)


@in_loop
async def test_pods_come_and_go() -> None:
    """Ready pods of the selector are engines, in whatever pages; each change of one is followed."""
    async with fake_kubernetes() as fake:
        for number in range(1, 6):
            fake.put(pod(f"p{number}", f"10.0.0.{number}", ready=number != 5, app="vllm"))
        fake.put(pod("other", "10.0.0.9", app="web"))
        async with following(fake) as (fleet, source):
            await becomes(fleet, "10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4")
            assert dict(fleet.engines()[0].target.labels) == {"pod": "p1"}
            await fake.watched()
            fake.put(pod("p5", "10.0.0.5", app="vllm"))
            await becomes(fleet, *(f"10.0.0.{number}" for number in range(1, 6)))
            fake.put(pod("p4", "10.0.0.4", ready=False, app="vllm"))
            fake.drop("p3")
            fake.put(pod("p6", None, app="vllm"))
            await becomes(fleet, "10.0.0.1", "10.0.0.2", "10.0.0.5")
            assert source.lists == 1
            assert fake.asked[0]["path"] == "/api/v1/namespaces/ns/pods"
            assert fake.tokens == {"bearer token-of-the-router"}


@in_loop
async def test_a_pod_that_is_ended_drains() -> None:
    """From the moment it is told to end it gets nothing new, and what it has is finished."""
    async with fake_kubernetes() as fake:
        fake.put(pod("p1", "10.0.0.1", app="vllm"))
        async with following(fake) as (fleet, _):
            await becomes(fleet, "10.0.0.1")
            engine = fleet.engines()[0]
            with engine.slot():
                ended = pod("p1", "10.0.0.1", app="vllm")
                ended["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
                fake.put(ended)
                await becomes(fleet)
                fake.drop("p1")
                assert fleet.find(engine.name) is engine
            assert fleet.find(engine.name) is None


@in_loop
async def test_roles_by_label() -> None:
    """With one selector for all, each pod says its role; one that says none is no engine."""
    async with fake_kubernetes() as fake:
        for number, role in enumerate(("prefill", "decode", "both", "nonsense"), 1):
            fake.put(pod(f"p{number}", f"10.0.0.{number}", app="vllm", **{"kvloop-role": role}))
        fake.put(pod("p5", "10.0.0.5", app="vllm"))
        async with following(fake, pods=Pods(8000, None, "kvloop-role")) as (fleet, _):
            await becomes(fleet, "10.0.0.1", "10.0.0.2", "10.0.0.3")
            assert sorted(fleet.prefill) == ["http://10.0.0.1:8000", "http://10.0.0.3:8000"]
            assert sorted(fleet.decode) == ["http://10.0.0.2:8000", "http://10.0.0.3:8000"]


@in_loop
async def test_an_api_server_that_goes_away() -> None:
    """Engines are kept as they are while it is gone, and what happened meanwhile is seen when it is back."""
    async with fake_kubernetes() as fake:
        fake.put(pod("p1", "10.0.0.1", app="vllm"))
        async with following(fake) as (fleet, source):
            await becomes(fleet, "10.0.0.1")
            await fake.watched()
            fake.broken = True
            fake.cut()
            await until(lambda: source.failures >= 3)
            assert names(fleet) == ["http://10.0.0.1:8000"]
            fake.drop("p1")
            fake.put(pod("p2", "10.0.0.2", app="vllm"))
            assert names(fleet) == ["http://10.0.0.1:8000"]
            fake.broken = False
            await becomes(fleet, "10.0.0.2")


@in_loop
async def test_a_place_that_is_too_old() -> None:
    """410, as a status or as an event of the watch, leads to a new list, and is no failure worth a line."""
    gone = b'{"type":"ERROR","object":{"kind":"Status","code":410,"message":"too old"}}\n'
    log = logging.getLogger("kvloop.router")
    async with fake_kubernetes() as fake:
        fake.put(pod("p1", "10.0.0.1", app="vllm"))
        async with following(fake) as (fleet, source):
            with mock.patch.object(log, "warning") as warning:
                await becomes(fleet, "10.0.0.1")
                await fake.watched()
                fake.oldest = fake.version + 1
                fake.say(gone)
                await until(lambda: source.lists >= 3)
                assert warning.call_count == 0
            fake.oldest = 0
            fake.put(pod("p2", "10.0.0.2", app="vllm"))
            await becomes(fleet, "10.0.0.1", "10.0.0.2")


@in_loop
async def test_nonsense_is_survived() -> None:
    """What is no event, or far too long, costs a new list and no engine; bookmarks only move the place."""
    async with fake_kubernetes() as fake:
        fake.put(pod("p1", "10.0.0.1", app="vllm"))
        async with following(fake) as (fleet, source):
            await becomes(fleet, "10.0.0.1")
            mark = b'{"type":"BOOKMARK","object":{"kind":"Pod","metadata":{"resourceVersion":"999"}}}\n'
            await fake.watched()
            fake.say(mark)
            for lists, said in enumerate((b"{}\n", b'{"type":"ADDED","object":[]}\n', b"x" * (5 << 20)), 2):
                await fake.watched()
                fake.say(said)
                while source.lists < lists:
                    await asyncio.sleep(0.002)
                assert names(fleet) == ["http://10.0.0.1:8000"]
            await fake.watched()
            fake.drop("p1")
            await becomes(fleet)


@in_loop
async def test_a_router_that_follows_pods() -> None:
    """The flags alone: a pod's engine serves a turn."""
    async with engines(decode_plan) as (engine,), fake_kubernetes() as fake:
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(kubeconfig(fake.port))
            file.flush()
            found = Discovery(
                decode_selector="app=vllm",
                pod_namespace="ns",
                pod_port=int(engine.url.rsplit(":", 1)[1]),
                kubeconfig=file.name,
            )
            config = RouterConfig(
                (), host="127.0.0.1", port=0, admin_port=0, models_interval_s=0, discovery=found
            )
            async with serving(config) as ports, raw_client(ports.port) as client:
                client.send(get("/health"))
                assert (await client.answer())[0] == 503
                fake.put(pod("p1", "127.0.0.1", app="vllm"))
                status = 503
                while status != 200:
                    client.send(post({"model": "m", "messages": [HELLO]}))
                    status = (await client.answer())[0]


@in_loop
async def test_no_way_in() -> None:
    """A file that is none, or a process that is no pod, is one sentence."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("nonsense")
        file.flush()
        for path, said in ((file.name, "--kubeconfig"), ("/nowhere", "--kubeconfig"), (None, "no pod")):
            with pytest.raises(UserError, match=said):
                async with pod_api(path):
                    pass
