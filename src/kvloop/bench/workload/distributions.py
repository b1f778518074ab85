"""The distributions that lengths and gaps are drawn from, by name.

Lengths and gaps of traffic are heavy-tailed: a lognormal, given by its median and the spread of its
logarithm, describes them from the tenth percentile to the ninetieth. Two percentiles are enough to fit one:

    sigma = ln(p90 / p50) / 1.2816        or        ln(p99 / p50) / 2.3263
"""

import math
import random
from dataclasses import dataclass
from typing import Protocol

from kvloop.errors import UserError

MAX_DRAWN = 1e9
"""What is drawn beyond is this: tails without end are of no use as lengths or seconds."""
MAX_COUNTED = 500
"""Above this mean a Poisson variable is drawn as a normal one, which it then is within a percent."""


class Distribution(Protocol):
    """Something to draw numbers from."""

    def draw(self, chance: random.Random) -> float:
        """The next number, never negative."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same."""

    value: float

    def __post_init__(self) -> None:
        """UserError for what cannot be drawn from."""
        _check(self, 0 <= self.value <= MAX_DRAWN)

    def draw(self, chance: random.Random) -> float:  # noqa: ARG002 (the others need it)
        """The value."""
        return self.value


@dataclass(frozen=True, slots=True)
class Uniform:
    """Anything from `low` to `high`; `whole`: whole numbers, both ends included."""

    low: float
    high: float
    whole: bool = False

    def __post_init__(self) -> None:
        """UserError for what cannot be drawn from."""
        _check(self, 0 <= self.low <= self.high <= MAX_DRAWN)

    def draw(self, chance: random.Random) -> float:
        """The next number."""
        if self.whole:
            return math.ceil(self.low) + chance.randrange(max(1, int(self.high) - math.ceil(self.low) + 1))
        return chance.uniform(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """exp of a normal variable with mean ln(`median`) and deviation `sigma`, at most `most`."""

    median: float
    sigma: float
    most: float = MAX_DRAWN

    def __post_init__(self) -> None:
        """UserError for what cannot be drawn from."""
        _check(self, 0 < self.median <= MAX_DRAWN and 0 <= self.sigma <= 20 and self.most > 0)

    def draw(self, chance: random.Random) -> float:
        """The next number."""
        return min(self.most, MAX_DRAWN, math.exp(math.log(self.median) + self.sigma * chance.gauss(0, 1)))


@dataclass(frozen=True, slots=True)
class Exponential:
    """With this mean: the gaps between arrivals that know nothing of one another."""

    mean: float

    def __post_init__(self) -> None:
        """UserError for what cannot be drawn from."""
        _check(self, 0 < self.mean <= MAX_DRAWN)

    def draw(self, chance: random.Random) -> float:
        """The next number."""
        return min(MAX_DRAWN, chance.expovariate(1 / self.mean))


@dataclass(frozen=True, slots=True)
class Zipf:
    """k with a probability in proportion to k ** -alpha, from 1 on, at most `most`."""

    alpha: float
    most: float = MAX_DRAWN

    def __post_init__(self) -> None:
        """UserError for what cannot be drawn from."""
        _check(self, 1.001 <= self.alpha <= 100 and self.most >= 1)

    def draw(self, chance: random.Random) -> float:
        """The next number, by rejection (Devroye 1986, chapter X.6)."""
        power = self.alpha - 1
        enough = min(self.most, MAX_DRAWN)
        scale = 2**power
        while True:
            across = 1 - chance.random()
            log = -math.log(across) / power
            if log > math.log(enough):
                return enough
            number = math.floor(math.exp(log))
            ratio = (1 + 1 / number) ** power
            if chance.random() * number * (ratio - 1) / (scale - 1) <= ratio / scale:
                return number


@dataclass(frozen=True, slots=True)
class Poisson:
    """Counts with this mean, at most `most`."""

    mean: float
    most: float = MAX_DRAWN

    def __post_init__(self) -> None:
        """UserError for what cannot be drawn from."""
        _check(self, 0 <= self.mean <= MAX_DRAWN and self.most > 0)

    def draw(self, chance: random.Random) -> float:
        """The next number: arrivals within a second that come at this rate."""
        if self.mean > MAX_COUNTED:
            return min(self.most, max(0, round(chance.gauss(self.mean, math.sqrt(self.mean)))))
        count, left = 0, self.mean
        while (left := left - chance.expovariate(1)) > 0:
            count += 1
        return min(self.most, count)


def _check(distribution: Distribution, is_possible: bool) -> None:
    if not is_possible:
        raise UserError(f"nothing can be drawn from {distribution}")
