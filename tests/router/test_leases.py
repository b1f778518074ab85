"""Leases through a whole router: what its conversations do to them, seen from decode's control port."""

import asyncio
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import pytest

from kvloop.core.keeper import Keeper
from kvloop.core.lineage import FiledTurn, Match
from kvloop.errors import UserError
from kvloop.router import renewal as module
from kvloop.router.config import LeasePolicy, Leases, Limits
from kvloop.router.leases import is_return
from kvloop.router.renewal import Renewal
from tests.router.decode_peer import KEY, DecodePeer, decode_peer, plan_of
from tests.router.fake_engine import Answer, Asked, Plan, engines
from tests.router.harness import HELLO, Stack, in_loop, post, raw_client, stack, until

A1 = {"role": "assistant", "content": "Hi"}
MORE = {"role": "user", "content": "more"}
OTHER = {"role": "user", "content": "other"}
TERM_S, INTERVAL_S = 2.0, 0.2


@asynccontextmanager
async def renewing(
    peer: DecodePeer, policy: LeasePolicy = LeasePolicy.FIXED, plan: Plan | None = None, **settings: Any
) -> AsyncIterator[Stack]:
    """A router that renews the leases of one decode engine every fifth of a second."""
    with tempfile.NamedTemporaryFile() as secret:
        secret.write(KEY)
        secret.flush()
        leases = Leases(secret.name, policy, lease_term_s=TERM_S, renew_interval_s=INTERVAL_S)
        async with stack(decode=[plan or plan_of(peer)], leases=leases, **settings) as router:
            yield router


def peer_() -> Any:
    """A decode engine's control side, with terms that fit a test."""
    return decode_peer(term_s=TERM_S)


async def renewed(peer: DecodePeer, times: int) -> None:
    """Wait for so many more renewals, beside one that may be under way."""
    heard = len(peer.renewals()) + 1
    await until(lambda: len(peer.renewals()) >= heard + times)


@in_loop
async def test_the_next_turn_s_lease_ends_the_last_one_s() -> None:
    """Streamed or not; what is filed last is renewed on, and one lease per conversation is held."""
    with peer_() as peer:
        async with renewing(peer) as router:
            await router.chat([HELLO])
            await renewed(peer, 1)
            (first,) = peer.renewals()[-1]
            await router.chat([HELLO, A1, MORE], stream=True)
            await until(lambda: peer.drops() == [first])
            await renewed(peer, 2)
            assert first not in peer.renewals()[-1]
            assert peer.held() == len(peer.renewals()[-1]) == 1
            assert await router.metric('lease_events_total{event="superseded"}') == 1
            assert await router.metric('leases{state="renewed"}') == 1
            engine = f'{{engine="127.0.0.1:{peer.port}",outcome='
            sent = await router.metric(f'control_messages_total{engine}"sent"}}')
            assert sent >= len(peer.heard) > 3
            assert await router.metric(f'control_messages_total{engine}"answered"}}') >= sent - 1
            assert await router.metric(f'control_messages_total{engine}"failed"}}') == 0


@in_loop
async def test_a_shared_system_prompt_brings_nobody_back() -> None:
    """Only who goes on from all of a turn returns to it; a first turn that begins like others does not."""
    rules = {"role": "system", "content": "be brief"}
    with peer_() as peer:
        async with renewing(peer) as router:
            for first in (HELLO, OTHER, MORE):
                await router.chat([rules, first])
            assert await router.metric("return_gap_seconds_count") == 0
            assert await router.metric('lease_events_total{event="returned"}') == 0
            await router.chat([rules, OTHER, A1, MORE])
            assert await router.metric("return_gap_seconds_count") == 1
            assert await router.metric('lease_events_total{event="returned"}') == 1


@in_loop
async def test_a_router_with_another_secret_says_so() -> None:
    """It cannot read the engines' handles, counts them, and serves as one without a secret."""
    with peer_() as peer, mock.patch("tests.router.test_leases.KEY", bytes(32)):
        async with renewing(peer) as router:
            with mock.patch("kvloop.router.leases.logger.warning") as warned:
                await router.chat([HELLO])
                assert (await router.chat([HELLO])).headers["x-kvloop-route"] == "return"
            assert warned.call_count == 1
            assert await router.metric('handles_unread_total{reason="forged"}') == 2
            assert peer.heard == []


@in_loop
async def test_a_superseded_lease_is_held_while_a_fork_is_in_flight() -> None:
    """The fork may still read it; when the last one is through, it is dropped."""
    forked = asyncio.Event()
    with peer_() as peer:
        plan = plan_of(peer)

        def slow_fork(asked: Asked) -> Answer:
            answer = plan(asked)
            if asked.body["messages"][-1] == OTHER:
                answer.before_head = forked
            return answer

        async with renewing(peer, plan=slow_fork) as router:
            await router.chat([HELLO])
            await renewed(peer, 1)
            (first,) = peer.renewals()[-1]
            fork = asyncio.ensure_future(router.chat([HELLO, A1, OTHER]))
            await until(lambda: len(router.decode[0].generations()) == 2)
            await router.chat([HELLO, A1, MORE])
            await renewed(peer, 6)  # longer than drops are gathered
            assert first in peer.renewals()[-1]
            assert peer.drops() == []
            forked.set()
            await fork
            await until(lambda: peer.drops() == [first])


