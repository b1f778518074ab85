"""Who comes back, and when; and how long a lease is worth its memory while nobody knows.

Learned per caller and per kind of turn end, from what was seen, in life tables (see `life_table`). Few
observations prove little: a caller's are shrunk towards those of all callers with the same kind of end, and
these towards recorded sessions.

The rule is Gray and Putzolu's (The 5 Minute Rule for Trading Memory for Disc Accesses, 1985): memory is worth
holding while what it saves costs more than it. There the price of memory against that of disc accesses makes
a break-even time, and what is needed again sooner stays. Here it is the time for which holding a token's KV
costs as much as computing it once, and when it is needed again is a chance that changes with age. So at each
age, from the counts, the time to let go is chosen that maximises

    P(return by then) - E[time held until then] / break-even time

per token, in units of computing it. That KV should be kept for a time that depends on what computing it again
costs and on how long the pause is likely to be is also the idea of CacheTTL (Li et al., arXiv 2511.02230),
for the pauses of tool calls.
"""

from collections import OrderedDict
from dataclasses import dataclass

from kvloop.core.life_table import OBSERVATION, PPM, Bins, Ending, LifeTable

__all__ = ["DEFAULT_BREAK_EVEN_NS", "PERMILLE", "Ending", "ReturnModel"]

PERMILLE = 1000
MAX_TABLES = 10_000  # callers x endings, at about 2 KiB; the least recently seen is forgotten
SHRINK_WEIGHT = 8 * OBSERVATION  # what a caller's own counts need to weigh as much as everybody's
PRIOR_WEIGHT = 4 * OBSERVATION  # and everybody's, to weigh as much as the recorded sessions
MAX_UNSEEN_EVENTS = 256  # that a plan may be behind its table
# Short beside the time that an engine takes to compute what its memory holds: what is let go is seldom lost,
# and only then had holding it been of use. Figures on recorded sessions are in docs/protocol.md.
DEFAULT_BREAK_EVEN_NS = 20_000_000_000


@dataclass(slots=True)
class _Plan:
    """What follows from a caller's counts, by bin edge; hazard_ppm by bin.

    gain_ppm: what holding on is worth from there, 0 where it is best to let go. stop: the edge at which to
    let go, if one has held on until there. alive_ppm: how many waits last that long. stamp: what was known.
    """

    hazard_ppm: list[int]
    gain_ppm: list[int]
    stop: list[int]
    alive_ppm: list[int]
    stamp: tuple[int, int]


@dataclass(slots=True)
class _Caller:
    table: LifeTable
    plan: _Plan | None = None


@dataclass(slots=True)
class _Everybody:
    table: LifeTable
    prior_ppm: list[int]
    hazard_ppm: list[int]
    stamp: int = 0


