"""Unequal shares: engines that can take more than others, and engines that are new.

Whatever the policy, an engine is looked at in as many turns as its share says, evenly spread: every other one
for a half. Mostly all shares are equal, and then nothing is asked at all.
"""

from collections.abc import Callable, Iterable

from kvloop.core.slow_start import takes_part
from kvloop.router.engine import Engine


class Shares:
    """Each engine's part of the heaviest one's share. `turns` counts all."""

    def __init__(self) -> None:
        self.turns = 0
        self._heaviest = 1.0
        self._even_from_s: float | None = None

    def changed(self) -> None:
        """Engines have come or gone, or are not what they were."""
        self._even_from_s = None

    def is_even(self, engines: Callable[[], Iterable[Engine]], now_s: float) -> bool:
        """Whether all shares are equal."""
        if self._even_from_s is None:
            there = [(engine.target.weight, engine.grown_s) for engine in engines()]
            weights = [weight for weight, _ in there]
            self._heaviest = max(weights, default=1.0)
            is_even = min(weights, default=1.0) == self._heaviest
            self._even_from_s = max((at_s for _, at_s in there), default=0.0) if is_even else float("inf")
        return now_s >= self._even_from_s

    def take_part(self, engine: Engine, now_s: float) -> bool:
        """Whether this turn is one of the engine's."""
        share = engine.share_permille(now_s) * engine.target.weight / self._heaviest
        return takes_part(self.turns, int(share))
