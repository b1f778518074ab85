"""Decode and prefill over a link that loses, reorders, duplicates and corrupts: never a wrong token."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.core.claim import ReadState
from tests.reach import explore_until_reached

from .peers.decode import Decode
from .peers.prefill import Attempt, Prefill
from .peers.world import (
    ANSWER_WITHIN,
    BLOCKS,
    CLAIM_TERM,
    MARGIN,
    MAX_SLOW_PPM,
    MAX_THINK,
    MAX_WATCH,
    MS,
    QUESTIONS,
    TTL,
    Schedule,
    Turn,
    World,
)

Fates = Sequence[tuple[int, ...]]
Acts = Sequence[tuple[int, str, int]]
HISTORIES = [("a", list(range(150))), ("a", [*range(100), 5]), ("b", list(range(128)))]
MUST_REACH = {"kept", "overdue", "no_reply", "aborted", "no_match", "wrong_root", "unknown_lease"}
MUST_REACH |= {"wrong_incarnation", "deadline", "read_failed", "kept at last", "no more questions"}
REACHED = Counter[str]()
EDITS = ["continued"] * 4 + ["shorter", "edited", "edited", "other", "foreign"]

good_fates = st.sampled_from([(0,), (1,), (3,)])
bad_fates = st.lists(st.sampled_from([0, 1, 3, 9, 12, 39, 60]), max_size=2).map(tuple)
fates = st.lists(good_fates, max_size=24) | st.lists(good_fates | good_fates | bad_fates, max_size=24)
turns = st.builds(
    Turn,
    at_ms=st.integers(0, 59) | st.integers(0, 120),
    lease=st.integers(0, 2),
    edit=st.sampled_from(EDITS),
    think_ms=st.sampled_from([0, 0, 0, 0, 3, 20, MAX_THINK // MS]),
    read_ms=st.sampled_from([1, 5, 20, 30, 33, 35, 37, 39, 40, 41, 42, 45, 90]),
    read_fails=st.sampled_from([False, False, False, False, False, True]),
    watch_ms=st.sampled_from([2, MAX_WATCH // MS]),
    abort_after_ms=st.sampled_from([None, None, None, None, None, 0, 5, 15, 30]),
    request_id=st.sampled_from(["", "", "", "r"]),
    misses=st.sampled_from([1, 1, 2, 5]),
)
acts = st.tuples(
    st.integers(0, 150),
    st.sampled_from(["drop", "drop", "reclaim", "renew", "renew", "restart", "grant", "grant", "grant"]),
    st.integers(0, 2),
)


def named(turn: Turn, number: int) -> Turn:
    """Most requests have an id of their own; some come back under the id of an earlier one."""
    return replace(turn, request_id=turn.request_id or f"r{number}")


schedules = st.builds(
    Schedule,
    fates=fates,
    corrupt=st.sets(st.integers(0, 20), max_size=2),
    turns=st.lists(turns, min_size=1, max_size=6).map(lambda several: [*map(named, several, range(6))]),
    acts=st.lists(acts, max_size=8),
    slow_ppm=st.sampled_from([0, MAX_SLOW_PPM]),
    prefill_offset_ns=st.sampled_from([0, 10**15]),
    wall_offset_ms=st.sampled_from([0, -20_000, 29_000]),
)


def play(schedule: Schedule) -> tuple[list[Attempt], Decode, Prefill]:
    """Let everything happen, checking after each event; then let time pass."""
    world = World(schedule)
    decode = Decode(world)
    prefill = Prefill(world, decode)
    for number, (tenant, tokens) in enumerate(HISTORIES):
        decode.grant(number, tenant, tokens)
    for at_ms, act, lease in schedule.acts:
        if act == "grant":
            tenant, tokens = HISTORIES[lease]
            world.at(at_ms * MS, lambda n=lease, t=tenant, k=tokens: decode.grant(n, t, k))  # type: ignore[misc]
        else:
            world.at(at_ms * MS, lambda a=act, n=lease: decode.act(a, n))  # type: ignore[misc]
    for request in schedule.turns:
        world.at(request.at_ms * MS, lambda t=request: prefill.arrive(t))  # type: ignore[misc]
    woken = set[int]()

    def after_each() -> None:
        decode.settle()
        prefill.book.check_integrity()
        deadline = decode.table.next_deadline_ns()
        if deadline is not None and deadline not in woken:
            woken.add(deadline)
            world.at(deadline, lambda: None)

    world.run(after_each)
    world.now += TTL + CLAIM_TERM
    after_each()
    return prefill.attempts, decode, prefill


@settings(deadline=None, max_examples=400)
@given(schedules)
def explore(schedule: Schedule) -> None:
    """Play a schedule; check its end. (What is kept is checked as it is kept, in `check_kept`.)"""
    attempts, decode, prefill = play(schedule)
    REACHED.update(attempt.answer for attempt in attempts)
    for attempt in attempts:
        assert attempt.is_over
        assert attempt.questions <= QUESTIONS
        REACHED["kept at last"] += attempt.answer == "kept" and attempt.questions > 1
        REACHED["no more questions"] += attempt.answer == "deadline" and not attempt.seen
        assert attempt.answered - attempt.arrived <= ANSWER_WITHIN * 1_000_000 // (1_000_000 - MAX_SLOW_PPM)
        state = prefill.book.state(attempt.turn.request_id)
        assert state in (None, ReadState.LATE, ReadState.DONE, ReadState.DISCARDED)
    assert sorted(decode.free) == list(range(BLOCKS))
    assert decode.table.claim_count() == len(decode.table) == 0


def test_never_a_wrong_token_and_always_an_answer() -> None:
    """Safety: what is kept was proven and held throughout. Liveness: every request is answered in time,
    every block comes home once, nobody is left with a claim. And the schedules reach every kind of end."""
    explore_until_reached(explore, REACHED, MUST_REACH)


def turn(request_id: str = "r", **changes: object) -> Turn:
    """A turn at time 0 on the first lease, which reads for 5 ms."""
    plain = Turn(0, 0, "continued", 0, 5, False, 2, None, request_id)
    return replace(plain, **changes)  # type: ignore[arg-type]


def played(*turns: Turn, fates: Fates = (), acts: Acts = (), slow_ppm: int = 0) -> list[tuple[str, int]]:
    """Answers, and tokens read, of these turns over a link that is good after `fates`."""
    attempts, _, _ = play(Schedule(list(fates), set(), list(turns), list(acts), slow_ppm, 0, 0))
    return [(attempt.answer, attempt.tokens) for attempt in attempts]


def test_a_good_link_keeps_every_read() -> None:
    """With nothing in the way three turns on one lease, two of them at once, keep all they read."""
    assert played(turn("r"), turn("s", at_ms=1), turn("t", at_ms=30)) == [("kept", 150)] * 3


def test_a_fork_of_an_edited_history_reads_what_is_proven() -> None:
    """Edited in its second segment, a prompt reads the first; another prompt reads nothing."""
    edits = [("r", "edited"), ("s", "other"), ("t", "foreign"), ("u", "shorter")]
    answers = [("kept", 64), ("no_match", 0), ("wrong_root", 0), ("kept", 128)]
    assert [played(turn(name, edit=edit))[0] for name, edit in edits] == answers


@pytest.mark.parametrize("slow_ppm", [0, MAX_SLOW_PPM])
@pytest.mark.parametrize("read_ms", range(30, 46))
def test_the_fence(read_ms: int, slow_ppm: int) -> None:
    """A lease is dropped under a read that starts after 2 ms: the read is kept if it ends before term less
    margin on prefill's clock, slow or not. (What is kept is compared with memory, in `check_kept`.)"""
    answers = played(turn(read_ms=read_ms), fates=[(0,), (0,)], acts=[(5, "drop", 0)], slow_ppm=slow_ppm)
    ends_ns = (2 + read_ms) * MS * (1_000_000 - slow_ppm) // 1_000_000
    assert (answers[0][0] == "kept") is (ends_ns < CLAIM_TERM - MARGIN)


