"""A policy that always wants the same decode engine, and to append there."""

from kvloop.core.decision import Ask, Option, Route
from kvloop.core.policy import Kv, Sight


class OneFirst:
    """The last decode engine by name, before all others."""

    def choose(self, ask: Ask, sight: Sight) -> list[Option]:
        """Every way, those to that engine first, and of them those of one hop."""
        ways = Kv().choose(ask, sight)
        last = max((way.decode for way in ways), default="")
        return sorted(ways, key=lambda way: (way.decode != last, way.route is not Route.APPEND))
