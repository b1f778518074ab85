"""Leases in a simulated fleet under recorded sessions: small ones, whose outcome can be counted by hand."""

import pytest

from kvloop.bench.lease_fleet import BLOCK_TOKENS, Held, compared, plan_of, run
from kvloop.bench.lease_replay import Policy
from kvloop.core.life_table import Ending
from kvloop.sim.fleet.recorded import RecordedSession, RecordedTurn

S = 1_000_000_000
TOKENS = 100 * BLOCK_TOKENS


def turn(blocks: int, after_s: float = 0.0, ending: Ending = Ending.STOP) -> RecordedTurn:
    """A prompt of the first so many of a session's engine blocks, and a token more."""
    names = ((1, blocks * BLOCK_TOKENS // 64),)
    return RecordedTurn(blocks * BLOCK_TOKENS + 1, 2, ending, names, round(after_s * S))


def outcome(policy: Policy, *sessions: RecordedSession, tokens: int = TOKENS) -> Held:
    """What comes of these sessions with one decode engine."""
    return run(sessions, plan_of(sessions, policy, 1, tokens))


@pytest.mark.parametrize("policy", list(Policy))
def test_what_comes_back_soon_is_reused_whatever_the_policy(policy: Policy) -> None:
    """Four blocks, and after five seconds six, and eight: four and six are read back."""
    tools = Ending.TOOL_CALLS
    session = RecordedSession("a", (turn(4, 0, tools), turn(6, 5, tools), turn(8, 5)))
    held = outcome(policy, session)
    assert (held.turns, held.turns_returning) == (3, 2)
    assert held.returned_tokens == (4 + 6) * BLOCK_TOKENS
    assert (held.reclaimed, held.preempted) == (0, 0)


def test_fixed_leases_last_until_superseded_and_upstreams_for_the_ttl() -> None:
    """Five blocks for about five seconds and seven for 480, or both for 480 and the first one's claim."""
    session = RecordedSession("a", (turn(4, ending=Ending.TOOL_CALLS), turn(6, 5)))
    fixed = outcome(Policy.FIXED, session).held_token_s / BLOCK_TOKENS
    assert fixed == pytest.approx(5 * 6 + 7 * 480, rel=0.01)
    upstream = outcome(Policy.UPSTREAM, session).held_token_s / BLOCK_TOKENS
    assert upstream == pytest.approx((5 + 7) * 480, rel=0.01)


def test_conversations_that_never_return_cost_adaptive_leases_less() -> None:
    """Forty single turns: less than an eighth of what either fixed way holds."""
    singles = [RecordedSession(f"{number}", (turn(4),)) for number in range(40)]
    held = {policy: outcome(policy, *singles, tokens=10 * TOKENS).held_token_s for policy in Policy}
    assert held[Policy.ADAPTIVE] < held[Policy.FIXED] / 8
    assert held[Policy.FIXED] == pytest.approx(held[Policy.UPSTREAM], rel=0.001)


def test_only_one_memory_is_judged() -> None:
    """By memory held for each token, and by turns that reuse; the tokens are shown."""
    ours = Held(100, 98, 980, 245.0, 0, 0, 0)
    theirs = Held(100, 100, 1000, 1000.0, 0, 0, 0)
    rows = compared(ours, theirs, Policy.FIXED, 8_000_000)
    assert [row.met for row in rows] == [True, True, None]
    assert [row.figure for row in rows] == [pytest.approx(0.25), pytest.approx(0.98), pytest.approx(0.98)]
    worse = compared(Held(100, 97, 970, 250.0, 0, 0, 0), theirs, Policy.FIXED, 8_000_000)
    assert [row.met for row in worse] == [False, False, None]
    assert not any(row.met for row in compared(ours, theirs, Policy.FIXED, 16_000_000))
