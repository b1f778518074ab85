"""Which of the possible ways a turn takes: what an operator may choose, or replace by his own.

A policy sees a turn and a few engines of each role, in an order that goes round from turn to turn, those that
hold something of its conversation among them, and says which ways it would go, the best first. `kv` goes by
predicted time (see `decision`). The others are what routers commonly do, for comparison and for whoever wants
it plain: they choose engines without asking what a way costs, and read back whatever there is to read back.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvloop.core.cost import Costs
from kvloop.core.decision import AppendLimits, Ask, Option, Route, options
from kvloop.core.load import Load


@dataclass(frozen=True, slots=True)
class Sight:
    """What a policy goes by. Engines that are worth trying, none twice in a role."""

    prefill: Sequence[Load]
    decode: Sequence[Load]
    costs: Costs
    limits: AppendLimits
    now_ns: int


class Policy(Protocol):
    """The extension point: a module with a class like this is named by `--policy module:Class`."""

    def choose(self, ask: Ask, sight: Sight) -> list[Option]:
        """The ways that it would go, the best first; none without a decode engine."""


class Kv:
    """By predicted time to first token and what it costs others."""

    def choose(self, ask: Ask, sight: Sight) -> list[Option]:
        """Every way, the shortest first."""
        prefill = _known_first(sight.prefill, ask.computed_at)
        decode = _known_first(sight.decode, ask.holder)
        return options(ask, prefill, decode, sight.costs, sight.limits, sight.now_ns)


class RoundRobin:
    """The next engine of each role."""

    def choose(self, ask: Ask, sight: Sight) -> list[Option]:
        """The ways through one prefill and one decode engine."""
        return _through(ask, sight, sight.prefill[:1], sight.decode[:1])


class LeastLoaded:
    """The engine of each role with the least under way."""

    def choose(self, ask: Ask, sight: Sight) -> list[Option]:
        """The ways through one prefill and one decode engine."""
        prefill = sorted(sight.prefill, key=_queued)[:1]
        decode = sorted(sight.decode, key=_running)[:1]
        return _through(ask, sight, prefill, decode)


class Sticky:
    """The engines of the conversation's turn before, whatever they are busy with."""

    def choose(self, ask: Ask, sight: Sight) -> list[Option]:
        """The ways through one prefill and one decode engine."""
        prefill = [one for one in sight.prefill if one.name == ask.computed_at] or sight.prefill[:1]
        decode = [one for one in sight.decode if one.name == ask.holder] or sight.decode[:1]
        return _through(ask, sight, prefill, decode)


POLICIES: Mapping[str, Callable[[], Policy]] = {
    "kv": Kv,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "sticky": Sticky,
}


def _through(ask: Ask, sight: Sight, prefill: Sequence[Load], decode: Sequence[Load]) -> list[Option]:
    """Reading back where there is something, by way of these engines."""
    found = options(ask, prefill, decode, sight.costs, AppendLimits(turn_tokens=0), sight.now_ns)
    return sorted(found, key=lambda option: option.route is not Route.RETURN)


def _known_first(engines: Sequence[Load], known: str | None) -> list[Load]:
    return sorted(engines, key=lambda load: load.name != known)


def _queued(load: Load) -> tuple[int, int]:
    return load.queued_tokens, load.running


def _running(load: Load) -> int:
    return load.running
