"""Who comes back, and when: learned per caller and per kind of turn end, from what was seen.

A conversation waits, from the end of a turn, until its next turn begins, or for ever. Ages are cut into
bins, and each has a life table's two counts: how many waits got through the bin or ended in it by a return
(exposure), and how many of those returned. A wait that is broken off in the middle of a bin, because its
lease was superseded or lost, counts for half: the actuarial estimator. Exposure is added as waits grow old,
so that traffic that never comes back is known for it after seconds, not at the end of the longest wait.

Few observations prove little, so a caller's counts are shrunk towards those of all callers with the same kind
of end, and these towards a prior. Counts are halved when a bin has seen enough: what was long ago fades.

All arithmetic is in integers, so that a seed gives the same simulation on every machine.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

NS_PER_S = 1_000_000_000
UNIT = 16  # of weight: one observation; divisible by halves
PPM = 1_000_000
PERMILLE = 1000
MAX_TABLES = 10_000  # callers x endings; the least recently seen is forgotten
FADE_WEIGHT = 512 * UNIT  # a bin that has seen this much is halved
SHRINK_WEIGHT = 8 * UNIT  # how much a caller's own counts need to weigh as much as everybody's
PRIOR_WEIGHT = 4 * UNIT  # and everybody's, to weigh as much as the prior
MAX_UNSEEN_EVENTS = 256  # that a plan may be behind; a plan takes 40 us to work out
# Finer where most agents return; a third apart.
EDGES_MS: Sequence[int] = (
    *(0, 100, 200, 500, 1000, 2000, 3000, 4000, 6000, 8000, 11_000, 15_000, 20_000, 27_000, 36_000, 48_000),
    *(64_000, 85_000, 113_000, 150_000, 200_000, 270_000, 360_000, 480_000, 640_000, 850_000, 1_130_000),
    *(1_500_000, 2_000_000, 2_700_000, 3_600_000),
)
PRIOR_PPM_PER_S = 20_000  # two of a hundred a second: until something is known


class Ending(StrEnum):
    """How a turn ended: what its conversation waits for depends on it.

    AGAIN is no end: a turn has gone on from it already, and what may come is a fork or a retry.
    """

    TOOL_CALLS = "tool_calls"
    STOP = "stop"
    LENGTH = "length"
    AGAIN = "again"


@dataclass(slots=True)
class _LifeTable:
    exposure: list[int]
    returns: list[int]
    events: int = 0

    def add(self, bin_index: int, weight: int, returned: bool) -> None:
        self.events += 1
        self.exposure[bin_index] += weight
        if returned:
            self.returns[bin_index] += weight
        if self.exposure[bin_index] > FADE_WEIGHT:
            self.exposure[bin_index] //= 2
            self.returns[bin_index] //= 2


@dataclass(slots=True)
class _Plan:
    """What follows from the counts, by bin edge.

    gain_ppm: what holding on is worth from there on, 0 where it is best to let go. stop: the edge at which
    to let go, once one has held on through the bin. alive_ppm: how many waits last that long. hazard_ppm: of
    those, how many return within the bin.
    """

    gain_ppm: list[int]
    stop: list[int]
    alive_ppm: list[int]
    hazard_ppm: list[int]
    stamp: tuple[int, int]


@dataclass(slots=True)
class _Caller:
    table: _LifeTable
    plan: _Plan | None = field(default=None)


class ReturnModel:
    """Life tables for callers and endings, and what to do about them. Ages are nanoseconds."""

    def __init__(self, ttl_ns: int, break_even_ns: int, max_tables: int = MAX_TABLES) -> None:
        """`break_even_ns`: holding a token's KV so long costs as much as computing it once."""
        if min(ttl_ns, break_even_ns, max_tables) <= 0:
            raise ValueError("times and bounds must be positive")
        self.ttl_ns = ttl_ns
        self.break_even_ns = break_even_ns
        self.max_tables = max_tables
        edges = [edge * NS_PER_S // 1000 for edge in EDGES_MS]
        self.edges_ns: Sequence[int] = [*(edge for edge in edges if edge < ttl_ns), ttl_ns]
        self._bins = len(self.edges_ns) - 1
        self._everybody = {ending: self._empty() for ending in Ending}
        self._callers: OrderedDict[tuple[str, Ending], _Caller] = OrderedDict()

    def __len__(self) -> int:
        """Callers' tables that are remembered."""
        return len(self._callers)

    def waited(self, caller: str, ending: Ending, from_ns: int, to_ns: int) -> None:
        """A wait that was seen at age `from_ns` has got to `to_ns` without a return."""
        for index in range(self._bin(from_ns), self._bin(to_ns)):
            self._add(caller, ending, index, UNIT, returned=False)

    def returned(self, caller: str, ending: Ending, from_ns: int, age_ns: int) -> None:
        """A wait that was seen at age `from_ns` ended at `age_ns`: its next turn has begun."""
        self.waited(caller, ending, from_ns, age_ns)
        if age_ns < self.ttl_ns:
            self._add(caller, ending, self._bin(age_ns), UNIT, returned=True)

    def broken_off(self, caller: str, ending: Ending, from_ns: int, age_ns: int) -> None:
        """A wait that was seen at age `from_ns` will not be seen any more after `age_ns`."""
        self.waited(caller, ending, from_ns, age_ns)
        if age_ns < self.ttl_ns:
            self._add(caller, ending, self._bin(age_ns), UNIT // 2, returned=False)

    def chance(self, caller: str, ending: Ending, age_ns: int, within_ns: int) -> int:
        """Permille of waits this old that end by a return within `within_ns` more, and the TTL."""
        plan = self._plan(caller, ending)
        now, then = self._alive(plan, age_ns), self._alive(plan, age_ns + within_ns)
        return PERMILLE * (now - then) // now if now else 0

    def keep_until(self, caller: str, ending: Ending, age_ns: int) -> int:
        """The age at which to let a lease go that has waited `age_ns`; 0 for now.

        It maximises P(return by then) - E[time held until then] / break-even time: what is saved, and what
        it costs, per token and in units of computing it.
        """
        if age_ns >= self.ttl_ns:
            return 0
        plan = self._plan(caller, ending)
        index = self._bin(age_ns)
        left_ns = self.edges_ns[index + 1] - age_ns
        width_ns = self.edges_ns[index + 1] - self.edges_ns[index]
        hazard = plan.hazard_ppm[index]
        gone_ppm = hazard * (width_ns - left_ns) // width_ns
        hazard = hazard * left_ns // width_ns * PPM // max(1, PPM - gone_ppm)
        if self._gain(hazard, left_ns, plan.gain_ppm[index + 1]) <= 0:
            return 0
        return self.edges_ns[plan.stop[index + 1]]

    def check_integrity(self) -> None:
        """AssertionError where counts are impossible or bounds do not hold."""
        assert len(self._callers) <= self.max_tables
        tables = [*self._everybody.values(), *(caller.table for caller in self._callers.values())]
        for table in tables:
            assert len(table.exposure) == len(table.returns) == self._bins
            for exposure, returns in zip(table.exposure, table.returns, strict=True):
                assert 0 <= returns <= exposure <= FADE_WEIGHT

    def _empty(self) -> _LifeTable:
        return _LifeTable([0] * self._bins, [0] * self._bins)

    def _bin(self, age_ns: int) -> int:
        """The bin that an age falls into; at or past the TTL, their number."""
        return min(bisect_right(self.edges_ns, age_ns) - 1, self._bins)

    def _add(self, caller: str, ending: Ending, index: int, weight: int, returned: bool) -> None:
        self._everybody[ending].add(index, weight, returned)
        self._caller(caller, ending).table.add(index, weight, returned)

    def _caller(self, caller: str, ending: Ending) -> _Caller:
        key = (caller, ending)
        found = self._callers.get(key)
        if found is None:
            found = self._callers[key] = _Caller(self._empty())
            if len(self._callers) > self.max_tables:
                self._callers.popitem(last=False)
        else:
            self._callers.move_to_end(key)
        return found

    def _plan(self, caller: str, ending: Ending) -> _Plan:
        mine, all_of_them = self._caller(caller, ending), self._everybody[ending]
        plan, stamp = mine.plan, (mine.table.events, all_of_them.events)
        if plan is None or _is_stale(plan.stamp, stamp):
            plan = mine.plan = self._worked_out(mine.table, all_of_them, stamp)
        return plan

    def _worked_out(self, mine: _LifeTable, all_of_them: _LifeTable, stamp: tuple[int, int]) -> _Plan:
        hazards: list[int] = []
        for index in range(self._bins):
            width_ns = self.edges_ns[index + 1] - self.edges_ns[index]
            rate = PRIOR_PPM_PER_S * width_ns // NS_PER_S
            prior = PPM * rate // (PPM + rate)
            broad = _shrunk(all_of_them, index, prior, PRIOR_WEIGHT)
            hazards.append(_shrunk(mine, index, broad, SHRINK_WEIGHT))
        gain, stop = [0] * (self._bins + 1), [self._bins] * (self._bins + 1)
        for index in reversed(range(self._bins)):
            width_ns = self.edges_ns[index + 1] - self.edges_ns[index]
            gain[index] = max(0, self._gain(hazards[index], width_ns, gain[index + 1]))
            stop[index] = stop[index + 1] if gain[index] else index
        alive = [PPM]
        for hazard in hazards:
            alive.append(alive[-1] * (PPM - hazard) // PPM)
        return _Plan(gain, stop, alive, hazards, stamp)

    def _gain(self, hazard_ppm: int, width_ns: int, then_ppm: int) -> int:
        """Of holding on for `width_ns`, in which so many return half-way through on average, and after."""
        held = PPM - hazard_ppm // 2
        return hazard_ppm - held * width_ns // self.break_even_ns + (PPM - hazard_ppm) * then_ppm // PPM

    def _alive(self, plan: _Plan, age_ns: int) -> int:
        if age_ns >= self.ttl_ns:
            return plan.alive_ppm[-1]
        index = self._bin(age_ns)
        start, end = self.edges_ns[index], self.edges_ns[index + 1]
        lost = plan.alive_ppm[index] - plan.alive_ppm[index + 1]
        return plan.alive_ppm[index] - lost * (age_ns - start) // (end - start)


def _shrunk(table: _LifeTable, index: int, towards_ppm: int, weight: int) -> int:
    returns = PPM * table.returns[index] + weight * towards_ppm
    return returns // (table.exposure[index] + weight)


def _is_stale(then: tuple[int, int], now: tuple[int, int]) -> bool:
    """Whether so much more has been seen that it may make a difference: a sixteenth."""
    return any(new - old > min(old // 16, MAX_UNSEEN_EVENTS) for old, new in zip(then, now, strict=True))
