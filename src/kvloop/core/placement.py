"""The engines of a fleet as one router's choices see them, and the choices themselves.

A policy is not shown thousands of engines: a turn looks at those that hold something of its conversation and
at a window of the others that moves on from turn to turn. To choose the best of a few at random is nearly as
good as to choose the best of all (the power of two choices, Mitzenmacher 2001), takes the same time in any
fleet, and routers that know nothing of one another do not all run to the same engine.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from kvloop.core.cost import Costs
from kvloop.core.decision import DECODE, PREFILL, AppendLimits, Ask, Option
from kvloop.core.load import Load
from kvloop.core.policy import Policy, Sight

WINDOW = 4  # engines of each role that a turn looks at, besides those that it knows

Holds = Callable[[str], bool]


class Eligible(NamedTuple):
    """Which engines may be asked: those that can serve the request at all, and those worth trying now."""

    suits: Holds
    usable: Holds


class Placement:
    """The loads of all engines by role, what is learned of them, and the policy that chooses.

    An engine may have both roles; it is one load then.
    """

    def __init__(self, policy: Policy, limits: AppendLimits) -> None:
        self.costs = Costs()
        self._policy = policy
        self._limits = limits
        self._loads: dict[str, Load] = {}
        self._roles: dict[str, list[Load]] = {PREFILL: [], DECODE: []}
        self._members: set[tuple[str, str]] = set()
        self._turned = {PREFILL: 0, DECODE: 0}  # how often each role went round: hops do not come in pairs

    def __getitem__(self, name: str) -> Load:
        """What is under way at an engine; of one that is gone, a book that nobody reads."""
        return self._loads.get(name) or Load(name)

    def has(self, name: str) -> bool:
        """Whether an engine is there."""
        return name in self._loads

    def add(self, name: str, role: str) -> None:
        """An engine of `role`, which may be the second one of an engine that is there."""
        load = self._loads.setdefault(name, Load(name))
        if (role, name) not in self._members:
            self._members.add((role, name))
            self._roles[role].append(load)

    def remove(self, name: str) -> None:
        """An engine is gone. What it has under way may still be given back."""
        load = self._loads.pop(name)
        for role, engines in self._roles.items():
            if (role, name) in self._members:
                self._members.remove((role, name))
                engines.remove(load)
        self.costs.forget(name)

    def choose(self, ask: Ask, now_ns: int, eligible: Eligible) -> list[Option]:
        """The ways that a turn may go, the best first; none where no decode engine suits."""
        self._turned[PREFILL] += 1
        prefill = self._window(PREFILL, ask.computed_at, eligible, ())
        decode = self._decode(ask, eligible, (), last_resort=True)
        ways = self._ways(ask, now_ns, prefill, decode)
        if ways and ways[0].prefill is None:  # else decode's turn is when prefill has answered
            self._turned[DECODE] += 1
        return ways

    def choose_prefill(
        self, ask: Ask, now_ns: int, eligible: Eligible, excluded: Collection[str]
    ) -> str | None:
        """Another prefill engine, or None where every usable one is excluded."""
        self._turned[PREFILL] += 1
        prefill = self._window(PREFILL, ask.computed_at, eligible, excluded)
        decode = self._decode(ask, eligible, (), last_resort=True)
        ways = self._ways(ask, now_ns, prefill, decode) if prefill else []
        return next((way.prefill for way in ways if way.prefill is not None), None)

    def choose_decode(
        self,
        ask: Ask,
        now_ns: int,
        eligible: Eligible,
        excluded: Collection[str],
        *,
        prefill: str | None,
        last_resort: bool,
    ) -> str | None:
        """The decode engine for a prompt that `prefill` has computed, or that nobody has; as a last resort
        one that is not usable."""
        self._turned[DECODE] += 1
        computed = [self[prefill]] if prefill is not None else []
        decode = self._decode(ask, eligible, excluded, last_resort=last_resort)
        if len(decode) < 2:
            return decode[0].name if decode else None
        ways = self._ways(ask, now_ns, computed, decode)
        return next((way.decode for way in ways if way.prefill == prefill), None)

    def check_integrity(self) -> None:
        """AssertionError where the books do not balance."""
        for load in self._loads.values():
            load.check_integrity()
        listed = {(role, load.name) for role, engines in self._roles.items() for load in engines}
        assert listed == self._members
        assert {name for _, name in listed} == self._loads.keys()

    def _ways(self, ask: Ask, now_ns: int, prefill: Sequence[Load], decode: Sequence[Load]) -> list[Option]:
        return self._policy.choose(ask, Sight(prefill, decode, self.costs, self._limits, now_ns))

    def _decode(
        self, ask: Ask, eligible: Eligible, excluded: Collection[str], *, last_resort: bool
    ) -> list[Load]:
        found = self._window(DECODE, ask.holder, eligible, excluded)
        if not found and last_resort:
            found = self._window(DECODE, ask.holder, eligible._replace(usable=eligible.suits), excluded)
        return found

    def _window(
        self, role: str, known: str | None, eligible: Eligible, excluded: Collection[str]
    ) -> list[Load]:
        """Engines that may be asked, going round, and the known one wherever it stands."""
        suits, usable = eligible
        engines = self._roles[role]
        count = len(engines)
        found: list[Load] = []
        names: list[str] = []
        start = self._turned[role]
        for place in range(start, start + count):
            load = engines[place % count]
            name = load.name
            if usable(name) and suits(name) and name not in excluded:
                found.append(load)
                names.append(name)
                if len(found) == WINDOW:
                    break
        if known is None or known in names or (role, known) not in self._members:
            return found
        if known not in excluded and usable(known) and suits(known):
            found.append(self._loads[known])
        return found
