"""Which way a turn goes: the shortest that is predicted, within what it may cost others."""

from hypothesis import given
from hypothesis import strategies as st

from kvloop.core.cost import Costs
from kvloop.core.decision import AppendLimits, Ask, Option, Route, options
from kvloop.core.load import Load, Work, pairs_of

S = 1_000_000_000
LIMITS = AppendLimits()
HISTORY = Ask(5100, held=5000, holder="d", can_return=True, local=4900, computed_at="p")


def measured() -> Costs:
    """Engines that compute 1,000 tokens a second, read 100,000 and take 50 ms for a hop."""
    costs = Costs()
    for size in (100, 400, 1600) * 8:
        for role, engine in (("prefill", "p"), ("prefill", "q"), ("decode", "d"), ("decode", "e")):
            costs.computed(role, engine, Work(1, size, pairs_of(size, 0), 50_000_000 + size * 1_000_000))
        for prefill in "pq":
            costs.was_read("d", prefill, size, 5_000_000 + size * 10_000)
            for decode in "de":
                costs.handed_over(prefill, decode, size, 0, 50_000_000 + size * 10_000)
    costs.local_hit("p", 1000, 0)  # its cache is off
    for _ in range(60):
        costs.local_hit("p", 1000, 0)
    return costs


def ways(
    ask: Ask = HISTORY,
    prefill: list[Load] | None = None,
    decode: list[Load] | None = None,
    limits: AppendLimits = LIMITS,
    costs: Costs | None = None,
    now_ns: int = 0,
) -> list[Option]:
    """The ways through p and q, d and e, if not said otherwise."""
    prefill = [Load("p"), Load("q")] if prefill is None else prefill
    decode = [Load("d"), Load("e")] if decode is None else decode
    return options(ask, prefill, decode, costs or measured(), limits, now_ns)


def test_a_short_suffix_is_appended() -> None:
    """Where decode is idle one hop is the shortest, and nothing is transferred."""
    best = ways()[0]
    assert (best.route, best.prefill, best.decode, best.computed, best.read) == (
        Route.APPEND, None, "d", 100, 0,
    )  # fmt: skip


def test_appending_gives_way_to_running_answers() -> None:
    """Each stands still while the suffix is computed; with enough of them the turn is returned instead."""
    busy = Load("d", running=8)
    assert ways(decode=[busy, Load("e")])[0].route is Route.RETURN
    assert ways(decode=[busy], limits=AppendLimits(stall_permille=0))[0].route is Route.APPEND


def test_appending_has_a_budget() -> None:
    """Of one turn, and of all turns under way at one engine, to the token; 0 is none."""
    long = Ask(6025, held=5000, holder="d", can_return=True)
    assert ways(long)[0].route is Route.RETURN
    assert Route.APPEND not in {way.route for way in ways(long)}
    fits = Ask(6024, held=5000, holder="d", can_return=True)
    assert Route.APPEND in {way.route for way in ways(fits)}
    full = Load("d", appended_tokens=LIMITS.budget_tokens - 99)
    assert Route.APPEND not in {way.route for way in ways(decode=[full])}
    assert Route.APPEND not in {way.route for way in ways(limits=AppendLimits(turn_tokens=0))}


def test_what_decode_holds_is_read_rather_than_computed() -> None:
    """And by the prefill engine that has the shorter queue, though the other one computed it last."""
    no_append = AppendLimits(turn_tokens=0)
    assert (ways(limits=no_append)[0].route, ways(limits=no_append)[0].read) == (Route.RETURN, 5000)
    queue = Load("p")
    queue.begin(0, 4000, 4 * S)
    best = ways(prefill=[queue, Load("q")], limits=no_append)[0]
    assert (best.route, best.prefill) == (Route.RETURN, "q")
    assert best.parts.queue_ns == 0


def test_a_warm_prefill_cache_is_worth_a_short_queue() -> None:
    """Affinity is soft: up to what the hit saves, and not beyond."""
    ask = Ask(5100, local=5000, computed_at="p")  # nothing to return
    costs = measured()
    for _ in range(60):
        costs.local_hit("p", 1000, 1000)
    short, long = Load("p"), Load("p")
    short.begin(0, 2000, 2 * S)
    long.begin(0, 9000, 9 * S)
    assert ways(ask, prefill=[short, Load("q")], costs=costs)[0].prefill == "p"
    assert ways(ask, prefill=[long, Load("q")], costs=costs)[0].prefill == "q"


