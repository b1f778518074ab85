"""Everything that is left to chance, out of one seed.

Each part of a run draws from a stream of its own (the Mersenne Twister, seeded with the seed and the part's
name), so that one part that draws more often does not shift what another one gets. Nothing depends on the
order of a set or on Python's string hashes.
"""

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")
PERMILLE = 1000


class Chance:
    """One part's stream."""

    def __init__(self, seed: int, part: str) -> None:
        self._random = Random(f"{seed}/{part}")
        self._draw = self._random.random  # by far the most asked

    def within(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included, each as likely."""
        return low + int(self._draw() * (high - low + 1))

    def spread(self, low: int, high: int) -> int:
        """A whole number from `low` (at least 1) to `high`, each factor as likely: log-uniform."""
        return min(high, int(low * (high / low) ** self._draw()))

    def waiting(self, mean: int) -> int:
        """How long until the next of events that come by themselves, `mean` apart: exponential."""
        return int(self._random.expovariate(1 / mean)) if mean > 0 else 0

    def permille(self, chance: int) -> bool:
        """True in so many of 1,000 cases."""
        return self._draw() * PERMILLE < chance

    def pick(self, items: Sequence[T]) -> T:
        """One of them."""
        return items[int(self._draw() * len(items))]

    def word(self) -> int:
        """64 bits."""
        return self._random.getrandbits(64)
