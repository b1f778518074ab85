"""Recorded sessions on real engines: what is played, when, with which prompts, and what is made of it."""

import math

import pytest

from kvloop.bench import lease_engines
from kvloop.bench.lease_engines import (
    MAX_UNITS,
    UNIT_TOKENS,
    Answered,
    Effort,
    Played,
    choose,
    pauses_s,
    prompt_of,
    rows,
    total,
)
from kvloop.bench.trace import TraceSession, TraceTurn, read_sessions
from kvloop.errors import UserError
from tests.bench.test_lease_replay import session, turn

EFFORT = Effort(sessions=2, begin_within_s=1.0, window_s=10.0)


def names(sessions: list[TraceSession]) -> list[str]:
    """Which they are."""
    return [one.name for one in sessions]


def test_sessions_are_cut_where_a_prompt_is_too_long_and_spread_over_the_trace() -> None:
    """What follows could not be played as it was recorded; a session that begins so is passed over."""
    large = session("b", turn(0, MAX_UNITS), turn(1, MAX_UNITS + 1), turn(2, 3))
    (first,) = choose([large], 1)
    assert first.turns == large.turns[:1]
    sessions = [session(name, turn(0, 0 if name == "b" else 2)) for name in "abcde"]
    assert names(choose(sessions, 2)) == ["a", "d"]
    with pytest.raises(UserError, match="1 sessions"):
        choose(sessions[:2], 2)


def test_pauses_are_from_the_end_of_an_answer_and_never_negative() -> None:
    """Ten seconds after an answer of two, and at once where the next one did not wait for the end."""
    assert pauses_s([turn(5, 1, took_s=2.0), turn(17, 2, took_s=9.0), turn(20, 3)]) == [10.0, 0.0]
    assert pauses_s([turn(5, 1)]) == []


def test_prompts_share_what_the_recorded_ones_share() -> None:
    """As many tokens as stretches from the start, and nothing with another session or another run."""
    one, longer = prompt_of("s", "a", (1, 2)), prompt_of("s", "a", (1, 2, 3))
    assert len(one) == 2 * UNIT_TOKENS
    assert longer[: len(one)] == one
    for other in (prompt_of("s", "b", (1, 2)), prompt_of("t", "a", (1, 2)), prompt_of("s", "a", (3, 2))):
        assert other[:UNIT_TOKENS] != one[:UNIT_TOKENS]


def test_the_recorded_sessions_can_be_played() -> None:
    """As many as the benchmark wants, each with more than ten turns on average."""
    chosen = choose(read_sessions(), Effort().sessions)
    assert len(chosen) == len(set(names(chosen))) == Effort().sessions
    assert sum(len(one.turns) for one in chosen) > 10 * len(chosen)


def test_a_window_is_summed_up() -> None:
    """Two of three turns reused 150 of 300 tokens, at two block-seconds each."""
    played = total([Answered(100, 0), Answered(100, 60), Answered(100, 90)], 300)
    assert played == Played(3, 2, 300, 150, 300)
    assert (played.held_per_reused, played.turns_share, played.tokens_share) == (2, 2 / 3, 0.5)


def test_the_verdicts() -> None:
    """A quarter of what fixed leases hold at the same reuse is met, a little more missed; so is less reuse,
    and a window in which nothing was reused."""
    fixed = Played(100, 50, 1000, 500, 400)
    assert [row.met for row in rows(Played(100, 50, 1000, 500, 100), fixed, EFFORT)] == [True, True, True]
    assert next(iter(rows(Played(100, 50, 1000, 500, 101), fixed, EFFORT))).met is False
    fewer = rows(Played(100, 48, 1000, 480, 90), fixed, EFFORT)
    assert [row.met for row in fewer] == [True, False, False]
    for nothing in (rows(Played(100, 0, 1000, 0, 100), fixed, EFFORT), rows(fixed, total([], 0), EFFORT)):
        assert not any(row.met for row in nothing)
    assert math.isnan(rows(fixed, total([], 0), EFFORT)[1].figure)


def test_the_same_window_is_replayed() -> None:
    """A pause of eight seconds after a stop, and none after that: fixed leases are held through it and to the
    window's end, adaptive ones are let go."""
    sessions = [session("a", turn(0, 100, took_s=1.0), turn(9, 110, took_s=1.0))]
    row = lease_engines.replayed(sessions, Effort(sessions=1, begin_within_s=0.0, window_s=100.0))
    assert 0 < row.figure < 0.2
    assert row.target is None


class _Clock:
    """Time that passes when somebody sleeps, or an answer takes its second."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.asked_at: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def answer(self, turn: TraceTurn) -> int:
        self.asked_at.append(self.now_s)
        self.now_s += 1
        return 10 * len(turn.units)


@pytest.mark.parametrize(("ends_s", "asked_at"), [(7.5, [1.0, 4.0]), (8.5, [1.0, 4.0, 8.0])])
def test_a_session_is_played_with_its_pauses_until_the_window_ends(
    monkeypatch: pytest.MonkeyPatch, ends_s: float, asked_at: list[float]
) -> None:
    """Answers took five seconds when recorded and take one here: the pauses of two and three seconds are
    kept. A turn that is due after the end is not asked, and one that is answered after it not counted."""
    clock = _Clock()
    monkeypatch.setattr(lease_engines, "time", clock)
    turns = (turn(0, 1, took_s=5.0), turn(7, 2, took_s=5.0), turn(15, 3, took_s=5.0), turn(20, 4))
    answered = lease_engines.play_session(turns, 1.0, ends_s, clock.answer)
    assert clock.asked_at == asked_at
    assert answered == [Answered(UNIT_TOKENS, 10), Answered(2 * UNIT_TOKENS, 20)]
