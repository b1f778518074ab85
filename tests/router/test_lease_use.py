"""A request's time with the lease that it goes on from: begun once, ended once, whatever becomes of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest

from kvloop.core.keeper import Keeper
from kvloop.router.config import Limits, Timeouts
from tests.router.decode_peer import decode_peer, plan_of
from tests.router.fake_engine import (
    DONE,
    Answer,
    Asked,
    Plan,
    chunk,
    json_answer,
    prefill_plan,
    stream_answer,
)
from tests.router.harness import HELLO, Stack, in_loop, post, raw_client, until
from tests.router.test_fallbacks import ALONE, breaks_off, dies, garbles, hangs, status
from tests.router.test_leases import renewing

A1 = {"role": "assistant", "content": "Hi"}
MORE = {"role": "user", "content": "more"}
NEXT = [HELLO, A1, MORE]


@dataclass
class Heard:
    """What the keeper was told of uses, in order: the lease, and whether it was the end."""

    said: list[tuple[str, bool]] = field(default_factory=list)

    @property
    def uses(self) -> int:
        """Uses that have begun."""
        return sum(not ended for _, ended in self.said)

    @property
    def ends(self) -> int:
        """Uses that have ended."""
        return sum(ended for _, ended in self.said)


class Decode:
    """A decode engine that leaves leases, and does with later requests what a test says."""

    def __init__(self, plan: Plan) -> None:
        self.good = plan
        self.plan: Plan | None = None

    def __call__(self, asked: Asked) -> Answer:
        return (self.plan or self.good)(asked)


@asynccontextmanager
async def conversation(**settings: Any) -> AsyncIterator[tuple[Stack, Decode, Heard]]:
    """A router with one conversation, whose next turn goes on from a lease."""
    heard = Heard()
    used, done = Keeper.used, Keeper.done

    def on_used(keeper: Keeper, lease_id: str, *rest: Any) -> None:
        heard.said.append((lease_id, False))
        used(keeper, lease_id, *rest)

    def on_done(keeper: Keeper, lease_id: str, *rest: Any) -> None:
        heard.said.append((lease_id, True))
        done(keeper, lease_id, *rest)

    with (
        decode_peer(term_s=2.0) as peer,
        mock.patch.object(Keeper, "used", on_used),
        mock.patch.object(Keeper, "done", on_done),
    ):
        decode = Decode(plan_of(peer))
        async with renewing(peer, plan=decode, **settings) as router:
            await router.chat([HELLO])
            assert heard.said == []
            yield router, decode, heard


def refuses_handover(good: Plan) -> Plan:
    """Fails over a handover, and answers without."""
    return lambda asked: good(asked) if asked.params == ALONE else status(500)(asked)


def never_began(good: Plan) -> Plan:
    """A stream that breaks off before its first event, and then a good one."""
    return lambda asked: good(asked) if asked.params == ALONE else stream_answer(None)


def breaks_mid_stream(_: Plan) -> Plan:
    """A stream that breaks off after its first event."""
    return lambda _: stream_answer(chunk("Hi"), None)


def says_nothing(_: Plan) -> Plan:
    """A stream that ends without an event."""
    return lambda _: stream_answer()


def overlong(_: Plan) -> Plan:
    """A stream of one line that has no end."""
    return lambda _: stream_answer(b"data: " + b"x" * 2000)


def fine(good: Plan) -> Plan:
    """As it should be."""
    return good


def always(plan: Plan) -> Callable[[Plan], Plan]:
    """The same whatever is asked."""
    return lambda _: plan


WAYS: dict[str, tuple[Plan, Callable[[Plan], Plan], int]] = {
    "all is well": (prefill_plan, fine, 200),
    "prefill refuses": (status(400), fine, 400),
    "prefill fails": (status(500), fine, 200),
    "prefill dies": (dies, fine, 200),
    "prefill breaks off": (breaks_off, fine, 200),
    "prefill gives no handover": (garbles, fine, 200),
    "prefill hangs": (hangs, fine, 200),
    "decode refuses the request": (prefill_plan, always(status(422)), 422),
    "decode refuses the handover": (prefill_plan, refuses_handover, 200),
    "decode fails": (prefill_plan, always(status(503)), 503),
    "decode dies": (prefill_plan, always(dies), 502),
    "decode hangs": (prefill_plan, always(hangs), 504),
    "the stream breaks off before its first byte": (prefill_plan, never_began, 200),
    "the stream breaks off after it": (prefill_plan, breaks_mid_stream, 200),
    "the stream has no bytes": (prefill_plan, always(says_nothing), 502),
    "the stream cannot be read": (prefill_plan, overlong, 200),
    "prefill and decode fail": (dies, always(dies), 502),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_every_use_ends_once(way: str, stream: bool) -> None:
    """Whatever engines do, in which order; and the lease that is meant is the same."""
    prefill, decode_of, code = WAYS[way]

    @in_loop
    async def check() -> None:
        async with conversation(
            prefill_timeout_s=0.3,
            timeouts=Timeouts(idle_timeout_s=0.3, drain_timeout_s=0.1),
            limits=Limits(max_event_bytes=1000),
        ) as (router, decode, heard):
            router.prefill[0].plan = prefill
            decode.plan = decode_of(decode.good)
            assert (await router.chat(NEXT, stream=stream)).status_code == code
            assert [ended for _, ended in heard.said] == [False, True]
            assert len({lease_id for lease_id, _ in heard.said}) == 1

    check()


@in_loop
async def test_a_request_that_is_not_sent_on_uses_nothing() -> None:
    """What is refused at once, or goes on from nothing."""
    async with conversation() as (router, _, heard):
        assert (await router.chat(NEXT, headers={"X-Kvloop-Retain": "?"})).status_code == 400
        assert (await router.chat(NEXT, n="many")).status_code == 400
        assert (await router.chat([MORE])).status_code == 200
        assert heard.said == []


@pytest.mark.parametrize("at", ["prefill", "decode", "stream's head", "stream"])
def test_a_client_that_leaves_ends_its_use(at: str) -> None:
    """While prefill has the request, before decode answers, before its stream's first byte, and after it."""

    @in_loop
    async def check() -> None:
        async with conversation() as (router, decode, heard):
            never = asyncio.Event()
            if at == "prefill":
                router.prefill[0].plan = hangs
            elif at == "decode":
                decode.plan = hangs
            else:
                first = [chunk("Hi")] if at == "stream" else []
                decode.plan = lambda _: stream_answer(*first, never)
            engine = router.prefill[0] if at == "prefill" else router.decode[0]
            async with raw_client(router.port) as client:
                client.send(post({"model": "tiny", "messages": NEXT, "stream": True}))
                await until(lambda: len(engine.generations()) == 2)
                if at == "stream":
                    await client.reader.readuntil(b"Hi")
                else:
                    await asyncio.sleep(0.05)
                assert (heard.uses, heard.ends) == (1, int(at == "stream"))
            await engine.cancelled.wait()
            await until(lambda: heard.ends == 1)
            assert (heard.uses, heard.ends) == (1, 1)

    check()


