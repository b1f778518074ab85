"""Runs of tiny sessions, whose reuse can be counted by hand."""

from dataclasses import replace

import pytest

from kvloop.bench.planning.arrangement import (
    Arrangement,
    engine_of,
    kvloop,
    one_way,
    plan_of,
    require_room,
    upstream,
)
from kvloop.bench.planning.looks import MAX_LOOKS, Look, Looks
from kvloop.bench.planning.run import Came, Runs, mean_of, with_traffic
from kvloop.bench.planning.traffic import Traffic
from kvloop.core.life_table import Ending
from kvloop.errors import UserError
from kvloop.local.fleet_turns import RouterTurn
from kvloop.sim.fleet.plan import AS_DELIVERED, S
from kvloop.sim.fleet.recorded import RecordedSession, RecordedTurn
from kvloop.sim.fleet.world import World
from kvloop.sim.profile import load_profile
from tests.bench.planning.small import traffic_of, turn

PROFILE = load_profile("qwen3-32b-h200")
GROWING = RecordedSession("growing", (turn(20), turn(30, 5), turn(60, 5)))
"""1,281 tokens, then 640 more, which decode may append, then 1,920 more, which it may not."""
PROMPTS = 1281 + 1921 + 3841


def play(arrangement: Arrangement, traffic: Traffic, *, cache: bool = True, seed: int = 1) -> Came:
    """What comes of it."""
    return Runs(traffic, PROFILE, cache, seed).play(arrangement)


def test_one_way_reuses_nothing_but_what_prefill_has() -> None:
    """Nothing at all without prefill's cache; with it the 20 and 30 blocks of the prompts before."""
    came = play(one_way(1, 1), traffic_of(GROWING), cache=False)
    assert (came.reused_share, came.tokens.computed_by_prefill) == (0, PROMPTS)
    assert (came.held_tokens, came.most_held_tokens) == (0, 0)
    tokens = play(one_way(1, 1), traffic_of(GROWING)).tokens
    assert (tokens.at_prefill, tokens.returned, tokens.at_decode) == (50 * 64, 0, 0)
    assert tokens.computed_by_prefill == PROMPTS - 50 * 64


def test_one_way_knows_which_prefill_engine_has_the_prompt() -> None:
    """A router without a return path still sends a conversation to where its prefix is cached."""
    tokens = play(one_way(3, 1), traffic_of(GROWING)).tokens
    assert tokens.at_prefill == 50 * 64


def test_an_answer_takes_a_step_for_each_further_token() -> None:
    """4 ms of the profile, and less than one on the way; of answers of one token nothing is known."""
    per_token_ms = play(one_way(1, 1), traffic_of(GROWING)).per_token_ms
    assert per_token_ms is not None
    assert 4 <= per_token_ms < 5
    short = RecordedTurn(65, 1, Ending.STOP, ((1, 1),))
    assert play(one_way(1, 1), traffic_of(RecordedSession("a", (short,)))).per_token_ms is None


@pytest.mark.parametrize(("cache", "local"), [(False, 0), (True, 20 * 64)])
def test_kvloop_appends_what_is_short_and_reads_the_rest_back(cache: bool, local: int) -> None:
    """The second prompt finds 20 blocks at decode; the third's 30 come from decode, but for those that
    prefill computed for the first one and still has."""
    tokens = play(kvloop(1, 1), traffic_of(GROWING), cache=cache).tokens
    assert (tokens.at_decode, tokens.appended_turns) == (20 * 64, 1)
    assert (tokens.returned, tokens.returning_turns) == (30 * 64 - local, 1)
    assert tokens.at_prefill == local
    assert tokens.computed_by_decode == 1921 - 20 * 64
    assert tokens.computed_by_prefill == 1281 + 3841 - 30 * 64
    assert tokens.prompt == PROMPTS