@in_loop
async def test_a_client_that_leaves_needs_nothing_any_more() -> None:
    """Its turn is not in flight for ever."""
    with peer_() as peer:
        plan = plan_of(peer)

        def stuck(asked: Asked) -> Answer:
            answer = plan(asked)
            answer.before_head = asyncio.Event() if asked.body["messages"][-1] == OTHER else None
            return answer

        async with renewing(peer, plan=stuck) as router:
            await router.chat([HELLO])
            await renewed(peer, 1)
            (first,) = peer.renewals()[-1]
            async with raw_client(router.port) as client:
                client.send(post({"model": "tiny", "messages": [HELLO, A1, OTHER]}))
                await until(lambda: len(router.decode[0].generations()) == 2)
            await router.chat([HELLO, A1, MORE])
            await until(lambda: first in peer.drops())


@in_loop
async def test_a_deleted_conversation_lets_its_leases_go() -> None:
    """All of them that have the name, at once; nobody else's."""
    with peer_() as peer:
        async with renewing(peer) as router:
            await router.chat([HELLO], conversation_id="c")
            await router.chat([OTHER], conversation_id="c")
            await renewed(peer, 1)
            deleted = peer.renewals()[-1]
            await router.chat([MORE])
            assert (await router.admin.delete("/conversations/conversation_id/c")).json() == {"forgotten": 2}
            await until(lambda: sorted(peer.drops()) == sorted(deleted))
            assert peer.held() == 1


@in_loop
async def test_a_turn_that_finds_no_room_lets_its_lease_go() -> None:
    """What the table forgets for newer turns cannot be offered, so decode need not hold it."""
    with peer_() as peer:
        async with renewing(peer, limits=Limits(max_conversation_keys=1)) as router:
            await router.chat([HELLO])
            await renewed(peer, 1)
            (first,) = peer.renewals()[-1]
            await router.chat([OTHER])
            await until(lambda: peer.drops() == [first])


@in_loop
async def test_who_opts_out_has_no_lease() -> None:
    """Decode keeps nothing, and there is nothing to renew."""
    with peer_() as peer:
        async with renewing(peer) as router:
            await router.chat([HELLO], headers={"X-Kvloop-Retain": "off"})
            assert peer.held() == 0
            assert await router.metric("handles_filed_total") == 0
            assert peer.heard == []


@in_loop
async def test_the_keeper_hears_how_turns_end_and_what_clients_wish() -> None:
    """The ending and the wish, streamed and not, under the caller that the tenant header names."""
    seen: list[tuple[Any, ...]] = []
    filed = Keeper.filed

    def recording(keeper: Keeper, ref: Any, caller: str, *rest: Any) -> None:
        seen.append((bool(caller), rest[0], rest[2]))
        filed(keeper, ref, caller, *rest)

    with peer_() as peer, mock.patch.object(Keeper, "filed", recording):
        for ending in ("tool_calls", "length"):
            async with renewing(peer, plan=plan_of(peer, ending)) as router:
                await router.chat([HELLO], headers={"X-Kvloop-Retain": "90"})
                await router.chat([HELLO], headers={"Authorization": "Bearer x"}, stream=True)
    assert seen == [
        (caller, ending, wish)
        for ending in ("tool_calls", "length")
        for caller, wish in ((False, 90 * 10**9), (True, None))
    ]


@in_loop
async def test_a_turn_whose_lease_is_gone_is_not_offered() -> None:
    """After decode was restarted prefill is not sent to ask it in vain."""
    with peer_() as peer:
        async with renewing(peer) as router:
            await router.chat([HELLO])
            await router.chat([OTHER])
            peer.restart()
            await until(lambda: peer.heard != [])
            while await router.metric('lease_events_total{event="lost"}') < 2:
                await asyncio.sleep(0.01)
            assert (await router.chat([HELLO, A1, MORE])).headers["x-kvloop-route"] == "recompute"
            assert "kvloop_handle" not in router.prefill[0].generations()[-1].params
            again = await router.chat([HELLO, A1, MORE, A1, MORE])
            assert again.headers["x-kvloop-route"] == "return", "the new turn's lease is not the lost one"


