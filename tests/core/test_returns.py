"""What the return model learns, and what follows from it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.core import returns as module
from kvloop.core.life_table import EDGES_MS, FADE_WEIGHT, OBSERVATION, PPM, RECORDED_PERMILLE, Bins, LifeTable
from kvloop.core.returns import DEFAULT_BREAK_EVEN_NS, MAX_UNSEEN_EVENTS, Ending, ReturnModel

from .naive_returns import NaiveReturns, Seen

S = 1_000_000_000
TTL = 480 * S


def made_of(seen: list[Seen], ttl_ns: int, break_even_ns: int) -> ReturnModel:
    """A model that has seen these."""
    model = ReturnModel(ttl_ns, break_even_ns)
    tell = {"waits": model.waited, "returns": model.returned, "breaks": model.broken_off}
    for one in seen:
        tell[one.end](one.caller, one.ending, one.from_ns, one.to_ns)
        model.check_integrity()
    return model


ages = st.one_of(
    st.integers(0, TTL), st.integers(0, 30 * S), st.sampled_from([edge * 1_000_000 for edge in EDGES_MS])
)
endings = st.sampled_from([Ending.TOOL_CALLS, Ending.TOOL_CALLS, Ending.AGAIN])
observations = st.builds(
    lambda caller, ending, one, other, end: Seen(caller, ending, min(one, other), max(one, other), end),
    st.sampled_from("ab"),
    endings,
    ages | st.just(0),
    ages,
    st.sampled_from(["waits", "returns", "returns", "breaks"]),
)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(observations, max_size=60),
    st.sampled_from([5 * S, 30 * S, 300 * S]),
    st.sampled_from([TTL, 30 * S, 100 * S, 2000 * S]),
    endings,
    st.lists(ages, min_size=1, max_size=5),
)
def test_equals_naive(
    seen: list[Seen], break_even_ns: int, ttl_ns: int, ending: Ending, asked: list[int]
) -> None:
    """Counted as a list of all observations says; chances are theirs, and no time to let go is better."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_UNSEEN_EVENTS", 0)
        model, naive = made_of(seen, ttl_ns, break_even_ns), NaiveReturns(ttl_ns, break_even_ns, seen)
        hazards = naive.hazards("a", ending)
        for age_ns in asked:
            until_ns = model.keep_until("a", ending, age_ns)
            if age_ns >= ttl_ns:
                assert until_ns == 0
                continue
            assert until_ns == 0 or age_ns < until_ns <= ttl_ns
            worth = naive.worth("a", ending, age_ns, until_ns) if until_ns else 0.0
            best = naive.best("a", ending, age_ns)
            assert worth == pytest.approx(max(0, best), abs=1e-4)
            if naive.alive(hazards, age_ns):
                gain_ppm = model._gain_ppm(model._plan("a", ending), age_ns)
                assert gain_ppm / PPM == pytest.approx(best, abs=1e-4, rel=1e-4)
            within_ns = ttl_ns // 3
            now, then = naive.alive(hazards, age_ns), naive.alive(hazards, age_ns + within_ns)
            chance = 1000 * (now - then) / now if now else 0
            assert model.chance("a", ending, age_ns, within_ns) == pytest.approx(chance, abs=1.5)


def test_traffic_that_never_returns_is_let_go_at_once() -> None:
    """Fifty turns of a caller that nobody came back for: the next lease is not worth holding."""
    model = ReturnModel(TTL)
    assert model.keep_until("batch", Ending.TOOL_CALLS, 0) > 0
    for _ in range(50):
        model.waited("batch", Ending.TOOL_CALLS, 0, TTL)
    assert model.keep_until("batch", Ending.TOOL_CALLS, 0) == 0
    assert model.chance("batch", Ending.TOOL_CALLS, 0, TTL) < 100


def test_that_nobody_returns_is_known_before_the_longest_wait_is_over() -> None:
    """Fifty turns that have waited for 20 s each say as much about the first 20 s as if they had ended."""
    model = ReturnModel(TTL)
    for _ in range(50):
        model.waited("batch", Ending.TOOL_CALLS, 0, 20 * S)
    assert model.keep_until("batch", Ending.TOOL_CALLS, 0) == 0


def test_a_wait_may_be_told_in_pieces() -> None:
    """What was seen of it is counted once, however often it was looked at."""
    whole, pieces = ReturnModel(TTL), ReturnModel(TTL)
    whole.returned("a", Ending.STOP, 0, 70 * S)
    for start in range(0, 70, 7):
        pieces.waited("a", Ending.STOP, start * S, (start + 7) * S)
    pieces.returned("a", Ending.STOP, 70 * S, 70 * S)
    for age_s in range(0, 100, 3):
        assert whole.chance("a", Ending.STOP, age_s * S, TTL) == pieces.chance(
            "a", Ending.STOP, age_s * S, TTL
        )


def test_traffic_that_returns_is_kept_until_it_has() -> None:
    """A caller that always comes back in 10 s is held for that long, and not to the end of the TTL."""
    model = ReturnModel(TTL)
    for _ in range(50):
        model.returned("agent", Ending.TOOL_CALLS, 0, 10 * S)
    assert 10 * S < model.keep_until("agent", Ending.TOOL_CALLS, 0) < 30 * S
    assert model.chance("agent", Ending.TOOL_CALLS, 0, 60 * S) > 900


