"""A return model that a child could check: it keeps every observation, and counts them each time."""

from dataclasses import dataclass, field

from kvloop.core.life_table import EDGES_MS, RECORDED_PERMILLE, Ending

NS_PER_MS = 1_000_000


@dataclass
class Seen:
    """A piece of a wait, from one age to another, and its end: `waits` (goes on), `returns`, `breaks`."""

    caller: str
    ending: Ending
    from_ns: int
    to_ns: int
    end: str


@dataclass
class NaiveReturns:
    """The same answers as ReturnModel's as long as nothing has faded, in floating point."""

    ttl_ns: int
    break_even_ns: int
    seen: list[Seen] = field(default_factory=list)

    @property
    def edges(self) -> list[int]:
        """Where bins begin and the last one ends."""
        edges = [edge * NS_PER_MS for edge in EDGES_MS]
        return [edge for edge in edges if edge < self.ttl_ns] + [self.ttl_ns]

    def counts(self, seen: list[Seen], start: int, end: int) -> tuple[float, float]:
        """Exposure and returns in one bin."""
        exposure = returns = 0.0
        for one in seen:
            if one.from_ns < end <= one.to_ns:
                exposure += 1  # got through
            elif start <= one.to_ns < end and one.end == "returns":
                exposure, returns = exposure + 1, returns + 1
            elif start <= one.to_ns < end and one.end == "breaks":
                exposure += 0.5
        return exposure, returns

    def hazards(self, caller: str, ending: Ending) -> list[float]:
        """Each bin's chance of a return: the caller's, shrunk towards everybody's, and the recorded."""
        alike = [one for one in self.seen if one.ending == ending]
        own = [one for one in alike if one.caller == caller]
        hazards = []
        for index, (start, end) in enumerate(zip(self.edges, self.edges[1:], strict=False)):
            recorded = RECORDED_PERMILLE[ending]
            prior = recorded[index] / 1000 if index < len(recorded) else 0.0
            if index < len(recorded):
                whole = (EDGES_MS[index + 1] - EDGES_MS[index]) * NS_PER_MS
                prior *= (end - start) / whole
            exposure, returns = self.counts(alike, start, end)
            everybody = (returns + 4 * prior) / (exposure + 4)
            exposure, returns = self.counts(own, start, end)
            hazards.append((returns + 8 * everybody) / (exposure + 8))
        return hazards

    def alive(self, hazards: list[float], age_ns: int) -> float:
        """The share of waits that last this long; returns are spread evenly over a bin."""
        living = 1.0
        for hazard, start, end in zip(hazards, self.edges, self.edges[1:], strict=False):
            if age_ns < end:
                return living * (1 - hazard * max(0, age_ns - start) / (end - start))
            living *= 1 - hazard
        return living

    def worth(self, caller: str, ending: Ending, age_ns: int, until_ns: int) -> float:
        """Of holding from one age to another: P(return) less the time held, by the break-even time."""
        hazards = self.hazards(caller, ending)
        points = [age_ns, *(edge for edge in self.edges if age_ns < edge < until_ns), until_ns]
        now = self.alive(hazards, age_ns)
        if not now:
            return 0.0
        living = [self.alive(hazards, point) / now for point in points]
        held = sum(
            (before + after) / 2 * (end - start)
            for before, after, start, end in zip(living, living[1:], points, points[1:], strict=False)
        )
        return 1 - living[-1] - held / self.break_even_ns

    def best(self, caller: str, ending: Ending, age_ns: int) -> float:
        """The worth of holding to the best of all later edges."""
        later = [edge for edge in self.edges if edge > age_ns]
        return max(self.worth(caller, ending, age_ns, edge) for edge in later)