def test_upstream_keeps_every_turn_and_kvloop_the_last() -> None:
    """Of prompts that have nothing in common: 82 blocks of 16 tokens, and twice and thrice as many; those of
    the last turn are all that kvloop holds when all is said."""
    session = RecordedSession("a", (turn(20), turn(20, 5, first=100), turn(20, 5, first=200)))
    each = -(-1282 // 16) * 16
    assert play(upstream(1, 1), traffic_of(session)).most_held_tokens == 3 * each
    assert play(kvloop(1, 1), traffic_of(session)).most_held_tokens < 3 * each
    assert play(one_way(1, 1), traffic_of(session)).most_held_tokens == 0


def test_a_block_of_several_leases_counts_once() -> None:
    """Upstream's three leases on growing prompts hold the longest one's blocks, and the last block of each of
    the others, which no longer prompt has; kvloop's later leases take the place of earlier ones."""
    longest = -(-3842 // 16) * 16
    assert play(upstream(1, 1), traffic_of(GROWING)).most_held_tokens == longest + 2 * 16
    assert play(replace(kvloop(1, 1), ttl_s=480), traffic_of(GROWING)).most_held_tokens < longest + 2 * 16


def test_a_run_of_less_than_a_second_is_looked_at_too() -> None:
    """Two prompts one after the other: what the first one left is held while the second is computed."""
    session = RecordedSession("a", (turn(100), turn(400)))
    came = play(upstream(1, 1), traffic_of(session))
    assert came.lasted_s < 1
    assert 0.5 * 6400 < came.held_tokens < 6416


def test_one_way_brings_no_handles() -> None:
    """Prefill is not even asked to read: there is nothing that a router could believe in."""
    traffic = traffic_of(GROWING)
    plan = plan_of(one_way(1, 1), traffic, PROFILE, prefill_cache=False, seed=1)
    world = World(
        plan, RouterTurn, checkers=(), traced=False, sessions=traffic.sessions, profile=engine_of(PROFILE)
    )
    reasons: list[object] = []
    world.people.hears = lambda _, reply: reasons.append((reply.turn or {}).get("reason"))
    world.people.open_the_doors()
    while not world.people.are_through and world.loop.step():
        pass
    assert reasons == ["no_handle"] * 3


def test_a_fixed_ttl_ends_leases() -> None:
    """Of 600 s between two turns they hold the first one's blocks for a tenth, or for a fifth."""
    session = RecordedSession("a", (turn(20), turn(60, 600)))
    traffic = traffic_of(session, per_hour=1)
    held = [play(replace(kvloop(1, 1), ttl_s=ttl_s), traffic).held_tokens for ttl_s in (60, 120)]
    assert held[0] == pytest.approx(1296 / 10, rel=0.05)
    assert held[1] == pytest.approx(1296 / 5, rel=0.05)


def test_the_threshold_is_the_engines() -> None:
    """What is shorter than it is neither kept nor read back."""
    traffic = traffic_of(GROWING)
    high = play(replace(kvloop(1, 1), threshold_tokens=5000), traffic, cache=False)
    assert high.tokens.returned == 0
    assert high.most_held_tokens == 0


def test_the_same_seed_is_the_same_answer() -> None:
    """Of runs that know nothing of each other; another seed lets conversations begin at other times."""
    traffic = traffic_of(*(RecordedSession(f"s{at}", GROWING.turns) for at in range(5)), per_hour=3600)
    assert play(kvloop(2, 2), traffic) == play(kvloop(2, 2), traffic)
    assert play(kvloop(2, 2), traffic).lasted_s != play(kvloop(2, 2), traffic, seed=2).lasted_s


def test_what_was_played_is_not_played_again() -> None:
    """The very same run."""
    runs = Runs(traffic_of(GROWING), PROFILE)
    assert runs.play(one_way(1, 1)) is runs.play(one_way(1, 1))


def test_an_engine_has_to_take_the_longest_turn() -> None:
    """Prompt and answer together; the error says what to do."""
    long = traffic_of(RecordedSession("long", (turn(512),)))
    with pytest.raises(UserError, match=r"32,771 tokens.*takes 32,768.*--scale.*--max-prompt-tokens"):
        require_room(long, PROFILE, "qwen3-32b-h200")
    require_room(traffic_of(GROWING), PROFILE, "qwen3-32b-h200")


def test_looks_are_bounded_and_evenly_apart() -> None:
    """However long a run is: some hundred of them, the same time from one to the next."""
    world = World(replace(AS_DELIVERED, conversations=0), RouterTurn, checkers=(), traced=False)
    looks = Looks(world)
    while world.loop.now_ns < 10_000 * S and world.loop.step():
        pass
    assert MAX_LOOKS // 2 <= len(looks.seen) < MAX_LOOKS
    assert {late.at_ns - early.at_ns for early, late in zip(looks.seen, looks.seen[1:], strict=False)} == {
        64 * S
    }


def test_means_are_over_the_time_with_traffic() -> None:
    """Until all have begun and nine tenths are answered; all of it where that never comes."""
    looks = [Look(at, 0, 0, answered, 1, at >= 20) for at, answered in ((0, 0), (10, 9), (20, 9), (30, 10))]
    assert [look.at_ns for look in with_traffic(looks, 10)] == [0, 10, 20]
    assert with_traffic(looks, 100) == looks
    assert mean_of(looks, lambda look: look.answered) == (0 + 9 + 9) / 3
    assert mean_of(looks[1:2], lambda look: look.answered) == 9
