"""Routers that stop renewing, for whatever reason: what they had is free within one term, and the next turn
is right."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvloop.bench.control import ControlClient
from kvloop.local.stack import Stack
from kvloop.wire.control import Renew, Renewed
from tests.e2e.counters import counters, grown
from tests.e2e.leases.books import EXPIRED, RENEWED, SKEWED, held
from tests.e2e.leases.clocks import Clocks
from tests.e2e.leases.conftest import LEASE_S, RENEW_S, TERM_RENEWALS, StartRouter
from tests.e2e.leases.front import Front
from tests.e2e.link import HOST, Frame, Link, clear
from tests.e2e.test_histories import check, opening, two_turns, user
from tests.e2e.test_router import Client, grow
from tests.e2e.turns import Pair, until

AN_HOUR_S = 3_600
WITHIN_SKEW_S = 20


def renewed(pair: Pair, times: int) -> None:
    """Wait for so many renewals more."""
    before = counters(pair.decode)[RENEWED]
    until(lambda: counters(pair.decode)[RENEWED] >= before + times, "nobody renews")


def expired(pair: Pair, act: Callable[[], object]) -> None:
    """Wait until what is leased when this begins has expired by itself."""
    leases, before = held(pair.decode), counters(pair.decode)[EXPIRED]
    assert leases > 0
    act()
    until(lambda: not held(pair.decode), "a lease outlives its renewals")
    assert counters(pair.decode)[EXPIRED] == before + leases


def only_claims(frame: Frame) -> Sequence[float]:
    """The weather in which no router reaches decode, and every prefill engine does."""
    return () if frame.sender.startswith("router/") else (0.0,)


def test_a_router_is_killed(pair: Pair, lease_stack: Stack, start_router: StartRouter) -> None:
    """Its leases live while it renews, and end when it does. The next router knows nothing of the
    conversation: the turn is computed, and the one after it returns."""
    router = start_router()
    client = Client(router.url)
    messages = opening("killed router")
    answer = client.chat(messages)
    renewed(pair, TERM_RENEWALS)
    assert held(pair.decode) == 1
    expired(pair, router.kill)
    router.start()
    lease_stack.wait([router])
    for route in ("recompute", "return"):
        messages = grow(messages, answer, "And?")
        answer = client.chat(messages)
        assert answer.route == route
        assert answer.tokens == pair.oracle(messages)


def test_a_router_is_cut_off_from_the_control_port(
    pair: Pair, front: Front, link: Link, start_router: StartRouter
) -> None:
    """Its leases end; yet it lives and its handle is good: what the blocks still hold is found again."""
    client = Client(start_router(front.url).url)
    messages = opening("cut off")
    answer = client.chat(messages)
    renewed(pair, TERM_RENEWALS)
    link.weather = only_claims
    expired(pair, lambda: None)
    messages = grow(messages, answer, "And?")
    answer = client.chat(messages)
    assert answer.route == "return"
    assert answer.tokens == pair.oracle(messages)
    link.weather = clear
    messages = grow(messages, answer, "And now?")
    answer = client.chat(messages)
    assert answer.route == "return"
    assert answer.tokens == pair.oracle(messages)
    renewed(pair, TERM_RENEWALS)
    assert held(pair.decode) >= 1


def test_two_routers_have_the_same_conversation(pair: Pair, start_router: StartRouter) -> None:
    """By turns and at once: each returns to what it filed itself, and the death of one frees its own leases
    alone."""
    first, second = (start_router(), start_router())
    a, b = Client(first.url), Client(second.url)
    messages = opening("two routers")
    answer = a.chat(messages)
    for client, route in ((b, "recompute"), (a, "return"), (b, "return")):
        messages = grow(messages, answer, "And?")
        answer = client.chat(messages)
        assert answer.route == route
        assert answer.tokens == pair.oracle(messages)
    messages = grow(messages, answer, "Both?")
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda client: client.chat(messages), (a, b)))
    assert [answer.tokens for answer in answers] == [pair.oracle(messages)] * 2
    assert [answer.route for answer in answers] == ["return", "return"]
    until(lambda: held(pair.decode) == 2, "not one lease for each router")
    first.kill()
    until(lambda: held(pair.decode) == 1, "the dead router's lease does not end")
    renewed(pair, TERM_RENEWALS)
    assert held(pair.decode) == 1
    messages = grow(messages, answers[1], "You?")
    answer = b.chat(messages)
    assert answer.route == "return"
    assert answer.tokens == pair.oracle(messages)


def test_a_lease_that_two_renew(pair: Pair, front: Front, start_router: StartRouter, secret: bytes) -> None:
    """It lives as long as either does."""
    router = start_router(front.url)
    Client(router.url).chat(opening("shared lease"))
    (lease_id,) = front.lease_ids
    heartbeat = Renew([(lease_id, int(LEASE_S * 1000), 500)])
    before = counters(pair.decode)[EXPIRED]
    with ControlClient(secret, HOST, pair.decode.control_port) as other:

        def beat(times: int) -> None:
            for _ in range(times):
                assert other.ask(heartbeat) == Renewed([], [])
                time.sleep(RENEW_S)

        beat(2)
        router.kill()
        beat(TERM_RENEWALS)
    assert held(pair.decode) == 1
    assert counters(pair.decode)[EXPIRED] == before


def test_a_lease_counts_no_wall_clock(pair: Pair, clocks: Clocks, start_router: StartRouter) -> None:
    """Decode's clock is set on by an hour and back: no lease has ended. It is set back by an hour: renewals
    do not open, and the lease ends by its term, not an hour later. Then it is right: leases are renewed."""
    client = Client(start_router().url)
    messages = opening("stepped")
    answer = client.chat(messages)
    renewed(pair, 1)
    before = counters(pair.decode)
    clocks.decode.step_to(AN_HOUR_S)
    assert held(pair.decode) == 1
    clocks.decode.step_to(0)
    renewed(pair, TERM_RENEWALS)
    assert counters(pair.decode)[EXPIRED] == before[EXPIRED]
    clocks.decode.step_to(-AN_HOUR_S)
    time.sleep(LEASE_S + 1)  # nothing can be asked meanwhile: frames so old have been forgotten
    clocks.decode.step_to(0)
    after = counters(pair.decode)
    assert grown(before, after, SKEWED) > 0
    assert grown(before, after, EXPIRED) == 1
    messages = grow(messages, answer, "And?")
    answer = client.chat(messages)
    assert answer.route == "return"
    assert answer.tokens == pair.oracle(messages)
    renewed(pair, TERM_RENEWALS)
    assert held(pair.decode) >= 1


def test_clocks_are_set(pair: Pair, clocks: Clocks) -> None:
    """Engines whose wall clocks are an hour apart do not hear each other: turns are computed. A difference
    within bounds changes nothing, and once the clocks are right turns return, at once.
    """
    history, last = two_turns(pair, "clocks")
    for clock, seconds, reason in (
        (clocks.prefill, WITHIN_SKEW_S, None),
        (clocks.decode, AN_HOUR_S, "no_reply"),
        (clocks.decode, -AN_HOUR_S, "no_reply"),
        (clocks.decode, 0, None),
        (clocks.prefill, -WITHIN_SKEW_S, None),
        (clocks.prefill, 0, None),
    ):
        clock.step_to(seconds)
        messages = [*history, user(f"It is {seconds} s later?")]
        turn = pair.turn(messages, last.filed)
        assert turn.reason == reason, (seconds, turn.reason)
        check(pair, turn, messages)
