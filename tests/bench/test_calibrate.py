"""The fit of a profile: the sums are the simulation's, and known numbers are found again."""

import random
from pathlib import Path

import msgspec
import pytest

from kvloop.bench.agreement_engines import Times
from kvloop.bench.calibrate import (
    ONE_WAY,
    PER_TOKEN,
    REPETITIONS,
    RETURNED,
    Point,
    expected_s,
    fit,
    least_squares,
    parts,
    points_of,
    rendered,
    rows_of,
)
from kvloop.bench.token_turn import ANSWER_TOKENS, NEW_TOKENS
from kvloop.errors import UserError
from kvloop.local.simulated import DEFAULT_PROFILE
from kvloop.sim.profile import Profile, Step, Transfer, load_profile
from tests.sim.pair import pair, tokens

PROFILE = msgspec.structs.replace(
    load_profile(DEFAULT_PROFILE),
    step=Step(base_ns=50_000_000, prompt_ns=20_000_000, token_ns=2_000_000, pair_ps=700_000),
    transfer=Transfer(setup_ns=40_000_000, block_ns=0, token_ns=30_000),
)


def points(profile: Profile) -> list[Point]:
    """What an engine would show that is exactly so."""
    return [
        Point(what, size, expected_s(profile, what, size))
        for what in (ONE_WAY, RETURNED, PER_TOKEN)
        for size in REPETITIONS
    ]


@pytest.mark.parametrize("size", [300, 1_500, 3_500])
@pytest.mark.parametrize("what", [ONE_WAY, RETURNED])
def test_the_sums_are_what_the_simulation_takes(size: int, what: str) -> None:
    """A turn through simulated engines in virtual time, by either way, but for messages on their way."""
    world = pair(PROFILE)
    world.check_each_step = False
    first = tokens(size - ANSWER_TOKENS - NEW_TOKENS)
    said, ended = world.turn("a", first, max_tokens=ANSWER_TOKENS)
    history = first + said
    prompt = history + tokens(size - len(history) // 4, kind=1)
    began_ns = world.loop.now_ns
    world.turn("b", prompt, ended.handle if what == RETURNED else None, max_tokens=ANSWER_TOKENS)
    took_s = (world.first_ns["bd"] - began_ns) / 1e9
    assert took_s == pytest.approx(expected_s(PROFILE, what, size), abs=1e-3)


def test_known_numbers_are_found_again() -> None:
    """From points without an error, whatever the profile was before."""
    found = fit(load_profile(DEFAULT_PROFILE), points(PROFILE))
    assert found.step == PROFILE.step
    assert found.transfer == PROFILE.transfer
    assert found.limits == PROFILE.limits


def test_an_error_of_some_percent_stays_one() -> None:
    """Every point up to 2 % off: no point of the fit is more than 4 % off."""
    drawn = random.Random(5)
    noisy = [Point(one.what, one.tokens, one.seconds * drawn.uniform(0.98, 1.02)) for one in points(PROFILE)]
    found = fit(load_profile(DEFAULT_PROFILE), noisy)
    assert all(row.figure < 4 and row.met for row in rows_of(found, noisy))


def test_nothing_is_negative() -> None:
    """The nearest point of x - y = -1 with neither below 0; and of two equal columns one is enough."""
    assert least_squares([[1, 0], [0, 1]], [-1, 2]) == pytest.approx([0, 2])
    assert least_squares([[1, -1]], [-1]) == pytest.approx([0, 1])
    assert sum(least_squares([[1, 1], [2, 2]], [3, 6])) == pytest.approx(3)
    assert least_squares([[1], [1]], [-1, -2]) == [0]


def test_too_few_points_are_refused() -> None:
    """Six numbers cannot be had from five times."""
    with pytest.raises(UserError, match="5 points"):
        fit(PROFILE, points(PROFILE)[:5])


def test_a_point_that_does_not_fit_is_missed() -> None:
    """One that takes twice as long as the numbers say."""
    good = points(PROFILE)
    assert all(row.met for row in rows_of(PROFILE, good))
    slow = Point(ONE_WAY, 300, 2 * good[0].seconds)
    (row,) = rows_of(PROFILE, [slow])
    assert (row.met, row.figure) == (False, pytest.approx(50))


def test_points_are_the_fastest() -> None:
    """One of each kind for each size."""
    times = Times({300: [1.0, 2.0, 9.0]}, {300: [4.0, 5.0]}, {300: [0.1]})
    assert points_of(times) == [
        Point(ONE_WAY, 300, 4.0),
        Point(RETURNED, 300, 1.0),
        Point(PER_TOKEN, 300, 0.1),
    ]


def test_a_profile_is_written_and_read_again(tmp_path: Path) -> None:
    """With what it was fitted to in its head."""
    path = tmp_path / "machine.toml"
    text = rendered(PROFILE, points(PROFILE))
    path.write_text(text)
    assert load_profile(str(path)) == PROFILE
    assert fit(PROFILE, points(PROFILE)).fitted_tokens == max(one.tokens for one in points(PROFILE))
    assert max(len(line) for line in text.splitlines()) <= 120
    for one in points(PROFILE):
        assert f"{one.tokens:>13,}   {one.what:<9} {1e3 * one.seconds:>8.0f} ms" in text


def test_an_answers_token_attends_to_everything_before_it() -> None:
    """And costs nothing else than the weights."""
    assert parts(PROFILE, PER_TOKEN, 300) == [1, 0, 0, 308, 0, 0]