@in_loop
async def test_the_first_byte_ends_it() -> None:
    """Not the head of a stream, which comes before anything is computed; and not its end."""
    head, rest = asyncio.Event(), asyncio.Event()
    async with conversation() as (router, decode, heard):
        decode.plan = lambda _: stream_answer(head, chunk("Hi"), rest, DONE)
        async with raw_client(router.port) as client:
            client.send(post({"model": "tiny", "messages": NEXT, "stream": True}))
            await until(lambda: len(router.decode[0].generations()) == 2)
            await asyncio.sleep(0.05)
            assert (heard.uses, heard.ends) == (1, 0)
            head.set()
            await client.reader.readuntil(b"Hi")
            assert (heard.uses, heard.ends) == (1, 1)
            rest.set()
            await client.reader.readuntil(b"[DONE]")
            assert (heard.uses, heard.ends) == (1, 1)


@in_loop
async def test_a_superseded_lease_is_dropped_while_the_last_fork_s_answer_still_comes() -> None:
    """What was kept for a fork is free from its first byte on, not from its last."""
    rest = asyncio.Event()
    with decode_peer(term_s=2.0) as peer:
        plan = plan_of(peer)
        fork = {"role": "user", "content": "fork"}

        def slow(asked: Asked) -> Answer:
            answer = plan(asked)
            if asked.body["messages"][-1] == fork:
                answer.pieces.insert(1, rest)
            return answer

        async with renewing(peer, plan=slow) as router, raw_client(router.port) as client:
            await router.chat([HELLO])
            await until(lambda: len(peer.renewals()) >= 1)
            (first,) = peer.renewals()[-1]
            client.send(post({"model": "tiny", "messages": [HELLO, A1, fork], "stream": True}))
            await client.reader.readuntil(b"Hi")
            await router.chat(NEXT)
            await until(lambda: peer.drops() == [first])
            assert not rest.is_set()


@in_loop
async def test_a_failure_of_the_router_s_own_ends_it() -> None:
    """A bug costs its request, and not the memory that was kept for it."""
    async with conversation() as (router, _, heard):
        with mock.patch("kvloop.router.proxy.read_report", side_effect=RuntimeError("a bug")):
            assert (await router.chat(NEXT)).status_code == 500
        assert (heard.uses, heard.ends) == (1, 1)


@in_loop
async def test_requests_at_once_end_their_own() -> None:
    """Forks of one turn, one of which fails: as many ends as uses."""
    async with conversation() as (router, decode, heard):

        def some(asked: Asked) -> Answer:
            return (
                json_answer({}, 500) if "2" in asked.body["messages"][-1]["content"] else decode.good(asked)
            )

        decode.plan = some
        forks = [[HELLO, A1, {"role": "user", "content": str(one)}] for one in range(4)]
        await asyncio.gather(*(router.chat(fork, stream=True) for fork in forks))
        assert (heard.uses, heard.ends) == (4, 4)
