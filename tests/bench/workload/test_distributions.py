"""What is drawn has the distribution that its name says."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.bench.workload.distributions import (
    MAX_DRAWN,
    Distribution,
    Exponential,
    Fixed,
    Lognormal,
    Poisson,
    Uniform,
    Zipf,
)
from kvloop.errors import UserError

DRAWS = 4000


def drawn(distribution: Distribution, seed: str = "seed") -> list[float]:
    """Numbers of it, in order of size."""
    chance = random.Random(seed)
    return sorted(distribution.draw(chance) for _ in range(DRAWS))


def test_fixed() -> None:
    """It is always the same."""
    assert set(drawn(Fixed(7))) == {7}


def test_uniform() -> None:
    """It is even, and whole numbers reach both ends."""
    numbers = drawn(Uniform(10, 20))
    assert statistics.mean(numbers) == pytest.approx(15, abs=0.2)
    assert 10 <= numbers[0] < 10.1
    whole = drawn(Uniform(1, 6, whole=True))
    assert set(whole) == {1, 2, 3, 4, 5, 6}
    assert all(whole.count(side) == pytest.approx(DRAWS / 6, rel=0.15) for side in range(1, 7))


def test_lognormal() -> None:
    """Median, ninetieth percentile and mean are those of the formula; the cap caps."""
    numbers = drawn(Lognormal(100, 0.8))
    assert statistics.median(numbers) == pytest.approx(100, rel=0.05)
    assert numbers[DRAWS * 9 // 10] == pytest.approx(100 * math.exp(1.2816 * 0.8), rel=0.1)
    assert statistics.mean(numbers) == pytest.approx(100 * math.exp(0.32), rel=0.07)
    assert max(drawn(Lognormal(100, 0.8, 150))) == 150


def test_exponential() -> None:
    """Mean and median."""
    numbers = drawn(Exponential(5))
    assert statistics.mean(numbers) == pytest.approx(5, rel=0.06)
    assert statistics.median(numbers) == pytest.approx(5 * math.log(2), rel=0.08)


def test_zipf() -> None:
    """1, 2 and 3 are as frequent as the zeta function says."""
    numbers = drawn(Zipf(2.0))
    for number in (1, 2, 3):
        assert numbers.count(number) / DRAWS == pytest.approx(6 / math.pi**2 / number**2, rel=0.12)
    assert max(drawn(Zipf(1.2, 50))) == 50


@pytest.mark.parametrize("mean", [0.5, 12.0, 900.0])
def test_poisson(mean: float) -> None:
    """Mean and variance are one, above and below where it is drawn as a normal."""
    numbers = drawn(Poisson(mean))
    assert statistics.mean(numbers) == pytest.approx(mean, rel=0.06)
    assert statistics.variance(numbers) == pytest.approx(mean, rel=0.1)
    assert all(number == int(number) for number in numbers)


@given(
    st.one_of(
        st.builds(Fixed, st.floats(0, MAX_DRAWN)),
        st.builds(Lognormal, st.floats(1e-9, MAX_DRAWN), st.floats(0, 20)),
        st.builds(Exponential, st.floats(1e-9, MAX_DRAWN)),
        st.builds(Zipf, st.floats(1.001, 100)),
        st.builds(Poisson, st.floats(0, 2000)),
    ),
    st.integers(),
)
def test_what_is_drawn_is_never_negative_nor_beyond(distribution: Distribution, seed: int) -> None:
    """Whatever can be drawn from."""
    chance = random.Random(seed)
    assert all(0 <= distribution.draw(chance) <= MAX_DRAWN for _ in range(5))


def test_what_cannot_be_drawn_from_is_an_error() -> None:
    """Negative, turned round, without a number."""
    for make in (
        lambda: Fixed(-1),
        lambda: Uniform(3, 2),
        lambda: Lognormal(0, 1),
        lambda: Lognormal(1, float("nan")),
        lambda: Exponential(0),
        lambda: Zipf(1),
        lambda: Poisson(float("inf")),
    ):
        with pytest.raises(UserError, match="nothing can be drawn"):
            make()