def test_each_loss_costs_the_reuse_only() -> None:
    """Question lost, answer lost, answer late, decode restarted, lease dropped under another's claim."""
    assert played(turn(), fates=[()]) == [("no_reply", 0)]
    assert played(turn(), fates=[(0,), ()]) == [("no_reply", 0)]
    assert played(turn(), fates=[(0,), (12,)]) == [("no_reply", 0)]
    assert played(turn(at_ms=9), acts=[(1, "restart", 0)]) == [("wrong_incarnation", 0)]
    assert played(turn(read_ms=30), acts=[(9, "restart", 0)]) == [("read_failed", 150)]
    assert played(turn(read_ms=20), turn("s", at_ms=9), acts=[(5, "drop", 0)])[1] == ("released", 0)
    assert played(turn(at_ms=61)) == [("unknown_lease", 0)]
    assert played(turn(read_ms=20, at_ms=55), turn("s", at_ms=61))[1] == ("expired", 0)


def test_a_claim_that_lapsed_in_the_queue_is_asked_for_again() -> None:
    """Its turn comes after the claim's term: the request asks again and reads; after two questions it
    computes. Where the lease has ended by then, or decode is gone, that is the answer."""
    waits = turn(think_ms=40, read_ms=20)
    assert played(waits) == [("kept", 150)]
    assert played(replace(waits, misses=2)) == [("deadline", 0)]
    assert played(waits, acts=[(5, "drop", 0)]) == [("unknown_lease", 0)]
    assert played(waits, acts=[(5, "restart", 0)]) == [("wrong_incarnation", 0)]
    assert played(waits, fates=[(0,), (0,), ()]) == [("no_reply", 0)]
    assert played(replace(waits, read_ms=42)) == [("overdue", 150)]


def test_an_old_answer_is_not_taken_for_a_new_one() -> None:
    """The first question's answer, late, meets the same request's second question: it is not believed."""
    first, second = turn(at_ms=0), turn(at_ms=20, read_ms=3, lease=1)
    assert played(first, second, fates=[(0,), (21,), (5,), (0,)])[1] == ("kept", 101)
