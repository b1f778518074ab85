"""The circuit breaker: what opens it, how long, one trial at a time; and what holds under every schedule."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.core.breaker import TRANSITIONS, Breaker, BreakerEvent, BreakerRules, BreakerState

S = 1_000_000_000
RULES = BreakerRules(max_failures=3, max_failure_permille=500, min_hops=6, window_ns=10 * S, trial_ns=30 * S)


def opened(now_ns: int = 0) -> Breaker:
    """A breaker that has just opened."""
    breaker = Breaker(RULES)
    breaker.failed(now_ns, trips=True)
    assert breaker.state is BreakerState.OPEN
    return breaker


def test_every_pair_is_a_move_or_illegal() -> None:
    """A breaker that is not open is not tried again; every other event means something everywhere."""
    missing = set(product(BreakerState, BreakerEvent)) - TRANSITIONS.keys()
    assert missing == {
        (BreakerState.CLOSED, BreakerEvent.RETRY),
        (BreakerState.HALF_OPEN, BreakerEvent.RETRY),
    }


def test_failures_in_a_row() -> None:
    """Three in a row open it; an answer between them starts the count again."""
    breaker = Breaker(RULES)
    for _ in range(4):
        breaker.failed(0, trips=False)
        breaker.failed(0, trips=False)
        breaker.succeeded()
        if breaker.state is not BreakerState.CLOSED:
            break
        breaker = Breaker(RULES)
    assert breaker.state is BreakerState.CLOSED
    for expected in (BreakerState.CLOSED, BreakerState.CLOSED, BreakerState.OPEN):
        breaker.failed(0, trips=False)
        assert breaker.state is expected


def test_share_of_a_window() -> None:
    """Half of six hops within a window open it, though no two failed in a row; of longer, they do not."""
    breaker = Breaker(RULES)
    for turn in range(3):
        assert breaker.state is BreakerState.CLOSED, turn
        breaker.succeeded()
        breaker.failed(turn, trips=False)
    breaker.succeeded()
    breaker.failed(3, trips=False)
    assert breaker.state is BreakerState.OPEN
    slow = Breaker(RULES)
    for turn in range(30):
        slow.succeeded()
        slow.failed(turn * 4 * S, trips=False)
    assert slow.state is BreakerState.CLOSED


def test_spells_double_up_to_a_bound() -> None:
    """Each failed trial doubles the spell; an answer makes the next one the first again."""
    breaker, now_ns, spells = opened(), 0, []
    for _ in range(7):
        start_ns = now_ns
        while not breaker.allows(now_ns):
            now_ns += S // 10
        spells.append((now_ns - start_ns) / S)
        breaker.begin(now_ns)
        breaker.failed(now_ns, trips=False)
    assert spells == [0.5, 1, 2, 4, 8, 8, 8]
    breaker.succeeded()
    breaker.failed(now_ns, trips=True)
    assert breaker.allows(now_ns + S // 2)


def test_failures_of_one_outage_count_once() -> None:
    """Requests that were under way when it opened do not lengthen the spell."""
    breaker = opened()
    for _ in range(5):
        breaker.failed(1, trips=True)
    assert breaker.allows(S // 2)
    assert breaker.openings == 1


def test_one_trial_at_a_time() -> None:
    """After the spell one request goes through; the next when it has ended unheard, or has taken too long."""
    breaker = opened()
    now_ns = S // 2
    first = breaker.begin(now_ns)
    assert first
    assert not breaker.allows(now_ns)
    assert breaker.begin(now_ns) == 0
    breaker.ended(first)
    second = breaker.begin(now_ns)
    assert second not in (0, first)
    breaker.ended(first)
    assert not breaker.allows(now_ns), "an old trial's end is not the new one's"
    assert breaker.allows(now_ns + RULES.trial_ns)
    third = breaker.begin(now_ns + RULES.trial_ns)
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED
    breaker.ended(third)
    assert breaker.begin(now_ns) == 0


@pytest.mark.parametrize("trips", [False, True])
def test_an_answer_in_an_outage_closes_it(trips: bool) -> None:
    """Who was asked as a last resort and answers is in again, and starts from nothing."""
    breaker = opened()
    breaker.failed(1, trips=trips)
    breaker.succeeded()
    assert breaker.allows(1)
    breaker.check_integrity()


@given(st.lists(st.tuples(st.sampled_from(["begin", "end", "ok", "fail", "trip"]), st.integers(0, 20 * S))))
def test_books_balance(steps: list[tuple[str, int]]) -> None:
    """Under every schedule: counts within bounds, one trial out at most, and time alone lets a trial in."""
    breaker, now_ns, trials = Breaker(RULES), 0, [0]
    for what, passed_ns in steps:
        now_ns += passed_ns
        if what == "begin":
            allowed = breaker.allows(now_ns)
            was_closed = breaker.state is BreakerState.CLOSED
            trials.append(breaker.begin(now_ns))
            assert (trials[-1] > 0) == (allowed and not was_closed)
        elif what == "end":
            breaker.ended(trials.pop() if trials else 0)
        elif what == "ok":
            breaker.succeeded()
        else:
            breaker.failed(now_ns, trips=what == "trip")
        breaker.check_integrity()
    if breaker.state is not BreakerState.CLOSED:
        assert breaker.allows(now_ns + RULES.backoff_max_ns + RULES.trial_ns)
