"""Learned linear costs: near the prior at first, near the truth in the end, never negative, never far off for
one odd observation."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.core.regression import MAX_SURPRISE, Regression

PRIOR = (20e6, 100e3)


def model() -> Regression:
    """One of a fixed part and a part per token."""
    return Regression(lambda: PRIOR)


def test_the_prior_is_what_is_believed_at_first() -> None:
    """And follows whatever it is taken from."""
    prior = [PRIOR]
    one = Regression(lambda: prior[0])
    assert one.predict((1.0, 100.0)) == 30_000_000
    prior[0] = (1e6, 0.0)
    assert one.predict((1.0, 100.0)) == 1_000_000


@pytest.mark.parametrize(("fixed", "each"), [(2e6, 10e3), (50e6, 2.3e6), (0.0, 5e3), (80e6, 0.0)])
def test_what_is_measured_is_learned(fixed: float, each: float) -> None:
    """Within a seventh after fifty observations of different sizes, whatever was believed before."""
    draw, one = random.Random(1), model()
    for _ in range(50):
        tokens = int(10 ** draw.uniform(1, 3.6))
        one.observe((1.0, float(tokens)), int((fixed + each * tokens) * draw.uniform(0.97, 1.03)))
    for tokens in (10, 500, 3000):
        truth = fixed + each * tokens
        assert one.predict((1.0, float(tokens))) == pytest.approx(truth, rel=0.15, abs=1e6)


def test_sizes_that_are_all_alike_say_nothing_of_others() -> None:
    """The slope stays near the prior's, in place of whatever the noise says."""
    draw, one = random.Random(2), model()
    for _ in range(50):
        one.observe((1.0, 100.0), int(30e6 * draw.uniform(0.9, 1.1)))
    assert one.predict((1.0, 100.0)) == pytest.approx(30e6, rel=0.1)
    assert one.predict((1.0, 1000.0)) == pytest.approx(120e6, rel=0.5)


def test_one_pause_is_no_news() -> None:
    """An observation a thousand times too long moves the prediction no more than one four times too long."""
    predictions = []
    for pause_ns in (30_000_000_000, int(30_000_000 * MAX_SURPRISE)):
        one = model()
        for _ in range(20):
            one.observe((1.0, 100.0), 30_000_000)
        one.observe((1.0, 100.0), pause_ns)
        predictions.append(one.predict((1.0, 100.0)))
    assert predictions[0] == predictions[1] < 45_000_000


def test_several_are() -> None:
    """An engine that has become ten times slower is known as such within twenty turns."""
    one = model()
    for _ in range(30):
        one.observe((1.0, 100.0), 30_000_000)
    for _ in range(20):
        one.observe((1.0, 100.0), 300_000_000)
    assert one.predict((1.0, 100.0)) > 90_000_000


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(-5, 10**13)), max_size=40)
)
def test_any_observations(observed: list[tuple[int, int, int]]) -> None:
    """No coefficient is negative or no number, and more work is never predicted to take less time."""
    one = Regression(lambda: (5e6, 5e3, 1e5))
    for tokens, running, value in observed:
        one.observe((1.0, float(tokens), float(running)), value)
    assert all(0 <= weight < float("inf") for weight in one.coefficients)
    assert one.predict((1.0, 10.0, 1.0)) <= one.predict((1.0, 20.0, 2.0))


@pytest.mark.parametrize("seed", [*range(100), 161, 230, 772, 846, 873, 1177])
def test_sizes_at_the_ends_of_what_can_be(seed: int) -> None:
    """Prompts of one token and of four million, in a microsecond and in an hour: never an error, though
    nothing but the prior may be left. The last seeds are those at which the equations have no solution."""
    draw, most = random.Random(seed), 4_194_304
    one = Regression(lambda: (20e6, 100e3, 5e3))
    for _ in range(12):
        tokens = draw.choice([0, 1, 2, most, most - 1, 1000])
        pairs = tokens * draw.choice([0, most - tokens]) + tokens * tokens // 2
        took_ns = draw.choice([1000, 3000, 20_000_000_000, 3_600_000_000_000])
        one.observe((1.0, float(tokens), pairs / 1000), took_ns)
        assert all(0 <= weight < float("inf") for weight in one.coefficients)
        assert one.predict((1.0, 100.0, 5.0)) >= 0