class ReturnModel:
    """What is known of callers and endings. Ages are nanoseconds."""

    def __init__(
        self, ttl_ns: int, break_even_ns: int = DEFAULT_BREAK_EVEN_NS, max_tables: int = MAX_TABLES
    ) -> None:
        """`break_even_ns`: holding a token's KV for so long costs as much as computing it once."""
        if min(ttl_ns, break_even_ns, max_tables) <= 0:
            raise ValueError("times and bounds must be positive")
        self.ttl_ns = ttl_ns
        self.break_even_ns = break_even_ns
        self.max_tables = max_tables
        self.bins = Bins(ttl_ns)
        self._cost_ppm = [PPM * width_ns // break_even_ns for width_ns in self.bins.widths_ns]
        self._everybody: dict[Ending, _Everybody] = {}
        for ending in Ending:
            prior = self.bins.recorded_ppm(ending)
            self._everybody[ending] = _Everybody(LifeTable(self.bins), prior, prior)
        self._callers: OrderedDict[tuple[str, Ending], _Caller] = OrderedDict()

    def __len__(self) -> int:
        """Callers' tables that are remembered."""
        return len(self._callers)

    def waited(self, caller: str, ending: Ending, from_ns: int, to_ns: int) -> None:
        """A wait that was seen at age `from_ns` has come to `to_ns` without a return."""
        first, last = self.bins.of(from_ns), self.bins.of(to_ns)
        if first < last:
            for table in self._tables(caller, ending):
                table.waited(first, last)

    def returned(self, caller: str, ending: Ending, from_ns: int, age_ns: int) -> None:
        """A wait that was seen at age `from_ns` ended at `age_ns`: its next turn has begun."""
        self.waited(caller, ending, from_ns, age_ns)
        if age_ns < self.ttl_ns:
            for table in self._tables(caller, ending):
                table.returned(self.bins.of(age_ns))

    def broken_off(self, caller: str, ending: Ending, from_ns: int, age_ns: int) -> None:
        """A wait that was seen at age `from_ns` will not be seen any more after `age_ns`."""
        self.waited(caller, ending, from_ns, age_ns)
        if age_ns < self.ttl_ns:
            for table in self._tables(caller, ending):
                table.broken_off(self.bins.of(age_ns))

    def chance(self, caller: str, ending: Ending, age_ns: int, within_ns: int) -> int:
        """Permille of waits this old that end by a return within `within_ns` more, and the TTL."""
        plan = self._plan(caller, ending)
        now, then = self._alive(plan, age_ns), self._alive(plan, age_ns + within_ns)
        return PERMILLE * (now - then) // now if now else 0

    def keep_until(self, caller: str, ending: Ending, age_ns: int) -> int:
        """The age at which to let go of a lease that has waited `age_ns`; 0 for now."""
        if age_ns >= self.ttl_ns:
            return 0
        plan = self._plan(caller, ending)
        if self._gain_ppm(plan, age_ns) <= 0:
            return 0
        return self.bins.edges_ns[plan.stop[self.bins.of(age_ns) + 1]]

    def check_integrity(self) -> None:
        """AssertionError where counts are impossible or bounds do not hold."""
        assert len(self._callers) <= self.max_tables
        for caller in self._callers.values():
            caller.table.check_integrity()
        for everybody in self._everybody.values():
            everybody.table.check_integrity()

    def _tables(self, caller: str, ending: Ending) -> tuple[LifeTable, LifeTable]:
        return self._everybody[ending].table, self._caller(caller, ending).table

    def _caller(self, caller: str, ending: Ending) -> _Caller:
        key = (caller, ending)
        found = self._callers.get(key)
        if found is None:
            found = self._callers[key] = _Caller(LifeTable(self.bins))
            if len(self._callers) > self.max_tables:
                self._callers.popitem(last=False)
        else:
            self._callers.move_to_end(key)
        return found

    def _plan(self, caller: str, ending: Ending) -> _Plan:
        mine, everybody = self._caller(caller, ending), self._everybody[ending]
        if _is_stale(everybody.stamp, everybody.table.events):
            everybody.hazard_ppm = everybody.table.hazards_ppm(everybody.prior_ppm, PRIOR_WEIGHT)
            everybody.stamp = everybody.table.events
        plan = mine.plan
        if plan is None or plan.stamp[1] != everybody.stamp or _is_stale(plan.stamp[0], mine.table.events):
            hazards = mine.table.hazards_ppm(everybody.hazard_ppm, SHRINK_WEIGHT)
            plan = mine.plan = self._worked_out(hazards, (mine.table.events, everybody.stamp))
        return plan

    def _worked_out(self, hazards: list[int], stamp: tuple[int, int]) -> _Plan:
        """Backwards from the last edge: what holding on through each bin is worth, and until where.

        Those that return in a bin do so half-way through it on average, and the others go on.
        """
        bins = len(hazards)
        gain, stop, alive = [0] * (bins + 1), [bins] * (bins + 1), [PPM] * (bins + 1)
        then, until = 0, bins
        for index in range(bins - 1, -1, -1):
            hazard = hazards[index]
            then = hazard + ((PPM - hazard) * then - (PPM - hazard // 2) * self._cost_ppm[index]) // PPM
            if then <= 0:
                then, until = 0, index
            gain[index], stop[index] = then, until
        living = PPM
        for index, hazard in enumerate(hazards, 1):
            alive[index] = living = living * (PPM - hazard) // PPM
        return _Plan(hazards, gain, stop, alive, stamp)

    def _gain_ppm(self, plan: _Plan, age_ns: int) -> int:
        """Of holding on from this age to the end of its bin, and then."""
        index = self.bins.of(age_ns)
        width_ns = self.bins.widths_ns[index]
        past_ns = age_ns - self.bins.edges_ns[index]
        hazard = plan.hazard_ppm[index]
        # Returns are spread evenly over a bin: of those that have not come so far, who comes in what is left.
        left = hazard * (width_ns - past_ns) // width_ns * PPM // max(1, PPM - hazard * past_ns // width_ns)
        left = min(left, PPM)
        cost = self._cost_ppm[index] * (width_ns - past_ns) // width_ns
        return left + ((PPM - left) * plan.gain_ppm[index + 1] - (PPM - left // 2) * cost) // PPM

    def _alive(self, plan: _Plan, age_ns: int) -> int:
        if age_ns >= self.ttl_ns:
            return plan.alive_ppm[-1]
        index = self.bins.of(age_ns)
        past_ns = age_ns - self.bins.edges_ns[index]
        lost = plan.alive_ppm[index] - plan.alive_ppm[index + 1]
        return plan.alive_ppm[index] - lost * past_ns // self.bins.widths_ns[index]


def _is_stale(then: int, now: int) -> bool:
    """Whether so much more has been seen that it may make a difference: an eighth."""
    return now - then > min(then // 8, MAX_UNSEEN_EVENTS)
