"""The replay of sessions, on small ones whose outcome can be counted by hand."""

import gzip
import json
import re
import statistics
from pathlib import Path

import pytest

from kvloop.bench.lease_replay import Policy, Replay
from kvloop.bench.trace import (
    DEFAULT_TRACE,
    UNIT_SEGMENTS,
    UNIT_TOKENS,
    UNRECORDED_FIRST_S,
    TraceSession,
    TraceTurn,
    read_sessions,
)
from kvloop.core.returns import Ending
from kvloop.errors import UserError

AMPLE_TOKENS = 1000 * UNIT_TOKENS


def turn(
    start_s: float, units: int, took_s: float = 1.0, answer_units: int = 0, first_s: float = 0.5
) -> TraceTurn:
    """A turn whose prompt is the first so many of a session's units."""
    output_tokens = answer_units * UNIT_TOKENS
    prompt = tuple(range(units))
    return TraceTurn(start_s, first_s, took_s, prompt, len(prompt) * UNIT_TOKENS, output_tokens, Ending.STOP)


def session(name: str, *turns: TraceTurn) -> TraceSession:
    """A conversation of these turns."""
    return TraceSession(name, turns)


@pytest.mark.parametrize("policy", list(Policy))
def test_a_turn_within_the_term_reuses_what_the_one_before_had(policy: Policy) -> None:
    """Four units, then six ten seconds later: four are reused, whatever the policy."""
    outcome = Replay([session("a", turn(0, 4), turn(11, 6))], policy, AMPLE_TOKENS).run()
    assert (outcome.turns, outcome.turns_reusing) == (2, 1)
    assert outcome.reused_tokens == 4 * UNIT_TOKENS


def test_fixed_leases_are_held_until_superseded_or_for_the_ttl() -> None:
    """Four units from second 1 to 12, where the next turn has ended, and six from then for 480 s."""
    outcome = Replay([session("a", turn(0, 4), turn(11, 6))], Policy.FIXED, AMPLE_TOKENS).run()
    assert outcome.held_token_s / UNIT_TOKENS == pytest.approx(4 * 11 + 6 * 480, abs=4 * 1.1)


def test_a_replay_may_end_early() -> None:
    """Of the same two turns until second 8: four units for seven seconds, nothing reused. The second of two
    sessions begins at half of the time that is said."""
    turns = (turn(0, 4), turn(11, 6))
    outcome = Replay([session("a", *turns)], Policy.FIXED, AMPLE_TOKENS).run(8.0)
    assert (outcome.turns, outcome.reused_tokens) == (1, 0)
    assert outcome.held_token_s / UNIT_TOKENS == pytest.approx(4 * 7)
    both = [session("a", *turns), session("b", *turns)]
    assert Replay(both, Policy.FIXED, AMPLE_TOKENS, 20.0).run(10.5).turns == 2
    assert Replay(both, Policy.FIXED, AMPLE_TOKENS, 22.0).run(10.5).turns == 1


@pytest.mark.parametrize("first_s", [1.0, 30.0, 100.0])
def test_a_lease_is_in_use_until_the_answer_of_the_next_turn_begins(first_s: float) -> None:
    """An adaptive lease after a stop is let go at once, unless in use: from second 11 to the next one's first
    byte. The next one's own is held for what is left of its term when it is let go, less than 2 s."""
    alone = Replay([session("a", turn(0, 4))], Policy.ADAPTIVE, AMPLE_TOKENS).run().held_token_s
    turns = (turn(0, 4), turn(11, 6, took_s=120.0, first_s=first_s))
    both = Replay([session("a", *turns)], Policy.ADAPTIVE, AMPLE_TOKENS).run()
    assert both.reused_tokens == 4 * UNIT_TOKENS
    held_s = (both.held_token_s - alone) / UNIT_TOKENS
    assert held_s == pytest.approx(4 * first_s + 6 / 4 * alone / UNIT_TOKENS, abs=4 * 1.1 + 6 * 1.1)


def test_upstream_pins_every_turn_for_the_ttl() -> None:
    """Whatever follows: both turns, 480 s each."""
    outcome = Replay([session("a", turn(0, 4), turn(11, 6))], Policy.UPSTREAM, AMPLE_TOKENS).run()
    assert outcome.held_token_s / UNIT_TOKENS == pytest.approx(10 * 480)