def test_memory_that_costs_nothing_is_held_to_the_end() -> None:
    """And memory that costs more than anything is worth is not held at all."""
    assert ReturnModel(TTL, 10**9 * S).keep_until("a", Ending.STOP, 0) == TTL
    assert ReturnModel(TTL, 1).keep_until("a", Ending.STOP, 0) == 0


def test_a_new_caller_is_taken_for_one_of_all() -> None:
    """Until it has shown otherwise; and callers are not taken for each other."""
    model = ReturnModel(TTL)
    assert model.keep_until("new", Ending.TOOL_CALLS, 0) > 0
    for number in range(200):
        model.waited(f"batch {number}", Ending.TOOL_CALLS, 0, TTL)
    assert model.keep_until("new", Ending.TOOL_CALLS, 0) == 0
    for _ in range(20):
        model.returned("new", Ending.TOOL_CALLS, 0, 5 * S)
    assert model.keep_until("new", Ending.TOOL_CALLS, 0) > 5 * S
    assert model.keep_until("batch 7", Ending.TOOL_CALLS, 0) == 0


def test_endings_are_apart() -> None:
    """That nobody answers a question is no sign that no tool does."""
    model = ReturnModel(TTL)
    before = model.keep_until("a", Ending.TOOL_CALLS, 0)
    for _ in range(100):
        model.waited("a", Ending.STOP, 0, TTL)
    assert model.keep_until("a", Ending.TOOL_CALLS, 0) == before > 0


def test_forks_are_not_waited_for_until_there_are_some() -> None:
    """A lease that was used is over, unless a caller uses its leases again."""
    model = ReturnModel(TTL)
    assert model.keep_until("a", Ending.AGAIN, 0) == 0
    assert model.chance("a", Ending.AGAIN, 0, TTL) == 0
    for _ in range(20):
        model.returned("a", Ending.AGAIN, 0, 3 * S)
    assert model.keep_until("a", Ending.AGAIN, 0) > 3 * S


def test_what_was_long_ago_fades() -> None:
    """After thousands of returns, fewer that stay away are enough to change the mind."""
    model = ReturnModel(TTL)
    for _ in range(5000):
        model.returned("a", Ending.TOOL_CALLS, 0, 5 * S)
    assert model.keep_until("a", Ending.TOOL_CALLS, 0) > 0
    for _ in range(2500):
        model.waited("a", Ending.TOOL_CALLS, 0, TTL)
    assert model.keep_until("a", Ending.TOOL_CALLS, 0) == 0
    model.check_integrity()


def test_plans_are_not_far_behind() -> None:
    """At most an eighth of what was seen, and never more than so many events, is not in the answer yet."""
    model = ReturnModel(TTL)
    for number in range(3000):
        model.returned("a", Ending.TOOL_CALLS, 0, 5 * S)
        model.keep_until("a", Ending.TOOL_CALLS, 0)
        plan, table = (
            model._callers["a", Ending.TOOL_CALLS].plan,
            model._callers["a", Ending.TOOL_CALLS].table,
        )
        assert plan is not None
        assert table.events - plan.stamp[0] <= min(table.events / 8, MAX_UNSEEN_EVENTS) or number == 0


def test_callers_are_bounded() -> None:
    """The one that was seen least recently is forgotten, and is then taken for one of all."""
    model = ReturnModel(TTL, max_tables=3)
    for caller in "abac":
        model.returned(caller, Ending.STOP, 0, 5 * S)
    model.returned("a", Ending.LENGTH, 0, 5 * S)
    model.check_integrity()
    assert len(model) == 3
    assert ("b", Ending.STOP) not in model._callers


def test_recorded_sessions_are_worth_holding_for_a_while() -> None:
    """Out of the box an agent's lease is held for its tool's usual time, not for the TTL."""
    model = ReturnModel(TTL)
    assert 5 * S < model.keep_until("new", Ending.TOOL_CALLS, 0) < 60 * S
    assert model.break_even_ns == DEFAULT_BREAK_EVEN_NS
    for recorded in RECORDED_PERMILLE.values():
        assert len(recorded) == len(EDGES_MS) - 1
        assert all(0 <= permille <= 1000 for permille in recorded)


def test_a_table_is_bounded_in_weight() -> None:
    """A bin is halved, not stopped: the ratio stays, and new observations count more than old ones."""
    table = LifeTable(Bins(TTL))
    for _ in range(3000):
        table.returned(3)
        table.check_integrity()
    assert FADE_WEIGHT // 2 <= table.exposure[3] == table.returns[3] <= FADE_WEIGHT
    for _ in range(3000):
        table.waited(3, 4)
        table.check_integrity()
    assert table.returns[3] < 20 * OBSERVATION


@pytest.mark.parametrize("options", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_bounds_must_be_positive(options: tuple[int, int, int]) -> None:
    """A model without time or room is a mistake in the configuration."""
    with pytest.raises(ValueError, match="positive"):
        ReturnModel(*options)