@in_loop
async def test_without_the_secret_nothing_is_renewed() -> None:
    """The router says so once, serves as ever, and leases live one term."""
    with peer_() as peer, mock.patch("kvloop.router.heartbeat.logger.warning") as warned:
        async with stack(decode=[plan_of(peer)]) as router:
            await router.chat([HELLO])
            assert (await router.chat([HELLO])).headers["x-kvloop-route"] == "return"
            assert await router.metric("handles_filed_total") == 2
        assert warned.call_count == 1
        assert peer.heard == []


@in_loop
async def test_a_router_that_returns_nothing_renews_nothing() -> None:
    """It reads no secret, opens no channel, shows no leases and says nothing of it; decode hears nothing."""
    with (
        peer_() as peer,
        mock.patch("kvloop.router.heartbeat.logger.warning") as warned,
        mock.patch("kvloop.router.heartbeat.ControlChannel") as channel,
    ):
        async with renewing(peer, return_enabled=False) as router:
            assert (await router.chat([HELLO])).headers["x-kvloop-route"] == "recompute"
            assert (await router.chat([HELLO, A1, MORE])).headers["x-kvloop-route"] == "recompute"
            assert "kvloop_router_lease" not in (await router.admin.get("/metrics")).text
        async with stack(return_enabled=False), stack(return_enabled=False, leases=Leases("/nowhere/secret")):
            pass
        assert (warned.call_count, channel.call_count, peer.heard) == (0, 0, [])


@in_loop
async def test_a_secret_that_cannot_be_read_ends_the_start() -> None:
    """Better than leases that nobody renews."""
    with pytest.raises(UserError, match="--secret-file"):
        async with stack(leases=Leases("/nowhere/secret")):
            pass


@in_loop
async def test_a_failure_of_its_own_does_not_end_the_heartbeat() -> None:
    """It is logged, and the next round is tried."""
    due = Keeper.due
    failures = [RuntimeError("a bug"), None]

    def failing(*args: Any) -> Any:
        if failures and (failure := failures.pop(0)) is not None:
            raise failure
        return due(*args)

    with (
        peer_() as peer,
        mock.patch.object(Keeper, "due", failing),
        mock.patch.object(module, "RETRY_S", 0.01),
    ):
        with mock.patch("kvloop.router.renewal.logger.exception") as logged:
            async with renewing(peer) as router:
                await router.chat([HELLO])
                await renewed(peer, 2)
        assert logged.call_count == 1


@in_loop
async def test_an_idle_heartbeat_sleeps() -> None:
    """Without leases it looks once, at its start; with one it wakes when that is due, and not in between."""
    looks = []
    step = Renewal.step

    def counted(renewal: Renewal) -> bool:
        looks.append(len(looks))
        return step(renewal)

    with peer_() as peer, mock.patch.object(Renewal, "step", counted):
        async with renewing(peer) as router:
            await asyncio.sleep(3 * INTERVAL_S)
            assert len(looks) == 1
            await router.chat([HELLO])
            await renewed(peer, 5)
            assert len(looks) <= 8 * len(peer.renewals()), "it does not sleep between renewals"


@in_loop
async def test_a_router_that_is_killed_renews_nothing() -> None:
    """The real process, by its flags: while it runs leases outlive their term, then they end within one."""
    with peer_() as peer, tempfile.NamedTemporaryFile() as secret:
        secret.write(KEY)
        secret.flush()
        async with engines(plan_of(peer)) as (decode,):
            flags = ["--decode", decode.url, "--port", "0", "--admin-port", "0", "--secret-file", secret.name]
            flags += ["--lease-policy", "fixed", "--lease-term-s", str(TERM_S), "--renew-interval-s", "0.2"]
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "kvloop.cli", "route", *flags, stderr=PIPE
            )
            try:
                assert process.stderr is not None
                while b"ready on http://" not in (line := await process.stderr.readline()):
                    assert line, "it ended"
                async with raw_client(int(line.rsplit(b":", 1)[1])) as client:
                    client.send(post({"model": "tiny", "messages": [HELLO]}))
                    assert (await client.answer())[0] == 200
                term_over_ns = time.monotonic_ns() + peer.term_ns
                await until(lambda: time.monotonic_ns() > term_over_ns)
                assert peer.held() == 1
            finally:
                process.kill()
                await process.wait()
            heard = len(peer.heard)
            await until(lambda: peer.held() == 0)
            assert len(peer.heard) == heard


@pytest.mark.parametrize(
    ("by", "depth", "is_one"),
    [
        ("content", 5, True),
        ("content", 6, True),
        ("content", 4, False),
        ("conversation_id", 0, True),
        ("x-session-id", 2, True),
        ("prompt_cache_key", 0, False),
        ("x-smg-routing-key", 4, False),
    ],
)
def test_what_counts_as_a_return(by: str, depth: int, is_one: bool) -> None:
    """A system prompt that everybody sends brings nobody back, nor does a key that is shared."""
    turn = FiledTurn(b"{}", "u", "t", 5, 1)
    assert is_return(Match(turn, by, depth)) is is_one
