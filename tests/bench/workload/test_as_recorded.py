"""Workloads as the fleet simulation's sessions: lengths, times, ends, and what is the same."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvloop.bench.trace import DEFAULT_TRACE
from kvloop.bench.workload.agent import AgentOptions, made_up
from kvloop.bench.workload.as_recorded import to_recorded
from kvloop.bench.workload.distributions import Fixed
from kvloop.bench.workload.options import RecordingOptions
from kvloop.bench.workload.read import read_workload
from kvloop.bench.workload.turns import Answer, Conversation, MadeUp, Said, Turn, Workload
from kvloop.core.life_table import Ending
from kvloop.errors import UserError
from kvloop.local.fleet_turns import RouterTurn
from kvloop.sim.fleet.plan import AS_DELIVERED
from kvloop.sim.fleet.players import fitted
from kvloop.sim.fleet.recorded import NS_PER_S, RecordedTurn, read_recorded
from kvloop.sim.fleet.world import World
from tests.bench.workload.layout import check, common, tokens_of

FIRST = MadeUp("user", (("a", 200),))


def played(*turns: Turn) -> tuple[RecordedTurn, ...]:
    """A conversation of them, as a session's turns."""
    (session,) = to_recorded(Workload("test", "", (Conversation("c", turns),)))
    return session.turns


def test_a_session_goes_there_and_back(tmp_path: Path) -> None:
    """Lengths and waits of recorded sessions are those that were read."""
    requests = [
        {"t": 0, "in": 300, "out": 40, "stop": "tool_use", "api_time": 3, "hash_runs": [[1, 4]]},
        {"t": 9, "in": 500, "out": 20, "stop": "end_turn", "api_time": 3, "hash_runs": [[1, 7]]},
        {"t": 90, "in": 520, "out": 20, "stop": "end_turn", "api_time": 3, "hash_runs": [[1, 3], [50, 5]]},
    ]
    path = tmp_path / "trace"
    path.write_text(json.dumps({"id": "s", "requests": requests}))
    workload = read_workload("auto", path)
    check(workload)
    assert [turn.kind for turn in workload.conversations[0].turns] == ["user", "tool", "edit"]
    (before,), (after,) = read_recorded(path), to_recorded(workload)
    for one, other in zip(before.turns, after.turns, strict=True):
        assert one.prompt_tokens == other.prompt_tokens
        assert one.answer_tokens == other.answer_tokens
        assert other.after_ns == pytest.approx(one.after_ns, abs=1000)
        assert not other.overlaps
    assert common(after.turns[1].blocks(), after.turns[2].blocks()) == 3
    assert [turn.ending for turn in after.turns] == [Ending.TOOL_CALLS, Ending.STOP, Ending.STOP]


def test_the_delivered_sessions_are_read_whole() -> None:
    """Of some of them, every turn is there and as long as it was."""
    workload = read_workload("agent-sessions", DEFAULT_TRACE, RecordingOptions(conversations=6))
    check(workload)
    sessions = {one.name: one for one in read_recorded(DEFAULT_TRACE)}
    for one, made in zip(workload.conversations, to_recorded(workload), strict=True):
        recorded = sessions[one.name]
        lengths = [turn.prompt_tokens for turn in recorded.turns]
        assert sorted(lengths) == sorted(turn.prompt_tokens for turn in made.turns)


def test_starts_are_known_where_they_differ() -> None:
    """Of one conversation, or of several that all begin at 0, they say nothing."""
    first = Conversation("a", (Turn((MadeUp("user", (("x", 100),)),), 10),))
    later = Conversation("b", first.turns, start_s=1.5)
    assert [one.start_ns for one in to_recorded(Workload("made", "up", (first, later)))] == [0, 1_500_000_000]
    assert [one.start_ns for one in to_recorded(Workload("made", "up", (first, first)))] == [None, None]


def test_known_texts_are_the_same_where_they_are_equal() -> None:
    """By what they say; lengths are estimates."""
    text = Said("user", "x" * 1024)
    one, other, again = played(
        Turn((text,), 10),
        Turn((Said("user", "y" * 1024),), 10, 0),
        Turn((text, Answer(0), Said("user", "z" * 400)), 10, 1),
    )
    assert one.prompt_tokens == 256
    assert common(one.blocks(), other.blocks()) == 0
    assert common(one.blocks(), again.blocks()) == 4
    assert again.prompt_tokens == 256 + 10 + 100


def test_branches_overlap_or_follow() -> None:
    """In order of their estimated starts, counted from ends or, beside one another, from starts."""
    first, second, third = played(
        Turn((FIRST,), 100),
        Turn((FIRST, Answer(0), MadeUp("user", (("b", 50),))), 100, 0, 5.0),
        Turn((FIRST, Answer(0), MadeUp("user", (("c", 50),))), 100, 0, 5.5),
    )
    assert (first.after_ns, first.overlaps) == (0, False)
    assert (second.after_ns, second.overlaps) == (5 * NS_PER_S, False)
    assert third.overlaps
    assert third.after_ns == pytest.approx(0.5 * NS_PER_S)


def test_a_made_up_workload_keeps_its_prefixes() -> None:
    """Every pair of prompts has the blocks in common that their tokens say."""
    workload = made_up(AgentOptions(conversations=3, scale=20, max_prompt_tokens=1500, fork_share=1.0))
    for one, session in zip(workload.conversations, to_recorded(workload), strict=True):
        texts = {len(tokens_of(one, number)): tokens_of(one, number) for number in range(len(one.turns))}
        for turn in session.turns:
            for other in session.turns:
                expected = common(texts[turn.prompt_tokens], texts[other.prompt_tokens]) // 64
                if len(texts) == len(one.turns):
                    assert common(turn.blocks(), other.blocks()) == expected


def test_the_simulation_plays_what_was_made_up() -> None:
    """A whole run over it: every checker holds, and turns were served."""
    options = AgentOptions(conversations=4, turns=Fixed(4), scale=60, time_scale=0.01, fork_share=0.5)
    sessions = to_recorded(made_up(options))
    plan = replace(AS_DELIVERED, safety_ms=20_000, conversations=4, leaves=0, hostile=0)
    world = World(fitted(plan, sessions), RouterTurn, sessions=sessions)
    outcome = world.run()
    assert outcome.held, outcome.finding
    assert world.people.turns > 4


def test_a_prompt_that_no_engine_holds_is_an_error() -> None:
    """As it is when it is read."""
    with pytest.raises(UserError, match="conversation c: no engine holds a prompt of 5000000 tokens"):
        played(Turn((MadeUp("user", (("a", 5_000_000),)),), 10))