def test_the_handle_goes_along_where_nothing_worth_a_read_is_missing() -> None:
    """It costs a claim; where prefill has forgotten what it computed, the whole prompt is at stake."""
    ask = Ask(5100, held=5000, holder="d", can_return=True, local=5000, computed_at="p")
    costs = Costs()
    for local, routes in ((5000, 1), (4937, 1), (4936, 2)):
        found = ways(ask._replace(local=local), prefill=[Load("p")], costs=costs)
        through_p = [way for way in found if way.prefill == "p"]
        assert [way.route for way in through_p if way.route is Route.RETURN] == [Route.RETURN]
        assert len(through_p) == routes
        assert min(way.read for way in through_p) == 0


def test_small_reads_are_not_worth_it() -> None:
    """Ten tokens are computed sooner than read."""
    costs = Costs()
    for size in (10, 100, 1000) * 8:
        costs.computed("prefill", "p", Work(1, size, 0, 1_000_000 + size * 10_000))
        costs.was_read("d", "p", size, 20_000_000)
    ask = Ask(60, held=50, holder="d", can_return=True)
    best = ways(ask, prefill=[Load("p")], costs=costs, limits=AppendLimits(turn_tokens=0))[0]
    assert best.route is Route.RECOMPUTE


def test_a_fuller_decode_engine_is_left_for_an_emptier_one() -> None:
    """Once what it holds saves less than its batch costs."""
    no_append = AppendLimits(turn_tokens=0)
    few, many = Load("d", running=1), Load("d", running=200)
    assert ways(decode=[few, Load("e")], limits=no_append)[0].decode == "d"
    assert ways(decode=[many, Load("e")], limits=no_append)[0].decode == "e"


def test_without_prefill_decode_does_it_all() -> None:
    """At whichever engine it is done sooner; without decode there is no way."""
    best = ways(Ask(500), prefill=[])[0]
    assert (best.route, best.prefill, best.computed) == (Route.DECODE, None, 500)
    assert ways(decode=[]) == []


def test_errors_feed_back() -> None:
    """A route that always takes twice as long as its parts is predicted to."""
    costs = measured()
    before = ways(costs=costs)[0].expected_ns
    for _ in range(100):
        costs.came(Route.APPEND, 1000, 2000)
    appended = next(way for way in ways(costs=costs) if way.route is Route.APPEND)
    assert appended.expected_ns > 1.9 * before


loads = st.builds(Load, st.sampled_from("pqde"), st.integers(0, 500), st.integers(0), st.integers(0, 5000))


@given(
    st.builds(
        Ask,
        st.integers(0, 10**6),
        st.integers(0, 10**6),
        st.sampled_from([None, "d", "e", "gone"]),
        st.booleans(),
        st.integers(0, 10**6),
        st.sampled_from([None, "p", "q", "gone"]),
    ),
    st.lists(loads, max_size=3, unique_by=lambda load: load.name),
    st.lists(loads, max_size=3, unique_by=lambda load: load.name),
)
def test_any_turn(ask: Ask, prefill: list[Load], decode: list[Load]) -> None:
    """There is a way wherever there is a decode engine; each computes at least a token, at most all of them,
    and appends only where it may."""
    found = options(ask, prefill, decode, Costs(), LIMITS, 0)
    assert bool(found) is bool(decode)
    for way in found:
        assert 1 <= way.computed <= max(1, ask.tokens)
        assert way.decode in {load.name for load in decode}
        assert (way.prefill is None) is (way.route in (Route.APPEND, Route.DECODE))
        assert way.route is not Route.RETURN or ask.can_return
        assert way.route is not Route.APPEND or (way.decode == ask.holder and way.computed <= 1024)
        assert way.score_ns >= way.expected_ns >= 0


def test_what_joining_a_batch_costs_is_a_part() -> None:
    """An eighth of a handover's fixed part for each request that runs there; none where nothing runs."""
    costs = measured()
    _, fixed_ns = costs.handover_ns("p", "d", 0, 0)
    for running in (0, 1, 24):
        way = ways(prefill=[Load("p")], decode=[Load("d", running=running)], costs=costs)
        split = next(one for one in way if one.prefill is not None)
        assert split.parts.pressure_ns == fixed_ns * running // 8
        assert split.score_ns == split.expected_ns + split.parts.pressure_ns


def test_nearly_equal_ways_are_equal() -> None:
    """Two prefill engines that differ by a hundredth: the one that is named first; by a fifth: the faster."""
    for factor, expected in ((0.99, "p"), (0.8, "q")):
        costs = Costs()
        for size in (100, 400, 1600) * 8:
            costs.computed("prefill", "p", Work(1, size, 0, 50_000_000 + size * 1_000_000))
            costs.computed("prefill", "q", Work(1, size, 0, int(factor * (50_000_000 + size * 1_000_000))))
        assert ways(Ask(1600), costs=costs)[0].prefill == expected
