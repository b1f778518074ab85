"""A policy for tests: what may be appended is appended, whatever is predicted."""

from kvloop.core.decision import Ask, Option, Route
from kvloop.core.policy import Kv, Sight


class AppendFirst:
    """By predicted time, but appending comes before everything else."""

    def __init__(self) -> None:
        self._kv = Kv()

    def choose(self, ask: Ask, sight: Sight) -> list[Option]:
        """The ways that it would go, the best first."""
        return sorted(self._kv.choose(ask, sight), key=lambda way: way.route is not Route.APPEND)
