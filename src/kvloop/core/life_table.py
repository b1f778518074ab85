"""How long conversations stay away, counted by age: one table for each kind of wait.

A wait begins at age 0 and is over when its conversation returns; many never do. Ages are cut into bins, finer
where most agents return. A bin counts the waits that got through it or ended in it (exposure), and those of
them that returned in it; the ratio is its hazard. A wait that is broken off inside a bin counts for half of
an exposure: the actuarial estimator, which takes withdrawals to be spread evenly over the bin. Exposure is
added as waits grow old, so traffic that never comes back is known for it after seconds, not at the end of
the longest wait. A bin that has seen enough is halved: what was long ago fades.

Everything is an integer, so that a seed gives the same simulation on every machine.
"""

from bisect import bisect_right
from collections.abc import Sequence
from enum import StrEnum

PPM = 1_000_000
OBSERVATION = 16  # weight of one; divisible by halves
FADE_WEIGHT = 512 * OBSERVATION  # a bin that has seen this much is halved
EDGES_MS: Sequence[int] = (
    *(0, 100, 200, 500, 1000, 2000, 3000, 4000, 6000, 8000, 11_000, 15_000, 20_000, 27_000, 36_000, 48_000),
    *(64_000, 85_000, 113_000, 150_000, 200_000, 270_000, 360_000, 480_000, 640_000, 850_000, 1_130_000),
    *(1_500_000, 2_000_000, 2_700_000, 3_600_000),
)
_NS_PER_MS = 1_000_000


class Ending(StrEnum):
    """How a turn ended: what its conversation waits for depends on it.

    AGAIN is no end: a turn has gone on from it already, and what may come is a fork or a retry.
    """

    TOOL_CALLS = "tool_calls"
    STOP = "stop"
    LENGTH = "length"
    AGAIN = "again"


# Permille of waits that return within each bin of EDGES_MS: 8,386 turns of 150 recorded coding-agent sessions
# (callanjfox/kv-cache-tester, Apache-2.0), from the end of a request to the start of the session's next one.
# None of them ended by length; where none says anything of forks and retries, none are expected.
_TOOL_CALLS: Sequence[int] = (
    *(1, 0, 0, 2, 2, 30, 104, 252, 225, 235, 205, 192, 183, 141, 126, 116, 169, 133, 272, 255),
    *(106, 231, 71, 387, 118, 118, 116, 71, 33, 112),
)
_STOP: Sequence[int] = (
    *(0, 0, 0, 0, 2, 11, 8, 47, 106, 176, 165, 128, 114, 59, 130, 65, 81, 120, 97, 92),
    *(81, 100, 66, 96, 102, 135, 50, 92, 94, 144),
)
RECORDED_PERMILLE: dict[Ending, Sequence[int]] = {
    Ending.TOOL_CALLS: _TOOL_CALLS,
    Ending.STOP: _STOP,
    Ending.LENGTH: _STOP,
    Ending.AGAIN: (0,) * (len(EDGES_MS) - 1),
}


class Bins:
    """Ages up to `limit_ns`, cut at EDGES_MS; beyond the last edge, one more bin."""

    def __init__(self, limit_ns: int) -> None:
        if limit_ns <= 0:
            raise ValueError("the longest age must be positive")
        edges = [edge * _NS_PER_MS for edge in EDGES_MS]
        self.edges_ns: Sequence[int] = [*(edge for edge in edges if edge < limit_ns), limit_ns]
        self.widths_ns = [
            after - before for before, after in zip(self.edges_ns, self.edges_ns[1:], strict=False)
        ]

    def __len__(self) -> int:
        return len(self.widths_ns)

    def of(self, age_ns: int) -> int:
        """The bin that an age falls into; at or past the limit, their number."""
        return bisect_right(self.edges_ns, age_ns) - 1

    def recorded_ppm(self, ending: Ending) -> list[int]:
        """Each bin's recorded hazard. A bin that is cut by the limit has its share, and none is known past
        the last edge."""
        recorded = RECORDED_PERMILLE[ending]
        hazards = [1000 * permille for permille in recorded[: len(self)]]
        hazards += [0] * (len(self) - len(hazards))
        last = len(self) - 1
        if last < len(recorded):
            whole_ns = (EDGES_MS[last + 1] - EDGES_MS[last]) * _NS_PER_MS
            hazards[last] = hazards[last] * self.widths_ns[last] // whole_ns
        return hazards


class LifeTable:
    """Exposure and returns of one kind of wait, by bin. `events` counts what was added, and only grows."""

    def __init__(self, bins: Bins) -> None:
        self.exposure = [0] * len(bins)
        self.returns = [0] * len(bins)
        self.events = 0

    def waited(self, first: int, last: int) -> None:
        """A wait got through bins `first` to before `last`."""
        self.events += last - first
        exposure = self.exposure
        for index in range(first, last):
            exposure[index] += OBSERVATION
            if exposure[index] > FADE_WEIGHT:
                self._fade(index)

    def returned(self, index: int) -> None:
        """A wait ended in this bin by a return."""
        self._add(index, OBSERVATION, OBSERVATION)

    def broken_off(self, index: int) -> None:
        """A wait will not be seen any more, from within this bin on."""
        self._add(index, OBSERVATION // 2, 0)

    def hazards_ppm(self, towards_ppm: Sequence[int], weight: int) -> list[int]:
        """Each bin's hazard, as if `weight` more had been seen at the hazard `towards_ppm`."""
        known = zip(self.returns, self.exposure, towards_ppm, strict=True)
        return [(PPM * returns + weight * ppm) // (exposure + weight) for returns, exposure, ppm in known]

    def check_integrity(self) -> None:
        """AssertionError where more return than wait, or a bin was not halved."""
        for returns, exposure in zip(self.returns, self.exposure, strict=True):
            assert 0 <= returns <= exposure <= FADE_WEIGHT

    def _add(self, index: int, exposure: int, returns: int) -> None:
        self.events += 1
        self.exposure[index] += exposure
        self.returns[index] += returns
        if self.exposure[index] > FADE_WEIGHT:
            self._fade(index)

    def _fade(self, index: int) -> None:
        self.exposure[index] //= 2
        self.returns[index] //= 2