def test_adaptive_leases_of_conversations_that_never_return_cost_less() -> None:
    """Two hundred single turns: far less is held than by fixed leases."""
    singles = [session(f"{number}", turn(0, 4)) for number in range(200)]
    held = {policy: Replay(singles, policy, AMPLE_TOKENS).run().held_token_s for policy in Policy}
    assert held[Policy.ADAPTIVE] < held[Policy.FIXED] / 8
    assert held[Policy.FIXED] == held[Policy.UPSTREAM]


def test_what_was_given_back_early_is_reused_while_nobody_needed_it() -> None:
    """A return after 200 s finds the blocks unchanged in an ample memory, and gone from a small one."""
    late = session("a", turn(0, 4), turn(201, 6))
    others = [session(f"{number}", turn(0, 4)) for number in range(400)]
    ample = Replay([late, *others], Policy.ADAPTIVE, 10 * AMPLE_TOKENS).run()
    small = Replay([late, *others], Policy.ADAPTIVE, 20 * UNIT_TOKENS).run()
    assert ample.reused_tokens == ample.revived_tokens == 4 * UNIT_TOKENS
    assert small.reused_tokens == 0


def test_live_work_takes_leases_that_nobody_claims() -> None:
    """Memory for three conversations, one begins every 90 s: from the fourth on, each takes a lease."""
    singles = [session(f"{number}", turn(0, 4)) for number in range(40)]
    outcome = Replay(singles, Policy.FIXED, 14 * UNIT_TOKENS).run()
    assert (outcome.turns, outcome.reclaimed, outcome.starved) == (40, 37, 0)


def test_sessions_do_not_share(tmp_path: Path) -> None:
    """Equal ids of two sessions are different contents; a subagent's are a session of its own."""
    runs = [[1, 2 * UNIT_SEGMENTS]]
    request = {"t": 0.0, "type": "n", "in": 1024, "out": 5, "stop": "tool_use", "api_time": 1.0}
    request |= {"hash_runs": runs}
    later = request | {"t": 30.0, "stop": "end_turn"}
    agent = {"t": 5.0, "type": "subagent", "requests": [request]}
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(
            json.dumps({"id": name, "requests": [request, later, agent]}) + "\n" for name in ("x", "y")
        )
    sessions = read_sessions(path)
    assert [one.name for one in sessions] == ["x", "x/2", "y", "y/2"]
    assert [one.ending for one in sessions[0].turns] == [Ending.TOOL_CALLS, Ending.STOP]
    outcome = Replay(sessions, Policy.FIXED, AMPLE_TOKENS).run()
    assert outcome.reused_tokens == 2 * 2 * UNIT_TOKENS


@pytest.fixture(scope="module")
def recorded() -> list[TraceSession]:
    """The trace that comes with kvloop."""
    return read_sessions()


def test_the_trace_that_comes_with_kvloop_is_read(recorded: list[TraceSession]) -> None:
    """150 sessions with their subagents, 8,386 turns."""
    assert len(recorded) == 156
    assert sum(len(one.turns) for one in recorded) == 8386


def test_answers_begin_when_the_trace_says_so_or_like_those_of_which_it_does(
    recorded: list[TraceSession],
) -> None:
    """A constant of the median of all that are recorded; no answer begins after its end."""
    with gzip.open(DEFAULT_TRACE, "rt", encoding="utf-8") as lines:
        given = [float(found) for found in re.findall(r'"ttft":([0-9.]+)', lines.read())]
    assert len(given) == 1016
    assert statistics.median(given) == pytest.approx(UNRECORDED_FIRST_S, abs=0.005)
    turns = [one for session in recorded for one in session.turns]
    assert all(0 <= one.first_s <= one.took_s for one in turns)
    assert set(given) <= {one.first_s for one in turns}


def test_a_file_that_is_no_trace_is_an_error(tmp_path: Path) -> None:
    """One line that names the file."""
    path = tmp_path / "other.txt"
    path.write_text("hello")
    with pytest.raises(UserError, match=r"other\.txt is not a trace"):
        read_sessions(path)
