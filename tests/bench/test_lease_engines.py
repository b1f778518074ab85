"""Recorded sessions scaled down: what is played, and with which prompts."""

import argparse

import pytest

from kvloop.bench.lease_engines import (
    MAX_UNITS,
    UNIT_TOKENS,
    Effort,
    choose,
    prompt_of,
    router_flags,
)
from kvloop.bench.lease_replay import Policy
from kvloop.bench.trace import TraceSession, read_sessions
from kvloop.errors import UserError
from kvloop.router.config import add_arguments, from_args
from kvloop.router.heartbeat import keeper_of
from tests.bench.test_lease_replay import session, turn

EFFORT = Effort(sessions=2, start_within_s=10, play_s=100)


def names(sessions: list[TraceSession]) -> list[str]:
    """Which they are."""
    return [one.name for one in sessions]


def test_sessions_are_cut_where_their_time_is_up_or_a_prompt_is_too_long() -> None:
    """What follows could not be played as it was recorded."""
    long = session("a", turn(50, 4), turn(150, 5), turn(151, 6))
    large = session("b", turn(0, MAX_UNITS), turn(1, MAX_UNITS + 1), turn(2, 3))
    first, second = choose([long, large], EFFORT)
    assert first.turns == long.turns[:2]
    assert second.turns == large.turns[:1]


def test_sessions_are_spread_over_the_trace_and_empty_ones_passed_over() -> None:
    """Every other of four, when one more has nothing that could be played."""
    sessions = [session(name, turn(0, 0 if name == "b" else 2)) for name in "abcde"]
    assert names(choose(sessions, EFFORT)) == ["a", "d"]
    with pytest.raises(UserError, match="1 sessions"):
        choose(sessions[:2], EFFORT)


def test_prompts_share_what_the_recorded_ones_share() -> None:
    """As many tokens as stretches from the start, and nothing with another session or another run."""
    one, longer = prompt_of("s", "a", (1, 2)), prompt_of("s", "a", (1, 2, 3))
    assert len(one) == 2 * UNIT_TOKENS
    assert longer[: len(one)] == one
    for other in (prompt_of("s", "b", (1, 2)), prompt_of("t", "a", (1, 2)), prompt_of("s", "a", (3, 2))):
        assert other[:UNIT_TOKENS] != one[:UNIT_TOKENS]


def test_the_routers_times_are_in_the_scale_of_the_sessions() -> None:
    """A fortieth of the defaults: a lease's life, and how long a message of drops is gathered."""
    flags = ("--prefill", "http://p:1", "--decode", "http://d:1", *router_flags(Policy.FIXED))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    keeper = keeper_of(from_args(parser.parse_args(flags)))
    assert keeper.fixed
    times = keeper.times
    assert (times.interval_ns, times.term_ns, times.ttl_ns) == (500_000_000, 1_500_000_000, 12_000_000_000)
    assert times.drop_every_ns == 25_000_000


def test_the_recorded_sessions_can_be_played() -> None:
    """As many as the benchmark wants, each with more than one turn on average."""
    chosen = choose(read_sessions(), Effort())
    assert len(chosen) == len(set(names(chosen))) == Effort().sessions
    assert sum(len(one.turns) for one in chosen) > 10 * len(chosen)
